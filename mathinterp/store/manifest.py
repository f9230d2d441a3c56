"""What a run is: its identity and its record, ``runs/<run_id>.json``.

Knows what makes two runs the same and what is remembered about one, also how many rows and which checksum each of its
files has; knows nothing about what is in the rows.
"""

import hashlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mathinterp.errors import Unfinished, UserError
from mathinterp.gates import real
from mathinterp.prompts.json_lines import MOST_DEPTH, is_deeper
from mathinterp.store.files import StoreFailed, StoreFiles
from mathinterp.store.recut import SHARD, adopt, is_cut, original_shards, originals_in
from mathinterp.versions import command, differences, merged, repeatable

if TYPE_CHECKING:
    from mathinterp.store.store import Store

logger = logging.getLogger(__name__)

RUN_ID_LENGTH = 12
MOST_NUMBER = 10**11  # of seconds since 1970, rows, bytes and the like in a record
RUN_ID = re.compile(rf"[0-9a-f]{{{RUN_ID_LENGTH}}}")
RESULT_FORMAT = 1  # raise it when stored rows of the same parameters would differ: other columns, other cut of shards


class BeingDeleted(ValueError):
    """The record of a run of which a deletion began."""


def run_id(
    scan: str,
    parameters: Mapping[str, Any],
    model_fingerprint: str,
    prompts_fingerprint: str,
    result_format: int | None = None,
) -> str:
    """12 hex digits that name a run by all that changes a stored row, and by nothing else.

    Machine, number of replicas and labels stay out; the dtype counts because it is one of ``parameters``.
    ``result_format`` is that of this version unless it is given.
    """
    version = RESULT_FORMAT if result_format is None else result_format
    identity = [version, scan, dict(parameters), model_fingerprint, prompts_fingerprint]
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:RUN_ID_LENGTH]


def record_name(run: str) -> str:
    """Where the record of a run lives in its store."""
    return f"runs/{run}.json"


def file_of(run: str, shard: str) -> str:
    """Where the rows of a shard, by its key, live in its store."""
    table, index = shard.split("/")
    return f"{table}/run_id={run}/shard-{index}.parquet"


def read_record(files: StoreFiles, run: str, *, now: bool = False) -> dict[str, Any] | None:
    """The record of a run; None if there is none. Raises ValueError if it is not one, or no file that can be read.

    Args:
        now: as ``StoreFiles.read``.
    """
    try:
        content = files.read(record_name(run), now=now)
    except FileNotFoundError:
        return None
    except StoreFailed:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror or error})") from error
    record = _value(content.decode())
    if not isinstance(record, dict) or record.get("run_id") != run or not _fields_fit(record):
        raise ValueError("not the record of this run")
    if "deleting" in record:
        raise BeingDeleted(f"the run is being deleted; `mathinterp runs delete {run}` ends what was begun")
    named_by = ("scan", "parameters", "model_fingerprint", "prompts_fingerprint", "result_format")
    if run_id(*(record[name] for name in named_by)) != run:
        raise ValueError("foreign: its id is not the hash of what it holds")
    return {**record, "command": repeatable(record.get("command"), record["scan"])}


