"""Operand maps: every head and neuron at END as a picture over all pairs of operands, and what it says.

A map is one number per pair (a, b): of a neuron its coefficient (down_proj's input), of a head the norm of what it adds
to o_proj's output ("norm") and its direct share in the answer's logit ("answer": <head's output, g (W_U[t] - mean
W_U)> / s, t the first answer token, s the final norm's frozen scale). The last one follows the answer's token by
itself: a head that gives the same for every pair has a map, too. Heuristics and the numbers of neurons kept follow
arXiv 2410.21272, sections 3.1 and 4.1, the periods arXiv 2502.00873. Where tokenizers split digits, END predicts the
answer's leading digit, and a tens digit of 0 is a number of fewer tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.operand_map.tables import TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_counts, read_layers
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_SEED

if TYPE_CHECKING:
    from mathinterp.experiments.operand_map.rows import MapState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

DEFAULT_KS = (200, 50, 10)  # 200: arXiv 2410.21272
ABLATIONS = ("mean", "zero")
BYTES_PER_NUMBER = 3  # of a stored map, about


@dataclass(frozen=True)
class ShownUnits:
    """Options of the summary and the figure."""

    top: int = option(10, "Units shown.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class OperandMap(Experiment):
    """Map every head and neuron over all pairs of operands 0..99: which heuristic and which periods explain it.

    Prompts: the sets operands_add (the default), operands_sub (n1 >= n2), operands_mul and operands_div (exact), or a
    file of another form with the fields operand_a and operand_b, each pair once. A heuristic (a, b or the result modulo
    2, 5, 10, its tens digit, a range; a carry; a = b) explains a unit as well as the area under its ROC curve says,
    beside the best one when pairs are shuffled. Shares of power at periods 2, 5, 10, 100. Then how often the first
    answer token is right when only the k neurons of largest effect are kept in each deep layer at END.
    """

    maps: int = option(
        20, "Neuron maps stored per layer: the best explained, families in turn; heads' all are.", least=0
    )
    every_map: bool = option(False, "Store every neuron's map.")
    shuffles: int = option(3, "Shuffles of the pairs that the control is a mean of.", least=1, most=100)
    sample: int = option(1000, "Pairs that neurons' effects are estimated on.", least=2)
    ks: tuple[int, ...] | None = option(
        None, "Neurons kept per layer.", parse=partial(read_counts, least=1),
        shown="200,50,10, those that are fewer than a layer has",
    )  # fmt: skip
    ablation: str = option("mean", "What the others become: their mean over all pairs, or zero.", choices=ABLATIONS)
    deep_layers: tuple[int, ...] | None = option(
        None,
        "In which layers neurons are kept, for example 17-31.",
        parse=partial(read_layers, field="deep_layers"),
        shown="from the layer nearest to 17/32 of the depth on",
    )
    layers: tuple[int, ...] | None = option(None, "Layers mapped, for example 0-3,17.", parse=read_layers, shown="all")
    map_seed: int = option(0, "Of shuffles, sample and random neurons.", least=0, most=MOST_SEED)

    name: ClassVar[str] = "operands"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    prompt_set: ClassVar[str] = "operands_add"
    show_options: ClassVar[type] = ShownUnits
    command_examples: ClassVar[Sequence[str]] = (
        "scan operands",
        "scan operands --prompts operands_mul --maps 50 --ks 200,100 --ablation zero",
    )

    def __post_init__(self) -> None:
        ks = read_counts(self.ks, least=1)
        normalized(
            self, ks=ks, layers=read_layers(self.layers), deep_layers=read_layers(self.deep_layers, "deep_layers")
        )
        check_options(self)
        if self.layers == () or self.deep_layers == () or ks == ():
            raise UserError("`layers`, `deep_layers` and `ks`: name at least one, or leave the option out")

    def bind(self, context: Context) -> Self:
        """Raises UserError where every map is more than the store's disk has free."""
        from mathinterp.experiments.neurons.against import require_free

        if self.every_map:
            neurons = len(self.chosen(context.model.shape)) * context.model.shape.n_neurons
            numbers = neurons * len(context.prompts)
            require_free(
                context.store, BYTES_PER_NUMBER * numbers,
                f"`every_map` would write about {{size}} ({neurons:,} neurons x {len(context.prompts):,} pairs)",
                "store the best `maps` of each layer, or take fewer `layers`",
            )  # fmt: skip
        return self

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers mapped; raises UserError for one that does not exist."""
        return shape.chosen_layers(self.layers)

    def deep(self, shape: ModelShape) -> list[int]:
        """The layers in which neurons are kept; raises UserError for one that does not exist."""
        from mathinterp.models.depth import deep_layers

        return shape.chosen_layers(deep_layers(shape.n_layers) if self.deep_layers is None else self.deep_layers)

    def chosen_ks(self, shape: ModelShape) -> list[int]:
        """Numbers of neurons kept per layer, largest first; raises UserError for one that leaves none out."""
        for k in self.ks or ():
            if k >= shape.n_neurons:
                raise UserError(f"`ks` {k}: a layer has {shape.n_neurons} neurons; keep fewer")
        return sorted({k for k in self.ks or DEFAULT_KS if k < shape.n_neurons}, reverse=True)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        lists = {
            name: None if getattr(self, name) is None else sorted(set(getattr(self, name)))
            for name in ("ks", "deep_layers", "layers")
        }
        single = {name: getattr(self, name) for name in ("shuffles", "sample", "ablation", "map_seed")}
        return {"maps": "all" if self.every_map else self.maps, **single, **lists, "scoring": "first_token"}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """A file per layer, the pairs, and the first answer token with all and with few neurons.

        Raises UserError for prompts that are no grid of operands.
        """
        from mathinterp.experiments.operand_map.grid import grid_of

        grid_of(prompts)
        self.deep(shape)
        keep = Shard("operand_keep_scan", 0, {"ks": self.chosen_ks(shape)}, cost=2.0)
        layers = [Shard("operand_unit_maps", index, {"layers": [k]}) for index, k in enumerate(self.chosen(shape))]
        return [
            keep, *layers, Shard("operand_pairs", 0, cost=0.1),
            Shard("baseline", 0, cost=0.1),
        ]  # fmt: skip

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (layer, pair), and for each pair and choice of neurons."""
        choices = 1 + 2 * len(shard.work.get("ks", ()))
        counts = {"operand_unit_maps": 1, "baseline": 1, "operand_keep_scan": choices}
        return counts.get(shard.table, 0) * len(prompts)

    def prepare(self, subject: Subject) -> MapState:
        """The clean pass, and the neurons' effects."""
        from mathinterp.experiments.operand_map.rows import prepare

        return prepare(self, subject)

    def run(self, state: MapState, shard: Shard) -> pa.Table:
        """Rows of one layer, or of one of the small tables."""
        from mathinterp.experiments.operand_map import rows

        if shard.table == "operand_unit_maps":
            return rows.layer_rows(state, shard.work["layers"][0])
        if shard.table == "operand_pairs":
            return rows.pair_rows(state)
        return rows.keep_rows(state) if shard.table == "operand_keep_scan" else rows.baseline_rows(state)
