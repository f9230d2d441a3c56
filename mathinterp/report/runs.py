"""Which runs a page is about, and what of each it shows: what it was, what it says, its figure and its grid.

Knows stored records and the registry; what a run means and how it looks, its experiment says.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.results import Results, Row, Summary
from mathinterp.store import Store

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
    figure: "Figure | None"
    grid: "Grid | None"
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
        elif (experiment := registry.experiments().get(run["scan"])) is None:
            left_out.append({**run, "why": f"the experiment {run['scan']} is not installed here"})
        else:
            shown.append(_shown(store, run, experiment))
    return Found(shown, left_out, store.problems)


def asked(store: Store, run_ids: Sequence[str] = ()) -> list[Row]:
    """The runs of these ids, or all, oldest first; raises UserError for an unknown one."""
    runs = f"SELECT {COLUMNS} FROM runs"
    if not run_ids:
        return store.rows(f"{runs} ORDER BY started_at, run_id")
    found = []
    for run_id in dict.fromkeys(run_ids):
        if store.record(run_id) is None:
            known = [name.removeprefix("runs/").removesuffix(".json") for name in store.files.find("runs", ".json")]
            raise UserError(f"no run {run_id} in {store.url}; it has {', '.join(known) or 'none'}")
        with store.held(run_id):
            found += store.rows(f"{runs} WHERE run_id = $run", {"run": run_id})
    return found


def _unfinished(run: Row) -> str:
    errors = json.loads(run["errors"] or "{}") if isinstance(run["errors"], str) else run["errors"] or {}
    first = next(iter(errors.values()), "").splitlines()
    return "; ".join([f"{run['shards_done']} of {run['shards']} shards are there", *first[:1]])


def _shown(store: Store, run: Row, experiment: type[Experiment]) -> Shown:
    """All that the page says of a run; raises UserError for one that has no shard."""
    _require_shards(run)
    results = Results(store, run["run_id"])
    with _own_rows(store, run, experiment):
        summary = experiment.summarize(results, experiment.show_options())
        try:
            figure, doubt = experiment.figure(results, experiment.show_options()), None
        except UserError as error:
            figure, doubt = None, str(error)
        record = store.record(run["run_id"]) or {}
        return Shown(run, record, summary, figure, experiment.grid(results), doubt)


def figure_of(store: Store, run_id: str) -> "Figure":
    """The figure of a run, by its experiment; raises UserError for an unknown run or one that has none."""
    [run] = asked(store, [run_id])
    experiment = registry.experiments().get(run["scan"])
    if experiment is not None:
        _require_shards(run)
        figure = experiment.figure(Results(store, run_id), experiment.show_options())
        if figure is not None:
            return figure
    raise UserError(f"run {run_id} is a scan of {run['scan']}, which has no figure")


def _require_shards(run: Row) -> None:
    if not run["shards_done"]:
        raise UserError(f"run {run['run_id']} has none of its {run['shards']} shards; its command computes them")


@contextmanager
def _own_rows(store: Store, run: Row, experiment: type[Experiment]) -> Iterator[None]:
    """Within the block an experiment that reads nothing of other runs does not wait for a look at them."""
    with store.held(run["run_id"]) if experiment.reads_own_rows else nullcontext():
        yield
