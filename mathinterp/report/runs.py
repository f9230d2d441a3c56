"""Which runs a page is about, and what of each it shows: what it was, what it says, its figure and its grid.

Knows stored records and the registry; what a run means and how it looks, its experiment says.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.experiments import registry, stability
from mathinterp.experiments.results import Results, Row, Summary
from mathinterp.experiments.stability.figure import draw as draw_stability
from mathinterp.store import Store
from mathinterp.store.runs import recorded

if TYPE_CHECKING:
    from mathinterp.experiments.figures import Figure
    from mathinterp.experiments.grid import Grid

COLUMNS = "run_id, scan, model, prompts, dtype, status, shards_done, shards, started_at, errors"


@dataclass(frozen=True)
class Shown:
    """One run on the page."""

    run: Row  # COLUMNS
    record: Row
    summary: Summary
    figures: "Mapping[str, Figure]"  # by what tells them apart: "" for its own, and "stability" of its ranking
    grid: "Grid | None" = None
    doubt: str | None = None  # why it has no figure although its kind has one

    @property
    def title(self) -> str:
        """What was run, on what."""
        return title(self.run)


def title(run: Row) -> str:
    """What was run, on what; and how far it is, unless it is finished."""
    state = "" if run["status"] == "finished" else f" ({run['shards_done']} of {run['shards']} shards: incomplete)"
    return f"{run['scan']}: {run['model']} on {run['prompts']}, {run['dtype']}{state}"


@dataclass(frozen=True)
class Found:
    """The runs of a page.

    left_out: runs that are not whole, or not known here: COLUMNS and ``why``.
    problems: files of the store that cannot be trusted, a line each.
    """

    shown: Sequence[Shown]
    left_out: Sequence[Row] = ()
    problems: Sequence[str] = ()

    def of(self, run_id: str) -> Shown:
        """The run of this id; raises UserError if it is left out."""
        for run in self.shown:
            if run.run["run_id"] == run_id:
                return run
        raise UserError(f"run {run_id} cannot be compared: its experiment is not installed here")


def find(store: Store, run_ids: Sequence[str] = (), compare: Sequence[str] = ()) -> Found:
    """The runs of these ids, unfinished ones too, or all that are finished; and those to compare.

    Raises UserError for an unknown run, and for one of those named that has no shard.
    """
    named = [*run_ids, *compare]
    asked(store, named)
    store.check([*run_ids, *compare] if run_ids else None)  # what is damaged is named, and counts as missing
    shown, left_out = [], []
    for run in asked(store, named if run_ids else ()):
        if run["status"] != "finished" and run["run_id"] not in named:
            left_out.append({**run, "why": _unfinished(run)})
        elif run["scan"] == stability.NAME and run["run_id"] not in named:
            continue  # shown with the run whose ranking it is about
        elif (one := _shown(store, run)) is None:
            left_out.append({**run, "why": f"the experiment {run['scan']} is not installed here"})
        else:
            shown.append(one)
    return Found(shown, left_out, store.problems)


def asked(store: Store, run_ids: Sequence[str] = ()) -> list[Row]:
    """The runs of these ids, or all, oldest first; raises UserError for an unknown one."""
    runs = f"SELECT {COLUMNS} FROM runs"
    if not run_ids:
        return store.rows(f"{runs} ORDER BY started_at, run_id")
    found = []
    for run_id in dict.fromkeys(run_ids):
        if store.record(run_id) is None:
            raise UserError(f"no run {run_id} in {store.url}; it has {', '.join(recorded(store.files)) or 'none'}")
        with store.held(run_id):
            found += store.rows(f"{runs} WHERE run_id = $run", {"run": run_id})
    return found


def _unfinished(run: Row) -> str:
    errors = json.loads(run["errors"] or "{}") if isinstance(run["errors"], str) else run["errors"] or {}
    first = next(iter(errors.values()), "").splitlines()
    return "; ".join([f"{run['shards_done']} of {run['shards']} shards are there", *first[:1]])


@dataclass(frozen=True)
class _Kind:
    """How a kind of run tells of itself."""

    summarize: Callable[[Results], Summary]
    figure: "Callable[[Results], Figure | None]"
    grid: "Callable[[Results], Grid | None]" = lambda results: None
    reads_own_rows: bool = False
    ranks: bool = False


def _kind(store: Store, run: Row) -> _Kind | None:
    """That of its experiment, else of the folder that fills its first table; None: it is known to none here."""
    experiment = registry.experiments().get(run["scan"])
    if experiment is not None:
        options, ranks = experiment.show_options(), experiment.node_ranking is not None
        return _Kind(
            lambda results: experiment.summarize(results, options),
            lambda results: experiment.figure(results, options),
            experiment.grid, experiment.reads_own_rows, ranks,
        )  # fmt: skip
    table = next(iter((store.record(run["run_id"]) or {}).get("shards", [])), "").split("/")[0]
    figure, summarize = registry.part_of(table, "figure", "draw"), registry.part_of(table, "summary", "summarize")
    if figure is None and summarize is None:
        return None
    return _Kind(summarize or (lambda results: Summary()), figure or (lambda results: None))


def _shown(store: Store, run: Row) -> Shown | None:
    """All that the page says of a run; None: its kind is not known here. Raises UserError for one that has no shard."""
    kind = _kind(store, run)
    if kind is None:
        return None
    _require_shards(run)
    results = Results(store, run["run_id"])
    with store.held(run["run_id"]) if kind.reads_own_rows else nullcontext():
        summary, doubt = kind.summarize(results), None
        try:
            figures = {"": kind.figure(results)}
        except UserError as error:
            figures, doubt = {}, str(error)
        if kind.ranks:
            figures["stability"] = draw_stability(results)
        drawn = {name: figure for name, figure in figures.items() if figure is not None}
        return Shown(run, store.record(run["run_id"]) or {}, summary, drawn, kind.grid(results), doubt)


def figure_of(store: Store, run_id: str) -> "Figure":
    """The figure of a run, by its experiment; raises UserError for an unknown run or one that has none."""
    [run] = asked(store, [run_id])
    kind = _kind(store, run)
    if kind is not None:
        _require_shards(run)
        figure = kind.figure(Results(store, run_id))
        if figure is not None:
            return figure
    raise UserError(f"run {run_id} is a scan of {run['scan']}, which has no figure")


def _require_shards(run: Row) -> None:
    if not run["shards_done"]:
        raise UserError(f"run {run['run_id']} has none of its {run['shards']} shards; its command computes them")
