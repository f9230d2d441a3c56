"""Fine-tuning on Ray Train: from a job, a model's name and data to a folder with what was learnt, as named steps.

Knows Ray and the store; knows nothing about the loop. Replay-safe: after the loss of a worker, and when the same
command is given again, training goes on from the last checkpoint; rows of ``tuning_runs`` are written a checkpoint
interval at a time, so that what is trained again replaces its own rows.
"""

import logging
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.train
import ray.train.torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from mathinterp.cluster.ray_cluster import cluster_total, connection
from mathinterp.errors import Unfinished, UserError
from mathinterp.local_files import whole_folder
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel
from mathinterp.store import Run, Store
from mathinterp.store.manifest import run_id, save_record
from mathinterp.tuning.data import Sample, data_fingerprint
from mathinterp.tuning.folders import TUNING_FILE, check_storage, is_free, read_about
from mathinterp.tuning.lines import followed, new_lines
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_workers import EXPORT_FOLDER, TABLE, worker_loop
from mathinterp.versions import code_version, versions

logger = logging.getLogger(__name__)

MOST_FAILURES = 3


class TuningJob(Protocol):
    """What trains and what is left behind; plain data, so that it travels to the workers."""

    @property
    def name(self) -> str:
        """As in ``mathinterp tune precise``."""

    @property
    def method(self) -> str:
        """What tables of evaluations call its models: the name, or how it differs from what the name says."""

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON."""

    def check(self, shape: ModelShape) -> None:
        """Raise UserError if a model of this shape has not what is to train."""

    def build(self, loaded: LoadedModel) -> nn.Module:
        """The model before the first step, the parameters to train requiring a gradient."""

    def export(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, base: str) -> None:
        """Write what was learnt."""


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning with everything it needs; travels to the workers."""

    job: TuningJob
    model: ModelSpec  # its dtype made plain
    model_fingerprint: str
    samples: Sequence[Sample]
    held_out: Sequence[Sample]  # evaluated before and after; may be empty
    config: SftConfig
    data_label: str
    store_url: str
    tensorboard: str | None = None  # folder; each run gets one of its own in it
    sharded: bool = False  # frozen layers are spread over the workers
    chosen_from: str | None = None  # which run or SQL named the heads, for people; the heads themselves are parameters
    run_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)  # for the footers of result files


@dataclass(frozen=True)
class TuningResult:
    """How a fine-tuning ended."""

    run_id: str
    out: Path
    about: dict[str, Any]  # the content of tuning.json
    trained_now: bool  # False: it was finished before


def named(tuning: Tuning, resolved: ResolvedModel) -> Tuning:
    """The fine-tuning with its run id; raises UserError if the job does not fit the model.

    Paths become absolute: Ray Train gives its workers a working directory of their own.
    """
    tuning.job.check(resolved.shape)
    tuning = replace(tuning, store_url=Store(tuning.store_url).url)
    if tuning.tensorboard is not None and "://" not in tuning.tensorboard:
        tuning = replace(tuning, tensorboard=str(Path(tuning.tensorboard).expanduser().resolve()))
    identity: dict[str, Any] = {
        "scan": f"tune_{tuning.job.name}",
        "model": resolved.label,
        "model_fingerprint": resolved.fingerprint,
        "prompts": tuning.data_label,
        "prompts_fingerprint": data_fingerprint(tuning.samples),
        "dtype": resolved.dtype,
        "parameters": {
            **tuning.job.parameters(),
            **tuning.config.parameters(),
            "checkpoint_every": tuning.config.checkpoint_every,
            "held_out": data_fingerprint(tuning.held_out) if tuning.held_out else None,
            **_log_every(tuning.config),
        },
        "code_version": code_version(),
        "versions": versions(["peft"]),
    }
    parameters = {**identity["parameters"], "dtype": resolved.dtype}
    run = run_id(identity["scan"], parameters, resolved.fingerprint, identity["prompts_fingerprint"])
    return replace(tuning, run_id=run, metadata=identity)


def _log_every(config: SftConfig) -> dict[str, int]:
    """How many steps a stored row stands for; left out where it is the usual number, as it was for all once."""
    usual = next(field.default for field in fields(SftConfig) if field.name == "log_every")
    return {} if config.log_every == usual else {"log_every": config.log_every}


def open_run(tuning: Tuning) -> Run:
    """The run's record in the store, new or earlier: one shard of rows a checkpoint interval.

    It says nothing of earlier files: steps that are trained again have other times, and their files other checksums.
    """
    intervals = math.ceil(tuning.config.steps / tuning.config.checkpoint_every)
    store = Store(tuning.store_url)
    run = store.open_run(**tuning.metadata, shards=[f"{TABLE}/{index:05d}" for index in range(intervals)])
    assert run.run_id == tuning.run_id
    if run.record["files"]:
        run.record["files"] = {}
        save_record(store.files, run.record)
    return run


