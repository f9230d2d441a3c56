"""MLP probing: how alike each MLP's input and output at END are to operands and answer (paper B section 4.2).

Cosine similarity with W_U[A], W_U[B], W_U[C], where A, B, C are the first digit tokens of operand A, operand B and the
answer as they stand in the sentence. Three rows per (layer, prompt). Only prompts that the model answers rightly are
read, unless all are asked for. The third measure is that of MLP_out - MLP_in, which a cosine need not normalise first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.mlp_probe.tables import TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_layers
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.experiments.mlp_probe.rows import ProbeState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

VECTORS = ("residual", "written")
LAYERS_PER_FILE = 8


def check_targets(prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise UserError unless every prompt has both operands or none has any, and all name the same types."""
    from mathinterp.prompts.token_types import named_spans, operand_spans, scheme_of

    arithmetic = scheme_of([item.prompt for item in prompts]) == "arithmetic"
    named = [name for name, _ in prompts[0].prompt.token_types]
    for item in prompts:
        if arithmetic and len(operand_spans(item.prompt)) < 2:
            raise UserError(
                f"prompt '{item.prompt.prompt_id}': probing compares with both operands; set the fields operand_a and"
                " operand_b of every prompt (or, for prompts that are no arithmetic, of none, nor operation)"
            )
        same = sorted(named_spans(item.prompt)) == sorted(named)
        if not same or (item.distractor is None) != (prompts[0].distractor is None):
            raise UserError(
                f"prompt '{item.prompt.prompt_id}': probing compares all prompts with the same, so name the same"
                f" token_types in each ({', '.join(named) or 'none'}), and give a distractor to all or none"
            )


@dataclass(frozen=True)
class MlpProbe(Experiment):
    """Cosine of each MLP's input and output at END with the unembedding of operands and answer (paper B, section 4.2).

    a, b, c: first digit tokens of operand A, operand B and the answer; difference: output - input. Of prompts without
    operands: the first and the last token of the text, and the answer. The words that the prompts name in their field
    token_types, and distractors, come besides.
    Prompts that the model answers wrongly (first token) are left out.
    """

    vectors: str = option(
        "residual",
        "residual: the stream before and after the MLP; written: the MLP's normed input and what it writes.",
        choices=VECTORS,
    )
    fold_norm: bool = option(False, "Fold the final norm's weight into the unembedding.")
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    keep_all: bool = option(False, "Keep prompts that the model answers wrongly, too.")

    name: ClassVar[str] = "probe"
    runs_quantised: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "pairs"
    command_examples: ClassVar[Sequence[str]] = (
        "scan probe",
        "scan probe --vectors written --fold-norm --prompts two_digit",
    )

    def __post_init__(self) -> None:
        normalized(self, layers=read_layers(self.layers))
        check_options(self)
        if self.layers == ():
            raise UserError("no MLPs to probe; name at least one layer, or leave `layers` out for all")

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers to probe; raises UserError for one that does not exist."""
        return shape.chosen_layers(self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        layers = None if self.layers is None else sorted(set(self.layers))
        return {
            "vectors": self.vectors,
            "fold_norm": self.fold_norm,
            "layers": layers,
            "keep_all": self.keep_all,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Files of eight layers; raises UserError for a prompt that has not what the others are compared with."""
        check_targets(prompts)
        layers = self.chosen(shape)
        return [
            Shard("mlp_probe", index, {"layers": layers[start : start + LAYERS_PER_FILE]})
            for index, start in enumerate(range(0, len(layers), LAYERS_PER_FILE))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One pass over the prompts serves all layers."""
        return len(prompts)

    def prepare(self, subject: Subject) -> ProbeState:
        """The choice of prompts, and one pass over them."""
        from mathinterp.experiments.mlp_probe.rows import prepare

        return prepare(subject, self.vectors, self.fold_norm, self.keep_all)

    def run(self, state: ProbeState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers."""
        from mathinterp.experiments.mlp_probe.rows import layer_rows

        return pa.concat_tables([layer_rows(state, layer) for layer in shard.work["layers"]])
