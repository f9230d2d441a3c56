"""SQL that only reads: one statement, on a connection that reaches the store and nothing else.

Knows DuckDB's parser and settings; knows nothing about views. DuckDB lets a COPY write wherever it may read, and a COPY
can stand behind EXPLAIN ANALYZE and, since version 2, in WITH: so settings and statements are both checked.
"""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from weakref import WeakSet

import duckdb

from mathinterp.errors import UserError
from mathinterp.store.files import StoreFiles
from mathinterp.text import quoted

_made: WeakSet[duckdb.DuckDBPyConnection] = WeakSet()
_of_parents: list[duckdb.DuckDBPyConnection] = []  # in a fork: their end waits for threads that are not there
os.register_at_fork(after_in_child=lambda: _of_parents.extend(_made))

NO_LIMITS: Mapping[str, str] = MappingProxyType({})
READS = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
ONE = "one SELECT (also WITH, VALUES, FROM first), DESCRIBE, SHOW, SUMMARIZE or EXPLAIN of one"
_EXPLAIN = re.compile(r"\s*EXPLAIN\b\s*(?:ANALYZE\b|\([\w\s,]*\))?", re.IGNORECASE)
_NODE = re.compile(
    r'(?<!\\)"type":"(\w+_NODE)"'
)  # in the parser's tree as JSON; in a user's text the quotes are escaped


def closed_connection(
    files: StoreFiles, *, allow_files: bool = False, locked: bool = True, limits: Mapping[str, str] = NO_LIMITS
) -> duckdb.DuckDBPyConnection:
    """An in-memory connection that reaches the store alone, or every file with ``allow_files``; no extension is loaded.

    Object stores are read through fsspec, with its credentials. locked: no setting can be changed any more. limits:
    further settings of DuckDB's, as text.
    """
    connection = duckdb.connect()
    _made.add(connection)
    if files.filesystem is not None:
        connection.register_filesystem(files.filesystem)
    settings = {
        **{name: quoted(value) for name, value in limits.items()},
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "python_enable_replacements": "false",
        "allowed_directories": f"[{quoted(files.root.rstrip('/') + '/')}]",
        **({} if allow_files else {"enable_external_access": "false"}),  # true cannot be set, it is there
        # DuckDB 1 else holds what it read of local files for as long as the database lives
        **({"enable_external_file_cache": "false"} if files.local else {}),
        "lock_configuration": "true" if locked else "false",  # the last one
    }
    for name, value in settings.items():
        connection.execute(f"SET GLOBAL {name} = {value}")  # for cursors of it, too
    return connection


def check_reads(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise UserError unless ``sql`` is one statement that only reads; raises duckdb.Error where it is no SQL."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UserError(f"SQL: {len(statements)} statements; give {ONE}")
    kind = statements[0].type
    if kind is duckdb.StatementType.EXPLAIN:
        explained = sql[found.end() :] if (found := _EXPLAIN.match(sql)) else ""
        _check_select(connection, explained, "EXPLAIN")
    else:
        _check_select(connection, sql, kind.name)


def _check_select(connection: duckdb.DuckDBPyConnection, sql: str, kind: str) -> None:
    """The parser's own tree, node by node."""
    kinds = [statement.type for statement in connection.extract_statements(sql)]
    if kinds != [duckdb.StatementType.SELECT]:
        listed = " (a PIVOT must list its values: ON column IN (...))" if kind == "MULTI" else ""
        raise UserError(f"SQL: this only reads, and a statement of kind {kind} does not; give {ONE}{listed}")
    [(tree,)] = connection.execute("SELECT json_serialize_sql($sql::VARCHAR)::VARCHAR", {"sql": sql}).fetchall()
    nodes = set(_NODE.findall(tree))
    if not nodes or nodes - READS:
        found = ", ".join(sorted(node.split("_")[0] for node in nodes - READS)) or "a part that is not known"
        raise UserError(f"SQL: this only reads, and the statement has {found} in it; give {ONE}")
