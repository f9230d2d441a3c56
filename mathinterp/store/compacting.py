"""Merge the small files of a finished run into fewer. Rows stay as they are, in their order.

A merged file is a shard of its own, with a number after all others; its footer has the configuration of every shard in
it. Readers go by the record: until it is replaced, in one write, they read the small files, from then on the merged
ones, and what it does not list is left out. So nothing is renamed, and an object store is as good as a disk. A marker
that is no Parquet file lies beside the files as long as both are there: a client that takes whatever has the right name
(an open ``views.sql``) then gets an error and never a row twice. Killed at any step, the run can be read, and the same
call ends what was begun. Knows files, footers and records.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from mathinterp.errors import Unfinished, UserError
from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFailed
from mathinterp.store.integrity import checksum_of
from mathinterp.store.manifest import file_of, save_record
from mathinterp.store.recut import FIELDS, original_shards, recut, table_of
from mathinterp.store.survey import COMPACTING
from mathinterp.store.writer import config_of, encode, footer_config, whole_rows
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.store.store import Store

OWN = ("shard", "rows", "sha256")  # of a footer: what each shard has for itself
TARGET_BYTES = 2**25  # of a merged file: small enough to be merged in memory
MARK = "The small files of this run are being merged; `mathinterp runs compact` ends it if it was interrupted."


@dataclass(frozen=True)
class Compacted:
    """What became of the files of a run."""

    run_id: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


@dataclass
class Merged:
    """New shards: their entries for the record, and what is in them."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # shard -> the shards in it, in order -> rows


def compact(store: "Store", run: str, target_bytes: int = TARGET_BYTES) -> Compacted:
    """Merge what is small; the same call again ends one that was killed, and does nothing more.

    Raises:
        UserError: there is no such run, it is not finished, or rows of it are damaged.
        Unfinished: the run was changed meanwhile, by another such call for example.
    """
    record = _finished_record(store, run)
    sizes = {shard: entry["bytes"] for shard, entry in record["files"].items()}
    groups = _groups(record["shards"], sizes, target_bytes)
    if groups:
        token = f"{MARK} {uuid4().hex}\n".encode()
        for table in {table_of(group[0]) for group in groups}:
            store.files.write(_marker(run, table), token)
        record = _replace(store, record, _merge(store, record, groups, token))
    _remove_superseded(store, record)
    after = record["files"].values()
    return Compacted(run, len(sizes), len(after), sum(sizes.values()), sum(entry["bytes"] for entry in after))


def _marker(run: str, table: str) -> str:
    return f"{table}/run_id={run}/{COMPACTING}"


def _finished_record(store: "Store", run: str) -> dict[str, Any]:
    """The record of a run, with an entry for each of its files, all of which are there."""
    record = store.runs.record(run)
    if unknown := {*map(table_of, record["shards"])} - set(catalog().tables):
        raise UserError(f"run {run} has tables of an experiment that is not installed: {', '.join(sorted(unknown))}")
    files = store.file_entries(record)
    if record["finished_at"] is None or set(files) < set(record["shards"]):
        done = f"{len(files)} of {counted(len(record['shards']), 'shard')} are there and whole"
        raise UserError(f"run {run} is not finished ({done}); the command that began it goes on, then merge its files")
    return {**record, "files": files}