def _value(text: str) -> Any:
    """The value of a record's JSON, if all of it can be written again; raises ValueError."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=real)
        if is_deeper(value, MOST_DEPTH):
            raise RecursionError
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if "\\ud" in text or "\\uD" in text:  # half a character would end whatever prints or stores it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _fields_fit(record: Mapping[str, Any]) -> bool:
    """Whether the fields of a record have the types that SQL and a resume expect of them, and there are shards."""
    texts = ("scan", "model", "model_fingerprint", "prompts", "prompts_fingerprint", "dtype", "code_version")
    shards, files, hosts = record.get("shards"), record.get("files", {}), record.get("hosts")
    versions = record.get("versions", [])
    return (
        all(isinstance(record.get(name), str) for name in texts)
        and all(isinstance(record.get(name), dict) for name in ("parameters", "errors", "attempts", "notes"))
        and all(isinstance(why, str) for why in record["errors"].values())
        and all(_is_number(count, int) for count in record["attempts"].values())
        and _notes_fit(record["notes"])
        and _is_number(record.get("result_format"), int)
        and isinstance(record.get("command"), str | None)
        and isinstance(versions, list) and all(_are_texts(entry) for entry in versions)
        and isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
        and _is_number(record.get("wall_seconds"))
        and _is_time(record.get("started_at")) and "finished_at" in record
        and (record["finished_at"] is None or _is_time(record["finished_at"]))
        and isinstance(shards, list) and len(shards) > 0
        and all(isinstance(shard, str) and SHARD.fullmatch(shard) for shard in shards)
        and len(set(shards)) == len(shards)
        and is_cut(record)
        and _are_grown(record.get("grown", []), original_shards(record))
        and isinstance(files, dict) and all(_is_file_entry(entry) for entry in files.values())
    )  # fmt: skip


def _are_grown(grown: Any, shards: list[str]) -> bool:
    """Whether these are shards with their work, as ``Run.grow`` keeps them."""
    kinds = {"table": str, "index": int, "work": dict, "cost": int | float}
    return isinstance(grown, list) and all(
        isinstance(shard, dict)
        and all(isinstance(shard.get(name), kind) for name, kind in kinds.items())
        and f"{shard['table']}/{shard['index']:05d}" in shards
        for shard in grown
    )


def _notes_fit(notes: Mapping[str, Any]) -> bool:
    """Whether those notes that are computed with are what ``close_run`` wrote."""
    nodes = notes.get("memory_ran_out", [])
    times = [notes[name] for name in ("model_loaded_at", "seconds_from_loaded_model") if name in notes]
    return all(map(_is_number, times)) and isinstance(nodes, list) and all(isinstance(node, str) for node in nodes)


def _is_file_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(_is_number(entry.get(name), int) for name in ("rows", "bytes"))
        and isinstance(entry.get("sha256"), str)
    )


def _are_texts(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())


def _is_number(value: Any, kind: Any = (int, float)) -> bool:
    """A count, or seconds: not below nothing, nor beyond what dates and SQL know."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < MOST_NUMBER


def _is_time(value: Any) -> bool:
    """Whether it is a time of which it is known how long ago it was."""
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


