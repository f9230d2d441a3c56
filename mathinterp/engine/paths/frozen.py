"""Path patching at END (method.md section 3): one row per (node, pair), carried through the MLPs alone.

A node (head or MLP) takes the output it has at END of X_c; everything else reads X_r. While the other heads keep their
outputs, no token but END can reach the logits and END reads no other token again: so the END row alone goes on, each
later layer being called with its attention output known. No attention runs, and no other token.

- freeze="heads": all other heads keep their X_r outputs, MLPs run. A head of layer l also moves the MLP of layer l
  where that one reads the stream after attention; in parallel blocks (GPT-J, GPT-NeoX), where it reads the layer's
  input beside attention, only MLPs of later layers.
- freeze="all": everything else keeps its X_r output: the node's change goes straight to the final norm.
freeze="none" is in patching.py.

Nothing here is per family: a layer is called with its attention (and for an MLP node its MLP) replaced by known
outputs, so norms behind them (Gemma-2), scales and parallel blocks are the layer's own.

Shape legend: P pair, N node of one layer, R row (node, pair), L layer, D model width, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from mathinterp.engine.alone import TOLERATED_DEVIATION, TOLERATED_HALF_DEVIATION
from mathinterp.engine.batching import free_memory
from mathinterp.engine.compiling import compiled as compiled_by_rule
from mathinterp.engine.in_flight import turns
from mathinterp.engine.layers import call_layer
from mathinterp.engine.pairs import CleanPairs, Ends
from mathinterp.engine.parts import known_twin
from mathinterp.engine.paths.nodes import Node
from mathinterp.engine.scores import LOGITS_AT_ONCE, score_logits, unembedded
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import at_module
from mathinterp.models.units import Head, Mlp

CPU_ROWS, GPU_ROWS = 2048, 32768  # most rows in one batch
COMPILE_FROM_ROWS = 200_000  # rows times layers from which compiling pays on a GPU


FinalRows = tuple[torch.Tensor, torch.Tensor, int]  # of a batch: hidden states R D, pairs R, how many rows count


@dataclass(frozen=True)
class Measures:
    """Of the scored token, float32 (float64 for a float64 model), on the model's device; N P each, or P."""

    logit: torch.Tensor  # after a final soft-cap
    logprob: torch.Tensor  # nats
    centred: torch.Tensor  # logit minus the mean logit of the vocabulary
    predicted: torch.Tensor  # the likeliest token

    def __getitem__(self, index: object) -> "Measures":
        return Measures(*(column[index] for column in self.columns))  # type: ignore[index]

    def difference(self, other: "Measures") -> float:
        """Largest difference of the three numbers; NaN if there is one."""
        pairs = list(zip(self.columns, other.columns, strict=True))[:3]
        return max((float((a - b).abs().max()) for a, b in pairs), key=lambda d: (d != d, d))

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        return self.logit, self.logprob, self.centred, self.predicted

    def numpy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logit, log-probability and centred logit in float64, on the host."""
        logit, logprob, centred = (column.double().cpu().numpy() for column in self.columns[:3])
        return logit, logprob, centred

    @staticmethod
    def joined(parts: Sequence["Measures"]) -> "Measures":
        """Rows of several one after another."""
        return Measures(*(torch.cat(columns) for columns in zip(*(part.columns for part in parts), strict=True)))

    @staticmethod
    def stacked(parts: Sequence["Measures"]) -> "Measures":
        """Several of P each as one of N P."""
        return Measures(*(torch.stack(columns) for columns in zip(*(part.columns for part in parts), strict=True)))


def measure_logits(logits_RV: torch.Tensor, gold_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logit, log-probability and centred logit of each row's gold token, and the likeliest token: R each."""
    logprob, logit, predicted = score_logits(logits_RV, gold_R)
    return logit, logprob, logit - logits_RV.mean(dim=1), predicted


