"""Activations of one layer over all operand pairs, from a packed clean pass, and what they say to the answer directly.

The direct share of a vector v in the answer's logit is that of the logit lens with frozen scales (engine/lens/lens.py):
<v, g (W_U[t] - mean of W_U over the vocabulary)> / s, t the pair's first answer token, s the final norm's scale at END;
through the norm behind the block where the family has one. A soft-cap of logits is left out.

Shape legend: P pair, H head, K neuron, D model width, Z o_proj input width, A answer token, U unit.
"""

from collections.abc import Callable

import torch
from torch import nn

from mathinterp.engine.choose import Engine
from mathinterp.engine.intervention import Tokens
from mathinterp.engine.lens.lens import Lens, norm_parts, written_values
from mathinterp.models.anatomy import Anatomy


class LayerMaps:
    """Maps of heads and neurons, layer by layer; pairs in the order of ``ends``.

    Args:
        ends: END of each pair.
        token_P: its first answer token.
    """

    def __init__(self, anatomy: Anatomy, engine: Engine, ends: Tokens, token_P: torch.Tensor):
        self.anatomy, self.engine, self.ends, self.lens = anatomy, engine, ends, Lens(anatomy)
        self.wide = self.lens.wide
        final_PD = engine.activations("residual", anatomy.shape.n_layers, ends)
        self.lens.check(final_PD)
        self.scale_P = self.lens.norm.scale(final_PD)
        tokens_A, self.answer_P = token_P.to(anatomy.device).unique(return_inverse=True)
        weight_VD = self.lens.unembedding_VD
        mean_D = weight_VD.mean(0, dtype=self.wide)
        self.direction_AD = self.lens.norm.centre((weight_VD[tokens_A].to(self.wide) - mean_D) * self.lens.gain_D)

    @torch.inference_mode()
    def heads(self, layer: int) -> dict[str, torch.Tensor]:
        """By measure, H P: the norm of what the head adds to o_proj's output, and its direct share in the answer."""
        anatomy, shape = self.anatomy, self.anatomy.shape
        values_PZ = self.engine.activations("head", layer, self.ends).to(self.wide)
        direction_AD, scale_P = self._behind(layer, "attention", anatomy.attention_post_norm)
        weight_ZD = anatomy.output_weight(layer).detach().to(self.wide)
        norms, shares = [], []
        for head in range(shape.n_heads):
            columns = anatomy.head_slice(head)
            output_PD = values_PZ[:, columns] @ weight_ZD[columns]
            norms.append(output_PD.norm(dim=1))
            shares.append((output_PD @ direction_AD.T).gather(1, self.answer_P[:, None])[:, 0] / scale_P)
        return {"norm": torch.stack(norms), "answer": torch.stack(shares)}

    @torch.inference_mode()
    def neurons(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients in the model's dtype, K P; and the mean over pairs of each neuron's direct share, K."""
        values_PK = self.engine.activations("neuron", layer, self.ends)
        direction_AD, scale_P = self._behind(layer, "mlp", self.anatomy.mlp_post_norm, weighted=False)
        weight_PA = nn.functional.one_hot(self.answer_P, len(direction_AD)).to(self.wide) / scale_P[:, None]
        sums_KA = values_PK.T.to(self.wide) @ weight_PA
        per_unit_KA = written_values(self.anatomy, layer) @ direction_AD.T
        return values_PK.T.contiguous(), (sums_KA * per_unit_KA).sum(1) / len(values_PK)

    def _behind(
        self, layer: int, site: str, norm_of: Callable[[int], nn.Module | None], *, weighted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The answers' directions and the pairs' scales as seen before the norm behind a block, if there is one.

        weighted: with that norm's weight; ``written_values`` have it.
        """
        post = norm_of(layer)
        if post is None:
            return self.direction_AD, self.scale_P
        parts = norm_parts(self.anatomy, post)
        assert not parts.centred, "a LayerNorm behind a block is not known in any family"
        direction_AD = self.direction_AD * parts.gain_D if weighted else self.direction_AD
        return direction_AD, self.scale_P * parts.scale(self.engine.activations(site, layer, self.ends))
