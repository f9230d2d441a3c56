"""A results card: what runs found and how sure that is, on a page of Markdown for an appendix or a model's page.

From stored rows alone. What a run means, its experiment says; every text that comes from a store is escaped.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import mathinterp
from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.results import Row, Shown, Summary
from mathinterp.gates import check_file
from mathinterp.local_files import whole_file
from mathinterp.report.cells import format_value
from mathinterp.report.facts import facts_of
from mathinterp.report.runs import Shown as Found
from mathinterp.report.runs import find, title
from mathinterp.store import Store
from mathinterp.text import escaped, printable

LONGEST = 900  # characters of a sentence
TABLES, ROWS, COLUMNS, QUERIES = 3, 15, 12, 3  # that are shown of a run: more would be no page
PROMPTS = """SELECT coalesce(operation, 'none') AS operation, count(*) AS n
             FROM prompts JOIN run_records USING (prompts_fingerprint)
             WHERE run_id = $run GROUP BY ALL ORDER BY n DESC, operation"""
LATEST = """SELECT run_id FROM (SELECT *, first_value(model_fingerprint) OVER last AS newest FROM runs
                               WHERE status = 'finished' AND list_contains($scans, scan)
                               WINDOW last AS (ORDER BY finished_at DESC NULLS LAST, started_at DESC, run_id))
            WHERE model_fingerprint = newest
            QUALIFY row_number() OVER (PARTITION BY scan, (parameters ->> 'decide') IS NOT NULL
                                       ORDER BY finished_at DESC NULLS LAST, started_at DESC, run_id) = 1
            ORDER BY started_at, run_id"""


def write_card(store: Store, path: str | Path, run_ids: Sequence[str] = ()) -> Path:
    """Write ``results_card`` to a file, whole or not at all; folders above it are made.

    Raises UserError as that does, and if the file cannot be written.
    """
    check_file(path, "`card`")
    path = Path(path).expanduser()
    text = results_card(store, run_ids)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"`card` '{path}' cannot be written: {error.strerror}; name another file") from error
    return path


def results_card(store: Store, run_ids: Sequence[str] = ()) -> str:
    """The card of some runs, or of the latest finished run of each kind, of the model that was scanned last.

    Raises UserError for an unknown run, one that has no shard, or where no run is finished.
    """
    chosen = list(run_ids) or [row["run_id"] for row in store.rows(LATEST, {"scans": list(registry.experiments())})]
    if not chosen:
        raise UserError(f"{store.url} has no finished run; run a scan first, or name runs")
    found = find(store, chosen)
    if not found.shown:
        raise UserError("none of these runs is of an experiment that is installed here")
    models = list(dict.fromkeys(run.run["model"] for run in found.shown))
    lines = [f"# Results card: {', '.join(map(escaped, models))}", ""]
    lines += [
        f"Made by mathinterp {mathinterp.__version__} from stored rows; fractions are printed in the units that headers"
        " name, intervals are 95 %.",
        "",
    ]
    lines += [f"- Left out: {escaped(title(run))}, {escaped(run['why'])}" for run in found.left_out]
    for run in found.shown:
        lines += ["", *_of_run(store, run)]
    return "\n".join(lines).rstrip() + "\n"


def _of_run(store: Store, run: Found) -> Iterator[str]:
    yield f"## {escaped(run.title)}"
    yield ""
    yield from _table([{"": name, " ": value} for name, value in facts_of(run.record).items()], header=False)
    if run.run["status"] != "finished":
        yield "**Not finished: what follows is of the shards that are there by chance.**"
        yield ""
    yield from _said(run.summary)
    yield "### How sure"
    yield ""
    yield from (f"- {line}" for line in _doubts(store, run))
    yield ""
    yield "### To make it again"
    yield ""
    command = run.record.get("command")
    if command:
        yield from _code(str(command), "bash")
    else:
        yield "No command was recorded: parameters, model and prompts are above."
        yield ""
    if run.summary.queries:
        yield from _code("\n".join(f"{query};" for query in list(run.summary.queries)[:QUERIES]), "sql")


def _said(summary: Summary) -> Iterator[str]:
    tables = 0
    for part in summary.parts:
        if isinstance(part, Shown):
            tables += 1
            if tables > TABLES:
                continue
            yield f"**{escaped(part.title)}**"
            yield ""
            yield from _table(part.printed[:ROWS])
            if len(part.rows) > ROWS:
                yield f"The first {ROWS} of {len(part.rows)} rows."
                yield ""
        elif part:
            yield escaped(str(part), LONGEST)
            yield ""


def _doubts(store: Store, run: Found) -> Iterator[str]:
    """What limits how far the figures may be trusted, all from the record and the rows."""
    counts = store.rows(PROMPTS, {"run": run.run["run_id"]})
    if counts:
        listed = ", ".join(f"{escaped(row['operation'])} {row['n']:,}" for row in counts[:COLUMNS])
        yield f"Prompts: {sum(row['n'] for row in counts):,} ({listed})"
    yield f"Noise floor of the run: {escaped(facts_of(run.record)['noise floor'])}"
    parameters = run.record["parameters"]
    if parameters.get("decide") is not None:
        yield (
            f"Adaptive: each node was decided by itself at a threshold of {parameters['decide']:g} points and a false"
            f" discovery rate of {100 * parameters['fdr']:g} %; intervals hold at every look"
        )
    for warning in run.summary.warnings:
        yield f"Doubtful: {escaped(warning, LONGEST)}"


def _table(rows: Sequence[Row], *, header: bool = True) -> Iterator[str]:
    """A table of GitHub's Markdown; numbers to the right. Without rows it says so."""
    if not rows:
        yield "No rows."
        yield ""
        return
    names = list(rows[0])[:COLUMNS]
    right = [any(type(row.get(name)) in (int, float) for row in rows) for name in names]
    yield _line([escaped(name) if header else " " for name in names])
    yield _line(["---:" if each else "---" for each in right])
    for row in rows:
        yield _line([escaped(format_value(row.get(name))) for name in names])
    yield ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str, language: str) -> Iterator[str]:
    """A fenced block, whose fence is longer than any in the text."""
    plain = printable(text)
    longest = max((len(found) for found in re.findall("`+", plain)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}{language}", plain, fence, "")
