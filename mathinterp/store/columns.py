"""What each column of a view or table means: the files ``columns.yaml``, beside the tables that they are about.

Such a file has, by view, column -> one line; under ``any`` what holds for every view of its folder. ``*`` in a column's
name stands for any text, which ``{0}`` in its line repeats. Exact names come before patterns, a folder's lines before
shared ones.
"""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import yaml

from mathinterp.experiments import columns as shared
from mathinterp.experiments import registry
from mathinterp.store.catalog import DIFFERENCES

Told = Mapping[str, str]
FILE = "columns.yaml"
STORED = "stored "  # before a table's name, where the view of that name has other columns


def described(views: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str | None]]:
    """Of every column of these views, and of tables ("stored NAME"), what it means; None where no file says so."""
    common = _read(Path(shared.__file__).with_name(FILE)) | _read(Path(__file__).with_name(FILE))
    found = {}
    for view, columns in views.items():
        own = {} if (folder := folder_of(view)) is None else _read(folder / FILE)
        names = (view, view.removesuffix(f"_{DIFFERENCES}"), view.removeprefix(STORED))
        scopes = [*(told.get(name, {}) for name in dict.fromkeys(names) for told in (own, common))]
        scopes += [own.get("any", {}), common["any"]]
        found[view] = {column: _said(column, _differing(view, scopes, common)) for column in columns}
    return found


def folder_of(view: str) -> Path | None:
    """The folder of the experiment whose table or view it is; None: it is shared."""
    stored = view.removeprefix(STORED).removesuffix(f"_{DIFFERENCES}")
    for module in registry.folders():
        tables = importlib.import_module(f"{module}.tables")
        folder = Path(tables.__file__ or "").parent
        if {view, stored} & tables.TABLES.keys() or (folder / "views" / f"{view}.sql").is_file():
            return folder
    return None


def _differing(view: str, scopes: Sequence[Told], common: Mapping[str, Told]) -> Sequence[Told]:
    """Views of logit differences have the table's columns, and these of their own."""
    return [common["baseline_logit_differences"], *scopes] if view.endswith(f"_{DIFFERENCES}") else scopes


def _said(column: str, scopes: Sequence[Told]) -> str | None:
    for scope in scopes:
        if column in scope:
            return scope[column]
    for scope in scopes:
        for name, text in scope.items():
            pattern = re.escape(name).replace(r"\*", "(.+)").replace(r"\?", "(.)")
            if pattern != re.escape(name) and (matched := re.fullmatch(pattern, column)):
                return text.replace("{0}", matched[1])
    return None


@cache
def _read(file: Path) -> dict[str, dict[str, str]]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
