"""Which experiments there are: folders of this package, installed plug-ins, and classes named as ``module:Class``.

Knows where to look; knows no experiment by name. A folder of ROOMS that has a ``tables.py`` is an experiment's: its
tables, its ``views/*.sql``, and the Experiment classes of its ``__init__.py``. An installed package adds its own under
the entry-point group ``mathinterp.experiments``; one that is broken, or that clashes with others, is named in a warning
and left out. Importing tables needs no torch, so that reading a store is quick.
"""

import dataclasses
import importlib
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError, did_you_mean
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.table import Table
from mathinterp.plugins import announced
from mathinterp.text import one_line

ROOMS = ("mathinterp.experiments", "mathinterp.tuning", "mathinterp.evaluation")
SHARED_VIEWS = Path(__file__).parent / "views"
OF_THE_STORE = frozenset(  # its own tables, views and lists of files, whose names no experiment may take
    ("answer_tokens", "functions", "latest_runs", "prompt_columns", "prompts", "run_records", "run_states", "runs",
     "shard_files", "shards")
)  # fmt: skip

logger = logging.getLogger(__name__)

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


def part_of(table: str, part: str, function: str) -> Callable[..., Any] | None:
    """What ``function`` of ``part``.py is in the folder that fills a table, whether or not an experiment does."""
    for folder in folders():
        if table in importlib.import_module(f"{folder}.tables").TABLES and find_spec(f"{folder}.{part}"):
            return getattr(importlib.import_module(f"{folder}.{part}"), function, None)
    return None


@cache
def stored() -> Stored:
    """Tables and views of every experiment; views that only pass a table through are made, not written."""
    return _stored_by(_others())


def _stored_by(others: Sequence[type[Experiment]]) -> Stored:
    """Those of our experiments and of ``others``; raises UserError for a name with two meanings."""
    tables, views = dict(SHARED_TABLES), sql_files(SHARED_VIEWS)
    for module in folders():
        declared = importlib.import_module(f"{module}.tables")
        _add_new(tables, declared.TABLES, module)
        _add_new(views, sql_files(Path(declared.__file__ or "").parent / "views"), module)
    for experiment in others:
        owner, own = f"{experiment.__module__}:{experiment.__qualname__}", views_of(experiment)
        new = {name: text for name, text in own.items() if views.get(name) != text}  # not those of its module-mate
        both = (new.keys() & tables.keys()) | (experiment.tables.keys() & (views.keys() - own.keys()))
        _add_new(views, new, owner, both)
        _add_new(tables, experiment.tables, owner)
    return Stored(tables, views)


@cache
def experiments() -> Mapping[str, type[Experiment]]:
    """Every experiment by its name, ours first; of our classes that share a name the first one."""
    return {**_ours(), **{experiment.name: experiment for experiment in _others()}}


@cache
def _ours() -> Mapping[str, type[Experiment]]:
    found: dict[str, type[Experiment]] = {}
    for module in folders():
        for experiment in _classes(importlib.import_module(module)):
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
    """Make a class known to the stores and reports of this process; does nothing for one that is known.

    One that was written anew, in a notebook for example, takes the place of what it was.
    Raises UserError if its name, or that of a table or view, has another meaning already.
    """
    key = f"{experiment.__module__}:{experiment.__qualname__}"
    ours = experiment.__module__ in folders()  # also one that shares its name with another
    if not ours and not any(experiment is known for known in _others()):
        _check_beside(_check(experiment), [other for other in _others() if other is not _added.get(key)])
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
    found: list[type[Experiment]] = []
    for entry in announced():
        try:
            experiment = _check(entry.load())
            _check_beside(experiment, found)
        except (Exception, SystemExit) as error:  # whatever an outside module does when it is imported
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            logger.warning(f"the installed experiment {entry.name} ({entry.value}) is left out: {one_line(why)}")
        else:
            found.append(experiment)
    return tuple(found)


def _check_beside(experiment: type[Experiment], others: Sequence[type[Experiment]]) -> None:
    """Raise UserError for a name, table or view that another experiment, or the store, has already."""
    known = {**_ours(), **{other.name: other for other in others}}
    if known.get(experiment.name, experiment) is not experiment:
        raise UserError(
            f"{experiment.__module__}:{experiment.__qualname__}: there is another experiment '{experiment.name}';"
            " give the class a name of its own"
        )
    _stored_by([*others, experiment])


def _imported(name: str) -> type[Experiment]:
    module, _, attribute = name.partition(":")
    try:
        return _check(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UserError(f"there is no experiment '{name}': {error}; the module must be importable from here") from error


def _check(experiment: object) -> type[Experiment]:
    if not (inspect.isclass(experiment) and issubclass(experiment, Experiment)) or inspect.isabstract(experiment):
        raise UserError(f"{experiment!r} is no experiment: derive a class from mathinterp.experiments.Experiment")
    name, tables = getattr(experiment, "name", None), getattr(experiment, "tables", None)
    if not dataclasses.is_dataclass(experiment) or not re.fullmatch(r"\w+", str(name)):
        raise UserError(f"{experiment!r} must be a dataclass with a word as its attribute name")
    if not isinstance(tables, Mapping) or not all(isinstance(table, Table) for table in tables.values()):
        raise UserError(f"{experiment!r} must say in its attribute tables what it stores")
    return experiment


def _classes(module: object) -> list[type[Experiment]]:
    """The experiments that a module defines itself."""
    own = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, Experiment)]
    return [each for each in own if each.__module__ == getattr(module, "__name__", "") and not inspect.isabstract(each)]


def _add_new(to: dict[str, Any], new: Mapping[str, Any], owner: str, taken: Collection[str] = ()) -> None:
    for name, value in new.items():
        if name in taken or name in OF_THE_STORE or to.setdefault(name, value) != value:
            raise UserError(f"{owner}: '{name}' is a table or view of another experiment; name it otherwise")