class Run:
    """One opened run: what is asked of it, and where its record is kept up to date."""

    def __init__(self, store: "Store", record: dict[str, Any]):
        self._store = store
        self._opened = time.monotonic()
        self.record = record

    @property
    def run_id(self) -> str:
        """12 hex digits."""
        run_id: str = self.record["run_id"]
        return run_id

    @property
    def shards(self) -> list[str]:
        """Keys of all shards, finished or not."""
        return list(self.record["shards"])

    def missing_shards(self) -> list[str]:
        """Keys of the shards that have no good file yet, in the run's order."""
        finished = self._store.finished_shards(self.run_id, self.record)
        return [shard for shard in self.record["shards"] if shard not in finished]

    def done_shards(self) -> set[str]:
        """Keys of the experiment's own shards that have a good file, or are in one with others."""
        return originals_in(self.record, self._store.finished_shards(self.run_id, self.record))

    def grow(self, shards: Sequence[Mapping[str, Any]]) -> None:
        """Add shards (table, index, work, cost) that followed from rows; in the record before any of them runs.

        Raises Unfinished, with nothing added, if another driver has added others meanwhile.
        """
        self._require_grown_here()
        self.record["grown"] = [*self.record.get("grown", []), *map(dict, shards)]
        keys = [f"{shard['table']}/{shard['index']:05d}" for shard in shards]
        assert not set(keys) & set(self.record["shards"]), keys
        self.record["shards"] = [*self.record["shards"], *keys]
        if "cut" in self.record:  # some of its files were merged, and others of these lost since
            self.record["cut"] = [*self.record["cut"], *keys]
        save_record(self._store.files, self.record)
        self._require_grown_here()  # or both saved at the same moment: the last one goes on

    def _require_grown_here(self) -> None:
        """Of a run that was deleted, or a store that is away, nothing is begun anew; and two drivers' further shards
        would have the same numbers and different rows.
        """
        try:
            there = read_record(self._store.files, self.run_id, now=True)
        except BeingDeleted as error:
            raise StoreFailed(f"run {self.run_id} of {self._store.url}: {error}") from error
        except ValueError:  # damaged; it is written anew
            return
        if there is None:
            raise StoreFailed(
                f"run {self.run_id} is no longer in {self._store.url}: it was deleted, or the store is away"
            )
        if there.get("grown", []) != self.record.get("grown", []):
            raise Unfinished(
                f"run {self.run_id} of {self._store.url} is being computed by another process at the same time, and"
                " which shards it needs follows from their rows: that process goes on, this one stops"
            )

    def made_by(self, versions: Mapping[str, str]) -> None:
        """Remember what computed shards of this run, a replica's packages; tell if others computed some before."""
        if not versions:
            return
        if differing := differences(self.record["versions"], versions):
            logger.warning(f"run {self.run_id}: its shards were made by {differing}")
        self.record["versions"] = merged(self.record["versions"], versions)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Remember facts about the run (engine, noise floor, device); plain JSON."""
        self._require_grown_here()
        self.record["notes"] = {**self.record["notes"], **facts}
        adopt(self.record, self._store.record(self.run_id))
        save_record(self._store.files, self.record)

    def finish(
        self,
        *,
        errors: Mapping[str, str] | None = None,
        attempts: Mapping[str, int] | None = None,
        hosts: Iterable[str] = (),
        written: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[str]:
        """Close the record when the driver stops, complete or not.

        Args:
            errors: shard -> why it was given up.
            attempts: shard -> how often it was tried, for those that needed more than one.
            hosts: machines that computed.
            written: shard -> rows, bytes and sha256 of what was written of it; files of others are read for that.
        Returns:
            the shards still missing; ``finished_at`` is set iff there are none.
        """
        self._require_grown_here()
        stored = self._store.record(self.run_id)
        while True:
            adopt(self.record, stored)
            before = self.record.get("files", {})
            self.record["files"] = {**before, **(written or {})}
            self.record["files"] = self._store.file_entries(self.record)
            stored = self._store.record(self.run_id)
            if stored is None or stored.get("compacted") == self.record.get("compacted"):
                break  # else files were merged while they were looked at
        missing = [shard for shard in self.record["shards"] if shard not in self.record["files"]]
        self.record["errors"] = {shard: why for shard, why in (errors or {}).items() if shard in missing}
        self.record["attempts"] = {**self.record["attempts"], **(attempts or {})}
        self.record["hosts"] = sorted({*self.record["hosts"], *hosts})
        self.record["wall_seconds"] += time.monotonic() - self._opened
        self._opened = time.monotonic()
        if not missing:
            self.record["finished_at"] = self.record["finished_at"] or timestamp()
        save_record(self._store.files, self.record)
        if self.record["files"] != before:
            self._store.write_views()
        return missing


def save_record(files: StoreFiles, record: dict[str, Any]) -> None:
    """Replace ``runs/<run_id>.json`` as a whole."""
    content = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    files.write(record_name(record["run_id"]), content.encode() + b"\n")


def new_record(identity: Mapping[str, Any], shards: list[str]) -> dict[str, Any]:
    """The record of a run that starts now on this machine."""
    return {
        **identity,
        "result_format": RESULT_FORMAT,
        "command": command(),
        "started_at": timestamp(),
        "finished_at": None,
        "shards": shards,
        "files": {},
        "errors": {},
        "attempts": {},
        "hosts": [socket.gethostname()],
        "wall_seconds": 0.0,
        "notes": {},
    }


def resumed_record(
    record: dict[str, Any], code_version: str, versions: Mapping[str, str], shards: list[str]
) -> dict[str, Any]:
    """An earlier record, opened again; raises UserError if the run was then cut into other shards."""
    grown = len(record.get("grown", []))
    cut = original_shards(record)
    if cut[: len(cut) - grown] != shards:
        raise UserError(
            f"run {record['run_id']} of this store was cut into other shards by version {record['code_version']}; "
            f"use another `store`, or `mathinterp runs delete {record['run_id']}`"
        )
    known = record["code_version"].split(", ")
    if code_version not in known:
        record["code_version"] = ", ".join([*known, code_version])
    record["versions"] = merged(record["versions"], versions) if versions else record["versions"]
    record["hosts"] = sorted({*record["hosts"], socket.gethostname()})
    record["errors"] = {}  # the shards given up are tried again
    return record


def timestamp() -> str:
    """Now, UTC, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