def _groups(shards: Sequence[str], sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Which shards, in the order of their files' names, become one file; tables that would not halve stay."""
    found = []
    for table in sorted({*map(table_of, shards)}):
        of_table = sorted(shard for shard in shards if table_of(shard) == table)
        groups: list[list[str]] = [[]]
        for shard in of_table:
            if groups[-1] and sum(sizes[each] for each in groups[-1]) + sizes[shard] > most:
                groups.append([])
            groups[-1].append(shard)
        found += groups if len(groups) * 2 <= len(of_table) else []
    return found


def _merge(store: "Store", record: Mapping[str, Any], groups: Sequence[Sequence[str]], token: bytes) -> Merged:
    """Write the merged files, under numbers after all others of their table."""
    run, merged = record["run_id"], Merged()
    for group in groups:
        table = table_of(group[0])
        known = [*original_shards(record), *record["shards"], *merged.files]
        shard = f"{table}/{max(int(each.split('/')[1]) for each in known if table_of(each) == table) + 1:05d}"
        content, merged.held[shard] = _merged_file(store, record, shard, group)
        if not _is_mine(store, _marker(run, table), token):
            raise Unfinished(f"run {run}: another command changes it, too")
        store.files.write(file_of(run, shard), content)
        digest = hashlib.sha256(content).hexdigest()
        if checksum_of(store.files, file_of(run, shard)) != digest:
            raise Unfinished(f"{store.files.address(file_of(run, shard))} is not what was written")
        rows = sum(merged.held[shard].values())
        merged.files[shard] = {"rows": rows, "bytes": len(content), "sha256": digest}
    return merged


def _is_mine(store: "Store", marker: str, token: bytes) -> bool:
    with suppress(FileNotFoundError):
        return store.files.read(marker) == token
    return False


def _merged_file(
    store: "Store", record: Mapping[str, Any], shard: str, group: Sequence[str]
) -> tuple[bytes, dict[str, int]]:
    """Of shards of one table a file, and the rows of each."""
    tables, configs = {}, []
    for part in group:
        tables[part] = _whole(store, record, part)
        own = {"rows": len(tables[part]), **config_of(tables[part])}
        inner = own.pop("merged", None)
        configs += [own | each for each in inner] if inner else [own | {"sha256": record["files"][part]["sha256"]}]
    shared = {
        name: value
        for name, value in configs[0].items()
        if name not in OWN and all(name in config and config[name] == value for config in configs)
    }
    apart = [{name: value for name, value in config.items() if name not in shared} for config in configs]
    rows = pa.concat_tables([table.replace_schema_metadata() for table in tables.values()])
    config = {**shared, "run_id": record["run_id"], "shard": shard, "merged": apart}
    return encode(rows, table_of(shard), config), {part: len(table) for part, table in tables.items()}


def _whole(store: "Store", record: Mapping[str, Any], shard: str) -> pa.Table:
    name = file_of(record["run_id"], shard)
    try:
        return whole_rows(store.files.read(name), record["files"][shard]["sha256"])
    except StoreFailed:
        raise
    except FileNotFoundError as error:
        raise Unfinished(f"{store.files.address(name)} is gone: another command changes this run") from error
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{store.files.address(name)}: {error}; the command that made it computes it anew") from error


def _replace(store: "Store", before: Mapping[str, Any], merged: Merged) -> dict[str, Any]:
    """Write the record that lists the merged files; from here on they are read."""
    stored = store.record(before["run_id"])
    if stored is None or any(stored.get(name) != before.get(name) for name in ("shards", "compacted")):
        raise Unfinished(f"run {before['run_id']}: another command changed it meanwhile")
    record = recut({**stored, "files": before["files"]}, merged.held, merged.files)
    save_record(store.files, record)
    return record


def _remove_superseded(store: "Store", record: Mapping[str, Any]) -> None:
    """Delete the files that merged ones replace, what an interrupted merge left, and last the markers."""
    run, listed = record["run_id"], {file_of(record["run_id"], shard) for shard in record["shards"]}
    tables = sorted({*map(table_of, original_shards(record))})
    there = [name for table in tables for name in store.files.find(f"{table}/run_id={run}", ".parquet")]
    gone = [name for name in there if name not in listed and _is_leftover(store, name, record)]
    marked = [name for name in there if name.endswith(f"/{COMPACTING}")]
    if not gone and not marked:
        return
    if lost := set(record["shards"]) - set(store.entries(record)):
        raise UserError(f"run {run}: {', '.join(sorted(lost))} is damaged; the command that began the run mends it")
    for name in (*gone, *marked):
        with suppress(FileNotFoundError):
            store.files.remove(name)
    stored = store.record(run)
    if (
        stored and "compacted" in record and stored.get("compacted") != record["compacted"]
    ):  # a driver wrote what it knew before
        save_record(store.files, {**stored, **{name: record[name] for name in FIELDS}})
    store.write_views()


def _is_leftover(store: "Store", name: str, record: Mapping[str, Any]) -> bool:
    """Whether a file that is not in the record was merged into another, or is of a merge that was not ended."""
    if name in {file_of(record["run_id"], shard) for shard in original_shards(record)}:
        return True
    with suppress(Exception):  # whatever is no Parquet file of ours
        config = footer_config(BytesIO(store.files.read(name)))
        return config["run_id"] == record["run_id"] and "merged" in config
    return False
