"""The store: one folder or object-store prefix that holds runs, their rows and the SQL views over them.

Knows where everything lies and which files can be trusted; knows nothing about how rows are computed.

    <store>/runs/<run_id>.json
    <store>/<table>/run_id=<run_id>/shard-00000.parquet
    <store>/prompts/prompts_fingerprint=<fingerprint>/prompts.parquet
    <store>/answer_tokens/prompts_fingerprint=<fingerprint>/answer_tokens.parquet
    <store>/prompt_columns/prompts_fingerprint=<fingerprint>/prompt_columns.parquet
    <store>/views.sql
"""

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import token_table
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import query
from mathinterp.store.catalog import catalog
from mathinterp.store.files import FileVersion, StoreFiles
from mathinterp.store.manifest import RESULT_FORMAT, Run, new_record, read_record, resumed_record, run_id, save_record
from mathinterp.store.partial import warn_of_partial_runs, with_runs
from mathinterp.store.writer import encode, fault
from mathinterp.versions import differences

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.store.frame import Frame

logger = logging.getLogger(__name__)

VIEWS_FILE = "views.sql"
_SHARD_FILE = re.compile(r"(?P<table>[^/]+)/run_id=(?P<run>[^/]+)/shard-(?P<index>\d{5,})\.parquet")
_PROMPT_FILE = re.compile(r"(?P<table>[^/]+)/prompts_fingerprint=(?P<fingerprint>[^/]+)/(?P=table)\.parquet")


