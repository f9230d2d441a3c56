"""The page of tables, views and columns, made from the schemas, the SQL of the views and the files ``columns.yaml``.

    python -m mathinterp.cli.data_model > docs/data-model.md

Knows the catalog of a store; a test compares what this prints with the file.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from mathinterp.experiments import registry
from mathinterp.store import Store
from mathinterp.store.catalog import DIFFERENCES, catalog
from mathinterp.store.columns import STORED, described, folder_of
from mathinterp.store.schema import sql_columns

Columns = Mapping[str, dict[str, str]]  # view -> column -> SQL type
HEADER = """\
# Data model

Made by `python -m mathinterp.cli.data_model > docs/data-model.md`.

A store is a folder of Parquet files, one for each shard of a run, and a JSON record for each run:

```text
results/
  runs/<run_id>.json                                        what was run, on what, with which versions
  <table>/run_id=<run_id>/shard-00000.parquet               the rows of one shard
  prompts/prompts_fingerprint=<fingerprint>/prompts.parquet the prompts, once for all runs that read them
  views.sql                                                 the views below, for any DuckDB client
```

Nothing else is stored: every other number is SQL over these rows. A **table** is what is stored; a **view** is what
you ask. A table without a view of its own making has one of the same name with the same columns. Accuracies, drops,
shares and effects are fractions of 1; log-probabilities are in nats. A view whose rows are of runs has `run_id`: join
[`latest_runs`](#latest_runs), or name a run, so that a query never mixes runs. `mathinterp sql` without a query lists
the views of a store with their numbers of rows.
"""
SHARED = "Every run"
_MADE = re.compile(rf"-- \w+_{DIFFERENCES}: of each row")


def page() -> str:
    """The whole page, in Markdown."""
    columns = columns_of_views()
    meanings = described(columns)
    parts = [HEADER]
    for heading, about, views in _sections(columns):
        parts += [f"## {heading}\n", *([f"{about}\n"] if about else [])]
        parts += [_view(view, columns[view], meanings[view]) for view in views]
    parts += [_logit_differences(columns), _stored(columns)]
    return "\n".join(parts)


@cache
def columns_of_views() -> Columns:
    """Every view of an empty store."""
    asked = "SELECT table_name, column_name, data_type FROM information_schema.columns ORDER BY ordinal_position"
    found: dict[str, dict[str, str]] = {}
    with TemporaryDirectory() as folder:
        for view, column, kind in Store(folder).connect().execute(asked).fetchall():
            found.setdefault(view, {})[column] = _short(kind)
    return found


def made_otherwise(columns: Columns) -> dict[str, dict[str, str]]:
    """Tables whose files have other columns than the view of their name: "stored NAME" -> column -> type."""
    stored = {name: sql_columns(table) for name, table in catalog().tables.items()}
    return {f"{STORED}{name}": own for name, own in stored.items() if not own.keys() <= columns[name].keys()}


def _sections(columns: Columns) -> Iterable[tuple[str, str, list[str]]]:
    """Heading, introduction and views: what every run has, then each experiment's."""
    folders: dict[Path | None, list[str]] = {None: []}
    for view in sorted(columns.keys() - set(_differences(columns))):
        folders.setdefault(folder_of(view), []).append(view)
    yield SHARED, "Records of runs, prompts, the unedited model, and what several experiments share.", folders[None]
    for module in registry.folders():
        folder = Path(importlib.import_module(f"{module}.tables").__file__ or "").parent
        about = (importlib.import_module(module).__doc__ or "").split("\n\n")[0]
        yield folder.name, " ".join(about.split()), folders[folder]


def _differences(columns: Columns) -> list[str]:
    """The views of logit differences that are made from tables; they differ in few columns."""
    return sorted(view for view in columns if _MADE.match(catalog().views[view]))


def _logit_differences(columns: Columns) -> str:
    """All of them in one section: the columns that they share, and those of each table."""
    views = _differences(columns)
    first, *others = (columns[view] for view in views)
    shared = {name: kind for name, kind in first.items() if all(name in other for other in others)}
    lines = [
        "## Logit differences\n",
        "One view for each table of scored answer tokens, with the rows of prompts that have a",
    ]
    lines += ["distractor: the table's columns that tell its rows apart, and those below.\n"]
    lines += [_table(shared, described({views[0]: [*shared]})[views[0]])]
    for view in views:
        own = ", ".join(f"`{name}`" for name in columns[view] if name not in shared)
        lines.append(f"- `{view}`" + (f": {own}, as in [`{_table_of(view)}`](#{_table_of(view)})" if own else ""))
    return "\n".join([*lines, ""])


def _anchor(view: str) -> str:
    return "logit-differences" if _MADE.match(catalog().views[view]) else view


def _table_of(view: str) -> str:
    return view.removesuffix(f"_{DIFFERENCES}")


def _view(view: str, columns: Mapping[str, str], meanings: Mapping[str, str | None]) -> str:
    about = _escaped(catalog().comments[view].strip())
    about = about[:1].upper() + about[1:]
    read = ", ".join(f"[`{name}`](#{_anchor(name)})" for name in catalog().mentions[view])
    tables = ", ".join(f"`{name}`" for name in sorted(catalog().sources[view]) if name in catalog().tables)
    source = " Stored rows." if tables == f"`{view}`" else f" Stored rows of {tables}." * bool(tables)
    return f"### {view}\n\n{about}{source}{f' Reads {read}.' if read else ''}\n\n{_table(columns, meanings)}"


def _stored(columns: Columns) -> str:
    """The tables, and the columns of those that no view shows as they are."""
    lines = [
        "## Tables\n",
        "What lies in the files. The columns are those of the view of the same name, but for the last ones.\n",
    ]
    lines += ["| table | one folder for each | columns |", "|---|---|---|"]
    for name, table in sorted(catalog().tables.items()):
        lines.append(f"| [`{name}`](#{name}) | `{table.partition}` | {len(table.schema.names)} |")
    others = made_otherwise(columns)
    meanings = described(others)
    parts = [f"### {name}\n\n{_table(own, meanings[name])}" for name, own in others.items()]
    return "\n".join([*lines, "", *parts])


def _table(columns: Mapping[str, str], meanings: Mapping[str, str | None]) -> str:
    rows = [f"| `{name}` | {kind} | {_escaped(meanings[name] or '')} |" for name, kind in columns.items()]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows, ""])


def _escaped(text: str) -> str:
    """Text in which names with underscores are code, and nothing else is markup."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    plain = [
        re.sub(r"(?<![\w/.])(\w*[a-z0-9]_\w+(?:\.\w+)*)", r"`\1`", part).replace("<", "&lt;") for part in parts[::2]
    ]
    shown = [part for pair in zip(plain, [*parts[1::2], ""], strict=True) for part in pair]
    return "".join(shown)


def _short(kind: str) -> str:
    """A type of several fields by its first word."""
    return "STRUCT" if kind.startswith("STRUCT") else kind


if __name__ == "__main__":
    click.echo(page(), nl=False)
