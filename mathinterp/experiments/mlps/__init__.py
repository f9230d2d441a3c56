"""MLP scan: ablate one whole MLP block at a time; rows as in the head scan, without a head (method.md section 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from mathinterp.engine.edits import Edit
from mathinterp.errors import UserError
from mathinterp.experiments.ablation import Ablation, AblationState, baseline_rows, prepare, replacement, score_rows
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.mlps.tables import MLP_SCAN, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

LAYERS_PER_FILE = 4


@dataclass(frozen=True)
class Mlps(Ablation):
    """Ablate the MLP of each of ``layers`` (all if None); see Ablation for the rest."""

    layers: tuple[int, ...] | None = None

    name: ClassVar[str] = "mlps"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers == ():
            raise UserError("no MLPs to ablate; name at least one layer, or leave --layers out for all")

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
        """The baseline, then files of four layers."""
        layers = self.chosen(shape)
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, start in enumerate(range(0, len(layers), LAYERS_PER_FILE)):
            part = layers[start : start + LAYERS_PER_FILE]
            cost = float(sum(shape.n_layers - layer for layer in part))
            pieces.append(Shard("mlp_scan", index, {"layers": part}, cost))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (layer, prompt)."""
        return len(shard.work.get("layers", [None])) * len(prompts)

    def batches(self, shape: ModelShape) -> list[list[Edit]]:
        """One MLP at a time."""
        return [[Edit.mlp_of(layer)] for layer in self.chosen(shape)]

    def prepare(self, subject: Subject) -> AblationState:
        """Clean pass (and counterfactual pass) over all prompts."""
        shape = subject.anatomy.shape
        return prepare(self, subject, self.edits_per_batch(shape), len(self.chosen(shape)))

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers, each MLP ablated by itself."""
        if shard.table == "baseline":
            return baseline_rows(state, BASELINE)
        return pa.concat_tables([self._ablate(state, layer) for layer in shard.work["layers"]])

    def _ablate(self, state: AblationState, layer: int) -> pa.Table:
        edits = [Edit.mlp_of(layer)]
        scores = state.engine.run_edits(layer, edits, replacement(self, state, "mlp", layer))
        return score_rows(state, scores, MLP_SCAN, {"layer": [layer]})

    def notes(self, state: AblationState) -> dict[str, Any]:
        """Engine, packing and noise floor of the run."""
        return state.notes
