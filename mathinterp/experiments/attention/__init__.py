"""Attention scan: what END looks at, head by head (paper B section 4.1, Figure 5; method.md section 4).

END's row of the attention matrix on X_r, summed over tokens of one type: a row per (head, prompt) and type.
Only prompts that the model answers rightly are read, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.experiments.attention.tables import TABLES
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.chosen_heads import check_choice, choice_parameters, chosen_heads, cut_heads
from mathinterp.experiments.options import check_options, normalized, option, read_heads, read_layers
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head
from mathinterp.prompts.token_types import SCHEMES

if TYPE_CHECKING:
    from mathinterp.experiments.attention.rows import AttentionState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import Prompt, TokenizedPrompt


@dataclass(frozen=True)
class ShownHeads:
    """How much of an attention scan is shown."""

    top: int = option(8, "Heads shown.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Attention(Experiment):
    """What each head attends to from the last prompt token, by token type (paper B, section 4.1 and Figure 5).

    Types: bos, operand_a, operand_b, operator, equals, other; of prompts without operands and operator bos, first, last
    (END), other. Types that a prompt's field token_types names come besides. The model runs eager attention for this.
    Prompts that the model answers wrongly (first token) are left out.
    """

    heads: tuple[Head, ...] | None = option(
        None, "Heads, for example 13.11,14.2.", parse=read_heads, shown="all of the layers"
    )
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    keep_all: bool = option(False, "Keep prompts that the model answers wrongly, too.")
    types: str | None = option(
        None,
        "arithmetic; words: first, last and those that the prompts name; position: counted back from END.",
        choices=(None, *SCHEMES),
        shown="arithmetic where any prompt has operands or an operator, else words",
    )

    name: ClassVar[str] = "attention"
    runs_quantised: ClassVar[bool] = True
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
        check_options(self)

    def bind(self, context: Context) -> Self:
        """With the kind of token types that the prompts have."""
        return replace(self, types=self.scheme(context.prompts))

    def scheme(self, prompts: Sequence[Prompt]) -> str:
        """The kind of token types: the one asked for, else the one that fits the prompts."""
        from mathinterp.prompts.token_types import scheme_of

        return self.types or scheme_of(prompts)

    def chosen(self, shape: ModelShape) -> list[Head]:
        """The query heads, layer by layer; raises UserError for one that does not exist."""
        return chosen_heads(shape, self.heads, self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        types = {} if self.types in (None, "arithmetic") else {"types": self.types}
        return {**choice_parameters(self.heads, self.layers), "keep_all": self.keep_all, **types}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of 16 heads and more; raises UserError for an operand, or words, that the text has not."""
        from mathinterp.prompts.token_types import named_spans, operand_spans

        arithmetic = self.scheme([item.prompt for item in prompts]) == "arithmetic"
        for item in prompts:
            named_spans(item.prompt)
            if arithmetic:
                operand_spans(item.prompt)
        return [
            Shard("attention_scan", index, {"heads": [list(head) for head in heads]})
            for index, heads in enumerate(cut_heads(self.chosen(shape)))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One pass over the prompts serves all heads."""
        return len(prompts)

    def prepare(self, subject: Subject) -> AttentionState:
        """The choice of prompts, and one eager pass over them."""
        from mathinterp.experiments.attention.rows import prepare

        layers = sorted({layer for layer, _ in self.chosen(subject.anatomy.shape)})
        return prepare(subject, layers, self.keep_all, self.scheme([item.prompt for item in subject.prompts]))

    def run(self, state: AttentionState, shard: Shard) -> pa.Table:
        """Rows of the shard's heads."""
        from mathinterp.experiments.attention.rows import head_rows

        return pa.concat_tables([head_rows(state, layer, head) for layer, head in shard.work["heads"]])
