"""Head scan: ablate one attention head at a time and score every answer token (paper A section 3, paper B 4.1).

For each layer l and query head h, the head's slice of o_proj's input is replaced (zero, mean or resample) and the
model answers all prompts again. One row per (head, prompt, scored token); the unedited model's rows are the baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.adaptive.ablations import AdaptiveAblation
from mathinterp.experiments.adaptive.drops import Node
from mathinterp.experiments.adaptive.reuse import with_reused
from mathinterp.experiments.adaptive.summary import decided, summarize_decisions
from mathinterp.experiments.adaptive.tables import TABLES as DECISIONS
from mathinterp.experiments.base import NothingToShow, Shard
from mathinterp.experiments.chosen_heads import check_choice, choice_parameters, chosen_heads, cut_heads, most_at_once
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.finished_run import HeadRanking
from mathinterp.experiments.heads.tables import HEAD_SCAN, TABLES
from mathinterp.experiments.options import normalized, option, read_heads, read_layers
from mathinterp.experiments.ranking import BY_DROP, Ranking
from mathinterp.experiments.results import SIGNIFICANT, Results, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.experiments.adaptive.blocks import Blocks
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Heads(AdaptiveAblation):
    """Ablate each attention head in turn and score every answer token (paper A, section 3)."""

    heads: tuple[Head, ...] | None = option(
        None, "Heads, for example 17.22,14.19.", parse=read_heads, shown="all of the layers"
    )
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")

    name: ClassVar[str] = "heads"
    runs_quantised: ClassVar[bool] = True
    node_table: ClassVar[str] = "head_scan"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES, **DECISIONS}
    command_examples: ClassVar[Sequence[str]] = (
        "scan heads",
        "scan heads --model smollm2 --adapter smollm2-arithmetic --limit 160",
        "scan heads --prompts pairs --ablation mean",
        "scan heads --decide 5",
    )

    head_ranking: ClassVar[HeadRanking] = HeadRanking(
        ranked="""SELECT layer, head FROM head_effects WHERE run_id = $run AND operation = $operation
                  ORDER BY round(drop, 12) DESC, logprob_change, layer, head""",
        key=f"""SELECT layer, head FROM head_effects
                WHERE run_id = $run AND drop > 0.05 AND (operation = $operation OR q_value < {SIGNIFICANT})""",
    )  # ties of accuracy: by log-probability
    node_ranking: ClassVar[Ranking] = BY_DROP
    reads_own_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, heads=read_heads(self.heads), layers=read_layers(self.layers))
        check_choice(self.heads, self.layers)

    def chosen(self, shape: ModelShape) -> list[Head]:
        """The heads to ablate, layer by layer; raises UserError for one that does not exist."""
        return chosen_heads(shape, self.heads, self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {**super().parameters(), **choice_parameters(self.heads, self.layers)}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, then files of 16 heads and more; layer l costs L - l. Under ``decide``: the first block."""
        if (growing := self.growing(shape, prompts)) is not None:
            return growing.first()
        if self.reused is not None:
            return list(self.reused.shards)
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, heads in enumerate(cut_heads(self.chosen(shape))):
            cost = float(sum(shape.n_layers - layer for layer, _ in heads))
            pieces.append(Shard("head_scan", index, {"heads": [list(head) for head in heads]}, cost))
        return pieces

    def decided_nodes(self, shape: ModelShape) -> list[Node]:
        """The chosen heads."""
        return [(head.layer, head.head) for head in self.chosen(shape)]

    def files(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """16 heads and more a file."""
        files = cut_heads([Head(layer, head) for layer, head in nodes if head is not None])
        return [[(head.layer, head.head) for head in file] for file in files if file]

    def named(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """``heads``."""
        return {"heads": [list(node) for node in nodes]}

    def nodes_in(self, shard: Shard) -> list[Node]:
        """Of ``heads``."""
        return [(layer, head) for layer, head in shard.work["heads"]]

    def batches(self, shape: ModelShape) -> list[list[Head]]:
        """The heads of one layer in one file at once."""
        return [
            list(heads)
            for file in cut_heads(self.chosen(shape))
            for _, heads in itertools.groupby(file, key=lambda head: head.layer)
        ]

    def edits_per_batch(self, shape: ModelShape) -> int:
        """By the model alone, so that a scan of some heads lays prompts out as one of all heads does."""
        return most_at_once(shape.n_heads)

    def run(self, state: AblationState | Blocks, shard: Shard) -> pa.Table:
        """Rows of the shard's heads, each ablated by itself."""
        from mathinterp.experiments.ablated import AblationState, baseline_rows

        state = state if isinstance(state, AblationState) else state.of(shard)
        if shard.table == "baseline":
            return baseline_rows(state, BASELINE)
        by_layer: dict[int, list[int]] = {}
        for layer, head in shard.work["heads"]:
            by_layer.setdefault(layer, []).append(head)
        return pa.concat_tables([self._ablate(state, layer, heads) for layer, heads in by_layer.items()])

    def _ablate(self, state: AblationState, layer: int, heads: list[int]) -> pa.Table:
        from mathinterp.engine.intervention import intervention
        from mathinterp.experiments.ablated import score_rows, value_of

        value = value_of(self, state, "head", layer)
        scores = state.engine.run([intervention([Head(layer, head)], value) for head in heads])
        return score_rows(state, scores, HEAD_SCAN, {"layer": [layer] * len(heads), "head": heads})

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """See summary.py."""
        if decided(results):
            return summarize_decisions(results, "head_decisions", "head")
        from mathinterp.experiments.heads.summary import summarize

        return with_reused(results, summarize(results))
