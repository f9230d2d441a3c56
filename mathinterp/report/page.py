"""One HTML page of a store's finished runs: what was run, its figure, what it says, and the SQL to go on with.

Knows stored tables and the registry; what a run means and how it looks, its experiment says. Figures lie beside the
page as PNG and SVG.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.figures import Figure, save
from mathinterp.experiments.results import Results, Row, Summary
from mathinterp.local_files import whole_file
from mathinterp.report.cells import format_value
from mathinterp.store import Store
from mathinterp.text import file_name

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Report:
    """Files that were written: the page, and two figures for each run."""

    page: Path
    figures: list[Path]


@dataclass(frozen=True)
class Drawn:
    """One run on the page; ``png`` and ``svg`` are names of files beside it."""

    run_id: str
    title: str
    png: str
    svg: str
    summary: Summary


def write_report(store: Store, out: Path, run_ids: Sequence[str] = ()) -> Report:
    """Draw runs (all finished ones that have a figure, or those named) and write ``out``/index.html.

    A link in ``out`` is replaced and its target left alone.

    Raises:
        UserError: an unknown run, a run without a figure, no run that has one, or ``out`` that cannot be written.
    """
    store.check(list(run_ids) or None)  # what is damaged is named, and counts as missing
    figures, summaries = [], []
    with store.held():
        for run in _asked(store, run_ids):
            with _own_rows(store, run):
                figure = _required_figure(store, run) if run_ids else _figure(store, run)
                if figure is not None:
                    figures.append((run, figure))
                    summaries.append(_summary(store, run))
    if not figures:
        raise UserError(f"{store.url} has no finished run that can be drawn; run a scan first")
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _write(store, out, figures, summaries)
    except OSError as error:
        raise UserError(f"`out` {out} cannot be written: {error.strerror}; name another folder") from error


def _write(store: Store, out: Path, figures: list[tuple[Row, Figure]], summaries: list[Summary]) -> Report:
    drawn, files = [], []
    for (run, figure), summary in zip(figures, summaries, strict=True):
        png, svg = save(figure, out / file_name(f"{run['scan']}-{run['run_id']}"))
        files += [png, svg]
        drawn.append(Drawn(run["run_id"], _title(run), png.name, svg.name, summary))
    page = out / "index.html"
    with whole_file(page) as temporary:
        temporary.write_text(render(store.url, drawn), encoding="utf-8")
    return Report(page, files)


def draw(store: Store, run_id: str) -> Figure:
    """The figure of a run, by its experiment; raises UserError for an unknown run or one that has none."""
    [run] = _asked(store, [run_id])
    return _required_figure(store, run)


def render(store: str, runs: Sequence[Drawn]) -> str:
    """The page's HTML; every text in it is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = format_value
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(store=store, runs=runs)


def _asked(store: Store, run_ids: Sequence[str]) -> list[Row]:
    """The runs of these ids, or all finished ones, oldest first."""
    runs = "SELECT run_id, scan, model, prompts, dtype, status, shards_done, shards FROM runs"
    if not run_ids:
        return store.rows(f"{runs} WHERE status = 'finished' ORDER BY started_at")
    found = []
    for run_id in run_ids:
        if store.record(run_id) is None:
            known = [name.removeprefix("runs/").removesuffix(".json") for name in store.files.find("runs", ".json")]
            raise UserError(f"no run {run_id} in {store.url}; it has {', '.join(known) or 'none'}")
        with store.held(run_id):
            found += store.rows(f"{runs} WHERE run_id = $run", {"run": run_id})
    return found


@contextmanager
def _own_rows(store: Store, run: Row) -> Iterator[None]:
    """Within the block an experiment that reads nothing of other runs does not wait for a look at them."""
    experiment = registry.experiments().get(run["scan"])
    with store.held(run["run_id"]) if experiment is not None and experiment.reads_own_rows else nullcontext():
        yield


def _required_figure(store: Store, run: Row) -> Figure:
    figure = _figure(store, run)
    if figure is None:
        raise UserError(f"run {run['run_id']} is a scan of {run['scan']}, which has no figure")
    return figure


def _figure(store: Store, run: Row) -> Figure | None:
    experiment = registry.experiments().get(run["scan"])  # None: of a package that is not installed here
    if experiment is None:
        return None
    if not run["shards_done"]:
        raise UserError(f"run {run['run_id']} has none of its {run['shards']} shards; its command computes them")
    return experiment.figure(Results(store, run["run_id"]), experiment.show_options())


def _summary(store: Store, run: Row) -> Summary:
    experiment = registry.find(run["scan"])
    return experiment.summarize(Results(store, run["run_id"]), experiment.show_options())


def _title(run: dict[str, Any]) -> str:
    state = "" if run["status"] == "finished" else f" ({run['shards_done']} of {run['shards']} shards: incomplete)"
    return f"{run['scan']}: {run['model']} on {run['prompts']}, {run['dtype']}{state}"
