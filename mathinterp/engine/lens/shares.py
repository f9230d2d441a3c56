"""Which earlier neurons put there what a head moves to END: the chain's first stage (paper A, section 4.4).

Neuron k of a layer before head (l, h) writes c v into x_t, the layer's input at token t (Gemma-2: c g' v / s', through
the norm behind the MLP, its scale frozen). The head moves A_t W_V (g c v / s_t) of it to END: g and s_t the weight and
the scale at t of the head's input norm, the scale frozen, v centred first in LayerNorm models; A, W_V and G as in
head_reads.py. Attention's pattern stays as it is. Paper A passes values through W_O W_V (all heads, attention 1) and
reads their tokens; how much a neuron matters on a prompt it does not say. Ours, of one neuron at one token through one
head:

- to first order: c A_t / s_t <W_V (g v), G>, for the log-odds of w (nats) and for the deep neurons' coefficients (a
  part);
- exactly: the log-odds of w less those with that share taken off the head's slice at END, all that follows run anew.

Shape legend: B prompt of a batch, T token, K neuron, D model width, N neuron of a list, d head width.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from mathinterp.engine.hooks import edited_input, watched
from mathinterp.engine.lens.head_reads import GOALS, HeadReader, HeadReads, end_adder, target_logodds
from mathinterp.engine.lens.lens import norm_parts, written_values
from mathinterp.engine.pairs import Batch, batches_of
from mathinterp.models.units import Head, Neuron


@dataclass(frozen=True)
class NeuronShare:
    """What one neuron writes at one token, as a head moves it to END; ``effect`` and ``deep`` to first order."""

    layer: int
    neuron: int
    token: int  # index in the prompt
    coefficient: float
    effect: float  # on the log-odds of w, nats
    deep: float  # part of the deep neurons' coefficients


class NeuronShares:
    """Shares of neurons in what one head a prompt moves to END."""

    def __init__(self, reader: HeadReader):
        self.reader, self.anatomy, self.wide = reader, reader.anatomy, reader.wide

    @torch.no_grad()
    def first(
        self, batch: Batch, reads: HeadReads, heads: Sequence[Head], top: int
    ) -> tuple[list[list[NeuronShare]], torch.Tensor]:
        """Each prompt's neurons of largest first-order effect on the log-odds of w; one forward pass.

        Args:
            heads: one for each prompt of the batch.
        Returns:
            each prompt's first ``top``; and the effect of all neurons before the head, together, by token: B T, nats.
        """
        query_BD = {
            goal: torch.stack([self._query(reads, row, head, goal) for row, head in enumerate(heads)]) for goal in GOALS
        }
        rows = [
            reads.weights_BHT[layer][row, head] / reads.scale_BT[layer][row] for row, (layer, head) in enumerate(heads)
        ]
        collected = _Collected(self, reads, query_BD, torch.stack(rows), [layer for layer, _ in heads], top)
        with ExitStack() as hooks:
            for layer in range(max(layer for layer, _ in heads)):
                hooks.enter_context(watched(self.anatomy.down_projection(layer), True, partial(collected.take, layer)))
            batch.forward(self.anatomy)
        return collected.ranked(), collected.total_BT

    @torch.no_grad()
    def exact(
        self,
        batch: Batch,
        reads: HeadReads,
        target_B: torch.Tensor,
        row: int,
        head: Head,
        shares: Sequence[NeuronShare],
    ) -> list[float]:
        """The log-odds of w on prompt ``row`` less those with each share, by itself, taken off at END; nats.

        Both from passes of the same batch shape.
        """
        if not shares:
            return []
        layer, number = head
        amounts = torch.tensor([self._amount(reads, row, head, share) for share in shares], device=self.anatomy.device)
        share_Nd = (
            self._read([Neuron(share.layer, share.neuron) for share in shares], head) * amounts.to(self.wide)[:, None]
        )
        sentence = tuple(batch.token_ids[row, : int(batch.ends[row]) + 1].tolist())
        found: list[float] = []
        for part in batches_of([sentence] * len(shares), self.anatomy):
            kept: list[torch.Tensor] = []
            cut = end_adder(part, -share_Nd[part.rows], self.anatomy.head_slice(number))
            projection = self.anatomy.output_projection(layer)
            with watched(self.anatomy.final_norm, True, part.keeper(kept)):
                part.forward(self.anatomy)
                with edited_input(projection, cut):
                    part.forward(self.anatomy)
            same_N = target_B[row].expand(len(part.rows))
            whole_N, cut_N = (target_logodds(self.anatomy, hidden_ND, same_N) for hidden_ND in kept)
            found += (whole_N - cut_N).tolist()
        return found

    @torch.no_grad()
    def moved(self, neurons: Sequence[Neuron], head: Head) -> torch.Tensor:
        """Each neuron's value through the head's value-output matrix into the stream, before positive scales: N D."""
        output_dD = self.anatomy.output_weight(head[0])[self.anatomy.head_slice(head[1])].detach().to(self.wide)
        written_ND = self._read(neurons, head) @ output_dD
        post = self.anatomy.attention_post_norm(head[0])
        return written_ND if post is None else written_ND * norm_parts(self.anatomy, post).gain_D

    def _read(self, neurons: Sequence[Neuron], head: Head) -> torch.Tensor:
        """W_V (g v) of each neuron: N d."""
        norm = self.reader.norms[head[0]]
        values_ND = torch.cat([written_values(self.anatomy, layer, [neuron]) for layer, neuron in neurons])
        return (norm.centre(values_ND) * norm.gain_D) @ self._value_weight(head).T

    def _value_weight(self, head: Head) -> torch.Tensor:
        """W_V of the head's key/value group: d D."""
        shape = self.anatomy.shape
        group = head[1] // (shape.n_heads // shape.n_groups)
        rows = slice(group * shape.d_head, (group + 1) * shape.d_head)
        return self.anatomy.value(head[0]).weight[rows].detach().to(self.wide)

    def _query(self, reads: HeadReads, row: int, head: Head, goal: str) -> torch.Tensor:
        """What a value is multiplied with: g W_V^T G, centred under a LayerNorm: D."""
        norm = self.reader.norms[head[0]]
        gradient_d = reads.gradient_BZ[goal][head[0]][row, self.anatomy.head_slice(head[1])]
        return norm.centre(norm.gain_D * (gradient_d @ self._value_weight(head)))

    def _amount(self, reads: HeadReads, row: int, head: Head, share: NeuronShare) -> float:
        """c A_t / s_t, and over s' where there is a norm behind the MLP."""
        moved = reads.weights_BHT[head[0]][row, head[1], share.token] / reads.scale_BT[head[0]][row, share.token]
        post_scale_BT = reads.post_scale_BT[share.layer]
        return (
            share.coefficient * float(moved) / (1 if post_scale_BT is None else float(post_scale_BT[row, share.token]))
        )


