"""Which experiments there are: folders of this package, installed plug-ins, and classes named as ``module:Class``.

Knows where to look; knows no experiment by name. A folder of ROOMS that has a ``tables.py`` is an experiment's: its
tables, its ``views/*.sql``, and the Experiment classes of its ``__init__.py``. An installed package adds its own under
the entry-point group ``mathinterp.experiments``. Importing tables needs no torch, so that reading a store is quick.
"""

import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mathinterp.errors import UserError, did_you_mean
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.table import Table

ROOMS = ("mathinterp.experiments", "mathinterp.tuning", "mathinterp.evaluation")
GROUP = "mathinterp.experiments"
SHARED_VIEWS = Path(__file__).parent / "views"

_added: dict[str, type[Experiment]] = {}  # by module:Class


@dataclass(frozen=True, eq=False)  # told apart by identity: made anew when an experiment becomes known
class Stored:
    """What experiments leave in a store: tables, and the SQL of the views over them, by name."""

    tables: Mapping[str, Table]
    views: Mapping[str, str]


@cache
def folders() -> tuple[str, ...]:
    """Dotted names of this package's experiment folders."""
    found = []
    for room in ROOMS:
        for place in importlib.import_module(room).__path__:
            packages = sorted(entry.name for entry in pkgutil.iter_modules([place]) if entry.ispkg)
            found += [f"{room}.{name}" for name in packages if (Path(place) / name / "tables.py").is_file()]
    return tuple(found)


@cache
def stored() -> Stored:
    """Tables and views of every experiment; views that only pass a table through are made, not written."""
    tables, views = dict(SHARED_TABLES), sql_files(SHARED_VIEWS)
    for module in folders():
        declared = importlib.import_module(f"{module}.tables")
        _add_new(tables, declared.TABLES, module)
        _add_new(views, sql_files(Path(declared.__file__ or "").parent / "views"), module)
    for experiment in _others():
        own = {name: table for name, table in experiment.tables.items() if tables.get(name) != table}
        _add_new(tables, own, experiment.__module__)
        _add_new(views, views_of(experiment), experiment.__module__)
    return Stored(tables, views)


@cache
def experiments() -> Mapping[str, type[Experiment]]:
    """Every experiment by its name, ours first; of classes that share a name the first one."""
    found: dict[str, type[Experiment]] = {}
    for module in folders():
        for experiment in _classes(importlib.import_module(module)):
            found.setdefault(experiment.name, experiment)
    for experiment in _others():
        found.setdefault(experiment.name, experiment)
    return found


def find(name: str) -> type[Experiment]:
    """The experiment of that name, or the class that ``module:Class`` names, which is then known to this process.

    Raises UserError if there is none.
    """
    if ":" in name:
        return add(_imported(name))
    if name not in experiments():
        raise UserError(
            f"there is no experiment '{name}'.{did_you_mean(name, experiments())}"
            f" There are {', '.join(experiments())}; or name module:Class"
        )
    return experiments()[name]


def add(experiment: type[Experiment]) -> type[Experiment]:
    """Make a class known to the stores and reports of this process; does nothing for one that is known."""
    key = f"{experiment.__module__}:{experiment.__qualname__}"
    ours = experiment.__module__ in folders()  # also one that shares its name with another
    if key not in _added and not ours and not any(experiment is known for known in experiments().values()):
        _check(experiment)
        _added[key] = experiment
        for cached in (stored, experiments):
            cached.cache_clear()
    return experiment


def sql_files(folder: Path) -> dict[str, str]:
    """Name -> text of every .sql file in a folder; empty if there is no such folder."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.sql"))}


def views_of(experiment: type[Experiment]) -> dict[str, str]:
    """The SQL of an experiment's own views: files in ``views`` beside its module, and its attribute ``views``."""
    file = getattr(sys.modules.get(experiment.__module__), "__file__", None)  # None: written in a notebook
    return (sql_files(Path(file).parent / "views") if file else {}) | dict(experiment.views)


def _others() -> list[type[Experiment]]:
    """Experiments from outside the package: installed, then those added by name."""
    return [*dict.fromkeys([*_installed(), *_added.values()])]


@cache
def _installed() -> tuple[type[Experiment], ...]:
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.append(_check(entry.load()))
    return tuple(found)


def _imported(name: str) -> type[Experiment]:
    module, _, attribute = name.partition(":")
    try:
        return _check(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UserError(f"there is no experiment '{name}': {error}; the module must be importable from here") from error


def _check(experiment: object) -> type[Experiment]:
    if not (inspect.isclass(experiment) and issubclass(experiment, Experiment)) or inspect.isabstract(experiment):
        raise UserError(f"{experiment!r} is no experiment: derive a class from mathinterp.experiments.Experiment")
    return experiment


def _classes(module: object) -> list[type[Experiment]]:
    """The experiments that a module defines itself."""
    own = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, Experiment)]
    return [each for each in own if each.__module__ == getattr(module, "__name__", "") and not inspect.isabstract(each)]


def _add_new(to: dict[str, object] | dict[str, Table] | dict[str, str], new: Mapping[str, object], owner: str) -> None:
    for name, value in new.items():
        assert name not in to, f"{owner}: '{name}' is another experiment's"
        to[name] = value  # type: ignore[assignment]
