"""Which runs a page is about, and what of each it shows: what it was, what it says, its figure and its grid.

Knows stored records and the registry; what a run means and how it looks, its experiment says.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.results import Results, Row, Summary
from mathinterp.store import Store

if TYPE_CHECKING:
    import altair as alt

    from mathinterp.experiments.grid import Grid

COLUMNS = "run_id, scan, model, prompts, dtype, status, shards_done, shards, started_at, errors"


@dataclass(frozen=True)
class Shown:
    """One run on the page."""

    run: Row  # COLUMNS
    record: Row
    summary: Summary
    figure: "alt.TopLevelMixin | None"
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


def shown(store: Store, run: Row) -> Shown | None:
    """All that the page says of a run; None: its experiment is not installed here.

    Raises UserError for a run that has no shard.
    """
    experiment = registry.experiments().get(run["scan"])
    if experiment is None:
        return None
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


def figure_of(store: Store, run_id: str) -> Any:
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
