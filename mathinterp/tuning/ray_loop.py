"""A training job on Ray Train: workers, checkpoints, resume, and the folder at the end.

Knows Ray; knows nothing about what is trained. The loop is replay-safe: after a loss of a worker, and when the same
command is given again, training goes on from the last checkpoint in the storage.
"""

import hashlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from mathinterp.cluster.ray_cluster import existing_cluster
from mathinterp.cluster.temporary import ray_folder
from mathinterp.errors import UserError
from mathinterp.tuning.accuracy import as_records
from mathinterp.tuning.batches import FreshBatches
from mathinterp.tuning.cards import Record
from mathinterp.tuning.checkpoints import EXPORT_FOLDER, MOST_FAILURES, latest_state
from mathinterp.tuning.checkpoints import report as report_checkpoint
from mathinterp.tuning.jobs import TrainingJob
from mathinterp.tuning.train import Progress, State, TrainingConfig, train

MOST_LOADER_PROCESSES = 12
LOCAL_OBJECT_STORE = 256 * 2**20  # bytes: nothing travels through it, and the loader processes need /dev/shm too


def connect(address: str | None) -> None:
    """Join the Ray cluster at ``address`` (or RAY_ADDRESS), or start a local one."""
    if ray.is_initialized():
        return
    if cluster := existing_cluster(address):
        ray.init(address=cluster)
        return
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a local Ray would write a token that later clusters demand
    with ray_folder():
        ray.init(address="local", include_dashboard=False, object_store_memory=LOCAL_OBJECT_STORE)


def fit(
    job: TrainingJob,
    config: TrainingConfig,
    *,
    batch_size: int,
    workers: int,
    out: Path,
    storage: str | None,
    name: str,
) -> list[dict[str, Any]]:
    """Train ``job`` on the connected cluster, write its folder to ``out``, return the accuracy table as records.

    Uses one GPU a worker where the cluster has as many, else CPUs. ``batch_size`` counts the samples of a step
    over all workers.
    Checkpoints go to ``storage``, a folder or URI that all nodes see (default: ``out`` with "-training" added).

    Raises UserError for a batch that does not divide, or more workers than CPUs.
    """
    if batch_size % workers:
        raise UserError(f"a batch of {batch_size} does not divide over {workers} workers")
    resources = ray.cluster_resources()
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if workers > cpus:
        raise UserError(f"{workers} workers asked for, but the cluster has {cpus} CPUs")
    use_gpu = gpus >= workers
    cpus_each = max(1, min(cpus // workers, MOST_LOADER_PROCESSES + 1))
    if use_gpu:
        config = replace(config, loader_processes=cpus_each - 1)
    storage = storage or str(out.resolve().with_name(out.name + "-training"))
    trainer = ray.train.torch.TorchTrainer(
        worker_loop,
        train_loop_config={"job": job, "config": config, "batch_size": batch_size // workers},
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": cpus_each, **({"GPU": 1} if use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(
            name=f"{name}-{_digest(job, config, batch_size, workers)}",
            storage_path=storage,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=MOST_FAILURES),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    assert result.metrics is not None
    with result.checkpoint.as_directory() as folder:
        shutil.copytree(Path(folder) / EXPORT_FOLDER, out, dirs_exist_ok=True)  # beside what is there
    return result.metrics["accuracy"]


def _digest(*parts: object) -> str:
    """Names the run, so that the same command resumes it and another one does not."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def worker_loop(settings: dict[str, Any]) -> None:
    """What every Ray Train worker runs: build, resume, train, and on rank 0 export and measure."""
    job: TrainingJob = settings["job"]
    config: TrainingConfig = settings["config"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    assert isinstance(device, torch.device)
    model, tokenizer = job.build(device, config.seed)
    batches = FreshBatches(tokenizer, job.mixture, settings["batch_size"], seed=config.seed, rank=rank)
    state = latest_state()

    def report(metrics: dict[str, Any], new_state: State | None) -> None:
        nonlocal state
        state = new_state
        with tempfile.TemporaryDirectory() as folder:
            report_checkpoint(metrics, state, Path(folder))

    progress = train(
        model, batches, config, device=device, reporter=report, resume=state, rank=rank, world_size=world_size
    )
    with tempfile.TemporaryDirectory() as folder:
        metrics: dict[str, Any] = dict(vars(progress))
        if rank == 0:
            record = _record(config, progress, settings["batch_size"] * world_size, device)
            metrics["accuracy"] = as_records(job.export(model, tokenizer, record, Path(folder) / EXPORT_FOLDER))
        report_checkpoint(metrics, state if rank == 0 else None, Path(folder))


def _record(config: TrainingConfig, progress: Progress, batch_size: int, device: torch.device) -> Record:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Record(config, progress.step, batch_size, progress.loss, progress.seconds, name)
