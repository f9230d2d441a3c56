"""All tables and views of a store: its own (runs, prompts, answer tokens), and those of the experiments.

Knows no experiment by name: the registry tells what each of them stores. Every text of a view is SQL with
``${table}`` for the stored rows of a table, ``${run_records}`` for the runs' JSON records and ``${shard_files}`` for
the list of result files.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

from mathinterp.experiments import registry
from mathinterp.experiments.columns import TOKEN_SCORE
from mathinterp.experiments.table import Table
from mathinterp.store.schema import STORE_TABLES

DIFFERENCES = (
    "logit_differences"  # <table>_logit_differences: the answer against the distractor, where prompts have one
)
FUNCTIONS = "functions"  # macros, no view


class Catalog:
    """Names and texts, and what needs what."""

    def __init__(self, stored: registry.Stored):
        self.tables: Mapping[str, Table] = {**STORE_TABLES, **stored.tables}
        written = {**registry.sql_files(Path(__file__).parent / "views"), **stored.views}
        made = {name: _passed_through(name, table) for name, table in self.tables.items() if name not in written}
        scored = {name: table for name, table in self.tables.items() if _is_scored(table)}
        made |= {f"{name}_{DIFFERENCES}": _differences(name, table) for name, table in scored.items()}
        self.functions = written.pop(FUNCTIONS)
        self.views: Mapping[str, str] = {**written, **made}
        code = {name: re.sub(r"--[^\n]*", "", text) for name, text in self.views.items()}
        uses = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
        self.comments = {name: _comment(name, text) for name, text in self.views.items()}
        self.about = {name: re.split(r"(?<=\.)\s", text, maxsplit=1)[0] for name, text in self.comments.items()}
        self.sources = {name: set(re.findall(r"\$\{(\w+)\}", text)) for name, text in self.views.items()}
        self.mentions = {name: sorted(set(uses.findall(text)) & set(code) - {name}) for name, text in code.items()}
        self.of_runs = {name for name, table in self.tables.items() if table.partition == "run_id"}  # not of prompts
        # whose run_id is that of another run than the one whose record or rows they show
        self.of_other_runs = {name for name, text in code.items() if re.search(r"\bAS\s+\"?run_id\b", text, re.I)}
        self.order = tuple(TopologicalSorter(self.mentions).static_order())  # each after those it mentions

    def needed(self, words: set[str]) -> list[str]:
        """The views among ``words`` (lower case) and those that these read, in order."""
        needed: set[str] = set()
        for name in reversed(self.order):
            if name in words or name in needed:
                needed |= {name, *self.mentions[name]}
        return [name for name in self.order if name in needed]

    def tables_of(self, views: Iterable[str]) -> list[str]:
        """The tables that views read; those that list result files read all of them."""
        sources = {source for name in views for source in self.sources[name]}
        return sorted((sources & set(self.tables)) | (self.of_runs if "shard_files" in sources else set()))


def catalog() -> Catalog:
    """The catalog of all experiments that are known now."""
    return _catalog_of(registry.stored())


@lru_cache(maxsize=1)
def _catalog_of(stored: registry.Stored) -> Catalog:
    return Catalog(stored)


def _comment(name: str, text: str) -> str:
    """What a view's text opens with."""
    comment = " ".join(line.lstrip("- ") for line in text[: text.index("CREATE ")].splitlines())
    return comment.removeprefix(f"{name}: ")


def _passed_through(name: str, table: Table) -> str:
    """The view of a table's own name, for tables without one of their own making."""
    columns = ", ".join(f'"{column}"' for column in (table.partition, *table.schema.names))
    about = f"-- {name}: {' '.join(table.doc.split())}"
    answers = "\nWHERE position >= 0" if _is_scored(table) else ""  # negative ones are of distractors
    return f"{about}\nCREATE OR REPLACE VIEW {name} AS\nSELECT {columns}\nFROM ${{{name}}}{answers};\n"


def _is_scored(table: Table) -> bool:
    """Whether its rows are scored answer tokens."""
    return all(table.schema.get_field_index(column.name) >= 0 for column in TOKEN_SCORE)


def _differences(name: str, table: Table) -> str:
    """The view of a scored table's logit differences: the answer's row beside that of its prompt's distractor."""
    scores = {column.name for column in TOKEN_SCORE}
    ids = [column for column in (table.partition, *table.schema.names) if column not in scores]
    known = {table.partition, "prompt_id"}  # never null; with = a query of one run looks at its files alone
    sames = {name: "=" if name in known else "IS NOT DISTINCT FROM" for name in (*ids, "prompt_id")}
    same = " AND ".join(f'd."{name}" {sign} a."{name}"' for name, sign in sames.items())
    shown = ", ".join(f'a."{column}"' for column in (*ids, "prompt_id"))
    return (
        f"-- {name}_{DIFFERENCES}: of each row of {name} whose prompt has a distractor: the answer's logit minus the"
        " distractor's, at the first token in which they differ (position). distractor_predicted: its token is the"
        f" likeliest.\nCREATE OR REPLACE VIEW {name}_{DIFFERENCES} AS\n"
        f"SELECT {shown}, a.position, a.logit::DOUBLE - d.logit::DOUBLE AS logit_difference,"
        f" a.logit, d.logit AS distractor_logit, d.correct AS distractor_predicted\n"
        f"FROM ${{{name}}} AS a\nJOIN ${{{name}}} AS d ON {same} AND d.position = -1 - a.position\n"
        "WHERE d.position < 0;\n"
    )
