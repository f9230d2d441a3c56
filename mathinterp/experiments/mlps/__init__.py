"""MLP scan: ablate one whole MLP block at a time; rows as in the head scan, without a head (method.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.adaptive.ablations import AdaptiveAblation
from mathinterp.experiments.adaptive.drops import Node
from mathinterp.experiments.adaptive.reuse import with_reused
from mathinterp.experiments.adaptive.summary import decided, summarize_decisions
from mathinterp.experiments.adaptive.tables import TABLES as DECISIONS
from mathinterp.experiments.base import NothingToShow, Shard
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.mlps.tables import MLP_SCAN, TABLES
from mathinterp.experiments.options import normalized, option, read_layers
from mathinterp.experiments.ranking import BY_DROP, Ranking
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Mlp

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.experiments.adaptive.blocks import Blocks
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

LAYERS_PER_FILE = 4


@dataclass(frozen=True)
class Mlps(AdaptiveAblation):
    """Ablate each whole MLP block in turn and score every answer token."""

    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")

    name: ClassVar[str] = "mlps"
    runs_quantised: ClassVar[bool] = True
    node_table: ClassVar[str] = "mlp_scan"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES, **DECISIONS}
    command_examples: ClassVar[Sequence[str]] = ("scan mlps --limit 200",)
    node_ranking: ClassVar[Ranking] = BY_DROP
    reads_own_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, layers=read_layers(self.layers))
        if self.layers == ():
            raise UserError("no MLPs to ablate; name at least one layer, or leave `layers` out for all")

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers to ablate; raises UserError for one that does not exist."""
        layers = list(range(shape.n_layers)) if self.layers is None else sorted(set(self.layers))
        for layer in layers:
            shape.check_layer(layer)
        return layers

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {**super().parameters(), "layers": None if self.layers is None else sorted(set(self.layers))}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, then files of four layers. Under ``decide``: the first block."""
        if (growing := self.growing(shape, prompts)) is not None:
            return growing.first()
        if self.reused is not None:
            return list(self.reused.shards)
        layers = self.chosen(shape)
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, start in enumerate(range(0, len(layers), LAYERS_PER_FILE)):
            part = layers[start : start + LAYERS_PER_FILE]
            cost = float(sum(shape.n_layers - layer for layer in part))
            pieces.append(Shard("mlp_scan", index, {"layers": part}, cost))
        return pieces

    def decided_nodes(self, shape: ModelShape) -> list[Node]:
        """The chosen layers' MLPs."""
        return [(layer, None) for layer in self.chosen(shape)]

    def files(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Four layers a file."""
        return [list(nodes[start : start + LAYERS_PER_FILE]) for start in range(0, len(nodes), LAYERS_PER_FILE)]

    def named(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """``layers``."""
        return {"layers": [layer for layer, _ in nodes]}

    def nodes_in(self, shard: Shard) -> list[Node]:
        """Of ``layers``."""
        return [(layer, None) for layer in shard.work["layers"]]

    def batches(self, shape: ModelShape) -> list[list[Mlp]]:
        """One MLP at a time."""
        return [[Mlp(layer)] for layer in self.chosen(shape)]

    def run(self, state: AblationState | Blocks, shard: Shard) -> pa.Table:
        """Rows of the shard's layers, each MLP ablated by itself."""
        from mathinterp.experiments.ablated import AblationState, baseline_rows

        state = state if isinstance(state, AblationState) else state.of(shard)
        if shard.table == "baseline":
            return baseline_rows(state, BASELINE)
        return pa.concat_tables([self._ablate(state, layer) for layer in shard.work["layers"]])

    def _ablate(self, state: AblationState, layer: int) -> pa.Table:
        from mathinterp.engine.intervention import intervention
        from mathinterp.experiments.ablated import score_rows, value_of

        scores = state.engine.run([intervention([Mlp(layer)], value_of(self, state, "mlp", layer))])
        return score_rows(state, scores, MLP_SCAN, {"layer": [layer]})

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """The MLPs that cost most, per operation, and how few they are."""
        if decided(results):
            return summarize_decisions(results, "mlp_decisions", "MLP")
        from mathinterp.experiments.ablation_summary import summarize_ablation

        return with_reused(results, summarize_ablation(results, "mlp_effects", "'mlp ' || layer", "MLP"))
