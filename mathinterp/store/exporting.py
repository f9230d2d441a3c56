"""Rows of one run as files that explain themselves: what they are is in a Parquet footer, or beside a CSV file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import mathinterp
from mathinterp.errors import UserError, did_you_mean
from mathinterp.gates import check_place
from mathinterp.local_files import whole_file
from mathinterp.store.catalog import catalog
from mathinterp.store.deleting import names_run
from mathinterp.store.export import check_export, export, writing
from mathinterp.store.faults import require_undamaged
from mathinterp.store.manifest import timestamp
from mathinterp.store.partial import warn
from mathinterp.store.recut import original_shards, table_of
from mathinterp.store.writer import FOOTER_KEY
from mathinterp.text import quoted

if TYPE_CHECKING:
    from mathinterp.store.store import Store

ENDINGS = (".parquet", ".csv")
LEFT_OUT = ("shards", "cut", "compacted", "files", "grown", "errors", "attempts")  # of a record: about its files


@dataclass(frozen=True)
class Exported:
    """A file that was written."""

    view: str
    path: str
    rows: int
    about: str  # where it is said what the rows are: the file itself, or the one beside it


def export_run(store: "Store", run: str, path: Path, view: str | None, force: bool) -> list[Exported]:
    """See ``Runs.export``."""
    check_export(path, ENDINGS)
    record, there = store.runs.present(run)
    tables = list(dict.fromkeys(table_of(shard) for shard in original_shards(record)))
    views = [view] if view is not None else tables
    named = {each: path if len(views) == 1 else path.with_name(f"{path.stem}.{each}{path.suffix}") for each in views}
    for place in [each for file in named.values() for each in (file, _beside(file)) if each is not None]:
        check_place(place, "`output`")
        if place.is_dir() and not place.is_symlink():
            raise UserError(f"`output` '{place}' is a folder; name another file")
        if not force and (place.exists() or place.is_symlink()):
            raise UserError(f"`output` '{place}' is there already; name another file, or give `force`")
    read = catalog().needed(set(views))
    sources = {source for view in read for source in catalog().sources[view]}
    _require_undamaged(store, record, sources, of_others=bool(catalog().of_other_runs & set(read)))
    _warn_if_partial(store, record, there, sources)
    with store.held():  # rows and status of one moment
        queries = {each: _query(store, run, each) for each in views}
        return [_export(store, record, each, queries[each], file) for each, file in named.items()]


def _require_undamaged(store: "Store", record: dict[str, Any], tables: set[str], *, of_others: bool) -> None:
    """Of the run and, where a view shows their rows as its own, of runs that were made from it."""
    run = record["run_id"]
    others = store.look([]).records if of_others else {}
    made_from_it = {name: other for name, other in others.items() if name != run and names_run(other, run)}
    require_undamaged(store, {run: record, **made_from_it}, tables)


def _warn_if_partial(store: "Store", record: dict[str, Any], there: set[str], tables: set[str]) -> None:
    """One line for all views, where shards are missing that they read; their queries tell nothing more."""
    shards = {shard for shard in record["shards"] if table_of(shard) in tables}
    there = shards & there
    if there < shards:
        by_chance = "its effects, ranks and q-values are of what is there by chance. The same command finishes a run"
        warn([(record, len(there), len(shards))], by_chance)
    store.looked_at |= {(record["run_id"], table) for table in catalog().of_runs}


def _beside(path: Path) -> Path | None:
    """The file that says what a CSV file has in it."""
    return path.with_name(path.name + ".json") if path.suffix == ".csv" else None


def _query(store: "Store", run: str, view: str) -> str:
    """All rows of a view that are of the run, or of its prompts; raises UserError for a view that has none such."""
    if view not in catalog().views:
        raise UserError(f"`view`: there is none named '{view}'.{did_you_mean(view, catalog().views)}")
    # Naming the run, so that of no other it is told that it is unfinished.
    columns = store.arrow(f"SELECT * FROM {view} WHERE {quoted(run)} IS NULL").column_names
    if "run_id" in columns:
        return f"SELECT * FROM {view} WHERE run_id = {quoted(run)}"
    if "prompts_fingerprint" in columns:
        own = f"SELECT prompts_fingerprint FROM runs WHERE run_id = {quoted(run)}"
        return f"SELECT * FROM {view} WHERE prompts_fingerprint = ({own})"
    raise UserError(f"`view`: '{view}' has rows neither of runs nor of prompts; ask it through `mathinterp sql`")


def _export(store: "Store", record: dict[str, Any], view: str, sql: str, path: Path) -> Exported:
    run = record["run_id"]
    status = [row["status"] for row in store.rows(f"SELECT status FROM runs WHERE run_id = {quoted(run)}")]
    if not status:
        raise UserError(f"run {run} was deleted meanwhile")
    about = {
        "view": view,
        "query": sql,
        "about": catalog().about[view],
        "store": store.url,
        "status": status[0],
        "exported_at": timestamp(),
        "exported_by": mathinterp.__version__,
        "run": {name: value for name, value in record.items() if name not in LEFT_OUT},
    }
    beside = _beside(path)
    rows = _while_there(store, run, store.stream(sql), beside)
    if beside is None:
        written = export(_with_about(rows, about), path)
        return Exported(view, str(path), written, str(path))
    written = export(rows, path)
    with writing(beside), whole_file(beside) as temporary:
        temporary.write_text(json.dumps({**about, "rows": written}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return Exported(view, str(path), written, str(beside))


def _while_there(store: "Store", run: str, rows: pa.RecordBatchReader, beside: Path | None) -> pa.RecordBatchReader:
    """The rows, and a UserError after them if the run was deleted meanwhile: they may lack some, or all.

    Then, just before the file is replaced, what is said beside it goes: it is never beside other rows than its own.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows
        store.runs.record(run)
        if beside is not None:
            with writing(beside):
                beside.unlink(missing_ok=True)

    return pa.RecordBatchReader.from_batches(rows.schema, batches())


def _with_about(rows: pa.RecordBatchReader, about: dict[str, Any]) -> pa.RecordBatchReader:
    schema = rows.schema.with_metadata({FOOTER_KEY: json.dumps(about, ensure_ascii=False).encode()})
    return pa.RecordBatchReader.from_batches(schema, (batch.replace_schema_metadata(schema.metadata) for batch in rows))