class Scorer:
    """Measures of final residual rows, in equal pieces: a product's last bits depend on its number of rows."""

    def __init__(self, anatomy: Anatomy, compiled: bool = False):
        self.anatomy = anatomy
        self.most = max(1, LOGITS_AT_ONCE // anatomy.shape.vocabulary)
        self._norm: Callable[..., torch.Tensor] = anatomy.final_norm
        self._measure = measure_logits
        if compiled:
            self._norm = compiled_by_rule(anatomy.final_norm, dynamic=True)
            self._measure = compiled_by_rule(measure_logits, dynamic=True)

    def pieces(self, rows: int) -> int:
        """In how many pieces ``rows`` rows are scored."""
        return -(-rows // self.most)

    def __call__(self, final_RD: torch.Tensor, gold_R: torch.Tensor) -> Measures:
        """Measures of the gold tokens: R."""
        pieces = self.pieces(len(final_RD))
        parts = [
            Measures(*self._measure(unembedded(self.anatomy, self._norm(rows)), gold))
            for rows, gold in zip(final_RD.chunk(pieces), gold_R.chunk(pieces), strict=True)
        ]
        return Measures.joined(parts)


class PathEngine:
    """Effects of nodes at END of all pairs, by END rows.

    Args:
        anatomy: the model; its weights decide device and dtype.
        clean: sentences up to END, and their activations there.
        max_rows: most rows in one batch; None = by device. Halved for good when memory runs out.
        compiled: compile layers and scoring; None = on CUDA, where there are rows enough.
    """

    freezes: ClassVar[tuple[str, ...]] = ("heads", "all")

    @torch.no_grad()
    def __init__(
        self, anatomy: Anatomy, clean: CleanPairs, *, max_rows: int | None = None, compiled: bool | None = None
    ):
        self.anatomy, self.pairs = anatomy, clean.pairs
        self.original, self.counterfactual = clean.original, clean.counterfactual
        self.gold_P = torch.from_numpy(self.pairs.gold_P).to(anatomy.device)
        family, shape = anatomy.family, anatomy.shape
        on_gpu = anatomy.device.type == "cuda"
        if compiled is None:
            compiled = on_gpu and shape.n_layers**2 * shape.n_heads * len(self.pairs) // 2 > COMPILE_FROM_ROWS
        self._fixed_shape = compiled or anatomy.dtype not in (torch.float32, torch.float64)
        self._call: Callable[..., torch.Tensor] = (
            compiled_by_rule(call_layer, dynamic=False) if compiled else call_layer
        )  # fmt: skip
        self.scorer = Scorer(anatomy, compiled)
        self.max_rows = max_rows or (GPU_ROWS if on_gpu else CPU_ROWS)  # however many cards: see packed.py
        self._mlp_runs = [known_twin(anatomy, layer) for layer in range(shape.n_layers)]
        self._all_known = [known_twin(anatomy, layer, family.mlp) for layer in range(shape.n_layers)]
        self._run_clean_rows()

    # ---- clean rows ----

    def _run_clean_rows(self) -> None:
        """Inputs of all layers at END of X_r, and the baseline, in batches of the shape of patched ones."""
        layers = self.anatomy.shape.n_layers
        self.residual_LPD = self.original.embedded_PD.new_empty(layers + 1, *self.original.embedded_PD.shape)
        parts = []
        for pair_R, kept in self._batches(1):
            hidden = self.original.embedded_PD[pair_R]
            for layer in range(layers):
                self.residual_LPD[layer, pair_R] = hidden
                hidden = self.layer(layer, hidden, self.original.attention_LPD[layer, pair_R])
            self.residual_LPD[layers, pair_R] = hidden
            parts.append(self.scorer(hidden, self.gold_P[pair_R])[:kept])
        self.baseline = Measures.joined(parts)

    def deviation(self) -> float:
        """Largest difference between the END rows' baseline and that of the clean forward pass.

        Raises RuntimeError if it is beyond what rounding explains in the model's dtype.
        """
        worst = self.baseline.difference(self.scorer(self.original.final_PD, self.gold_P))
        limit = TOLERATED_DEVIATION.get(self.anatomy.dtype, TOLERATED_HALF_DEVIATION)
        if not worst <= limit:  # NaN is no agreement
            raise RuntimeError(
                f"END rows stray {worst:.3g} nats from forward passes (limit {limit:g} in {self.anatomy.dtype}):"
                f" layers of {self.anatomy.shape.model_type} are not called as expected; report this"
            )
        return worst

    @torch.no_grad()
    def noise_floor(self) -> float:
        """Largest difference that patching X_r's own outputs makes: first, middle and last layer, head 0 and MLP."""
        last = self.anatomy.shape.n_layers - 1
        own = self.original
        return max(
            self._patched([Head(layer, 0), Mlp(layer)], "heads", own)[node].difference(self.baseline)
            for layer in sorted({0, (last + 1) // 2, last})
            for node in (0, 1)
        )

    # ---- patched rows ----

    def patched(self, nodes: Sequence[Node], freeze: str = "heads") -> Measures:
        """Measures under each node patched by itself at END: N P.

        Args:
            nodes: query heads and the MLP of one layer.
            freeze: "heads" or "all".
        """
        assert freeze in self.freezes, f"{type(self).__name__} does not do freeze={freeze}"
        while True:
            try:
                return self._patched(nodes, freeze, self.counterfactual)
            except torch.cuda.OutOfMemoryError:
                if self.max_rows <= 1:
                    raise
            self.max_rows //= 2
            free_memory()

    @torch.no_grad()
    def _patched(self, nodes: Sequence[Node], freeze: str, source: Ends) -> Measures:
        run = self._direct_rows if freeze == "all" else self._carried_rows
        with closing(run(nodes, source)) as batches:
            parts = [self.scorer(final_RD, self.gold_P[pair_R])[:kept] for final_RD, pair_R, kept in batches]
        found = Measures.joined(parts)
        return Measures(*(column.unflatten(0, (len(nodes), -1)) for column in found.columns))

    def _carried_rows(self, nodes: Sequence[Node], source: Ends) -> Generator[FinalRows]:
        """freeze="heads": through the layer's MLP, or past it where the MLP is the node, and all later layers."""
        for hidden_RD, pair_R, kept in self.entering(nodes, source):
            yield self.carry(nodes[0].layer + 1, hidden_RD, pair_R), pair_R, kept

    def entering(self, nodes: Sequence[Node], source: Ends) -> Generator[FinalRows]:
        """Rows that leave the nodes' layer with one of them patched; what follows belongs to the batch's turn."""
        layer, change = nodes[0].layer, self.attention_changes(nodes, source).flatten(0, 1)
        is_mlp_N = torch.tensor([isinstance(node, Mlp) for node in nodes], device=change.device)
        residual_PD, attention_PD = self.residual_LPD[layer], self.original.attention_LPD[layer]
        past_mlp_PD = self.layer(layer, residual_PD, attention_PD, source.mlp_LPD[layer])
        for row_R, kept in turns(self.anatomy.cards, self._batches(len(nodes))):
            pair_R, node_R = row_R % len(self.pairs), row_R // len(self.pairs)
            through = self.layer(layer, residual_PD[pair_R], attention_PD[pair_R] + change[row_R])
            yield torch.where(is_mlp_N[node_R, None], past_mlp_PD[pair_R], through), pair_R, kept

    def _direct_rows(self, nodes: Sequence[Node], source: Ends) -> Generator[FinalRows]:
        """freeze="all": x_L plus what the node adds to the residual stream on X_c less what it adds on X_r."""
        change = self.direct_changes(nodes, source).flatten(0, 1)
        for row_R, kept in turns(self.anatomy.cards, self._batches(len(nodes))):
            pair_R = row_R % len(self.pairs)
            yield self.residual_LPD[-1, pair_R] + change[row_R], pair_R, kept

    def attention_changes(self, nodes: Sequence[Node], source: Ends) -> torch.Tensor:
        """What each node changes in the attention output (o_proj's) at END: N P D, zero for the MLP."""
        shape, layer = self.anatomy.shape, nodes[0].layer
        weight_HdD = self.anatomy.output_weight(layer).unflatten(0, (shape.n_heads, shape.d_head))
        change_PHd = (source.heads_LPZ[layer] - self.original.heads_LPZ[layer]).unflatten(1, (shape.n_heads, -1))
        change: torch.Tensor = change_PHd.new_zeros(len(nodes), len(change_PHd), shape.d_model)
        places = [place for place, node in enumerate(nodes) if isinstance(node, Head)]
        heads = [node.head for node in nodes if isinstance(node, Head)]
        if places == list(range(len(heads))):  # as scans ask for them: nothing need be moved
            torch.bmm(change_PHd[:, heads].transpose(0, 1), weight_HdD[heads], out=change[: len(heads)])
        else:
            change[places] = torch.bmm(change_PHd[:, heads].transpose(0, 1), weight_HdD[heads])
        return change

    def direct_changes(self, nodes: Sequence[Node], source: Ends) -> torch.Tensor:
        """What each node changes in the residual stream by itself, behind a norm of its own (Gemma-2): N P D."""
        layer = nodes[0].layer
        attention_PD = self.original.attention_LPD[layer]
        change = self.attention_changes(nodes, source)
        if (norm := self.anatomy.attention_post_norm(layer)) is not None:
            change = norm(attention_PD + change) - norm(attention_PD)
        if Mlp(layer) in nodes:
            norm = self.anatomy.mlp_post_norm(layer) or nn.Identity()
            change[list(nodes).index(Mlp(layer))] = norm(source.mlp_LPD[layer]) - norm(self.original.mlp_LPD[layer])
        return change

    def carry(self, first: int, hidden_RD: torch.Tensor, pair_R: torch.Tensor, stop: int | None = None) -> torch.Tensor:
        """Rows that enter layer ``first``, taken to layer ``stop`` (None: the end) with X_r's attention: R D."""
        for layer in range(first, self.anatomy.shape.n_layers if stop is None else stop):
            hidden_RD = self.layer(layer, hidden_RD, self.original.attention_LPD[layer, pair_R])
        return hidden_RD

    def layer(
        self, layer: int, hidden_RD: torch.Tensor, attention_RD: torch.Tensor, mlp_RD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output, its attention output and perhaps its MLP output known: R D."""
        family = self.anatomy.family
        if mlp_RD is None:
            twin, call, known = self._mlp_runs[layer], self._call, {family.attention: attention_RD[:, None]}
        else:
            twin, call = self._all_known[layer], call_layer
            known = {family.attention: attention_RD[:, None], family.mlp: mlp_RD[:, None]}
        hidden_R1D = at_module(twin.module, hidden_RD)[:, None]
        output = call(twin.load(**known), hidden_R1D, (), dict.fromkeys(family.layer_needs))
        twin.check_used()
        return output[:, 0].to(hidden_RD.device)

    def _batches(self, nodes: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Indices of rows node * P + pair in batches, and how many of each batch count.

        Where results depend on the number of rows in a product (half precision), or that is compiled, all batches are
        of one size: that which cuts all nodes of a layer evenly. The last one starts over to be full.
        """
        total = nodes * len(self.pairs)
        rows = _even(total, self.max_rows)
        if self._fixed_shape:
            rows = _even((self.anatomy.shape.n_heads + 1) * len(self.pairs), self.max_rows)
            pieces = self.scorer.pieces(rows)
            rows = -(-rows // pieces) * pieces
        for start in range(0, total, rows):
            kept = min(rows, total - start)
            stop = start + (rows if self._fixed_shape else kept)
            yield torch.arange(start, stop, device=self.gold_P.device) % total, kept


def _even(total: int, most: int) -> int:
    """The size of the fewest equal parts of at most ``most``."""
    parts = -(-total // most)
    return -(-total // parts)
