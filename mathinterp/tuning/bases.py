"""The model that a fine-tuning starts from: looked at before anything trains, not loaded."""

from dataclasses import replace
from pathlib import Path

from mathinterp.cluster.ray_cluster import cluster_total, connection, existing_cluster, gpus_each
from mathinterp.cluster.ray_private import local_gpus
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve


def resolve_base(spec: ModelSpec, *, on_gpu: bool) -> ResolvedModel:
    """The base model; ``on_gpu`` decides what the dtype ``auto`` means. Raises UserError for one that cannot train."""
    if spec.adapter is not None:
        raise UserError("`adapter`: merge it into its base first ('mathinterp tune merge') and train the result")
    if spec.load_in is not None:
        raise UserError(f"`load_in` {spec.load_in}: quantised weights cannot be trained; leave it out")
    if spec.dtype == "float16":
        raise UserError("`dtype` float16 loses small gradients; train in bfloat16 or float32")
    return resolve(spec, "cuda" if on_gpu else "cpu")


def trains_on_gpu(gpu: bool | None, workers: int, address: str | None) -> bool:
    """Whether so many workers train on GPUs: as asked, else where there are enough.

    Raises UserError for more workers on GPUs than this machine has, where there is no cluster.
    """
    if existing_cluster(address):
        if gpu is not None:
            return gpu
        with connection(address):
            return cluster_total("GPU") >= workers
    check_gpus(gpu, workers)
    return local_gpus() >= workers if gpu is None else gpu


def check_gpus(gpu: bool | None, workers: int) -> None:
    """Raise UserError for more workers on GPUs than this machine has GPUs."""
    if gpu and local_gpus() < workers:
        raise UserError(f"`gpu`: {workers} workers need a GPU each, and this machine has {local_gpus()}")


def scans_on_gpu(gpus_per_replica: float | None, address: str | None) -> bool:
    """Whether replicas that reserve so much compute on GPUs."""
    if existing_cluster(address):
        with connection(address):
            return gpus_each(gpus_per_replica) > 0
    return gpus_each(gpus_per_replica) > 0


def plain_spec(base: ResolvedModel) -> ModelSpec:
    """How workers find the base: its dtype made plain, a path made absolute (Ray Train's workers run elsewhere)."""
    name = Path(base.spec.name).expanduser()
    return replace(base.spec, dtype=base.dtype, name=str(name.resolve()) if name.exists() else base.spec.name)
