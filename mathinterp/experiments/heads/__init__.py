"""Head scan: ablate one attention head at a time and score every answer token (paper A section 3, paper B 4.1).

For each layer l and query head h, the head's slice of o_proj's input is replaced (zero, mean or resample) and the
model answers all prompts again. One row per (head, prompt, scored token); the unedited model's rows are the baseline.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mathinterp.engine.edits import Edit
from mathinterp.engine.scores import Scores
from mathinterp.errors import UserError
from mathinterp.experiments.ablation import Ablation, AblationState, baseline_rows, prepare, replacement, score_rows
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.controls import Head
from mathinterp.experiments.heads.tables import HEAD_SCAN, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

FEWEST_HEADS, MOST_HEADS = 16, 32  # in a file, and in a batch: never a thousand small files


@dataclass(frozen=True)
class Heads(Ablation):
    """Ablate each of ``heads``, or all heads of ``layers``, or all of the model; see Ablation for the rest."""

    heads: tuple[tuple[int, int], ...] | None = None
    layers: tuple[int, ...] | None = None

    name: ClassVar[str] = "heads"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.heads, self.layers)

    def chosen(self, shape: ModelShape) -> list[Head]:
        """The heads to ablate, layer by layer; raises UserError for one that does not exist."""
        return chosen_heads(shape, self.heads, self.layers)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {**super().parameters(), **choice_parameters(self.heads, self.layers)}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, then files of 16 heads and more; layer l costs L - l."""
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, heads in enumerate(cut_heads(self.chosen(shape))):
            cost = float(sum(shape.n_layers - layer for layer, _ in heads))
            pieces.append(Shard("head_scan", index, {"heads": [list(head) for head in heads]}, cost))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (head, prompt)."""
        return len(shard.work.get("heads", [None])) * len(prompts)

    def batches(self, shape: ModelShape) -> list[list[Edit]]:
        """The heads of one layer in one file at once."""
        return [
            [Edit.heads_of(layer, [head]) for _, head in heads]
            for file in cut_heads(self.chosen(shape))
            for layer, heads in itertools.groupby(file, key=lambda head: head[0])
        ]

    def edits_per_batch(self, shape: ModelShape) -> int:
        """By the model alone, so that a scan of some heads lays prompts out as one of all heads does."""
        return most_at_once(shape.n_heads)

    def prepare(self, subject: Subject) -> AblationState:
        """Clean pass (and counterfactual pass) over all prompts."""
        shape = subject.anatomy.shape
        return prepare(self, subject, self.edits_per_batch(shape), len(self.chosen(shape)))

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of the shard's heads, each ablated by itself."""
        if shard.table == "baseline":
            return baseline_rows(state, BASELINE)
        by_layer: dict[int, list[int]] = {}
        for layer, head in shard.work["heads"]:
            by_layer.setdefault(layer, []).append(head)
        parts = [self._ablate(state, layer, heads) for layer, heads in by_layer.items()]
        return pa.concat_tables(parts)

    def _ablate(self, state: AblationState, layer: int, heads: list[int]) -> pa.Table:
        edits = [Edit.heads_of(layer, [head]) for head in heads]
        scores: Scores = state.engine.run_edits(layer, edits, replacement(self, state, "head", layer))
        ids = {"layer": [layer] * len(heads), "head": heads}
        return score_rows(state, scores, HEAD_SCAN, ids)

    def notes(self, state: AblationState) -> dict[str, Any]:
        """Engine, packing and noise floor of the run."""
        return state.notes


def check_choice(heads: Sequence[Head] | None, layers: Sequence[int] | None) -> None:
    """Raise UserError unless at most one of them is given, and it names something."""
    if heads is not None and layers is not None:
        raise UserError("--heads and --layers name heads in two ways; give one of them")
    if (heads is not None and not heads) or (layers is not None and not layers):
        raise UserError("no heads are chosen; name at least one, or leave --heads and --layers out for all")


def chosen_heads(shape: ModelShape, heads: Sequence[Head] | None, layers: Sequence[int] | None) -> list[Head]:
    """``heads``, or all heads of ``layers``, or of the model, layer by layer; UserError for one that does not exist."""
    if heads is None:
        within = range(shape.n_layers) if layers is None else sorted(set(layers))
        heads = [(layer, head) for layer in within for head in range(shape.n_heads)]
    for layer, head in heads:
        shape.check_head(layer, head)
    return sorted(set(heads))


def choice_parameters(heads: Sequence[Head] | None, layers: Sequence[int] | None) -> dict[str, Any]:
    """The choice as run parameters."""
    return {
        "heads": None if heads is None else [f"{layer}.{head}" for layer, head in sorted(set(heads))],
        "layers": None if layers is None else sorted(set(layers)),
    }


def most_at_once(n_heads: int) -> int:
    """Most heads of one layer in one file, and so in one batch: 32 of 32, 20 of 40, 8 of 8."""
    return -(-n_heads // -(-n_heads // MOST_HEADS))


def cut_heads(heads: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut a sorted list of heads into files: whole layers where they are narrow, parts of one where it is wide.

    Llama-2-7B (32 heads a layer) gives one file a layer, 13B (40) two, a model of 8 heads one file for two layers.
    """
    files: list[list[tuple[int, int]]] = [[]]
    for layer in sorted({layer for layer, _ in heads}):
        members = [head for head in heads if head[0] == layer]
        for part in np.array_split(np.array(members), -(-len(members) // MOST_HEADS)):
            if len(files[-1]) >= FEWEST_HEADS:
                files.append([])
            files[-1] += [(int(a), int(b)) for a, b in part]
    return files