class _Collected:
    """The first shares so far, while a pass goes up the layers: nothing as large as B T K outlives a layer."""

    def __init__(
        self, shares: NeuronShares, reads: HeadReads, query_BD: dict[str, torch.Tensor], moved_BT: torch.Tensor,
        head_layers: Sequence[int], top: int,
    ):  # fmt: skip
        self.shares, self.reads, self.query_BD, self.moved_BT = shares, reads, query_BD, moved_BT
        self.head_layers, self.top = torch.tensor(head_layers, device=moved_BT.device), top
        self.total_BT = torch.zeros_like(moved_BT)
        self.found: list[list[NeuronShare]] = [[] for _ in head_layers]

    def take(self, layer: int, coefficients_BTK: torch.Tensor) -> None:
        """What the layer's down_proj reads."""
        coefficients_BTK = coefficients_BTK.to(self.shares.wide)
        values_KD = written_values(self.shares.anatomy, layer)
        moved_BT = self.moved_BT * (self.head_layers > layer)[:, None]  # zero where the head does not come after
        if (post_scale_BT := self.reads.post_scale_BT[layer]) is not None:
            moved_BT = moved_BT / post_scale_BT
        per_unit_BK = {goal: query_BD @ values_KD.T for goal, query_BD in self.query_BD.items()}
        effect_BTK = coefficients_BTK * moved_BT[..., None] * per_unit_BK["answer"][:, None]
        self.total_BT += effect_BTK.sum(dim=-1)
        count = min(self.top, effect_BTK[0].numel())
        effect_Bn, place_Bn = effect_BTK.flatten(1).topk(count, dim=1)
        neurons = coefficients_BTK.shape[2]
        for row in torch.nonzero(self.head_layers > layer)[:, 0].tolist():
            for effect, place in zip(effect_Bn[row].tolist(), place_Bn[row].tolist(), strict=True):
                token, neuron = divmod(place, neurons)
                coefficient = float(coefficients_BTK[row, token, neuron])
                deep = coefficient * float(moved_BT[row, token] * per_unit_BK["deep"][row, neuron])
                self.found[row].append(NeuronShare(layer, neuron, token, coefficient, effect, deep))

    def ranked(self) -> list[list[NeuronShare]]:
        """Each prompt's first shares, largest effect first; ties by (layer, neuron, token)."""
        return [
            sorted(shares, key=lambda share: (-share.effect, share.layer, share.neuron, share.token))[: self.top]
            for shares in self.found
        ]
