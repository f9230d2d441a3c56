"""The files of the page about a store's runs: ``index.html`` and, in ``assets``, its scripts and data.

The same files open from a folder (file://, nothing is fetched) and from a server. Where they are ``served``, the page
has an empty ``<section id="sql">``, loads ``sql.js`` from beside it and may talk to its own server.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mathinterp.errors import UserError
from mathinterp.experiments.grid import Grid
from mathinterp.report.cells import format_value
from mathinterp.report.facts import facts_of
from mathinterp.report.grids import grid_data
from mathinterp.report.runs import Shown, asked, shown
from mathinterp.report.scripts import packed, script, vega_bundle
from mathinterp.store import Store
from mathinterp.text import file_name, printable

WEB = Path(__file__).with_name("web")
STATIC = ("style.css", "app.js", "cells.js", "grid.js")


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
    wanted = [*run_ids, *(compare or ())]
    store.check(wanted or None)  # what is damaged is named, and counts as missing
    sections, left_out, compared = [], [], None
    with store.held():
        for run in asked(store, wanted):
            if not wanted and run["status"] != "finished":
                left_out.append(_unfinished(run))
                continue
            found = shown(store, run)
            if found is None:
                left_out.append({**run, "why": f"the experiment {run['scan']} is not installed here"})
                continue
            sections.append(_section(store, found))
            yield from _data(found)
    if not sections and not served:
        raise UserError(f"{store.url} has no finished run that can be drawn; run a scan first")
    for name in STATIC:
        yield f"assets/{name}", WEB.joinpath(name).read_bytes()
    yield "assets/vega.js", vega_bundle()
    yield "index.html", render(store, sections, left_out, compared, served).encode()


def render(
    store: Store,
    sections: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]] = (),
    compared: Mapping[str, Any] | None = None,
    served: bool = False,
) -> str:
    """The page's HTML; every text in it is printable and escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
    )  # fmt: skip
    environment.filters["cell"] = format_value
    template = environment.from_string(WEB.joinpath("index.html").read_text(encoding="utf-8"))
    return template.render(
        store=store.url, sections=sections, left_out=left_out, problems=store.problems, compared=compared, served=served
    )


def _section(store: Store, run: Shown) -> dict[str, Any]:
    """What the template shows of a run."""
    return {
        **run.run,
        "key": file_name(run.run["run_id"]),
        "title": run.title,
        "summary": run.summary,
        "facts": facts_of(run.record),
        "command": run.record.get("command"),
        "has_figure": hasattr(run.figure, "to_dict"),
        "doubt": run.doubt,
        "grid": None if run.grid is None else _size(run.grid),
    }


def _size(grid: Grid) -> dict[str, Any]:
    return {"word": grid.word, "components": len(grid.layers), "prompts": len(grid.prompts)}


def _data(run: Shown) -> Iterator[tuple[str, bytes]]:
    key = file_name(run.run["run_id"])
    if hasattr(run.figure, "to_dict"):
        yield f"assets/data/{key}-figure.js", script("figure", key, run.figure.to_dict())
    if run.grid is not None:
        yield f"assets/data/{key}.js", script("grid", key, grid_data(run.grid, packed))


def _unfinished(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run that is named and not drawn."""
    errors = run["errors"] if isinstance(run["errors"], Mapping) else {}
    first = next(iter(errors.values()), "")
    why = f"{run['shards_done']} of {run['shards']} shards are there" + (
        f"; {str(first).splitlines()[0]}" if first else ""
    )
    return {**run, "why": why}
