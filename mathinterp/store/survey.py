"""Which files of a store may be read, and why the others may not.

A shard's file counts if the record of its run lists the shard, with that number of rows, and its footer says the same.
Each version of a file is opened once: what footers said is kept in memory and, once that spares opening many, in
``<store>/inspected.json``, which speaks of a file only as long as its size and times are the same. Records are
read anew by every process. Knows names, records and footers; knows nothing about SQL.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from mathinterp.store.catalog import catalog
from mathinterp.store.files import FileVersion, StoreFailed, StoreFiles
from mathinterp.store.manifest import file_of, read_record, record_name
from mathinterp.store.recut import table_of
from mathinterp.store.runs import run_of
from mathinterp.store.writer import Footer, read_footer
from mathinterp.text import visible

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Record = Mapping[str, Any]

KEPT_IN = "inspected.json"
WORTH_KEEPING = 100  # footers that were read by one process
FEW_FOLDERS = 3  # more than these of an object store are listed in one go
ELSEWHERE = "elsewhere"  # in ``good``: shards in tables of experiments that are not installed here
COMPACTING = "compacting.parquet"  # in a run's folder while its files are merged, see compacting.py
SHARD_FILE = re.compile(r"(?P<table>[^/]+)/run_id=(?P<run>[^/]+)/shard-(?P<index>\d{5,})\.parquet")
PROMPT_FILE = re.compile(r"(?P<table>[^/]+)/prompts_fingerprint=(?P<fingerprint>[^/]+)/(?P=table)\.parquet")
PROMPT_TABLES = ("prompts", "answer_tokens")


@dataclass(frozen=True)
class Survey:
    """What was found: the records by run, the names of files to read by table ("runs": records), and of all others."""

    records: Mapping[str, Record]
    good: Mapping[str, list[str]]
    bad: list[str]


class Surveyor:
    """Looks through the files of a store; ``problems`` names every one found so far that is left out, and why."""

    def __init__(self, files: StoreFiles):
        self.problems: list[str] = []
        self._files = files
        self._records: dict[str, tuple[FileVersion, Record | None, str | None]] = {}
        # Name -> size and stamp of a file's version, fault and rows of its footer. None: not read from KEPT_IN yet.
        self._footers: dict[str, list[Any]] | None = None
        self._unkept = 0  # footers that KEPT_IN does not have
        self._unlisted: set[str] = set()  # runs with files that their records do not list
        self.merging: set[str] = set()  # markers of runs whose files are being merged
        self.faults: dict[str, str] = {}  # name of each file in ``problems`` -> why

    def survey(self, tables: Iterable[str], run: str | None = None) -> Survey:
        """All records, and the files of some tables; with ``run`` of this run alone, and its prompts."""
        tables = list(tables)
        for _ in range(5):  # until record and files fit
            found = self._survey(tables, run)
            suspects = self._unlisted | {run for run, record in found.records.items() if "compacted" in record}
            if not any(self._moved(each, found, tables) for each in suspects & set(found.records)):
                break
        return found

    def _moved(self, run: str, found: Survey, tables: list[str]) -> bool:
        """Whether files of a finished run were merged while they were listed, so that some seem to be missing."""
        record = found.records[run]
        names = {file_of(run, shard): shard for shard in record["shards"] if table_of(shard) in tables}
        there = {names[name] for table in tables for name in found.good.get(table, []) if name in names}
        if record["finished_at"] is None or len(there) == len(names):
            return False
        with suppress(ValueError):  # damaged meanwhile
            found_now = set(names.values()) & set(self.of_run(run, record))
            return found_now != there or read_record(self._files, run, now=True) != record
        return True

    def _survey(self, tables: list[str], run: str | None) -> Survey:
        listed = self._listed(["runs", *tables]) if run is None else self._listed_of_run(tables, run)
        records, good, bad = self._read_records(listed["runs"])
        expected = _expected(records)
        for table in tables:
            whys = self._table(table, records, listed[table], expected)
            good[table] = [name for name, why in whys.items() if why is None]
            bad += [name for name, why in whys.items() if why is not None]
        if run is None and catalog().of_runs <= set(tables):
            good[ELSEWHERE] = self._elsewhere(records)
        if self._unkept >= WORTH_KEEPING:
            self.keep()
        return Survey(records, good, bad)

    def of_run(self, run: str, record: Record) -> dict[str, tuple[str, int]]:
        """Shard -> name and size of its file, for those of a run that may be read; others are named."""
        found = {}
        for table in sorted({table_of(shard) for shard in record["shards"]} & set(catalog().tables)):
            listed = self._files.find(f"{table}/run_id={run}", ".parquet")
            for name, why in self._table(table, {run: record}, listed).items():
                place = SHARD_FILE.fullmatch(name)
                if why is None and place is not None:
                    found[f"{table}/{place['index']}"] = name, listed[name].size
        return found

    def of_prompts(self, table: str, fingerprint: str) -> list[str]:
        """The file of a prompt set in one of the tables, if there is one that may be read."""
        listed = self._files.find(f"{table}/prompts_fingerprint={fingerprint}", ".parquet")
        return [name for name, why in self._table(table, {}, listed).items() if why is None]

    def seen(self, name: str) -> tuple[int, int]:
        """Bytes and rows of a file that may be read, as they were when it was last looked at."""
        return self._known_footers()[name][0], self._known_footers()[name][3]

    def distrust(self, name: str, why: str) -> None:
        """Leave this version of a file, which was good so far, out from now on, in other processes too."""
        self._known_footers()[name][2:] = why, -1
        self.report(name, why)
        self.keep()

    def distrust_record(self, name: str, why: str) -> None:
        """Leave this version of a record out."""
        self._records[name] = self._records[name][0], None, why

    def report(self, name: str, why: str, consequence: str = "left out") -> None:
        """Name a problem, once."""
        self.faults[name] = why
        problem = f"{visible(self._files.address(name))}: {visible(why)}; {consequence}"
        if problem not in self.problems:
            self.problems.append(problem)
            logger.warning(problem)

    def keep(self) -> None:
        """Write what footers said beside the records; a store that cannot be written does without."""
        kept: dict[str, dict[str, Any]] = {}
        for name, said in self._known_footers().items():
            table = name.split("/")[0]
            if table not in kept:
                kept[table] = {"columns": _columns(table), "files": {}}
            kept[table]["files"][name] = said
        with suppress(OSError):
            self._files.write(KEPT_IN, json.dumps(kept).encode())
            self._unkept = 0

    def _listed(self, folders: list[str]) -> dict[str, dict[str, FileVersion]]:
        suffixes = {folder: ".json" if folder == "runs" else ".parquet" for folder in folders}
        if self._files.local or len(folders) <= FEW_FOLDERS:
            return {folder: self._files.find(folder, suffix) for folder, suffix in suffixes.items()}
        everything = self._files.find("", "")
        found: dict[str, dict[str, FileVersion]] = {folder: {} for folder in folders}
        for name, version in everything.items():
            folder = name.split("/")[0]
            if folder in found and name.endswith(suffixes[folder]):
                found[folder][name] = version
        return found

    def _listed_of_run(self, tables: list[str], run: str) -> dict[str, dict[str, FileVersion]]:
        name = record_name(run)
        found = {"runs": {each: version for each, version in self._files.find("runs", ".json").items() if each == name}}
        record = self._read_records(found["runs"])[0].get(run)
        prompts = record["prompts_fingerprint"] if record else ""
        of_runs, has = catalog().of_runs, {table_of(shard) for shard in record["shards"]} if record else set(tables)
        for table in tables:
            place = f"{table}/{catalog().tables[table].partition}={run if table in of_runs else prompts}"
            asked = self._files.local or table in has or table not in of_runs  # each costs an object store requests
            found[table] = self._files.find(place, ".parquet") if asked else {}
        return found

    def _elsewhere(self, records: Mapping[str, Record]) -> list[str]:
        """Files in tables that are not known here: their rows cannot be read, but their runs' shards be counted."""
        shards = {f"{run}/{shard}" for run, record in records.items() for shard in record["shards"]}
        found = []
        for folder in self._files.folders():
            for name in self._files.find(folder, ".parquet") if folder not in {"runs", *catalog().tables} else ():
                place = SHARD_FILE.fullmatch(name)
                if place and f"{place['run']}/{place['table']}/{place['index']}" in shards:
                    found.append(name)
        return found

    def _read_records(
        self, listed: Mapping[str, FileVersion]
    ) -> tuple[dict[str, Record], dict[str, list[str]], list[str]]:
        fresh = [name for name, version in listed.items() if self._records.get(name, (None,))[0] != version]
        for name, (record, why) in zip(fresh, self._each(self._record, fresh, listed), strict=True):
            self._records[name] = listed[name], record, why
        records, bad = {}, []
        for name in listed:
            _, record, why = self._records[name]
            if record is None:
                bad.append(name)
                self.report(name, f"not a run's record ({why})")
            else:
                records[record["run_id"]] = record
        return records, {"runs": [f"runs/{run}.json" for run in records]}, bad

    def _record(self, name: str, version: FileVersion) -> tuple[Record | None, str | None]:
        run = run_of(name)
        try:
            if version.odd or "/" in run:
                raise ValueError(version.odd or "its name is not one that mathinterp gives")
            record = read_record(self._files, run)
            return record, "gone" if record is None else None
        except StoreFailed:
            raise
        except (ValueError, OSError) as error:
            return None, " ".join(str(error).split())

    def _table(
        self,
        table: str,
        records: Mapping[str, Record],
        listed: Mapping[str, FileVersion],
        expected: dict[str, dict[str, int | None]] | None = None,
    ) -> dict[str, str | None]:
        """Name -> why a file of a table must not be read, or None. expected: ``_expected``, where it is at hand."""
        of_runs, known = table in catalog().of_runs, self._known_footers()
        listed_rows = (_expected(records) if expected is None else expected).get(table, {})
        whys: dict[str, str | None] = {}
        fresh: list[str] = []  # versions whose footers are not known yet
        for name, version in listed.items():
            whys[name] = why = version.odd or (
                None if name in listed_rows else _misplaced(name, records if of_runs else None)
            )
            if why is None and not _is_of(known.get(name), version):
                fresh.append(name)
        self._read_footers(table, fresh, listed)
        for name, why in whys.items():
            if why is None:
                _, _, why, rows = known[name]
                told = listed_rows.get(name)
                if why is None and told is not None and told != rows:
                    why = f"it has {rows} rows, and the record of its run says {told}"
                whys[name] = why
            if why is not None and not self._is_in_step(name, why, listed):
                self.report(name, why)
        return whys

    def _is_in_step(self, name: str, why: str, listed: Mapping[str, FileVersion]) -> bool:
        """Whether a file is left out while files of its run are merged, which is no fault."""
        folder, _, own = name.rpartition("/")
        self.merging |= {name} if own == COMPACTING else set()
        if why.startswith("none of the"):
            self._unlisted.add(folder.rpartition("run_id=")[2])
            return f"{folder}/{COMPACTING}" in listed
        return own == COMPACTING

    def _read_footers(self, table: str, names: list[str], listed: Mapping[str, FileVersion]) -> None:
        known = self._known_footers()

        def read(name: str, version: FileVersion) -> Footer:
            try:
                with self._files.open(name) as file:
                    return read_footer(file, table, _identity(name))
            except StoreFailed:
                raise
            except OSError as error:
                return Footer(f"cannot be read ({error.strerror or error})")

        for name, footer in zip(names, self._each(read, names, listed), strict=True):
            known[name] = [listed[name].size, listed[name].stamp, footer.fault, footer.rows]
        self._unkept += len(names)

    def name_missing_prompts(self, found: Survey) -> None:
        """Rows of prompts that are gone would fall out of every view that joins them, in silence."""
        records, good = found.records, found.good
        read = {name.split("/")[1] for table, names in good.items() if table not in ("runs", *PROMPT_TABLES)
                for name in names}  # fmt: skip
        for table in (table for table in PROMPT_TABLES if table in good):
            there = {name.split("/")[1] for name in good[table]}
            lost: dict[str, list[str]] = {}
            for run, record in records.items():
                folder = f"prompts_fingerprint={record['prompts_fingerprint']}"
                if f"run_id={run}" in read and folder not in there and _reads_prompts(record):
                    lost.setdefault(f"{table}/{folder}/{table}.parquet", []).append(run)
            for name, runs in lost.items():
                of = f"run {runs[0]}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
                self.report(name, f"no readable prompts of {of}", "views that join them lack those rows")

    def _known_footers(self) -> dict[str, list[Any]]:
        if self._footers is None:
            self._footers = {}
            with suppress(FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError, KeyError, OSError):
                for table, entry in json.loads(self._files.read(KEPT_IN)).items():
                    if table in catalog().tables and entry["columns"] == _columns(table):
                        self._footers.update(entry["files"])
        return self._footers

    def _each(
        self, look: Callable[[str, FileVersion], Result], names: list[str], listed: Mapping[str, FileVersion]
    ) -> list[Result]:
        versions = [listed[name] for name in names]
        if self._files.local:
            return [look(name, version) for name, version in zip(names, versions, strict=True)]
        with ThreadPoolExecutor(16) as pool:  # one round trip each: overlap them
            return list(pool.map(look, names, versions))


