"""What END reads through the attention heads, token by token, and what it is worth (the chain; paper A, section 4.4).

Head (l, h) at END adds to o_proj's input, on its own slice, the sum over tokens t of A_t (W_V N(x_t) + b_V): A_t its
attention weight, N the layer's input norm, x_t the layer's input, W_V that of the head's key/value group. Let G be the
gradient with respect to that slice, through the whole model after it, of a number at END: of the log-odds
log p(w) - log(1 - p(w)) of the answer's token w ("answer", nats), or of D = sum_j sign(c_j) c_j / sum_j |c_j| over the
prompt's deep neurons, its denominator and signs fixed ("deep", a part of those coefficients). What the head reads from
t is, to first order, A_t <W_V N(x_t) + b_V, G>. Paper A describes this path and gives no measure of it: these are ours.
Log-odds change as log p does where p is small, and still change where p is near 1 and log p is flat.

Shape legend: B prompt of a batch, L layer, H query head, T token, K neuron, D model width, Z o_proj input width,
C features of the value projection (key/value group by group), d head width, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mathinterp.engine.attention_rows import end_attention
from mathinterp.engine.hooks import Edit, edited_input, watched
from mathinterp.engine.lens.lens import NormParts, norm_parts, wide_dtype
from mathinterp.engine.pairs import Batch
from mathinterp.engine.scores import answer_logits
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron

GOALS = ("answer", "deep")


@dataclass(frozen=True)
class HeadReads:
    """One batch: what END attends to, what stands there, and what it is worth; lists have one tensor a layer."""

    weights_BHT: list[torch.Tensor]  # END's attention
    values_BTC: list[torch.Tensor]  # W_V N(x) + b_V of every token
    scale_BT: list[torch.Tensor]  # of the norm that attention reads through
    post_scale_BT: list[torch.Tensor | None]  # of the norm behind the MLP, where there is one
    gradient_BZ: dict[str, list[torch.Tensor]]  # goal -> G of all heads, side by side


class HeadReader:
    """Reads of one model's heads."""

    def __init__(self, anatomy: Anatomy):
        self.anatomy, self.wide = anatomy, wide_dtype(anatomy.dtype)
        self.layers = range(anatomy.shape.n_layers)
        self.norms = [norm_parts(anatomy, anatomy.attention_norm(layer)) for layer in self.layers]
        posts = [anatomy.mlp_post_norm(layer) for layer in self.layers]
        self.post_norms: list[NormParts | None] = [
            None if post is None else norm_parts(anatomy, post) for post in posts
        ]

    def read(self, batch: Batch, target_B: torch.Tensor, deep: Sequence[Sequence[Neuron]]) -> HeadReads:
        """One forward and two backward passes, and one forward pass for the attention weights.

        Args:
            target_B: the token w of each prompt.
            deep: each prompt's deep neurons.
        """
        seen = _Seen(self, batch)
        with torch.enable_grad():
            width = self.anatomy.shape.n_heads * self.anatomy.shape.d_head
            like = torch.empty(0, dtype=self.anatomy.dtype, device=self.anatomy.device)
            added_BZ = [like.new_zeros(len(batch.ends), width).requires_grad_() for _ in self.layers]
            with ExitStack() as hooks:
                for layer in self.layers:
                    add = end_adder(batch, added_BZ[layer])
                    hooks.enter_context(edited_input(self.anatomy.output_projection(layer), add))
                    seen.listen(hooks, layer)
                hooks.enter_context(watched(self.anatomy.final_norm, True, batch.keeper(seen.final_BD)))
                batch.forward(self.anatomy)
            seen.check()
            logodds_B = target_logodds(self.anatomy, seen.final_BD[0], target_B)
            goals = {"answer": logodds_B.sum(), "deep": _drive(seen.coefficients_BK, deep)}
            gradient_BZ = {name: self._gradients(goal, added_BZ) for name, goal in goals.items()}
        weights_BLHT = end_attention(self.anatomy, batch, list(self.layers))
        return HeadReads(
            list(weights_BLHT.unbind(1)),
            seen.values_BTC,
            seen.scale_BT,
            seen.post_scale_BT,
            gradient_BZ,
        )

    def _gradients(self, goal: torch.Tensor, added_BZ: list[torch.Tensor]) -> list[torch.Tensor]:
        """Zero for a layer that the goal does not depend on: deep neurons may lie below it, or there may be none."""
        if not goal.requires_grad:
            return [torch.zeros_like(added, dtype=self.wide) for added in added_BZ]
        found = torch.autograd.grad(goal, added_BZ, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(added, dtype=self.wide) if gradient is None else gradient.to(self.wide)
            for added, gradient in zip(added_BZ, found, strict=True)
        ]

    @torch.no_grad()
    def effects(self, reads: HeadReads, layer: int, goal: str) -> torch.Tensor:
        """What each head of the layer reads from each token, to first order: B H T."""
        shape = self.anatomy.shape
        values_BTGd = reads.values_BTC[layer].unflatten(2, (shape.n_groups, shape.d_head))
        values_BTHd = values_BTGd.repeat_interleave(shape.n_heads // shape.n_groups, dim=2)
        gradient_BHd = reads.gradient_BZ[goal][layer].unflatten(1, (shape.n_heads, shape.d_head))
        return reads.weights_BHT[layer] * torch.einsum("bthd,bhd->bht", values_BTHd, gradient_BHd)


class _Seen:
    """What a pass shows of each layer: values and scales of every token; coefficients at END with their gradients."""

    def __init__(self, reader: HeadReader, batch: Batch):
        self.reader, self.batch = reader, batch
        self.values_BTC: list[torch.Tensor] = []
        self.scale_BT: list[torch.Tensor] = []
        self.post_scale_BT: list[torch.Tensor | None] = []
        self.coefficients_BK: list[torch.Tensor] = []
        self.final_BD: list[torch.Tensor] = []

    def listen(self, hooks: ExitStack, layer: int) -> None:
        """Hook the layer's modules; layers must be run in order."""
        anatomy, wide = self.reader.anatomy, self.reader.wide
        norm, post, value = self.reader.norms[layer], self.reader.post_norms[layer], anatomy.value(layer)

        def keep_scale(stream_BTD: torch.Tensor) -> None:
            self.scale_BT.append(norm.scale(stream_BTD.detach()))

        def keep_values(values_BTX: torch.Tensor) -> None:
            self.values_BTC.append(values_BTX.detach()[..., value.features].to(wide))

        def keep_post_scale(mlp_BTD: torch.Tensor) -> None:
            self.post_scale_BT.append(None if post is None else post.scale(mlp_BTD.detach()))

        down = anatomy.down_projection(layer)
        hooks.enter_context(watched(anatomy.layers[layer], True, keep_scale))
        hooks.enter_context(watched(value.module, False, keep_values))
        hooks.enter_context(watched(down, True, self.batch.keeper(self.coefficients_BK)))
        hooks.enter_context(watched(down, False, keep_post_scale))

    def check(self) -> None:
        """Every hook must have fired once."""
        kept = (self.values_BTC, self.scale_BT, self.post_scale_BT, self.coefficients_BK)
        fired = [len(part) for part in kept]
        assert fired == [len(self.reader.layers)] * len(kept), (
            f"hooks fired {fired} times, once per layer each expected"
        )
        assert len(self.final_BD) == 1, f"the final norm was read {len(self.final_BD)} times"


def end_adder(batch: Batch, added_BX: torch.Tensor, columns: slice = slice(None)) -> Edit:
    """A hook's function that adds a row to END of each prompt, at ``columns`` alone."""

    def add(values_BTX: torch.Tensor) -> torch.Tensor:
        whole_BX = values_BTX.new_zeros(len(added_BX), values_BTX.shape[-1])
        whole_BX[:, columns] = added_BX.to(values_BTX.dtype)
        rows = torch.arange(len(batch.ends), device=values_BTX.device)
        return values_BTX.index_put((rows, batch.ends), whole_BX, accumulate=True)

    return add


def target_logodds(anatomy: Anatomy, final_BD: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """log p - log(1 - p) of each row's token, from the input of the final norm: B, nats."""
    logits_BV, where_B1 = answer_logits(anatomy, final_BD), target_B[:, None]
    others_BV = logits_BV.scatter(1, where_B1, -torch.inf)
    return logits_BV.gather(1, where_B1)[:, 0] - others_BV.logsumexp(dim=1)


def _drive(coefficients_BK: list[torch.Tensor], deep: Sequence[Sequence[Neuron]]) -> torch.Tensor:
    """The sum of D over the prompts."""
    total = coefficients_BK[0].new_zeros(())
    for row, neurons in enumerate(deep):
        if neurons:
            values = torch.stack([coefficients_BK[layer][row, neuron] for layer, neuron in neurons])
            signs, size = values.detach().sign(), values.detach().abs().sum()
            total = total + (signs * values).sum() / size.clamp(min=torch.finfo(size.dtype).tiny)
    return total
