"""The files of the page about a store's runs: ``index.html`` and, in ``assets``, its scripts and data.

The same files open from a folder (file://, nothing is fetched) and from a server. Where they are ``served``, the page
has an empty ``<section id="sql">``, loads ``sql.js`` from beside it and may talk to its own server.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mathinterp.errors import UserError
from mathinterp.experiments.grid import MISSING, Grid
from mathinterp.experiments.results import Summary
from mathinterp.gates import shortened
from mathinterp.report.cells import format_value, shown_text
from mathinterp.report.compare import Comparison
from mathinterp.report.compare import compared as compare_runs
from mathinterp.report.facts import facts_of
from mathinterp.report.grids import grid_data
from mathinterp.report.runs import Found, Shown, find
from mathinterp.report.scripts import packed, script, spec_of, vega_bundle
from mathinterp.store import Store
from mathinterp.text import file_name, printable

WEB = Path(__file__).with_name("web")
STATIC = ("style.css", "app.js", "cells.js", "lists.js", "grid.js")


def contents(
    store: Store, run_ids: Sequence[str] = (), compare: tuple[str, str] | None = None, served: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file of the page, ``index.html`` last.

    Args:
        run_ids: the runs to show, also unfinished ones; none: all that are finished. Others are named at the top.
        compare: two runs to put side by side.
        served: see above; the page is then made even if no run is finished yet.

    Raises:
        UserError: an unknown run, one named that has no rows yet, or no finished run.
    """
    with store.held():
        found = find(store, run_ids, compare or ())
        if not found.shown and not served:
            raise UserError(f"{store.url} has no finished run that can be drawn; run a scan first")
        yield from files(store, found, compare, served)


def files(
    store: Store, found: Found, compare: tuple[str, str] | None = None, served: bool = False
) -> Iterator[tuple[str, bytes]]:
    """See ``contents``, of runs that were found."""
    for run in found.shown:
        yield from _data(run)
    comparison = None if compare is None else compare_runs(store, found.of(compare[0]), found.of(compare[1]))
    for name, chart in (comparison.charts if comparison else {}).items():
        yield f"assets/data/compare-{name}.js", script("figure", f"compare-{name}", spec_of(chart))
    for name in STATIC:
        yield f"assets/{name}", WEB.joinpath(name).read_bytes()
    yield "assets/vega.js", vega_bundle()
    yield "index.html", render(store.url, found, comparison, served).encode()


def render(store: str, found: Found, comparison: Comparison | None = None, served: bool = False) -> str:
    """The page's HTML; every text in it is printable and escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_safe
    )
    environment.filters |= {"cell": format_value, "whole": lambda text: escape(printable(text))}
    template = environment.from_string(WEB.joinpath("index.html").read_text(encoding="utf-8"))
    apart = _apart(found.shown)
    sections = {run.run["run_id"]: _section(run, apart) for run in found.shown}
    compared = None
    if comparison is not None:
        compared = {"says": comparison, "sides": [sections[run.run["run_id"]] for run in comparison.runs]}
    return template.render(
        store=store, sections=[*sections.values()], left_out=found.left_out, problems=found.problems,
        compared=compared, served=served,
    )  # fmt: skip


def _safe(value: Any) -> Any:
    """Text without what a program would obey, and with an end."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown_text(value)


def _apart(runs: Sequence[Shown]) -> dict[str, str]:
    """Run -> the parameters that tell it from others of the same scan, model and prompts."""
    alike = defaultdict(list)
    for run in runs:
        alike[run.run["scan"], run.run["model"], run.run["prompts"]].append(run)
    told = {}
    for group in alike.values():
        given = [run.record["parameters"] for run in group]
        names = [name for name in sorted({*chain(*given)}) if len({str(each.get(name)) for each in given}) > 1]
        for run, each in zip(group, given, strict=True):
            values = [f"{name} {shortened(each[name], 24)}" for name in names if each.get(name) is not None]
            told[run.run["run_id"]] = ", ".join(values)
    return told


def _section(run: Shown, apart: Mapping[str, str]) -> dict[str, Any]:
    """What the template shows of a run."""
    return {
        **run.run,
        "key": file_name(run.run["run_id"]),
        "title": run.title,
        "apart": apart[run.run["run_id"]],
        "summary": run.summary,
        "finding": _finding(run.summary),
        "facts": facts_of(run.record),
        "command": run.record.get("command"),
        "figures": {name: _figure_key(run, name) for name in run.figures},
        "doubt": run.doubt,
        "grid": None if run.grid is None else _size(run.grid),
    }


def _finding(summary: Summary) -> str | None:
    """The sentence to read first: the verdict, else the first sentence that is said; None: it has only tables."""
    said = (part for part in summary.parts if isinstance(part, str) and part)
    return summary.data.get("verdict") or next(said, None)


def _figure_key(run: Shown, name: str) -> str:
    return "-".join([file_name(run.run["run_id"]), "figure", *([name] if name else [])])


def _size(grid: Grid) -> dict[str, Any]:
    computed = int((grid.cells != MISSING).sum())
    return {"word": grid.word, "nodes": len(grid.layers), "prompts": len(grid.prompts), "computed": computed,
            "verbs": (grid.outcomes.worse[0], grid.outcomes.better[0])}  # fmt: skip


def _data(run: Shown) -> Iterator[tuple[str, bytes]]:
    key = file_name(run.run["run_id"])
    for name, figure in run.figures.items():
        figure_key = _figure_key(run, name)
        yield f"assets/data/{figure_key}.js", script("figure", figure_key, spec_of(figure))
    if run.grid is not None:
        yield f"assets/data/{key}.js", script("grid", key, grid_data(run.grid, packed))
