"""One HTML page of a store's finished runs: what was run, its figure, what it says, and the SQL to go on with.

Knows stored tables and the registry; what a run means and how it looks, its experiment says. Figures lie beside the
page as PNG and SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.figures import save
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
    with store.held():
        figures = _figures(store, _runs(store), run_ids)
        summaries = [_summary(store, run) for run, _ in figures]
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
    return _figures(store, _runs(store), [run_id])[0][1]


def render(store: str, runs: Sequence[Drawn]) -> str:
    """The page's HTML; every text in it is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = format_value
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(store=store, runs=runs)


def _runs(store: Store) -> dict[str, Row]:
    rows = store.rows(
        "SELECT run_id, scan, model, prompts, dtype, status, shards_done, shards FROM runs ORDER BY started_at"
    )
    return {str(row["run_id"]): row for row in rows}


def _figures(store: Store, runs: dict[str, Row], run_ids: Sequence[str]) -> list[tuple[Row, Figure]]:
    """Each named run, or else each finished one that can be drawn, with its figure."""
    for run_id in run_ids:
        if run_id not in runs:
            raise UserError(f"no run {run_id} in {store.url}; it has {', '.join(runs) or 'none'}")
    asked = [runs[run_id] for run_id in run_ids] or [run for run in runs.values() if run["status"] == "finished"]
    found = [(run, figure) for run in asked if (figure := _figure(store, run)) is not None]
    if without := [run for run in asked if run_ids and all(run is not drawn for drawn, _ in found)]:
        run = without[0]
        raise UserError(f"run {run['run_id']} is a scan of {run['scan']}, which has no figure")
    if not found:
        raise UserError(f"{store.url} has no finished run that can be drawn; run a scan first")
    return found


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
