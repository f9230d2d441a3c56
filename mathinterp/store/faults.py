"""What is wrong with the files of a store, each with what mends it."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mathinterp.errors import UserError
from mathinterp.store.catalog import catalog
from mathinterp.store.deleting import PROMPT_FOLDERS
from mathinterp.store.foreign import WHY as FOREIGN
from mathinterp.store.foreign import foreign_in
from mathinterp.store.integrity import Checked
from mathinterp.store.manifest import file_of, record_name
from mathinterp.store.query import VIEWS_FILE
from mathinterp.store.recut import original_shards, table_of
from mathinterp.store.runs import run_of
from mathinterp.store.survey import Record
from mathinterp.store.writer import footer_config

if TYPE_CHECKING:
    from mathinterp.store.store import Store

Kind = Literal["missing", "truncated", "damaged", "duplicate", "foreign", "stale", "interrupted"]
Mend = Literal["rerun", "delete", "compact", "remove", "views"]
OLD_VIEWS = "absent, or not of the files that can be trusted now, where they are now; other DuckDB clients read it"
_OF_RUN = re.compile(r"[^/]+/run_id=([0-9a-f]{12})/")


@dataclass(frozen=True)
class Fault:
    """A file that is not as it should be."""

    file: str  # its name in the store
    kind: Kind
    why: str
    mend: Mend  # the run's own command again; `runs delete` or `runs compact` of the run; remove the file; `sql`
    run: str | None  # which the file is of, where it is of one
    command: str | None = None  # that runs it again, where the record has it


@dataclass(frozen=True)
class Faults:
    """Of some runs, or of a whole store."""

    runs: Sequence[Checked]
    faults: Sequence[Fault]
    problems: Sequence[str]  # as they were told

    @property
    def harmless(self) -> bool:
        """Whether nothing was found but temporary files of dead processes, or views for other clients of before."""
        return all(fault.kind == "stale" for fault in self.faults)


class Damaged(UserError):
    """A file that a call reads is not as it was written."""

    def __init__(self, fault: Fault):
        again = f"the command that made run {fault.run}, again, mends it"
        super().__init__(f"{fault.kind}: {fault.file} ({fault.why}); {again}")
        self.fault = fault


def require_undamaged(store: "Store", records: Mapping[str, Record], tables: Collection[str]) -> None:
    """Read the files of some runs in some tables, and of their prompts, to their end; raises Damaged for the first."""
    for record in records.values():
        found = store.first_damaged(record, tables)
        if found is not None:
            raise Damaged(_fault(store, records, *found))


def find_faults(store: "Store", runs: Sequence[str] | None) -> Faults:
    """See ``Runs.check``."""
    checked = store.check(runs)
    records = store.look([]).records
    asked = None if runs is None else set(runs)
    faults = [_fault(store, records, name, why) for name, why in store.faults.items()]
    for each in checked:
        faults += _missing(records[each.run_id], each, {fault.file for fault in faults})
    faults += _unfinished_steps(store, checked, records)
    faults += _foreign_files(store, records, runs, {fault.file for fault in faults})
    if runs is None and records and not store.views_are_current():
        faults.append(Fault(VIEWS_FILE, "stale", OLD_VIEWS, "views", None))
    chosen = [fault for fault in faults if asked is None or fault.run is None or fault.run in asked]
    return Faults(checked, sorted(chosen, key=lambda fault: fault.file), store.problems)


def _fault(store: "Store", records: Mapping[str, Record], name: str, why: str) -> Fault:
    run = _of_run(name)
    if name.startswith("runs/"):
        run = run_of(name)
        if "being deleted" in why:
            return Fault(name, "interrupted", why, "delete", run)
        return Fault(name, "damaged", why, "rerun", run)
    if run is not None and run not in records:
        broken = "being deleted" not in store.faults.get(record_name(run), "being deleted")
        return Fault(name, "foreign", why, "rerun" if broken else "delete", run)
    if any(word in why for word in ("none of the", "foreign", "links are not followed", "no regular file")):
        return _foreign(store, records, name, why, run)
    kind: Kind = "truncated" if "truncated" in why else "missing" if "no readable prompts" in why else "damaged"
    run = run or _of_prompts(records, name)
    return Fault(name, kind, why, "rerun", run, _command(records, run))


def _command(records: Mapping[str, Record], run: str | None) -> str | None:
    return None if run is None else records[run].get("command")


def _of_prompts(records: Mapping[str, Record], name: str) -> str | None:
    """A run whose prompts these are: its command writes them again."""
    found = [run for run, record in records.items() if f"prompts_fingerprint={record['prompts_fingerprint']}/" in name]
    return min(found, default=None)


def _foreign(store: "Store", records: Mapping[str, Record], name: str, why: str, run: str | None) -> Fault:
    """Of a file whose name or footer is not that of a shard which its run has there."""
    record: Record = {} if run is None else records[run]
    listed = run is not None and name in {file_of(run, shard) for shard in record["shards"]}
    mend: Mend = "rerun" if listed else "remove"
    config = _config(store, name)
    if (
        config.get("run_id") == run
        and ("merged" in config or config.get("shard") in record.get("cut", ()))
        and not listed
    ):
        return Fault(name, "interrupted", "left by a merge of this run's files", "compact", run)
    twin = _twin(store, records, config, name)
    if twin is not None:
        return Fault(name, "duplicate", f"the same shard as {twin}", mend, run, _command(records, run))
    return Fault(name, "foreign", why, mend, run, _command(records, run))


def _config(store: "Store", name: str) -> dict[str, Any]:
    with suppress(Exception), store.files.open(name) as file:  # whatever is no Parquet file of ours
        found = footer_config(file)
        return found if isinstance(found, dict) else {}
    return {}


def _twin(store: "Store", records: Mapping[str, Record], config: Mapping[str, Any], name: str) -> str | None:
    """The file of the store that has the shard which the footer of a file elsewhere names."""
    record = records.get(str(config.get("run_id")))
    if record is None or config.get("shard") not in record["shards"]:
        return None
    own = file_of(record["run_id"], config["shard"])
    return own if own != name and _config(store, own).get("shard") == config["shard"] else None


def _missing(record: Record, checked: Checked, named: set[str]) -> list[Fault]:
    """Shards of a run that was finished once whose files are gone."""
    files = {file_of(checked.run_id, shard): shard for shard in checked.missing}
    command = record.get("command")
    return [
        Fault(name, "missing", f"shard {shard} of a finished run is gone", "rerun", checked.run_id, command)
        for name, shard in files.items()
        if record["finished_at"] is not None and name not in named
    ]


def _unfinished_steps(store: "Store", checked: Sequence[Checked], records: Mapping[str, Record]) -> list[Fault]:
    """Merges that were interrupted, or are at work, and temporary files of processes that died."""
    why = "the files of this run are being merged, or that was interrupted"
    found = [Fault(name, "interrupted", why, "compact", _of_run(name)) for name in store.merging]
    folders = {
        f"{table_of(shard)}/run_id={each.run_id}"
        for each in checked
        for shard in (*records[each.run_id]["shards"], *records[each.run_id].get("cut", ()))
    }
    stale = store.files.leftovers("", "runs", *sorted(folders))
    why = "temporary file of a process that died"
    return found + [Fault(name, "stale", why, "remove", _of_run(name)) for name in stale]


def _foreign_files(
    store: "Store", records: Mapping[str, Record], runs: Sequence[str] | None, named: set[str]
) -> list[Fault]:
    """What others left in the folders of these runs and of their prompts, or of all."""
    if runs is None:
        of_runs = {table_of(shard) for record in records.values() for shard in record["shards"]}
        folders = {"runs", *catalog().tables, *of_runs}
    else:
        folders = {f"{table_of(shard)}/run_id={run}" for run in runs for shard in original_shards(records[run])}
        prompts = {records[run]["prompts_fingerprint"] for run in runs}
        folders |= {f"{table}/prompts_fingerprint={each}" for table in PROMPT_FOLDERS for each in prompts}
    found = foreign_in(store.files, sorted(folders))
    return [Fault(name, "foreign", FOREIGN, "remove", _of_run(name)) for name in found if name not in named]


def _of_run(name: str) -> str | None:
    found = _OF_RUN.match(name)
    return found[1] if found else None
