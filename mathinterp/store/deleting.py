"""Free one run: its record, rows and temporary files, and the prompts that no other run has.

The record first says that the run is being deleted, from when on nobody reads its rows, and goes last: killed at any
step, the same call ends what was begun. Links are neither followed nor removed, and files of others stay; but what
stands in the place of the record goes, whatever it is, unless it is a folder with something in it. Knows files and
records.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.store.files import FileVersion, StoreFailed
from mathinterp.store.foreign import is_ours
from mathinterp.store.manifest import RUN_ID, file_of, read_record, record_name, timestamp
from mathinterp.store.run_list import last_write
from mathinterp.store.runs import alike, recorded
from mathinterp.store.survey import Record

if TYPE_CHECKING:
    from mathinterp.store.store import Store

PROMPT_FOLDERS = ("prompts", "answer_tokens", "prompt_columns")
AT_WORK = 900.0  # seconds since the last write, in which a driver may still be at work on an unfinished run


@dataclass(frozen=True)
class Deletion:
    """What a run has to itself."""

    run_id: str
    scan: str | None  # None: its record cannot be read
    status: str  # finished, unfinished, being deleted (a call was killed), or no readable record
    files: Sequence[str]  # in the order in which they go; the record is the last one
    bytes: int
    prompts: Sequence[str]  # of ``files`` those of prompts that no other run has
    kept_prompts: str | None  # why its prompts stay; None: they go, or there are none
    left: Sequence[str]  # links and whatever else is no regular file: left alone
    foreign: Sequence[str]  # files that mathinterp did not write: left alone
    needed_by: Sequence[str]  # runs whose parameters name this one
    written: float | None  # of an unfinished run: seconds since the last write, where the store says so
    writing: bool  # a process of this machine, or lately of another, is writing one of its files

    @property
    def may_be_at_work(self) -> bool:
        """Whether a driver may be writing: nothing in a store tells one that runs from one that was killed just now."""
        recent = self.written is None or self.written < AT_WORK
        return self.writing or (self.status == "unfinished" and recent)


def deletion(store: "Store", run: str, after: Collection[str] = ()) -> Deletion:
    """See ``Runs.deletion``."""
    if not RUN_ID.fullmatch(run):
        raise UserError(f"'{run}' is no run id (12 hex digits).{alike(store.files, run)}")
    raw, others = _raw_record(store, run), _other_records(store, run)
    others = {other: record for other, record in others.items() if other not in after}
    listed = _files_of(store, run)
    prompts, kept = _own_prompts(store, raw, others)
    foreign = [name for name, version in {**listed, **prompts}.items() if not version.odd and not is_ours(name)]
    for name in foreign:
        listed.pop(name, None)
        prompts.pop(name, None)
    if not listed:
        raise UserError(f"there is no run '{run}' in {store.url}.{alike(store.files, run)}")
    regular = [name for name, version in listed.items() if not version.odd]
    record = record_name(run)
    files = [*(name for name in regular if name != record), *prompts, *([record] if record in listed else [])]
    status = _status(store, run, raw, regular)
    temporary = {name for name in regular if name.endswith(".tmp")}
    return Deletion(
        run_id=run,
        scan=None if raw is None else str(raw.get("scan")),
        status=status,
        files=files,
        bytes=sum(version.size for name, version in {**listed, **prompts}.items() if name in set(files)),
        prompts=list(prompts),
        kept_prompts=kept,
        left=[
            *(name for name, version in listed.items() if version.odd and name != record),
            *([record] if store.files.has_in_it(record) else []),
        ],
        foreign=foreign,
        needed_by=sorted(other for other, text in others.items() if text is not None and names_run(text, run)),
        written=last_write(store, run, regular) if status == "unfinished" else None,
        writing=bool(temporary - set(store.files.leftovers(*{name.rpartition("/")[0] for name in temporary}))),
    )


def delete(store: "Store", run: str, *, force: bool = False) -> Deletion:
    """See ``Runs.delete``."""
    found, others = deletion(store, run), _other_records(store, run)
    if found.may_be_at_work and not force:
        when = "" if found.written is None else f" and was written to {found.written:.0f} s ago"
        why = "is being written" if found.writing else f"is not finished{when}"
        raise UserError(f"run {run} {why}: a driver may be at work on it. Stop it first, or give `force` if none is")
    _mark(store, run)
    for name in found.files[: -1 if found.files[-1:] == [record_name(run)] else None]:
        if name not in found.prompts:
            _remove(store, name)
    record = _raw_record(store, run)
    prompts, _ = _own_prompts(store, record, _other_records(store, run, others))  # a run may have begun meanwhile
    for name in filter(is_ours, prompts):
        _remove(store, name)
    store.files.remove_folder(record_name(run))  # if one without anything in it is in the record's place
    if not store.files.has_in_it(record_name(run)):
        _remove(store, record_name(run))
    for folder in _folders((*found.files, *prompts)):
        store.files.remove_folder(folder)
    store.write_views()
    return found


def _folders(names: Iterable[str]) -> list[str]:
    """The folders that files were in, the deepest first, but for that of the records."""
    parts = [name.split("/")[:-1] for name in names]
    folders = {"/".join(each[:end]) for each in parts for end in range(1, len(each) + 1)} - {"runs"}
    return sorted(folders, key=lambda folder: -folder.count("/"))


def _mark(store: "Store", run: str) -> None:
    """From here on the run is not read any more."""
    record = _raw_record(store, run)
    if record is not None and "deleting" not in record:
        content = json.dumps({**record, "deleting": timestamp()})  # whatever it holds
        store.files.write(record_name(run), content.encode() + b"\n")


def _remove(store: "Store", name: str) -> None:
    with suppress(FileNotFoundError):
        store.files.remove(name)


def _raw_record(store: "Store", run: str) -> dict[str, Any] | None:
    """The record as it stands, also of a run that is being deleted; None: none that is JSON."""
    try:
        found = json.loads(store.files.read(record_name(run), now=True))
    except StoreFailed:
        raise
    except (OSError, ValueError, RecursionError):  # OSError: gone, a link, or not to be read
        return None
    return found if isinstance(found, dict) else None


def _other_records(
    store: "Store", run: str, before: Mapping[str, Record | None] | None = None
) -> dict[str, Record | None]:
    """Of each other run the record; None: it cannot be read, or names no prompts. before: those of an earlier call."""
    others = {*recorded(store.files)} - {run}
    known: dict[str, Record | None] = dict(store.look([]).records if before is None else before)
    for other in others - known.keys():
        record = _raw_record(store, other)
        known[other] = record if record and isinstance(record.get("prompts_fingerprint"), str) else None
    return {other: known[other] for other in sorted(others)}


def _files_of(store: "Store", run: str) -> dict[str, FileVersion]:
    """Everything of a run but prompts: its record, temporary files of that, and what its folder in each table has."""
    records = store.files.find("runs", "")
    mine = {
        name: version
        for name, version in records.items()
        if name == record_name(run) or (name.startswith(f"runs/.{run}.json.") and name.endswith(".tmp"))
    }
    for table in store.files.folders(anew=True):
        if table != "runs":
            mine |= store.files.find(f"{table}/run_id={run}", "")
    return mine


def _own_prompts(
    store: "Store", record: dict[str, Any] | None, others: dict[str, Record | None]
) -> tuple[dict[str, FileVersion], str | None]:
    """Files in the folders of the run's prompts, if no other run has them; or why they stay."""
    fingerprint = None if record is None else record.get("prompts_fingerprint")
    if not isinstance(fingerprint, str) or not fingerprint.isalnum():
        return {}, "the record does not say which are its prompts"
    unread = sorted(other for other, text in others.items() if text is None)
    if unread:
        return {}, f"the record of {unread[0]} cannot be read, which may have the same prompts"
    same = sorted(other for other, text in others.items() if text and text["prompts_fingerprint"] == fingerprint)
    if same:
        more = f"and {len(same) - 1} more have" if len(same) > 1 else "has"
        return {}, f"run {same[0]} {more} the same prompts"
    found: dict[str, FileVersion] = {}
    for table in PROMPT_FOLDERS:
        listed = store.files.find(f"{table}/prompts_fingerprint={fingerprint}", "")
        found |= {name: version for name, version in listed.items() if not version.odd}
    return found, None


def _status(store: "Store", run: str, raw: dict[str, Any] | None, names: Iterable[str]) -> str:
    try:
        record = read_record(store.files, run, now=True)
    except ValueError:
        record = None
    if record is None:
        return "being deleted" if raw is not None and "deleting" in raw else "no readable record"
    there = set(names)
    finished = record["finished_at"] and all(file_of(run, shard) in there for shard in record["shards"])
    return "finished" if finished else "unfinished"


def names_run(record: Record, run: str) -> bool:
    """Whether the parameters of a run name another."""
    return run in json.dumps(record.get("parameters"))
