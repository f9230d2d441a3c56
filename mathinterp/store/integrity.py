"""Are the bytes of a store those that were written? Whole files against their records, pages against their checksums.

Knows files, records and what a survey found; knows nothing about how rows are computed or queried.
"""

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFailed, StoreFiles
from mathinterp.store.manifest import file_of, read_record
from mathinterp.store.query import refusal
from mathinterp.store.reading import closed_connection
from mathinterp.store.recut import table_of
from mathinterp.store.survey import PROMPT_TABLES, Record, Survey, Surveyor
from mathinterp.store.writer import checksum, damage, has_checksums

SEAL = ".sha256"  # ending of the file beside a prompts file
BETWEEN_WRITES = 0.5  # seconds, from a prompts file to its checksum
Entry = dict[str, Any]  # rows, bytes and sha256 of a shard's file, as the record of its run has them


@dataclass(frozen=True)
class Checked:
    """What became of the shards of a run."""

    run_id: str
    scan: str
    shards: int
    intact: int  # as the record's checksums, or those of their pages, say
    unproved: int = 0  # shards and prompts files: readable, but written without checksums, by an early version
    missing: list[str] = field(default_factory=list)  # not computed yet, or left out for what ``problems`` says


def entries(files: StoreFiles, surveyor: Surveyor, record: Record, *, again: bool) -> dict[str, Entry]:
    """Shard -> entry for the record, for every shard of a run whose file is whole; others are distrusted.

    Args:
        again: read files that the record has an entry for, and compare; else they are only looked for.
    """
    known = record.get("files", {})
    found = {}
    for shard, (name, size) in surveyor.of_run(record["run_id"], record).items():
        entry = known.get(shard)
        if entry is not None and not again and entry["bytes"] == size:
            found[shard] = entry
            continue
        entry, why = _read(files, name, entry if again else None)
        if why is not None:
            surveyor.distrust(name, why)
        elif entry is not None:
            found[shard] = entry
    return found


def _read(files: StoreFiles, name: str, known: Entry | None) -> tuple[Entry | None, str | None]:
    """The entry of a file, read to its end, or why it is damaged."""
    try:
        with files.open(name) as file:
            digest = checksum(file)
            if known is not None and known["sha256"] != digest:
                return None, "damaged: its checksum is not the one that the record of its run has"
            file.seek(0)
            why = None if known is not None else damage(file)
            if why is not None:
                return None, why
            rows, size = pq.ParquetFile(file).metadata.num_rows, file.seek(0, os.SEEK_END)
            return {"rows": rows, "bytes": size, "sha256": digest}, None
    except StoreFailed:
        raise
    except FileNotFoundError:  # since it was listed: files were merged, or the run is being deleted
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"


def files_of(surveyor: Surveyor, records: Mapping[str, Record]) -> Survey:
    """The files of some runs and of their prompts."""
    good: dict[str, list[str]] = {table: [] for table in PROMPT_TABLES}
    for run, record in records.items():
        for shard, (name, _) in surveyor.of_run(run, record).items():
            good.setdefault(table_of(shard), []).append(name)
        for table in PROMPT_TABLES:
            good[table] += surveyor.of_prompts(table, record["prompts_fingerprint"])
    return Survey(records, good, [])


def check_runs(files: StoreFiles, surveyor: Surveyor, runs: Iterable[str]) -> list[Checked]:
    """Read every file of some runs, and their prompts, to its end; what is damaged is distrusted and named.

    Each run as it is when its turn comes: its files may be merged meanwhile, or it may be deleted and is left out.
    """
    found = []
    for run in runs:
        while (record := _record_now(files, run)) is not None:
            checked = _check(files, surveyor, record)
            after = _record_now(files, run)
            if after is None or after["shards"] == record["shards"]:
                found += [checked] if after is not None else []
                break
    return found


def _record_now(files: StoreFiles, run: str) -> Record | None:
    with suppress(ValueError):  # being deleted, or damaged meanwhile
        return read_record(files, run, now=True)
    return None


def _check(files: StoreFiles, surveyor: Surveyor, record: Record) -> Checked:
    whole = entries(files, surveyor, record, again=True) | _elsewhere(files, surveyor, record)
    prompts, unsealed = record["prompts_fingerprint"], 0
    for table in (*PROMPT_TABLES, "prompt_columns"):
        sealed = intact_prompts(files, surveyor, table, prompts)
        unsealed += 0 if sealed else len(surveyor.of_prompts(table, prompts))
    unproved = 0
    for shard in whole.keys() - record.get("files", {}).keys():
        with suppress(FileNotFoundError), files.open(file_of(record["run_id"], shard)) as file:
            unproved += not has_checksums(file)
    missing = [shard for shard in record["shards"] if shard not in whole]
    proved = len(whole) - unproved
    return Checked(record["run_id"], record["scan"], len(record["shards"]), proved, unproved + unsealed, missing)


