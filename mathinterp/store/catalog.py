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
from mathinterp.experiments.table import Table
from mathinterp.store.schema import STORE_TABLES

FUNCTIONS = "functions"  # macros, no view


class Catalog:
    """Names and texts, and what needs what."""

    def __init__(self, stored: registry.Stored):
        self.tables: Mapping[str, Table] = {**STORE_TABLES, **stored.tables}
        written = {**registry.sql_files(Path(__file__).parent / "views"), **stored.views}
        made = {name: _passed_through(name, table) for name, table in self.tables.items() if name not in written}
        self.functions = written.pop(FUNCTIONS)
        self.views: Mapping[str, str] = {**written, **made}
        code = {name: re.sub(r"--[^\n]*", "", text) for name, text in self.views.items()}
        uses = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
        self.sources = {name: set(re.findall(r"\$\{(\w+)\}", text)) for name, text in self.views.items()}
        self.mentions = {name: sorted(set(uses.findall(text)) & set(code) - {name}) for name, text in code.items()}
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
        shards = {table for table, stored in self.tables.items() if stored.partition == "run_id"}
        return sorted((sources & set(self.tables)) | (shards if "shard_files" in sources else set()))


def catalog() -> Catalog:
    """The catalog of all experiments that are known now."""
    return _catalog_of(registry.stored())


@lru_cache(maxsize=1)
def _catalog_of(stored: registry.Stored) -> Catalog:
    return Catalog(stored)


def _passed_through(name: str, table: Table) -> str:
    """The view of a table's own name, for tables without one of their own making."""
    columns = ", ".join(f'"{column}"' for column in (table.partition, *table.schema.names))
    about = f"-- {name}: {' '.join(table.doc.split())}"
    return f"{about}\nCREATE OR REPLACE VIEW {name} AS\nSELECT {columns}\nFROM ${{{name}}};\n"
