"""What a replica is told, and what becomes of the rows that it computes: checked, and written as a shard's file.

Knows rows and stores; knows nothing about how rows are computed. Imports nothing heavy: rows that a service computes
are written by its client.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from mathinterp.cluster.events import Receipt
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.models.handle import ModelSource
from mathinterp.models.resolved import ResolvedModel
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store
from mathinterp.store.files import StoreFailed
from mathinterp.store.writer import config_of
from mathinterp.versions import own_source, versions

Result = TypeVar("Result")

AT_ONCE = 2  # shards of one replica on a GPU: one computes, one is written
AWAY_SECONDS = 120.0  # for which a shard's rows wait for a store that is away: a share that is mounted anew


@dataclass(frozen=True)
class ReplicaJob:
    """All that a replica needs to know; passed once, through Ray's object store."""

    scan: Experiment
    source: ModelSource
    prompts: tuple[TokenizedPrompt, ...]
    model_fingerprint: str  # the driver's; a replica that finds another one must not add rows
    prompts_fingerprint: str
    store_url: str | None  # None: rows are asked for, and written by whoever asks
    run_id: str
    device: str  # "cuda" or "cpu"
    threads: int  # CPU threads of one replica
    cards: int = 1  # GPUs that the layers of one replica are dealt out to
    metadata: dict[str, Any] = field(default_factory=dict)  # into the footer of each file
    log_json: bool = False  # log as JSON


@dataclass(frozen=True)
class Computed:
    """A shard's rows before they are written, and what they took."""

    table: pa.Table
    seconds: float
    peak_memory: int
    halved: int
    versions: dict[str, str]
    node: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def taken_over(scan: Experiment, store: Store, shard: Shard) -> tuple[pa.Table, dict[str, str]]:
    """The rows of a shard that names those of another run, and what made them."""
    rows = store.read_shard(*shard.work["stored"])
    return scan.taken_over(rows, shard).replace_schema_metadata(), config_of(rows).get("versions", {})


def written(store: Store, job: ReplicaJob, shard: Shard, computed: Computed, aside: bool = False) -> Receipt:
    """Check a shard's rows and write its file; raises as ``Replica.run`` does.

    Args:
        aside: another shard is computed meanwhile, so that the time it takes does not count.
    """
    started = time.perf_counter()
    check_rows(computed.table, job.scan.tables[shard.table].schema, shard.key)
    config = {**job.metadata, "versions": computed.versions}

    def write() -> dict[str, Any]:
        store.files.require_local(f"runs/{job.run_id}.json")  # of a store that is away none is begun anew
        return store.write_shard(job.run_id, shard.table, shard.index, computed.table, config)

    file = patiently(write)
    return Receipt(
        key=shard.key,
        rows=computed.table.num_rows,
        seconds=computed.seconds + (0.0 if aside else time.perf_counter() - started),
        node=computed.node,
        pid=computed.pid,
        bytes=file["bytes"],
        sha256=file["sha256"],
        peak_memory=computed.peak_memory,
        versions=computed.versions,
        halved=computed.halved,
    )


def made_here(scan: Experiment, model: ResolvedModel, device: str) -> dict[str, str]:
    """Versions of what computes rows in this process, of those packages that this scan and model use."""
    peft = [] if model.adapter is None else ["peft"]
    gguf = ["gguf"] if model.source.kind == "gguf" else []
    quantised = ["bitsandbytes"] if model.spec.load_in else []
    found = {**versions([*scan.packages, *peft, *gguf, *quantised], device), **own_source(type(scan))}
    torch: Any = sys.modules.get("torch")  # of a process that has not imported it the GPU is not in use
    on_gpu = device == "cuda" and torch is not None and torch.cuda.is_initialized()
    return {**found, "gpu": torch.cuda.get_device_name()} if on_gpu else found


def patiently(write: Callable[[], Result]) -> Result:
    """The result of ``write``, which is tried again while the store is away; what was computed is kept so long."""
    until = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return write()
        except StoreFailed as error:
            if not error.may_pass or time.monotonic() > until:
                raise
        time.sleep(1.0)


def check_rows(table: pa.Table, schema: pa.Schema, key: str) -> None:
    """Raise TypeError unless ``table`` has ``schema``, ArithmeticError at its first NaN or infinite value."""
    if not table.schema.equals(schema):
        raise TypeError(f"shard {key}: the scan returned columns {_columns(table.schema)}, declared {_columns(schema)}")
    floats = [column.name for column in schema if pa.types.is_floating(column.type)]
    for name in floats:
        finite = pc.is_finite(table[name])
        if not pc.all(finite, min_count=0).as_py():
            row = pc.index(finite, False).as_py()
            place = ", ".join(f"{other} {table[other][row].as_py()}" for other in schema.names if other not in floats)
            raise ArithmeticError(f"shard {key}: {name} is {table[name][row].as_py()} at {place}")


def _columns(schema: pa.Schema) -> str:
    return "(" + ", ".join(f"{column.name} {column.type}" for column in schema) + ")"