def _expected(records: Mapping[str, Record]) -> dict[str, dict[str, int | None]]:
    """By table, name -> rows of every file that records list; None where a record does not say how many."""
    expected: dict[str, dict[str, int | None]] = {}
    for run, record in records.items():
        entries = record.get("files", {})
        for shard in record["shards"]:
            rows = entries[shard]["rows"] if shard in entries else None
            expected.setdefault(table_of(shard), {})[file_of(run, shard)] = rows
    return expected


def _misplaced(name: str, records: Mapping[str, Record] | None) -> str | None:
    """Why a file is none of a run's shards; with no records: why it is no file of prompts."""
    place = (PROMPT_FILE if records is None else SHARD_FILE).fullmatch(name)
    if place is None:
        return "foreign: its name is not one that mathinterp gives"
    if records is None:
        return None
    record = records.get(place["run"])
    if record is None:
        return f"its run has no readable runs/{place['run']}.json"
    return f"none of the {len(record['shards'])} shards of its run"


def _identity(name: str) -> dict[str, str]:
    """What the footer of a file of that name says."""
    if place := SHARD_FILE.fullmatch(name):
        return {"run_id": place["run"], "shard": f"{place['table']}/{place['index']}"}
    [table, folder, _] = name.split("/")
    return {"prompts_fingerprint": folder.removeprefix("prompts_fingerprint="), "table": table}


def _is_of(said: Any, version: FileVersion) -> bool:
    """Whether what is known, maybe from a file that anyone can write, is of this version."""
    same = isinstance(said, list) and len(said) == 4 and said[:2] == [version.size, version.stamp]
    return same and isinstance(said[2], str | None) and isinstance(said[3], int)


def _reads_prompts(record: Record) -> bool:
    """Whether rows of a run are about prompts that the store keeps."""
    tables = {table_of(shard) for shard in record["shards"]} & set(catalog().tables)
    return any("prompt_id" in catalog().tables[table].schema.names for table in tables)


def _columns(table: str) -> str:
    """Changes with the columns of a table."""
    known = catalog().tables.get(table)
    return "" if known is None else hashlib.sha256(str(known.schema).encode()).hexdigest()[:12]
