"""A finished run asked for again: found without torch, transformers or a model.

What a call makes of an experiment, a model's files and prompts (parameters, fingerprints, shards) is kept in the user's
cache under a hash of all that decides it: the contents of these files, the prompts, this package's source and the
versions of the libraries. The store alone says whether the run is finished. Whatever is in doubt, a GPU for example
that decides the dtype, goes the long way through ``run_scan``.

Knows what decides a run before anything loads; knows nothing about models.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.cluster.summary import RunSummary
from mathinterp.experiments.base import Experiment
from mathinterp.models.cache import cache_folder, keep_sealed, read_sealed
from mathinterp.models.recalled import decides, has_files
from mathinterp.models.sources import find_adapter, find_source
from mathinterp.prompts.given import Prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from mathinterp.versions import PACKAGE, checkout, code_version

if TYPE_CHECKING:
    from mathinterp.store import Run

GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/dri")  # there may be one if any is there


def key_of(
    scan: Experiment, spec: Any, prompts: Sequence[Prompt], gpus_per_replica: float | None, address: str | None
) -> str | None:
    """A hash of all that decides the run and its shards; None: it cannot be told without loading more.

    Args:
        spec: a ``ModelSpec``, or anything with its fields.
    Raises:
        UserError: there is no such model or adapter.
    """
    own = type(scan).__module__.partition(".")[0] == PACKAGE.name
    if not own or scan.binds or scan.one_replica or not dataclasses.is_dataclass(scan):
        return None  # what it makes of its parameters may depend on other files or runs
    if not isinstance(prompts, Prompts) or prompts.columns or any(prompt.further_fields for prompt in prompts):
        return None
    on_cpu = gpus_per_replica == 0 or (gpus_per_replica is None and not any(map(os.path.exists, GPU_FILES)))
    if address != "local" or not on_cpu or not has_files(spec):
        return None
    source = find_source(spec.name)
    adapter = None if spec.adapter is None else find_adapter(spec.adapter)
    asked = [
        f"{type(scan).__module__}.{type(scan).__qualname__}", repr(scan),
        [spec.name, spec.adapter, spec.dtype, getattr(spec, "load_in", None)], *decides(source, adapter),
        prompts.label, hashlib.blake2b(repr(prompts.items).encode(), digest_size=16).hexdigest(),
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()


@contextmanager
def remembered(
    scan: Experiment, spec: Any, prompts: Sequence[Prompt], gpus_per_replica: float | None, address: str | None
) -> Iterator[dict[str, Any]]:
    """What the block puts into the dict, arguments of ``Store.open_run``, is kept, unless files changed meanwhile."""
    key = key_of(scan, spec, prompts, gpus_per_replica, address)
    opened: dict[str, Any] = {}
    yield opened
    if opened and key is not None and key_of(scan, spec, prompts, gpus_per_replica, address) == key:
        keep_sealed(_file(key), key, json.dumps(opened, sort_keys=True))


def finished_again(
    scan: Experiment,
    spec: Any,
    prompts: Sequence[Prompt],
    store_url: str,
    *,
    gpus_per_replica: float | None = None,
    address: str | None = None,
) -> RunSummary | None:
    """What ``run_scan`` would return where every shard of the run is in the store already; None: ask ``run_scan``.

    The run is opened as any resumed one is: its files are read and compared with the checksums of its record.
    """
    started = time.monotonic()
    key = key_of(scan, spec, prompts, gpus_per_replica, address)
    opened = None if key is None else _recall(key)
    if opened is None:
        return None
    store = Store(store_url)
    run = _finished(store, opened)
    if run is None:
        return None
    shards = len(run.shards)
    return RunSummary(
        run_id=run.run_id, store=store.url, shards=shards, reused=shards, done=0, rows=0, evaluations=0,
        seconds=time.monotonic() - started, device=None, replicas=0, replicas_lost=0, busy=0.0, peak_memory=0,
    )  # fmt: skip


def _finished(store: Store, opened: dict[str, Any]) -> "Run | None":
    """The run, opened and closed again, if it has finished in this store and nothing of it is lost."""
    identity = {
        name: opened[name] for name in ("scan", "parameters", "dtype", "model_fingerprint", "prompts_fingerprint")
    }
    if not store.has_finished(store.run_id(**identity), opened["prompts_fingerprint"]):
        return None
    versions = {**opened["versions"], **checkout()}
    run = store.open_run(**{**opened, "versions": versions, "code_version": code_version()})
    return None if run.missing_shards() or run.finish() else run


def _file(key: str) -> Path:
    return cache_folder() / "runs" / key


def _recall(key: str) -> dict[str, Any] | None:
    content = read_sealed(_file(key), key)
    found: dict[str, Any] | None = None if content is None else json.loads(content)
    return found
