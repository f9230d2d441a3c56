"""Comparative Neuron Analysis of a layer sweep: the original against the model with each layer's LoRA.

Paper A section 5, method.md sections 5 and 6. change = tuned - original, both under the original's scales; a LoRA in
attention leaves the value vectors alone, so neurons mean the same in all. Per prompt the neurons of largest change are
kept, all layers ranked together. One shard per adapter; the original's side is computed once per replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.engine.lens import TARGETS
from mathinterp.experiments.base import Experiment, NothingToShow, Shard, Subject
from mathinterp.experiments.options import check_options, option
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.experiments.table import Table
from mathinterp.tuning.lora_sweep import adapter_folder
from mathinterp.tuning.sweep_neurons.tables import TABLES

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt
    from mathinterp.tuning.sweep_neurons.rows import SweepNeuronState

TOP = 50


@dataclass(frozen=True)
class SweepNeurons(Experiment):
    """Coefficients of the most enhanced neurons under each adapter of a sweep.

    sweep: its run id. trials: (layer, learning rate) of the adapters, which are in ``folder``.
    top: neurons per prompt. target: the token w, "predicted" by the original model or "gold".
    """

    sweep: str
    trials: tuple[tuple[int, float], ...]
    folder: str
    top: int = TOP
    target: str = option("predicted", "The token that neurons are compared on.", choices=TARGETS)

    name: ClassVar[str] = "sweep_neurons"
    runs_split: ClassVar[bool] = False
    tables: ClassVar[Mapping[str, Table]] = TABLES
    on_command_line: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; the sweep's run id stands for the adapters."""
        return {
            "sweep": self.sweep,
            "trials": [list(trial) for trial in self.trials],
            "top": self.top,
            "target": self.target,
            "change": "tuned - original",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One an adapter."""
        return [
            Shard("sweep_neurons", index, {"layer": layer, "learning_rate": rate})
            for index, (layer, rate) in enumerate(self.trials)
        ]

    def prepare(self, subject: Subject) -> SweepNeuronState:
        """The original's passes."""
        from mathinterp.tuning.sweep_neurons.rows import prepare

        return prepare(subject, self.target)

    def run(self, state: SweepNeuronState, shard: Shard) -> pa.Table:
        """Rows of one adapter."""
        from mathinterp.tuning.sweep_neurons.rows import adapter_rows

        layer, rate = shard.work["layer"], shard.work["learning_rate"]
        return adapter_rows(state, adapter_folder(self.folder, layer, rate), layer, rate, self.top)

    @classmethod
    def summarize(cls, results: Results, shown: NothingToShow) -> Summary:
        """How much the coefficients of the most enhanced neurons grow, by band of layers."""
        query = "SELECT * EXCLUDE (run_id) FROM paper_a_table10 WHERE run_id = $run ORDER BY band = '1-9' DESC, band"
        rows = results.rows(query)
        return Summary(
            parts=[
                Shown(
                    "Increase (%) of the coefficients of the most enhanced neurons",
                    rows,
                    dict.fromkeys(("top50", "top30", "top20", "top10"), ""),
                )
            ],
            data={"coefficients": rows},
            queries=[results.query(query)],
        )


def missing_adapters(folder: str, trials: Sequence[tuple[int, float]]) -> list[Path]:
    """Adapters of finished trials that are not where they should be."""
    places = [adapter_folder(folder, layer, rate) for layer, rate in trials]
    return [place for place in places if not (place / "adapter_config.json").is_file()]
