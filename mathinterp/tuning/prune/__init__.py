"""Pruning scored: the same prompts under each condition of a pruning (paper A, section 6.1; see tuning/pruning.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.base import Experiment, NothingToShow, Shard, Subject
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.results import ACCURACIES, Results, Shown, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Neuron
from mathinterp.tuning.prune.tables import TABLES

if TYPE_CHECKING:
    from mathinterp.experiments.scored import ScoredState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Condition:
    """A model to score: the original with neurons pruned, with an adapter, or both."""

    name: str  # lora, pruned, random, pruned_lora or random_lora
    seed: int = 0
    kept: tuple[Neuron, ...] | None = field(default=None, repr=False)  # None: nothing is pruned
    adapter: str | None = None  # folder
    trained_as: str | None = None  # the adapter's run id


@dataclass(frozen=True)
class Prune(Experiment):
    """Score the same prompts under each condition; the baseline is the original model.

    deep: the layers that were pruned.
    """

    conditions: tuple[Condition, ...]
    deep: tuple[int, ...]

    name: ClassVar[str] = "prune"
    runs_split: ClassVar[bool] = False
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    on_command_line: ClassVar[bool] = False

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; sets of neurons are fingerprints and counts."""
        told = [
            {
                "condition": each.name,
                "seed": each.seed,
                "kept": None if each.kept is None else [len(each.kept), _digest(each.kept)],
                "trained_as": each.trained_as,
            }
            for each in self.conditions
        ]
        return {"conditions": told, "pruned_layers": list(self.deep), "scoring": "token"}

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One a condition, the baseline, and the neurons kept."""
        for layer in self.deep:
            shape.check_layer(layer)
        pieces = [Shard("prune_scan", index, {"condition": index}) for index in range(len(self.conditions))]
        return [*pieces, Shard("baseline", 0), Shard("prune_neurons", 0, cost=0.1)]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each prompt."""
        return 0 if shard.table == "prune_neurons" else len(prompts)

    def prepare(self, subject: Subject) -> ScoredState:
        """Nothing yet."""
        from mathinterp.experiments.scored import ScoredState

        return ScoredState.of(subject)

    def notes(self, state: ScoredState) -> dict[str, Any]:
        """How many neurons the pruned layers have."""
        return {"pruned_from": len(self.deep) * state.subject.anatomy.shape.n_neurons}

    def run(self, state: ScoredState, shard: Shard) -> pa.Table:
        """Rows of one condition."""
        from mathinterp.experiments.scored import baseline_rows
        from mathinterp.tuning.prune.rows import condition_rows, neuron_rows

        if shard.table == "prune_neurons":
            return neuron_rows(self.conditions)
        if shard.table == "baseline":
            return baseline_rows(state)
        return condition_rows(state, self.conditions[shard.work["condition"]], self.deep)

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """Accuracy under each condition."""
        query = (
            "SELECT * EXCLUDE (run_id) FROM paper_a_table11 WHERE run_id = $run"
            " ORDER BY condition = 'origin' DESC, condition = 'lora' DESC, condition, seed"
        )
        rows = results.rows(query)
        return Summary(
            parts=[Shown("Accuracy (%) on the test prompts, deep layers pruned", rows, ACCURACIES)],
            data={"accuracy": rows},
            queries=[results.query(query), results.query("SELECT * FROM prune_neurons WHERE run_id = $run LIMIT 20")],
        )


def _digest(neurons: Sequence[Neuron]) -> str:
    return hashlib.sha256(json.dumps(sorted(neurons)).encode()).hexdigest()[:16]
