"""One HTML page of a store's finished runs: what was run, its figure, its leading rows, and the SQL behind them.

Knows stored tables only; figures lie beside the page as PNG and SVG.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.report.figures import FIGURES, draw, save
from mathinterp.store import Store

# scan -> the query whose rows the page shows; {run} is the run's id
QUERIES = {
    "heads": "SELECT layer, head, 100 * drop AS drop_points, 100 * drop_low AS low, 100 * drop_high AS high, q_value"
    " FROM head_effects WHERE run_id = '{run}' AND operation = 'all' ORDER BY drop DESC LIMIT 10",
    "paths": "SELECT node, layer, head, mean AS effect, low, high, q_value, key FROM path_effects"
    " WHERE run_id = '{run}' AND operation = 'all' ORDER BY mean LIMIT 10",
    "knockout": "SELECT ranking, k, avg(accuracy) AS accuracy FROM knockout_curve"
    " WHERE run_id = '{run}' AND operation = 'all' GROUP BY ALL ORDER BY ranking, k",
    "attention": "SELECT layer, head, token_type, mean, mass FROM attention_by_type"
    " WHERE run_id = '{run}' AND operation = 'all' AND token_type <> 'bos' ORDER BY mass DESC LIMIT 10",
    "probe": "SELECT * FROM mlp_probe_curve WHERE run_id = '{run}' AND operation = 'all' ORDER BY layer, target",
    "lora_sweep": "SELECT layer, band, learning_rate, accuracy, low, high FROM paper_a_table9"
    " WHERE run_id = '{run}' ORDER BY layer",
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "img{max-width:100%}pre{background:#f5f5f5;padding:.6em;white-space:pre-wrap}"
)


@dataclass(frozen=True)
class Report:
    """Files that were written: the page, and two figures for each run."""

    page: Path
    figures: list[Path]


def write_report(store: Store, out: Path, run_ids: Sequence[str] = ()) -> Report:
    """Draw runs (all finished ones that have a figure, or those named) and write ``out``/index.html.

    Raises:
        UserError: an unknown run, a run without a figure, no run that has one, or ``out`` that cannot be written.
    """
    runs = store.rows(
        "SELECT run_id, scan, model, prompts, dtype, status, shards_done, shards FROM runs ORDER BY started_at"
    )
    known = {str(run["run_id"]): run for run in runs}
    for run_id in run_ids:
        if run_id not in known:
            raise UserError(f"no run {run_id} in {store.url}; it has {', '.join(known) or 'none'}")
    finished = [run for run in runs if run["scan"] in FIGURES and run["status"] == "finished"]
    chosen = [known[run_id] for run_id in run_ids] or finished
    if not chosen:
        raise UserError(f"{store.url} has no finished run that can be drawn ({', '.join(FIGURES)}); run a scan first")
    drawn = [draw(store, run["run_id"]) for run in chosen]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; name another folder") from error
    sections, figures = [], []
    for run, figure in zip(chosen, drawn, strict=True):
        png, svg = save(figure, out / f"{run['scan']}-{run['run_id']}")
        figures += [png, svg]
        sections.append(_section(store, run, png.name, svg.name))
    page = out / "index.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>mathinterp</title><style>{STYLE}</style>"
        f"<h1>mathinterp: {html.escape(store.url)}</h1>" + "".join(sections),
        encoding="utf-8",
    )
    return Report(page, figures)


def _section(store: Store, run: dict[str, Any], png: str, svg: str) -> str:
    query = QUERIES[run["scan"]].format(run=run["run_id"])
    state = "" if run["status"] == "finished" else f" ({run['shards_done']} of {run['shards']} shards: incomplete)"
    title = f"{run['scan']}: {run['model']} on {run['prompts']}, {run['dtype']}{state}"
    return (
        f"<h2>{html.escape(title)}</h2><p>run {run['run_id']}, <a href='{svg}'>SVG</a></p><img src='{png}'>"
        f"{_table(store.rows(query))}<pre>{html.escape(query)}</pre>"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "<p>no rows</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value))
