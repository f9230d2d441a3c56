"""Which neurons of a layer matter most, and the first answer token where only they are kept.

Source: arXiv 2410.21272, section 3.1, which ranks neurons by attribution patching between prompts and mean-ablates all
that is outside of a circuit. Ours ranks them by the size of the first-order effect of the ablation itself, at END, on
the log-odds of the first answer token, and leaves heads, earlier layers and all tokens before END as they are.

Shape legend: P pair, L layer, K neuron, B pair of a batch, T token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mathinterp.engine.attribution.pairs import GPU_TOKENS, Place, caught, embedding
from mathinterp.engine.choose import Engine, many_layers
from mathinterp.engine.intervention import Change, Intervention, Tokens, Value
from mathinterp.engine.lens.lens import wide_dtype
from mathinterp.engine.pairs import batches_of
from mathinterp.engine.scores import Scores
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@torch.enable_grad()
def effects(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], ablation: str = "mean", max_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Effect of each neuron's ablation at END, to first order: signed mean and mean size over prompts, L K each.

    (target - c) dm / dc, nats, m = log p - log(1 - p) of the first answer token: where the model is sure, log p has no
    gradient left. The target is 0 for "zero", the mean of c over these prompts for "mean". One forward and one backward
    pass.
    """
    final: Place = ("residual", anatomy.shape.n_layers)
    places: list[Place] = [("neuron", layer) for layer in range(anatomy.shape.n_layers)]
    gold_P = torch.tensor([prompt.scored[0].token_id for prompt in prompts], device=anatomy.device)
    wide = wide_dtype(anatomy.dtype)
    sizes = (len(places), len(prompts), anatomy.shape.n_neurons)
    values_LPK = torch.empty(sizes, dtype=anatomy.dtype, device=anatomy.device)
    gradient_LPK = torch.empty_like(values_LPK)
    if max_tokens is None and anatomy.device.type == "cuda":
        max_tokens = GPU_TOKENS
    for batch in batches_of([prompt.input_ids[: prompt.end + 1] for prompt in prompts], anatomy, max_tokens):
        with embedding(anatomy, lambda hidden: hidden), caught(anatomy, [*places, final]) as found:
            batch.forward(anatomy)
        logits_BV = anatomy.logits(batch.at_end(found[final])).to(wide)
        logodds_B = _logodds(logits_BV, gold_P[batch.rows])
        gradients = torch.autograd.grad(logodds_B.sum(), [found[place] for place in places])
        for layer, (place, gradient_BTK) in enumerate(zip(places, gradients, strict=True)):
            values_LPK[layer, batch.rows] = batch.at_end(found[place].detach())
            gradient_LPK[layer, batch.rows] = batch.at_end(gradient_BTK)
    signed, sizes_LK = [], []
    for values_PK, gradient_PK in zip(values_LPK, gradient_LPK, strict=True):
        values_PK = values_PK.to(wide)
        target_K = values_PK.mean(0) * (ablation == "mean")
        change_PK = (target_K - values_PK) * gradient_PK.to(wide)
        signed.append(change_PK.mean(0))
        sizes_LK.append(change_PK.abs().mean(0))
    return torch.stack(signed), torch.stack(sizes_LK)


def _logodds(logits_BV: torch.Tensor, token_B: torch.Tensor) -> torch.Tensor:
    own_B1 = token_B[:, None]
    others_B = logits_BV.scatter(1, own_B1, -torch.inf).logsumexp(1)
    return logits_BV.gather(1, own_B1)[:, 0] - others_B


def kept_neurons(size_K: torch.Tensor, ranking: str, k: int, seed: int, layer: int) -> torch.Tensor:
    """Boolean K: the k of largest effect, or k random ones; of a ranking fewer are among more."""
    if ranking == "top":
        order = torch.sort(size_K.cpu(), descending=True, stable=True).indices
    else:
        order = torch.from_numpy(np.random.default_rng([seed, layer]).permutation(len(size_K)))
    kept_K = torch.zeros(len(size_K), dtype=torch.bool)
    kept_K[order[:k]] = True
    return kept_K


class Keeping:
    """Scores of the first answer token with few neurons kept at END."""

    def __init__(self, anatomy: Anatomy, engine: Engine, ends: Tokens, layers: Sequence[int], ablation: str):
        self.engine, self.ends, self.layers = engine, ends, layers
        self.values: dict[int, Value] = {}
        for layer in layers:
            if ablation == "zero":
                self.values[layer] = Value.zero(anatomy, "neuron", layer)
            else:
                rows_PK = engine.activations("neuron", layer, ends)
                self.values[layer] = Value(rows_PK.mean(0, dtype=wide_dtype(rows_PK.dtype)))

    def run(self, kept: Sequence[dict[int, torch.Tensor]]) -> Scores:
        """One row for each choice of kept neurons, layer -> boolean K."""
        interventions: list[Intervention] = [
            tuple(Change("neuron", layer, ~choice[layer], self.values[layer], self.ends) for layer in self.layers)
            for choice in kept
        ]
        return many_layers(self.engine).run(interventions)
