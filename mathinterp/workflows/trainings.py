"""The trainings behind papers' tables, and benchmarks: workflows with runs of their own, called as their commands do.

They train on Ray and start from a model without an adapter; what they leave lies beside the store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.errors import Unfinished, UserError
from mathinterp.models.handle import Model
from mathinterp.models.spec import ModelSpec
from mathinterp.tuning.settings import Choice, PruneSettings, SweepSettings, TuneSettings

if TYPE_CHECKING:
    from mathinterp.tuning.sft_ray import TuningJob
    from mathinterp.workflows.stages import Asked

Say = Callable[[str], None]
BENCHMARKS = "benchmarks"
TRAIN, TEST = "signed_two_digit_train", "signed_two_digit_test"
# What items read -> the training that makes it.
TRAININGS = {
    "sweep": "sweep", "sweep_neurons": "sweep", "prune": "prune", "precise": "precise", "random": "random",
    "lora": "lora", "full": "full", "fingerprint": BENCHMARKS,
}  # fmt: skip
NEEDS = {"precise": ("paths",), "random": ("paths",)}  # stages whose runs a training reads
SHARE = 32  # heads of B's precise fine-tuning, of 1,024: as large a share of other models


@dataclass(frozen=True)
class Training:
    """One training. steps: None: the papers' four epochs. out: folder for what trainings leave; place: of run_scan."""

    model: Model
    asked: "Asked"
    steps: int | None
    out: Path | None
    place: dict[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """Raises UserError for a model that trainings cannot start from."""
        if self.model.in_memory_alone:
            raise UserError("a model in memory is not trained; save it to a folder")
        if self.model.spec.adapter is not None:
            raise UserError("trainings start from a model without an adapter; merge it first")
        return self.model.spec

    @property
    def folder(self) -> Path:
        """Where what is learnt goes: a folder for each model, length, dtype and seed."""
        if self.out is None:
            raise UserError("needs a folder for what is learnt (`trained`)")
        length = f"{self.steps}-steps" if self.steps else "four-epochs"
        return self.out / self.model.fingerprint / f"{length}-{self.model.described.dtype}-seed-{self.asked.seed}"

    @property
    def length(self) -> dict[str, Any]:
        """Steps as settings take them."""
        return {"steps": self.steps, "epochs": None if self.steps else 4.0}

    @property
    def lora(self) -> dict[str, Any]:
        """Settings that the layer sweep and pruning share."""
        asked = self.asked
        return {
            **self.length, **self.place, "store": asked.store.url, "seed": asked.seed, "test_limit": asked.limit,
            "case_limit": asked.limit,
        }  # fmt: skip

    @property
    def n_heads(self) -> int:
        """Heads that precise fine-tuning trains."""
        heads = self.asked.model.shape.n_layers * self.asked.model.shape.n_heads
        return max(1, round(heads * SHARE / 1024))


def train(name: str, training: Training, say: Say) -> dict[str, str]:
    """Train, or find finished; the runs by the names that items read. Raises UserError and Unfinished."""
    if name == BENCHMARKS:
        return _benchmarks(training)
    if name == "sweep":
        return _sweep(training, say)
    if name == "prune":
        return _prune(training, say)
    return _tune(name, training, say)


def _sweep(training: Training, say: Say) -> dict[str, str]:
    from mathinterp.tuning.sweep import sweep

    swept = sweep(training.spec, SweepSettings(**training.lora), training.folder / "sweep", say)
    if swept.compared is None or not swept.complete:
        raise Unfinished("the LoRA sweep is incomplete")
    return {"sweep": swept.trials.run_id, "sweep_neurons": swept.compared.run_id}


def _prune(training: Training, say: Say) -> dict[str, str]:
    from mathinterp.tuning.pruning import prune

    pruned = prune(training.spec, PruneSettings(**training.lora), training.folder / "prune", say)
    if pruned.scored is None or not pruned.complete:
        raise Unfinished("pruning is incomplete")
    return {"prune": pruned.scored.run_id}


def _tune(name: str, training: Training, say: Say) -> dict[str, str]:
    """B's precise fine-tuning or one of its controls, on the signed two-digit set."""
    from dataclasses import replace

    from mathinterp.tuning.finetune import prepare_tuning, resolve_tuned, run_tuning

    spec, rates = training.spec, {"precise": 1e-3, "random": 1e-3, "lora": 2e-4, "full": 2e-5}
    settings = TuneSettings(
        lr=rates[name], data=(TRAIN,), held_out=(TEST,), **training.length, seed=training.asked.seed, micro_batch=128,
        store=training.asked.store.url, address=training.place["address"],
    )  # fmt: skip
    base = resolve_tuned(spec if name != "full" else replace(spec, dtype="float32"), settings)
    prepared = prepare_tuning(_job(name, training, base, say), base, settings, say=say)
    tuned = run_tuning(prepared, settings, training.folder / name, say)
    return {name: tuned.run_id}


def _job(name: str, training: Training, base: Any, say: Say) -> "TuningJob":
    from mathinterp.tuning.chosen import precise_job
    from mathinterp.tuning.controls import FullJob, LoraJob

    if name == "full":
        return FullJob()
    if name == "lora":
        return LoraJob()
    if "paths" not in training.asked.runs:
        raise UserError("needs the path scan, which ranks the heads")
    choice = Choice(
        heads_from=training.asked.runs["paths"], top=training.n_heads, control="random" if name == "random" else None
    )
    return precise_job(choice, base, training.asked.store, say)


def _benchmarks(training: Training) -> dict[str, str]:
    """The model on the benchmarks whose files are there; tuned ones are evaluated by whoever has trained them."""
    from mathinterp.evaluation import jobs
    from mathinterp.evaluation.task_files import ORDER

    data = training.asked.data
    if data is None:
        raise UserError("needs the benchmarks' public files (`data`)")
    if training.model.in_memory_alone:
        raise UserError("a model in memory is not evaluated; save it to a folder")
    tasks = [name for name in ORDER if (data / name).is_dir()]
    if not tasks:
        raise UserError(f"`data` {data} has no folder of a benchmark, for example svamp")
    found = jobs.evaluate(
        tasks, training.model, store=training.asked.store.url, data_dir=str(data), limit=training.asked.limit,
        **training.place,
    )  # fmt: skip
    if not found.complete:
        raise Unfinished("benchmarks are incomplete")
    return {}
