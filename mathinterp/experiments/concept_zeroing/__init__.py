"""Zero whole sets of neurons, those that a concept scan kept at each level, against random ones (paper A, Table 8).

Every neuron of a set has coefficient 0 at every token of every prompt. A random set has as many neurons in each layer,
none of them from the set itself. One row per (set, prompt, scored token); the unedited model is in ``baseline``, from
the same batches.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from mathinterp.engine.neuron_sets import Neuron, NeuronSets, neuron_mask
from mathinterp.errors import UserError
from mathinterp.experiments.ablated import AblationState, score_rows
from mathinterp.experiments.ablation import SCORINGS
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.concept_zeroing.tables import CONCEPT_ZEROING, TABLES
from mathinterp.experiments.neuron_controls import has_control, layer_matched_neurons
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

KEPT, RANDOM = "concepts", "random"


@dataclass(frozen=True)
class NeuronSet:
    """The neurons that a concept scan kept at one level."""

    level: int
    neurons: tuple[Neuron, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the neurons."""
        return hashlib.sha256(repr(sorted(self.neurons)).encode()).hexdigest()[:16]


def check_zeroing(seeds: int, scoring: str) -> None:
    """Raise UserError for a scoring that is not known or a number of draws that cannot be made."""
    if scoring not in SCORINGS:
        raise UserError(f"--scoring '{scoring}' is not known; take one of {', '.join(SCORINGS)}")
    if seeds < 0:
        raise UserError(f"{seeds} random draws cannot be made; give 0 or more")


@dataclass(frozen=True)
class ConceptZeroing(Experiment):
    """Zero each of ``sets`` at once, and ``seeds`` random sets of its size.

    source: run id of the concept scan that the sets are from.
    seeds: random sets of each, seeds 0, 1, ...; none where a set has more than half of a layer.
    scoring: "token", "first_token" or "exact_match".
    """

    sets: tuple[NeuronSet, ...]
    source: str
    seeds: int = 3
    scoring: str = "token"

    name: ClassVar[str] = "concept_zeroing"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        check_zeroing(self.seeds, self.scoring)
        assert self.sets, "no sets to zero"
        assert all(group.neurons for group in self.sets), "a set has no neurons"

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row or how it is counted; each set by its fingerprint."""
        return {
            "source": self.source,
            "sets": {str(group.level): group.fingerprint for group in self.sets},
            "seeds": self.seeds,
            "scoring": self.scoring,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, and a file for each set: the kept neurons and all their random draws."""
        pieces = [Shard("baseline", 0)]
        for index, group in enumerate(self.sets):
            for layer, neuron in group.neurons:
                shape.check_layer(layer)
                assert 0 <= neuron < shape.n_neurons
            passes = 1 + (self.seeds if has_control(shape, group.neurons) else 0)
            pieces.append(Shard("concept_zeroing", index, {"passes": passes}, cost=float(passes)))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (set, prompt)."""
        return len(prompts) * int(shard.work.get("passes", 1))

    def prepare(self, subject: Subject) -> AblationState:
        """The batches that all sets share."""
        engine = NeuronSets(subject.anatomy, subject.prompts)
        return AblationState(subject.anatomy, subject.prompts, engine, None, {"engine": engine.name})

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of the unedited model, or of one set and its random draws."""
        engine, shape = state.engine, state.anatomy.shape
        assert isinstance(engine, NeuronSets)
        if shard.table == "baseline":
            return score_rows(state, engine.run_masks([{}]), BASELINE, {})
        group = self.sets[shard.index]
        seeds = range(shard.work["passes"] - 1)
        members = [group.neurons, *(layer_matched_neurons(shape, group.neurons, seed) for seed in seeds)]
        scores = engine.run_masks([neuron_mask(state.anatomy, neurons) for neurons in members])
        ids: dict[str, Any] = {
            "neurons": [KEPT] + [RANDOM] * len(seeds),
            "level": [group.level] * len(members),
            "seed": [0, *seeds],
            "zeroed": [len(neurons) for neurons in members],
        }
        return score_rows(state, scores, CONCEPT_ZEROING, ids)
