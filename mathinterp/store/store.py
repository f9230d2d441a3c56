"""The store: one folder or object-store prefix that holds runs, their rows and the SQL views over them.

Knows where everything lies and which files can be trusted; knows nothing about how rows are computed.

    <store>/runs/<run_id>.json
    <store>/<table>/run_id=<run_id>/shard-00000.parquet
    <store>/prompts/prompts_fingerprint=<fingerprint>/prompts.parquet, and its checksum, prompts.parquet.sha256
    <store>/answer_tokens/prompts_fingerprint=<fingerprint>/answer_tokens.parquet
    <store>/prompt_columns/prompts_fingerprint=<fingerprint>/prompt_columns.parquet
    <store>/views.sql
"""

import hashlib
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import token_columns
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import query
from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFailed
from mathinterp.store.integrity import Checked, check_runs, entries, files_of, intact_prompts, seal
from mathinterp.store.manifest import (
    RESULT_FORMAT,
    Run,
    file_of,
    new_record,
    read_record,
    resumed_record,
    run_id,
    save_record,
)
from mathinterp.store.reader import StoreReader
from mathinterp.store.recut import place_of, restored, table_of
from mathinterp.store.survey import PROMPT_TABLES
from mathinterp.store.writer import encode, encode_parts, of_one_shard, whole_rows
from mathinterp.versions import differences

if TYPE_CHECKING:
    from mathinterp.store.runs import Runs

logger = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 10_000