def earlier_result(out: Path, run_id: str) -> dict[str, Any] | None:
    """What ``out`` says about this very run, or None if it is free; raises UserError if something else is there."""
    if is_free(out):
        return None
    about = out / TUNING_FILE
    if not about.is_file():
        raise UserError(f"`out` '{out}' exists and holds something else; give a new folder")
    found = read_about(about, "run_id")
    if found["run_id"] != run_id:
        raise UserError(
            f"`out` '{out}' holds run {found['run_id']}, and this one is {run_id} (other settings, data or model); "
            "give a new folder"
        )
    return found


def warn_of_lost_rows(tuning: Tuning) -> None:
    """What was trained is not trained again where only its rows are lost."""
    store = Store(tuning.store_url)
    record = store.record(tuning.run_id)
    if record is None or not store.finished_shards(tuning.run_id, record) >= set(record["shards"]):
        logger.warning(
            f"run {tuning.run_id}: not all rows of its training are in {store.url}; another `out` trains it again, and"
            " writes them"
        )


def fit(
    tuning: Tuning, *, workers: int, gpu: bool | None, out: Path, storage: str | None, address: str | None,
    say: Callable[[str], None],
) -> TuningResult:  # fmt: skip
    """Train, or resume, and write the folder ``out``; ``tuning`` comes from ``named``.

    Args:
        workers: data-parallel workers, one GPU each on GPUs.
        gpu: whether to use GPUs; None: if the cluster has enough.
        storage: folder or URI for checkpoints, seen by all nodes; None: ``out`` with "-training" added.
        address: a running Ray cluster; None: that of RAY_ADDRESS, else a local Ray for this call.
        say: gets what worker 0 says, a line at a time.
    Raises:
        UserError: ``out`` holds something else, a batch that does not divide, more workers than there are CPUs (GPUs),
            a ``storage`` that cannot be written, or what a worker refused: a cache without layers below, a loss that is
            not finite.
        Unfinished: workers failed again and again; the same call goes on from the last checkpoint.
    """
    found = earlier_result(out, tuning.run_id)
    if found is not None:
        warn_of_lost_rows(tuning)
        return TuningResult(tuning.run_id, out, found, trained_now=False)
    if storage is not None:
        check_storage(storage)
    with connection(address):
        reserved = scaling(tuning, workers, gpu)
        run = open_run(tuning)
        lines = new_lines()
        trainer = ray.train.torch.TorchTrainer(
            worker_loop,
            train_loop_config={"tuning": tuning, "lines": lines},
            scaling_config=reserved,
            run_config=ray.train.RunConfig(
                name=tuning.run_id,
                storage_path=storage or str(out.resolve().with_name(out.name + "-training")),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                failure_config=ray.train.FailureConfig(max_failures=MOST_FAILURES),
            ),
        )
        # What Ray prints belongs to stderr: stdout is for results.
        with redirect_stdout(sys.stderr), followed(lines, say):
            result = _fitted(trainer)
        refusal = ray.get(lines.refusal.remote())
        if refusal is not None:
            raise UserError(refusal)
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as folder, whole_folder(out) as part:
            shutil.copytree(Path(folder) / EXPORT_FOLDER, part, dirs_exist_ok=True)
    about = read_about(out / TUNING_FILE)
    noted = {name: about[name] for name in ("trained_parameters", "before", "after", "device", "chosen_from")}
    run.note({**noted, "workers": workers, "sharded": tuning.sharded})
    run.finish()
    return TuningResult(tuning.run_id, out, about, trained_now=True)


def _fitted(trainer: ray.train.torch.TorchTrainer) -> ray.train.Result:
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise Unfinished(f"training failed: {first.strip()}") from error


def scaling(tuning: Tuning, workers: int, gpu: bool | None) -> ray.train.ScalingConfig:
    """What the workers reserve; raises UserError where the cluster has not as much."""
    if workers < 1 or tuning.config.batch_size % workers:
        raise UserError(f"a batch of {tuning.config.batch_size} does not divide over {workers} workers")
    cpus, gpus = int(cluster_total("CPU")), int(cluster_total("GPU"))
    use_gpu = gpus >= workers if gpu is None else gpu
    if use_gpu and gpus < workers:
        raise UserError(f"{workers} workers on GPUs asked for, but the cluster has {gpus} GPUs")
    if workers > cpus:
        raise UserError(f"{workers} workers asked for, but the cluster has {cpus} CPUs")
    smallest = min(int(node["Resources"]["CPU"]) for node in ray.nodes() if node["Resources"].get("CPU", 0) >= 1)
    each = {"CPU": 1, "GPU": 1} if use_gpu else {"CPU": min(cpus // workers, smallest)}
    return ray.train.ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=each)
