"""How far the runs of a store are, and all that is known of one: from its records and files alone."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError, did_you_mean
from mathinterp.store.catalog import catalog
from mathinterp.store.manifest import file_of, record_name
from mathinterp.store.recut import original_shards, originals_in, table_of
from mathinterp.store.survey import ELSEWHERE, Record, Survey
from mathinterp.text import quoted

if TYPE_CHECKING:
    from mathinterp.store.store import Store

STATUSES = ("finished", "failed", "unfinished")


@dataclass(frozen=True)
class RunRow:
    """A run in the list of all. Times are UTC, ISO 8601."""

    run_id: str
    scan: str
    model: str
    prompts: str
    dtype: str
    status: str  # as in the view runs: finished, failed (some shards were given up), unfinished (running, or stopped)
    shards_done: int
    shards: int  # as the experiment cut them, also where files were merged
    files: int
    rows: int
    bytes: int
    started_at: str
    finished_at: str | None
    last_write: float | None  # seconds ago, of runs that are not finished, where the store says so: is it at work?


@dataclass(frozen=True)
class TableSize:
    """What a run has in one table."""

    table: str
    shards_done: int
    shards: int
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class RunCard:
    """All that is known of a run."""

    run: RunRow
    parameters: Mapping[str, Any]
    model_fingerprint: str
    prompts_fingerprint: str
    code_version: str
    versions: Sequence[Mapping[str, str]]
    hosts: Sequence[str]
    wall_seconds: float
    noise_floor: Any  # how far a change of nothing moves rows; None: not measured
    notes: Mapping[str, Any]
    tables: Sequence[TableSize]
    missing: Sequence[str]  # shards
    errors: Mapping[str, str]  # shard -> why it was given up
    attempts: Mapping[str, int]  # shard -> how often it was tried, of those tried more than once
    problems: Mapping[str, str]  # file -> why it is left out
    command: str | None  # which began the run, and goes on with it; None: another program than a command of ours
    queries: Sequence[str]


def list_runs(store: "Store", scan: str | None, model: str | None, status: str | None) -> list[RunRow]:
    """See ``Runs.list``."""
    if status is not None and status not in STATUSES:
        raise UserError(f"`status` is one of {', '.join(STATUSES)}, not '{status}'.{did_you_mean(status, STATUSES)}")
    found = store.look()
    names = _names_by_run(found)
    rows = [
        _row(store, record, names[run])
        for run, record in found.records.items()
        if scan in (None, record["scan"]) and (model or "").lower() in record["model"].lower()
    ]
    if scan is not None and not rows and scan not in (scans := {record["scan"] for record in found.records.values()}):
        raise UserError(f"no run of scan '{scan}' is in {store.url}; it has {', '.join(sorted(scans)) or 'none'}")
    chosen = [row for row in rows if status in (None, row.status)]
    return sorted(chosen, key=lambda row: (row.started_at, row.run_id), reverse=True)


def show_run(store: "Store", run: str) -> RunCard:
    """See ``Runs.show``."""
    store.runs.record(run)  # raises where there is none
    found = store.look()  # records and files of one moment
    record, names = found.records.get(run) or store.runs.record(run), _names_by_run(found)[run]
    row = _row(store, record, names)
    sizes = _sizes(store, record, names)
    cut, done = original_shards(record), originals_in(record, sizes)
    tables = list(dict.fromkeys(table_of(shard) for shard in cut))
    return RunCard(
        run=row,
        parameters=record["parameters"],
        model_fingerprint=record["model_fingerprint"],
        prompts_fingerprint=record["prompts_fingerprint"],
        code_version=record["code_version"],
        versions=record.get("versions", []),
        hosts=record["hosts"],
        wall_seconds=record["wall_seconds"],
        noise_floor=record["notes"].get("noise_floor"),
        notes=record["notes"],
        tables=[_size_of(table, sizes, cut, done) for table in tables],
        missing=[shard for shard in cut if shard not in done],
        errors=record["errors"],
        attempts=record["attempts"],
        problems={name: why for name, why in store.faults.items() if f"/run_id={run}/" in name},
        command=record.get("command"),
        queries=[f"SELECT * FROM {table} WHERE run_id = {quoted(run)} LIMIT 5" for table in tables]
        + [f"SELECT status, shards_done, shards, errors FROM runs WHERE run_id = {quoted(run)}"],
    )


def last_write(store: "Store", run: str, names: Sequence[str]) -> float | None:
    """For how many seconds none of these files of a run, nor its record, was written; None: the store does not say."""
    times = [when for name in (record_name(run), *names) if (when := store.files.modified(name)) is not None]
    return max(time.time() - max(times), 0.0) if times else None


def age(when: str) -> float:
    """Seconds since a time in a record."""
    return (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()


def _names_by_run(found: Survey) -> defaultdict[str, list[str]]:
    names = defaultdict(list)
    for table, files in found.good.items():
        if table == ELSEWHERE or table in catalog().of_runs:
            for name in files:
                names[name.split("/")[1].removeprefix("run_id=")].append(name)
    return names


def _row(store: "Store", record: Record, names: Sequence[str]) -> RunRow:
    sizes = _sizes(store, record, names)
    cut = original_shards(record)
    done = len(originals_in(record, sizes))
    status = "finished" if done == len(cut) else "failed" if record["errors"] else "unfinished"
    return RunRow(
        run_id=record["run_id"],
        scan=record["scan"],
        model=record["model"],
        prompts=record["prompts"],
        dtype=record["dtype"],
        status=status,
        shards_done=done,
        shards=len(cut),
        files=len(sizes),
        rows=sum(rows for _, rows in sizes.values()),
        bytes=sum(size for size, _ in sizes.values()),
        started_at=record["started_at"],
        finished_at=record["finished_at"] if status == "finished" else None,
        last_write=None if status == "finished" else last_write(store, record["run_id"], names),
    )


def _sizes(store: "Store", record: Record, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Shard -> bytes and rows of its file, of the files that are there."""
    there, sizes = set(names), {}
    for shard in record["shards"]:
        if (name := file_of(record["run_id"], shard)) in there:
            if (entry := record.get("files", {}).get(shard)) is not None:
                sizes[shard] = entry["bytes"], entry["rows"]
            else:
                sizes[shard] = store.size_of(name) if table_of(shard) in catalog().tables else (0, 0)
    return sizes


def _size_of(table: str, sizes: Mapping[str, tuple[int, int]], cut: Sequence[str], done: set[str]) -> TableSize:
    own = [size for shard, size in sizes.items() if table_of(shard) == table]
    shards = Counter(table_of(shard) for shard in cut)[table]
    bytes_, rows = (sum(each[i] for each in own) for i in range(2))
    return TableSize(table, sum(table_of(shard) == table for shard in done), shards, len(own), rows, bytes_)