class Store(StoreReader):
    """Runs, rows and views under one URL. Cheap to make, and can be made again in every process.

    Files that cannot be trusted are never read; see ``problems``.
    """

    def __init__(self, url: str | os.PathLike[str]):
        """A local folder (made at the first write), or s3://, gs:// or any fsspec URL.

        Raises UserError if the path is a file or the protocol is not available.
        """
        super().__init__(url)
        self._in_views: set[str] = set()  # tables that views.sql is known to read

    def check_writable(self) -> None:
        """Raise UserError unless a small file can be written here."""
        self.files.check_writable()

    @staticmethod
    def run_id(
        scan: str, parameters: Mapping[str, Any], dtype: str, model_fingerprint: str, prompts_fingerprint: str
    ) -> str:
        """The id that ``open_run`` gives a run, whether there is one yet or not."""
        return run_id(scan, {**parameters, "dtype": dtype}, model_fingerprint, prompts_fingerprint)

    def open_run(
        self,
        *,
        scan: str,
        model: str,
        model_fingerprint: str,
        prompts: str,
        prompts_fingerprint: str,
        dtype: str,
        parameters: Mapping[str, Any],
        code_version: str,
        shards: Sequence[str],
        versions: Mapping[str, str] | None = None,
    ) -> Run:
        """Create a run's record, or open it again to resume.

        Args:
            model, prompts: labels; the fingerprints are what counts.
            parameters: all that changes a stored row; the dtype is added to them.
            shards: keys "<table>/<index, five digits>" of everything the run has to compute.
            versions: of what computes (see mathinterp.versions); a warning tells if earlier shards were made by others.
        Raises UserError if the store is not writable or the run was cut into other shards before.
        """
        self.check_writable()
        run = self.run_id(scan, parameters, dtype, model_fingerprint, prompts_fingerprint)
        identity = {
            "run_id": run,
            "scan": scan,
            "model": model,
            "model_fingerprint": model_fingerprint,
            "prompts": prompts,
            "prompts_fingerprint": prompts_fingerprint,
            "dtype": dtype,
            "parameters": {**parameters, "dtype": dtype},
            "code_version": code_version,
            "versions": [dict(versions)] if versions else [],
        }
        while (record := self._opened(identity, list(shards), versions or {})) is None:
            logger.info(f"run {run}: its files were merged meanwhile; they are looked at again")
        self.write_views()
        return Run(self, record)

    def _opened(
        self, identity: Mapping[str, Any], shards: list[str], versions: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """The record, new or as it was, saved; None: files were merged, or merged ones lost, while they were read."""
        run: str = identity["run_id"]
        try:
            earlier = read_record(self.files, run, now=True)
        except StoreFailed:
            raise
        except (ValueError, OSError) as error:
            self._surveyor.report(f"runs/{run}.json", f"not a run's record ({error})", "written anew")
            earlier = None
        if earlier is None:
            record, merged = new_record(identity, shards), None
        else:
            merged = earlier.get("compacted")
            earlier["versions"] = self._made_before(earlier, versions)
            record = resumed_record(earlier, identity["code_version"], versions, shards)
        tables = {table_of(shard) for shard in shards}
        self.files.remove_stale("", "runs", *(f"{table}/run_id={run}" for table in sorted(tables)))
        record["files"] = entries(self.files, self._surveyor, record, again=True)
        if lost := set(record.get("compacted", {})) - set(record["files"]):
            record = restored(record, lost)
            record["files"] |= entries(self.files, self._surveyor, record, again=False)
        stored = self.record(run)
        if stored is not None and stored.get("compacted") != merged:
            return None
        save_record(self.files, record)
        return record

    def has_finished(self, run: str, prompts_fingerprint: str) -> bool:
        """Whether a record says that the run is finished, and its prompts are here, whole."""
        record = self.record(run)
        return (
            record is not None
            and record["finished_at"] is not None
            and all(intact_prompts(self.files, self._surveyor, table, prompts_fingerprint) for table in PROMPT_TABLES)
        )

    def _made_before(self, earlier: Mapping[str, Any], versions: Mapping[str, str]) -> list[dict[str, str]]:
        """What made the shards that are there; a warning tells if ``versions`` would add others to them."""
        made: list[dict[str, str]] = earlier.get("versions", [])
        run = earlier["run_id"]
        differing = differences(made, versions)
        if not differing:
            return made
        finished = self.finished_shards(run, earlier)
        if finished >= set(earlier["shards"]):
            logger.warning(f"run {run}: made by other versions ({differing}); another `store` computes it anew")
        elif finished:
            logger.warning(f"run {run}: shards made by {differing} would mix; another `store` keeps them apart")
        return made if finished else []

    def finished_shards(self, run: str, record: Mapping[str, Any] | None = None) -> set[str]:
        """Keys of the shards whose file is there with a readable footer of this run and shard.

        Any other file in the run's folders is named in a warning and in ``problems``, and counts as missing.

        Args:
            record: of the run; None: the one in the store, without which no file counts.
        """
        record = self._surveyor.survey([]).records.get(run) if record is None else record
        return set() if record is None else set(self._surveyor.of_run(run, record))

    def file_entries(self, record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Shard -> rows, bytes and sha256 of its file, for the finished shards of a run; reads what is not known."""
        return entries(self.files, self._surveyor, record, again=False)

    def entries(self, record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """As ``file_entries``, of files that were read to their end and are those of the record."""
        return entries(self.files, self._surveyor, record, again=True)

    @property
    def runs(self) -> "Runs":
        """What can be done with whole runs: list, show, compare, delete, export, check and compact them."""
        from mathinterp.store.runs import Runs

        return Runs(self)

    def record(self, run: str) -> dict[str, Any] | None:
        """The record of a run as it is now; None: there is none that can be read."""
        try:
            return read_record(self.files, run, now=True)
        except ValueError:
            return None

    def read_shard(self, run: str, shard: str) -> pa.Table:
        """The rows of one finished shard, by its key; checksums of its pages and, where its record has one, of it all.

        Raises UserError if its file is gone or damaged.
        """
        record = self.record(run) or {"shards": []}
        held_in, start, count = place_of(record, shard)
        name = file_of(run, held_in)
        try:
            entry = record.get("files", {}).get(held_in)
            rows = whole_rows(self.files.read(name), None if entry is None else entry["sha256"])
            return rows if count is None else of_one_shard(rows, shard, start, count)
        except StoreFailed:
            raise
        except FileNotFoundError as error:
            raise UserError(
                f"shard {shard} of run {run} is not in the store as this machine sees it; give `store` a folder that"
                " all nodes share, or an s3:// or gs:// URL, and leave it there until the end"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"{self.files.address(name)} cannot be read ({error}); the command that made it computes it anew"
            ) from error

    def check(self, runs: Sequence[str] | None = None) -> list[Checked]:
        """Read the files of some runs, or of all, to their end; what is damaged is named and left out from then on, and
        a run that is deleted meanwhile is left out.

        Raises UserError for an unknown run.
        """
        known = self._surveyor.survey([]).records
        for run in runs or ():
            if run not in known:
                raise UserError(f"no run {run} in {self.url}; it has {', '.join(sorted(known)) or 'none'}")
        asked = known if runs is None else {run: known[run] for run in runs}
        every = runs is None  # then all that is foreign is named, too
        found = self._surveyor.survey(catalog().tables) if every else files_of(self._surveyor, asked)
        self._surveyor.name_missing_prompts(found)
        return check_runs(self.files, self._surveyor, asked)

    def require(self, run: str) -> None:
        """Raise StoreFailed unless the run is still here: of a store that is gone nothing may be concluded."""
        if self.record(run) is None:
            raise StoreFailed(
                f"run {run} is no longer in {self.url}: the store was deleted, moved or damaged meanwhile"
            )

    def write_shard(
        self, run: str, table: str, index: int, rows: pa.Table, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write one shard's file; writing it again replaces it, atomically.

        Args:
            rows: the table's columns without run_id.
            metadata: the configuration the rows were computed under, plain JSON, kept in the footer.
        Returns:
            a receipt: shard, path, rows, bytes, sha256, host.
        """
        name = file_of(run, f"{table}/{index:05d}")
        config = {**metadata, "run_id": run, "shard": f"{table}/{index:05d}", "result_format": RESULT_FORMAT}
        content = encode(rows, table, config)
        self.files.write(name, content)
        if table not in self._in_views or not self.files.takes_patterns:
            # The first rows of a table: until now its view was an empty one. Without patterns each file is named.
            if not self.files.takes_patterns or not query.reads_table(self._current_views(), table):
                self.write_views()
            self._in_views.add(table)
        return {
            "shard": config["shard"],
            "path": self.files.address(name),
            "rows": rows.num_rows,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "host": socket.gethostname(),
        }

    def write_prompts(
        self,
        fingerprint: str,
        prompts: Sequence[TokenizedPrompt],
        columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Keep the prompts and their scored answer tokens, unless they are there already.

        Args:
            columns: prompt_id -> further columns; they replace those that were kept before.
        """
        places = [f"{table}/prompts_fingerprint={fingerprint}" for table in PROMPT_TABLES]
        self.files.remove_stale(*places)
        makers = {"prompts": _prompt_columns, "answer_tokens": token_columns}
        missing = [table for table in makers if not intact_prompts(self.files, self._surveyor, table, fingerprint)]
        counts = {"prompts": len(prompts), "answer_tokens": sum(len(prompt.scored) for prompt in prompts)}
        if missing:
            self.check_writable()
        for table in missing:  # in parts, so that never all of them are in memory a second time
            parts = (prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE))
            self._write_prompt_table(table, fingerprint, map(makers[table], parts), counts[table])
        more = [
            {"prompt_id": prompt.prompt.prompt_id, "name": name, "value": value}
            for prompt in prompts
            for name, value in (
                *(columns or {}).get(prompt.prompt.prompt_id, {}).items(),
                *prompt.prompt.further_fields.items(),
            )
        ]
        if more:
            columns_of = {name: [row[name] for row in more] for name in ("prompt_id", "name", "value")}
            self._write_prompt_table("prompt_columns", fingerprint, [columns_of], len(more))
        if missing or more:
            self.write_views()

    def _write_prompt_table(
        self, table: str, fingerprint: str, parts: Iterable[dict[str, list[Any]]], count: int
    ) -> None:
        config = {"table": table, "prompts_fingerprint": fingerprint, "result_format": RESULT_FORMAT}
        schema = catalog().tables[table].schema
        content = encode_parts((pa.Table.from_pydict(part, schema) for part in parts), count, table, config)
        seal(self.files, f"{table}/prompts_fingerprint={fingerprint}/{table}.parquet", content)

    def write_views(self) -> None:
        """Bring views.sql up to date, also after the store was moved; raises OSError if a write is needed and fails."""
        content = self.views_sql()
        if content != self._current_views():
            self.files.write(query.VIEWS_FILE, content.encode())

    def views_are_current(self) -> bool:
        """Whether views.sql is what ``write_views`` would write."""
        return self.views_sql() == self._current_views()

    def _current_views(self) -> str:
        try:
            return self.files.read(query.VIEWS_FILE).decode(errors="replace")
        except StoreFailed:
            raise
        except OSError:  # absent, or no file: replaced if that can be
            return ""


def _prompt_columns(prompts: Sequence[TokenizedPrompt]) -> dict[str, list[Any]]:
    names = catalog().tables["prompts"].schema.names
    return {name: [getattr(item.prompt, name) for item in prompts] for name in names}
