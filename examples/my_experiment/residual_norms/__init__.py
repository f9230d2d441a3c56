"""Residual norms: how large the residual stream is at END, before each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from mathinterp.experiments import Experiment, Shard, Subject, Table, option
from mathinterp.experiments.columns import LAYER
from mathinterp.experiments.options import check_options, normalized, read_layers

SCHEMA = pa.schema([LAYER, pa.field("prompt_id", pa.string()), pa.field("norm", pa.float32())])


@dataclass(frozen=True)
class ResidualNorms(Experiment):
    """Measure the norm of the residual stream at END, on entering each layer.

    l2: root of the sum of squares; max: largest absolute entry.
    """

    measure: str = option("l2", "l2 or max.", choices=("l2", "max"))
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")

    name: ClassVar[str] = "residual_norms"
    tables: ClassVar[Mapping[str, Table]] = {
        "residual_norms": Table(SCHEMA, ("layer",), doc="the norm at END of one prompt on entering one layer."),
    }
    command_examples: ClassVar[Sequence[str]] = ("scan residual_norms:ResidualNorms --limit 32",)

    def __post_init__(self) -> None:
        normalized(self, layers=read_layers(self.layers))  # "0-3,17", lists and tuples are all taken
        check_options(self)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {"measure": self.measure, "layers": None if self.layers is None else list(self.layers)}

    def shards(self, shape: Any, prompts: Sequence[Any]) -> list[Shard]:
        """One file for eight layers."""
        layers = shape.chosen_layers(self.layers)
        return [
            Shard("residual_norms", index, {"layers": layers[start : start + 8]})
            for index, start in enumerate(range(0, len(layers), 8))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[Any]) -> int:
        """One pass serves all layers."""
        return len(prompts)

    def prepare(self, subject: Subject) -> Any:
        """Once per replica: one pass over the prompts."""
        from residual_norms.rows import norms_at_end

        return norms_at_end(subject, self.measure)

    def run(self, state: Any, shard: Shard) -> pa.Table:
        """Rows of the shard's layers."""
        return pa.concat_tables(
            [
                pa.table([[layer] * len(state.names), state.names, state.norms_LP[layer]], schema=SCHEMA)
                for layer in shard.work["layers"]
            ]
        )