class Store:
    """Runs, rows and views under one URL. Cheap to make, and can be made again in every process.

    ``problems`` names every file found so far that cannot be trusted, and why; such files are never read.
    """

    def __init__(self, url: str | os.PathLike[str]):
        """A local folder (made at the first write), or s3://, gs:// or any fsspec URL.

        Raises UserError if the path is a file or the protocol is not available.
        """
        self.given = os.fspath(url)
        self.files = StoreFiles(url)
        self.problems: list[str] = []
        self._inspected: dict[str, tuple[FileVersion, str | None]] = {}
        self.runs_looked_at: set[str] = set()  # finished, or unfinished and told: see partial.py
        self._in_views: set[str] = set()  # tables that views.sql is known to read

    @property
    def url(self) -> str:
        """Absolute path or URL."""
        return self.files.root

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
        try:
            earlier = read_record(self.files, run)
        except ValueError as error:
            self._report(f"runs/{run}.json", f"not a run's record ({error})")
            earlier = None  # written anew below
        if earlier is None:
            record = new_record(identity, list(shards))
        else:
            earlier["versions"] = self._made_before(earlier, versions or {})
            record = resumed_record(earlier, code_version, versions or {}, list(shards))
        save_record(self.files, record)
        for table in {shard.split("/")[0] for shard in shards}:
            self.files.remove_stale(f"{table}/run_id={run}")
        self.write_views()
        return Run(self, record)

    def _made_before(self, earlier: Mapping[str, Any], versions: Mapping[str, str]) -> list[dict[str, str]]:
        """What made the shards that are there; a warning tells if ``versions`` would add others to them."""
        made: list[dict[str, str]] = earlier.get("versions", [])
        run = earlier["run_id"]
        differing = differences(made, versions)
        if not differing:
            return made
        finished = self.finished_shards(run)
        if finished >= set(earlier["shards"]):
            logger.warning(f"run {run}: made by other versions ({differing}); another --store computes it anew")
        elif finished:
            logger.warning(f"run {run}: shards made by {differing} would mix; another --store keeps them apart")
        return made if finished else []

    def finished_shards(self, run: str) -> set[str]:
        """Keys of the shards whose file is there with a readable footer of this run and shard.

        Any other file in the run's folders is named in a warning and in ``problems``, and counts as missing.
        """
        finished = set()
        for table, stored in catalog().tables.items():
            if stored.partition != "run_id":
                continue
            found = self._inspect(self.files.find(f"{table}/run_id={run}", ".parquet"))
            places = [_SHARD_FILE.fullmatch(name) for name, why in found.items() if why is None]
            finished |= {f"{place['table']}/{place['index']}" for place in places if place}
        return finished

    def write_shard(
        self, run: str, table: str, index: int, rows: pa.Table, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write one shard's file; writing it again replaces it, atomically.

        Args:
            rows: the table's columns without run_id.
            metadata: the configuration the rows were computed under, plain JSON, kept in the footer.
        Returns:
            a receipt: shard, path, rows, bytes, host.
        """
        name = f"{table}/run_id={run}/shard-{index:05d}.parquet"
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
        kept = {"prompts": [asdict(prompt.prompt) for prompt in prompts], "answer_tokens": token_table(prompts)}
        for table, rows in kept.items():
            name = f"{table}/prompts_fingerprint={fingerprint}/{table}.parquet"
            if self._inspect(self.files.find(name.rpartition("/")[0], ".parquet")).get(name, "absent") is not None:
                self._write_prompt_table(table, fingerprint, rows)
        ids = [prompt.prompt.prompt_id for prompt in prompts]
        more = [
            {"prompt_id": prompt_id, "name": name, "value": value}
            for prompt_id in ids
            for name, value in (columns or {}).get(prompt_id, {}).items()
        ] + [
            {"prompt_id": prompt.prompt.prompt_id, "name": name, "value": value}
            for prompt in prompts
            for name, value in prompt.prompt.further_fields.items()
        ]
        if more:
            self._write_prompt_table("prompt_columns", fingerprint, more)
        self.write_views()

    def _write_prompt_table(self, table: str, fingerprint: str, rows: list[dict[str, Any]]) -> None:
        config = {"table": table, "prompts_fingerprint": fingerprint, "result_format": RESULT_FORMAT}
        content = encode(pa.Table.from_pylist(rows, catalog().tables[table].schema), table, config)
        self.files.write(f"{table}/prompts_fingerprint={fingerprint}/{table}.parquet", content)

    def views_sql(self) -> str:
        """The text of views.sql: macros and views over all files that can be trusted, by absolute path or URL."""
        return query.views_sql(self.files, *self._survey())

    def write_views(self) -> None:
        """Bring views.sql up to date, also after the store was moved; raises OSError if a write is needed and fails."""
        content = self.views_sql()
        if content != self._current_views():
            self.files.write(VIEWS_FILE, content.encode())

    def connect(self, *views: str) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with all views; ``problems`` then names what they leave out.

        Only the named ``views``, and those that they read, take a tenth of the time.
        """
        wanted = query.views_of(" ".join(views)) if views else None
        return query.connect(self.files, query.views_sql(self.files, *self._survey(), wanted), locked=False)

    def arrow(self, sql: str, values: Mapping[str, Any] | None = None) -> pa.Table:
        """The result of a query; ``$name`` in it takes the value of that name, if there is one.

        Raises UserError with DuckDB's first line, and for a statement that does more than read the store.
        """
        return query.arrow(self._connect_for(sql, values), sql, values)

    def stream(self, sql: str, *, allow_files: bool = False) -> pa.RecordBatchReader:
        """The result of a query in batches, as it is computed; see ``arrow``. allow_files: it may read other files."""
        return query.stream(self._connect_for(sql, allow_files=allow_files), sql)

    def _connect_for(
        self, sql: str, values: Mapping[str, Any] | None = None, *, allow_files: bool = False
    ) -> duckdb.DuckDBPyConnection:
        views = query.views_sql(self.files, *self._survey(), query.views_of(with_runs(sql)))
        connection = query.connect(self.files, views, allow_files=allow_files)
        warn_of_partial_runs(self, connection, sql, values)
        return connection

    def require_runs(self) -> None:
        """Raise UserError unless a run was recorded here."""
        if not self.files.find("runs", ".json"):
            raise UserError(f"there is no store at '{self.given}'; run a scan first, or name its folder with `store`")

    def sql(self, query: str, **values: Any) -> "Frame":
        """The result of a query as a pandas data frame that also gives Arrow and polars.

        Args:
            query: ``$name`` in it takes its value from ``values``.
        Raises:
            UserError: with DuckDB's first line, for a statement that does more than read the store, and where there
                is no store.

        >>> import mathinterp as mi
        >>> mi.open_store("results").sql("SELECT $n + 1 AS more", n=41)
           more
        0    42
        """
        from mathinterp.store.frame import Frame

        self.require_runs()
        return Frame.of(self.arrow(query, values))

    def dataframe(self, sql: str, values: Mapping[str, Any] | None = None) -> "pd.DataFrame":
        """The result of a query as a pandas data frame; see ``arrow``."""
        frame: pd.DataFrame = self.arrow(sql, values).to_pandas()
        return frame

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The result of a query as plain JSON; see ``arrow``."""
        return query.json_rows(self.arrow(sql, values))

    def _current_views(self) -> str:
        try:
            return self.files.read(VIEWS_FILE).decode()
        except FileNotFoundError:
            return ""

    def _survey(self) -> tuple[dict[str, list[str]], list[str]]:
        """Table (and "runs") -> names of its trusted files; and the names of all others, reported."""
        records = self._inspect(self.files.find("runs", ".json"))
        known = {name.removeprefix("runs/").removesuffix(".json") for name, why in records.items() if why is None}
        good = {"runs": [name for name, why in records.items() if why is None]}
        bad = [name for name, why in records.items() if why is not None]
        for table in catalog().tables:
            good[table] = []
            for name, why in self._inspect(self.files.find(table, ".parquet")).items():
                shard = _SHARD_FILE.fullmatch(name)
                if why is None and shard and shard["run"] not in known:
                    why = f"its run has no readable runs/{shard['run']}.json"
                    self._report(name, why)
                (bad if why else good[table]).append(name)
        return good, bad

    def _inspect(self, found: Mapping[str, FileVersion]) -> dict[str, str | None]:
        """Name -> why the file cannot be trusted, or None; each version of a file is opened once."""
        fresh = [name for name, version in found.items() if self._inspected.get(name, (None,))[0] != version]
        if self.files.local:
            whys = [self._fault(name) for name in fresh]
        else:  # one round trip each: overlap them
            with ThreadPoolExecutor(16) as pool:
                whys = list(pool.map(self._fault, fresh))
        for name, why in zip(fresh, whys, strict=True):
            self._inspected[name] = (found[name], why)
        for name in found:
            if why := self._inspected[name][1]:
                self._report(name, why)
        return {name: self._inspected[name][1] for name in found}

    def _fault(self, name: str) -> str | None:
        if name.startswith("runs/"):
            return self._record_fault(name)
        shard, prompts = _SHARD_FILE.fullmatch(name), _PROMPT_FILE.fullmatch(name)
        place = shard or prompts
        expected = "run_id" if shard else "prompts_fingerprint"
        if place is None or catalog().tables[place["table"]].partition != expected:
            return "foreign: its name is not one that mathinterp gives"
        if shard:
            identity = {"run_id": shard["run"], "shard": f"{shard['table']}/{shard['index']}"}
        else:
            identity = {"prompts_fingerprint": place["fingerprint"], "table": place["table"]}
        with self.files.open(name) as file:
            return fault(file, place["table"], identity)

    def _record_fault(self, name: str) -> str | None:
        try:
            read_record(self.files, name.removeprefix("runs/").removesuffix(".json"))
        except ValueError as error:
            return f"not a run's record ({error})"
        return None

    def _report(self, name: str, why: str) -> None:
        problem = f"{self.files.address(name)}: {why}; left out"
        if problem not in self.problems:
            self.problems.append(problem)
            logger.warning(problem)
