"""Attention scan: what END looks at, head by head (paper B section 4.1, Figure 5; method.md section 4).

END's row of the attention matrix on X_r, summed over tokens of one type: six rows per (head, prompt), one per type.
Only prompts that the model answers rightly are read, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.attention.tables import TABLES
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.chosen_heads import check_choice, choice_parameters, chosen_heads, cut_heads
from mathinterp.experiments.options import check_options, normalized, option, read_heads, read_layers
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mathinterp.experiments.attention.rows import AttentionState
    from mathinterp.experiments.costs import Cost
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class ShownHeads:
    """How much of an attention scan is shown."""

    top: int = option(8, "Heads shown.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Attention(Experiment):
    """What each head attends to from the last prompt token, by token type (paper B, section 4.1 and Figure 5).

    Types: bos, operand_a, operand_b, operator, equals, other. The model runs eager attention for this.
    Prompts that the model answers wrongly (first token) are left out.
    """

    heads: tuple[Head, ...] | None = option(
        None, "Heads, for example 13.11,14.2.", parse=read_heads, shown="all of the layers"
    )
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    keep_all: bool = option(False, "Keep prompts that the model answers wrongly, too.")

    name: ClassVar[str] = "attention"
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "pairs"
    show_options: ClassVar[type] = ShownHeads
    command_examples: ClassVar[Sequence[str]] = (
        "scan attention",
        "scan attention --heads 0.6,0.1 --prompts two_digit",
    )

    def __post_init__(self) -> None:
        normalized(self, heads=read_heads(self.heads), layers=read_layers(self.layers))
        check_choice(self.heads, self.layers)

    def chosen(self, shape: ModelShape) -> list[Head]:
        """The query heads, layer by layer; raises UserError for one that does not exist."""
        return chosen_heads(shape, self.heads, self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {**choice_parameters(self.heads, self.layers), "keep_all": self.keep_all}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of 16 heads and more; raises UserError for a prompt in whose text an operand is not to be found."""
        from mathinterp.prompts.token_types import operand_spans

        for item in prompts:
            operand_spans(item.prompt)
        return [
            Shard("attention_scan", index, {"heads": [list(head) for head in heads]})
            for index, heads in enumerate(cut_heads(self.chosen(shape)))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One pass over the prompts serves all heads."""
        return len(prompts)

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.attention.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> AttentionState:
        """The choice of prompts, and one eager pass over them."""
        from mathinterp.experiments.attention.rows import prepare

        layers = sorted({layer for layer, _ in self.chosen(subject.anatomy.shape)})
        return prepare(subject, layers, self.keep_all)

    def run(self, state: AttentionState, shard: Shard) -> pa.Table:
        """Rows of the shard's heads."""
        from mathinterp.experiments.attention.rows import head_rows

        return pa.concat_tables([head_rows(state, layer, head) for layer, head in shard.work["heads"]])

    def notes(self, state: AttentionState) -> dict[str, Any]:
        """How far eager attention strays from the model's own (log-probabilities, nats), and weights' sums from 1."""
        return state.notes

    @classmethod
    def summarize(cls, results: Results, shown: ShownHeads) -> Summary:
        """See summary.py."""
        from mathinterp.experiments.attention.summary import summarize

        return summarize(results, shown.top)

    @classmethod
    def figure(cls, results: Results, shown: ShownHeads) -> Figure:
        """See figure.py."""
        from mathinterp.experiments.attention.figure import draw

        return draw(results, shown.top)
