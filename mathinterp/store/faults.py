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
from mathinterp.store.manifest import RUN_ID, file_of, record_name
from mathinterp.store.query import VIEWS_FILE
from mathinterp.store.recut import original_shards, table_of
from mathinterp.store.runs import run_of
from mathinterp.store.survey import Record
from mathinterp.store.writer import footer_config

if TYPE_CHECKING:
    from mathinterp.store.store import Store

Kind = Literal["missing", "truncated", "damaged", "duplicate", "foreign", "stale", "interrupted"]
Mend = Literal["rerun", "delete", "compact", "remove", "allow", "views"]
OLD_VIEWS = "absent, or not of the files that can be trusted now, where they are now; other DuckDB clients read it"
_OF_RUN = re.compile(r"[^/]+/run_id=([0-9a-f]{12})/")


@dataclass(frozen=True)
class Fault:
    """A file that is not as it should be."""

    file: str  # its name in the store
    kind: Kind
    why: str
    mend: Mend  # the run's own command, `runs delete` or `compact` of it; remove the file, let it be read; or `sql`
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
    every = runs is None
    checked = store.check(runs)
    records = store.look([]).records
    checked = [each for each in checked if each.run_id in records]  # the others were deleted meanwhile
    asked = {each.run_id for each in checked}
    faults = [_fault(store, records, name, why, () if every else asked) for name, why in store.faults.items()]
    named = {fault.file for fault in faults}
    for each in checked:
        faults += _missing(records[each.run_id], each, named)
    faults += _unfinished_steps(store, checked, records)
    faults += _foreign_files(store, records, None if every else asked, {fault.file for fault in faults})
    if every and records and not store.views_are_current():
        faults.append(Fault(VIEWS_FILE, "stale", OLD_VIEWS, "views", None))
    chosen = [
        fault for fault in faults
        if every or fault.run in asked or (fault.run is None and not fault.file.startswith("runs/"))
    ]  # fmt: skip
    return Faults(checked, sorted(chosen, key=lambda fault: fault.file), store.problems)


def _fault(store: "Store", records: Mapping[str, Record], name: str, why: str, asked: Collection[str] = ()) -> Fault:
    run = _of_run(name)
    if name.startswith("runs/"):
        if not RUN_ID.fullmatch(run_of(name)):
            return Fault(name, "foreign", FOREIGN, "remove", None)
        return Fault(name, "interrupted" if "being deleted" in why else "damaged", why, *_of_lost(store, run_of(name)))
    if run is not None and run not in records:
        return Fault(name, "foreign", why, *_of_lost(store, run))
    if any(word in why for word in ("none of the", "foreign", "links are not followed", "no regular file")):
        return _foreign(store, records, name, why, run)
    kind: Kind = "truncated" if "truncated" in why else "missing" if "no readable prompts" in why else "damaged"
    run = run or _of_prompts(records, name, asked)
    if run is not None:
        return Fault(name, kind, why, "rerun", run, _command(records, run))
    if "cannot be listed" in why:
        return Fault(name, kind, why, "allow", None)
    return Fault(name, "foreign" if "its run has no" in why else kind, why, "remove", None)  # of no run that is here


def _of_lost(store: "Store", run: str) -> tuple[Mend, str]:
    """What mends a file of a run without a record that can be read: its command writes a damaged one anew."""
    broken = "being deleted" not in store.faults.get(record_name(run), "being deleted")
    return "rerun" if broken else "delete", run


def _command(records: Mapping[str, Record], run: str | None) -> str | None:
    return None if run is None else records[run].get("command")


def _of_prompts(records: Mapping[str, Record], name: str, asked: Collection[str]) -> str | None:
    """A run whose prompts these are, whose command writes them anew: one that was asked for, or has a command."""
    found = [run for run, record in records.items() if f"prompts_fingerprint={record['prompts_fingerprint']}/" in name]
    return min(found, key=lambda run: (run not in asked, _command(records, run) is None, run), default=None)


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
    """Shards of a run that was finished once whose files are gone, and were not merged since they were looked for."""
    files = {file_of(checked.run_id, shard): shard for shard in checked.missing if shard in record["shards"]}
    command = record.get("command")
    return [
        Fault(name, "missing", f"shard {shard} of a finished run is gone", "rerun", checked.run_id, command)
        for name, shard in files.items()
        if record["finished_at"] is not None and name not in named
    ]


def _unfinished_steps(store: "Store", checked: Sequence[Checked], records: Mapping[str, Record]) -> list[Fault]:
    """Merges that were interrupted, or are at work, and temporary files of processes that died."""
    found = [_of_merge(store, records, name) for name in store.merging]
    folders = {
        f"{table_of(shard)}/run_id={each.run_id}"
        for each in checked
        for shard in (*records[each.run_id]["shards"], *records[each.run_id].get("cut", ()))
    }
    prompts = {records[each.run_id]["prompts_fingerprint"] for each in checked}
    folders |= {f"{table}/prompts_fingerprint={each}" for table in PROMPT_FOLDERS for each in prompts}
    stale = store.files.leftovers("", "runs", *sorted(folders))
    why = "temporary file of a process that died"
    return found + [Fault(name, "stale", why, "remove", _of_run(name)) for name in stale]


def _of_merge(store: "Store", records: Mapping[str, Record], name: str) -> Fault:
    why, run = "the files of this run are being merged, or that was interrupted", _of_run(name)
    if run is None or run in records:
        return Fault(name, "interrupted", why, "compact", run)
    return Fault(name, "interrupted", why, *_of_lost(store, run))


def _foreign_files(
    store: "Store", records: Mapping[str, Record], runs: Collection[str] | None, named: set[str]
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
