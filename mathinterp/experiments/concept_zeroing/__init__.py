"""Zero whole sets of neurons, those that a concept scan kept at each level, against random ones (paper A, Table 8).

Every neuron of a set has coefficient 0 at every token of every prompt. A random set has as many neurons in each layer,
none of them from the set itself. One row per (set, prompt, scored token); the unedited model is in ``baseline``, from
the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.experiments.ablation import SCORINGS
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.concept_zeroing.tables import CONCEPT_ZEROING, TABLES
from mathinterp.experiments.neuron_controls import has_control, layer_matched_neurons
from mathinterp.experiments.options import check_options, normalized, option
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import with_distractors

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

KEPT, RANDOM = "concepts", "random"


@dataclass(frozen=True)
class NeuronSet:
    """The neurons that a concept scan kept at one level."""

    level: int
    neurons: tuple[Neuron, ...]

    def __post_init__(self) -> None:
        normalized(self, neurons=tuple(Neuron(*neuron) for neuron in self.neurons))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the neurons."""
        return hashlib.sha256(repr(sorted(map(tuple, self.neurons))).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ConceptZeroing(Experiment):
    """Zero each of ``sets`` at once, and ``seeds`` random sets of its size.

    source: run id of the concept scan that the sets are from.
    seeds: random sets of each, seeds 0, 1, ...; none where a set has more than half of a layer.
    """

    sets: tuple[NeuronSet, ...]
    source: str
    seeds: int = option(3, "Random sets with as many neurons in each layer, per level.", least=0, most=MOST_DRAWS)
    scoring: str = option("token", "What counts as right.", choices=SCORINGS)

    name: ClassVar[str] = "concept_zeroing"
    on_command_line: ClassVar[bool] = False  # follows a concept scan
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        check_options(self)
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
        from mathinterp.engine.plain import PlainEngine
        from mathinterp.experiments.ablated import AblationState

        prompts = with_distractors(subject.prompts)
        engine = PlainEngine(subject.anatomy, prompts)
        return AblationState(subject.anatomy, prompts, engine, None, {"engine": engine.name})

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of the unedited model, or of one set and its random draws."""
        from mathinterp.engine.intervention import zeroed
        from mathinterp.experiments.ablated import score_rows

        engine, shape = state.engine, state.anatomy.shape
        if shard.table == "baseline":
            return score_rows(state, engine.baseline(), BASELINE, {})
        group = self.sets[shard.index]
        seeds = range(shard.work["passes"] - 1)
        members = [group.neurons, *(layer_matched_neurons(shape, group.neurons, seed) for seed in seeds)]
        scores = engine.run([zeroed(state.anatomy, neurons) for neurons in members])
        ids: dict[str, Any] = {
            "neurons": [KEPT] + [RANDOM] * len(seeds),
            "level": [group.level] * len(members),
            "seed": [0, *seeds],
            "zeroed": [len(neurons) for neurons in members],
        }
        return score_rows(state, scores, CONCEPT_ZEROING, ids)