def _elsewhere(files: StoreFiles, surveyor: Surveyor, record: Record) -> dict[str, Entry]:
    """As ``entries``, in tables of experiments that are not installed: their rows cannot be read, but their bytes."""
    found, known = {}, record.get("files", {})
    for shard in record["shards"]:
        if table_of(shard) not in catalog().tables:
            entry, why = _read(files, file_of(record["run_id"], shard), known.get(shard))
            if why is not None:
                surveyor.report(file_of(record["run_id"], shard), why)
            elif entry is not None:
                found[shard] = entry
    return found


def intact_prompts(files: StoreFiles, surveyor: Surveyor, table: str, fingerprint: str) -> bool:
    """Whether a prompt set is there, whole, with its checksum beside it; one without is only looked through.

    A damaged one is distrusted. Reads files to their end.
    """
    proved = False
    for name in surveyor.of_prompts(table, fingerprint):
        sealed, why = _against_seal(files, name)
        if why is not None:
            surveyor.distrust(name, why)
        elif sealed:
            proved = True
        else:
            _distrust_damaged(files, surveyor, [name])
    return proved


def _against_seal(files: StoreFiles, name: str) -> tuple[bool, str | None]:
    """Whether a prompts file has a checksum beside it, and why the file is not the one that it is of."""
    try:
        known, digest = _kept_checksum(files, name), checksum_of(files, name)
        if known is not None and known != digest:  # or ``seal`` is between its two writes
            time.sleep(BETWEEN_WRITES)
            known, digest = _kept_checksum(files, name), checksum_of(files, name)
    except StoreFailed:
        raise
    except OSError as error:
        return False, f"cannot be read ({error.strerror or error})"
    same = known is None or known == digest
    return known is not None, None if same else "damaged: its checksum is not the one that was written beside it"


def first_damaged(
    files: StoreFiles, surveyor: Surveyor, record: Record, tables: Collection[str]
) -> tuple[str, str] | None:
    """Of a run's files in some tables, and of its prompts: the first that is not as it was written, and why.

    Reads them to their end, and distrusts none. One without a checksum is only looked through.
    """
    known, of_runs = record.get("files", {}), catalog().of_runs
    for shard, (name, _) in surveyor.of_run(record["run_id"], record).items():
        if table_of(shard) in tables:
            _, why = _read(files, name, known.get(shard))
            if why is not None:
                return name, why
    for table in sorted({*tables} & (catalog().tables.keys() - of_runs)):
        for name in surveyor.of_prompts(table, record["prompts_fingerprint"]):
            sealed, why = _against_seal(files, name)
            why = why if sealed or why is not None else _read(files, name, None)[1]
            if why is not None:
                return name, why
    return None


def checksum_of(files: StoreFiles, name: str) -> str:
    """SHA-256 of a file."""
    with files.open(name) as file:
        return checksum(file)


def _kept_checksum(files: StoreFiles, name: str) -> str | None:
    """What ``seal`` kept; None: the file was written by an early version."""
    try:
        return files.read(name + SEAL).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def seal(files: StoreFiles, name: str, content: bytes) -> None:
    """Write a file, then its checksum beside it, as runs that have it in their records come and go."""
    files.write(name, content)
    files.write(name + SEAL, hashlib.sha256(content).hexdigest().encode() + b"\n")


def deeper_faults(files: StoreFiles, surveyor: Surveyor, survey: Survey, readable: Mapping[str, str]) -> bool:
    """Look into files whose footers are good, after a query of them failed; whether some are now distrusted.

    Args:
        readable: record's name -> why DuckDB cannot read it, for those that it cannot.
    """
    for name, why in readable.items():
        surveyor.distrust_record(name, why)
    before = len(surveyor.problems)
    names = [name for table in catalog().tables for name in survey.good.get(table, [])]
    _distrust_damaged(files, surveyor, names)
    return bool(readable) or len(surveyor.problems) > before


def _distrust_damaged(files: StoreFiles, surveyor: Surveyor, names: Iterable[str]) -> None:
    reader = closed_connection(files)
    for name in names:
        try:
            with files.open(name) as file:
                why = damage(file)
            if why is None and (refused := refusal(reader, files.address(name))):
                why = f"damaged ({refused})"
        except StoreFailed:
            raise
        except FileNotFoundError:
            why = None  # merged with others, or deleted, since it was listed
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
        if why is not None:
            surveyor.distrust(name, why)
