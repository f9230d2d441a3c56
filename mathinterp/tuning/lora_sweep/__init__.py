"""The LoRA layer sweep: one adapter a layer, and how well the model does with each (paper A, section 5; method.md 6).

A scan like any other, so that trials run in parallel on Ray's replicas (whole GPUs, fractions or CPU cores), are tried
again when one dies, and are kept when they are finished: a trial is a shard, one (layer, learning rate). Its adapter is
written beside the rows, to a folder that all nodes see. Of the learning rates a view takes the one that does best on
samples kept from training, so that the test prompts choose nothing. SweepNeurons then compares the original with
each chosen adapter, neuron by neuron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, NothingToShow, Shard, Subject
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.results import ACCURACIES, Results, Shown, Summary
from mathinterp.experiments.table import Table
from mathinterp.tuning.lora_sweep.tables import TABLES

if TYPE_CHECKING:
    from mathinterp.experiments.scored import ScoredState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt
    from mathinterp.tuning.controls import LoraJob
    from mathinterp.tuning.data import Sample
    from mathinterp.tuning.sft import SftConfig

RATES = (1e-3, 5e-4, 1e-4)
RANK, ALPHA = 32, 64
TARGETS = "attention"


@dataclass(frozen=True)
class LoraSweep(Experiment):
    """Train a LoRA of one layer's attention in each trial and score the test prompts.

    samples, validation: what trains, and what chooses the learning rate.
    config: of every trial; its learning rate is replaced by the trial's.
    folder: for the adapters, seen by all nodes; see ``adapter_folder``.
    layers: None = all.
    base: what the adapters name as their base model.
    """

    samples: Sequence[Sample] = field(repr=False)
    validation: Sequence[Sample] = field(repr=False)
    config: SftConfig
    folder: str
    rates: tuple[float, ...] = RATES
    layers: tuple[int, ...] | None = None
    rank: int = RANK
    alpha: int = ALPHA
    base: str = ""

    name: ClassVar[str] = "lora_sweep"
    runs_split: ClassVar[bool] = False
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    on_command_line: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or len(set(self.rates)) < len(self.rates):
            raise UserError("learning rates must be above 0, each given once")
        if not self.samples or not self.validation:
            raise UserError("the sweep needs samples to train on and others to choose the learning rate by")

    def job(self, layer: int) -> LoraJob:
        """What trains in a trial."""
        from mathinterp.tuning.controls import LoraJob

        return LoraJob(self.rank, self.alpha, TARGETS, (layer,))

    def chosen(self, shape: ModelShape) -> list[int]:
        """The layers of the sweep; raises UserError for one that does not exist, or an impossible rank."""
        layers = shape.chosen_layers(self.layers)
        for layer in layers:
            self.job(layer).check(shape)
        return layers

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; samples are their fingerprints."""
        from mathinterp.tuning.data import data_fingerprint

        config = {name: value for name, value in self.config.parameters().items() if name != "learning_rate"}
        return {
            **config,
            "learning_rates": list(self.rates),
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": TARGETS,
            "layers": None if self.layers is None else sorted(set(self.layers)),
            "data": data_fingerprint(self.samples),
            "validation": data_fingerprint(self.validation),
            "scoring": "token",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The base model's scores, and one trial for each layer and learning rate; low layers take longest."""
        trials = [(layer, rate) for layer in self.chosen(shape) for rate in self.rates]
        return [
            Shard("baseline", 0, cost=0.1),
            *(
                Shard("sweep_scan", index, {"layer": layer, "learning_rate": rate}, cost=2.0 - layer / shape.n_layers)
                for index, (layer, rate) in enumerate(trials)
            ),
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Samples trained, and prompts scored."""
        trained = self.config.steps * self.config.batch_size if shard.table == "sweep_scan" else 0
        return trained + len(prompts)

    def prepare(self, subject: Subject) -> ScoredState:
        """Nothing yet."""
        from mathinterp.experiments.scored import ScoredState

        return ScoredState.of(subject)

    def notes(self, state: ScoredState) -> dict[str, Any]:
        """The model's depth, which says where its layers stand in the paper's."""
        return {"n_layers": state.subject.anatomy.shape.n_layers}

    def run(self, state: ScoredState, shard: Shard) -> pa.Table:
        """One trial: train, keep the adapter, score; or the base model's scores."""
        from mathinterp.experiments.scored import baseline_rows
        from mathinterp.tuning.lora_sweep.rows import trial_rows

        if shard.table == "baseline":
            return baseline_rows(state)
        return trial_rows(self, state, shard.work["layer"], shard.work["learning_rate"])

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """Accuracy by layer, of each layer's best learning rate."""
        query = "SELECT * EXCLUDE (run_id) FROM paper_a_table9 WHERE run_id = $run ORDER BY layer"
        rows = results.rows(query)
        return Summary(
            parts=[Shown("Accuracy (%) with a LoRA in one layer (-1: none)", rows, ACCURACIES)],
            data={"accuracy": rows},
            queries=[results.query(query), "SELECT * FROM lora_sweep_trials ORDER BY layer, learning_rate"],
        )


def adapter_folder(folder: str, layer: int, rate: float) -> Path:
    """Where the adapter of a trial is."""
    return Path(folder) / f"layer-{layer:02d}-lr-{rate:g}"
