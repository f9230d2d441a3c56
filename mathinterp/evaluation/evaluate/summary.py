"""What evaluation runs say: the table of paper B's form, and the rows behind it.

Knows the evaluation views of a store; computes nothing itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mathinterp.store import Store
from mathinterp.text import quoted

Row = dict[str, Any]


@dataclass(frozen=True)
class EvaluationSummary:
    """Results of some runs, beside those of other models on the same items."""

    results: list[Row]  # rows of evaluation_results
    table: list[Row]  # a row a model: numbers, accuracies as fractions
    shown: list[Row]  # the same for people
    remarks: list[str]
    queries: list[str]


def summarize_evaluations(store: Store, runs: Sequence[str]) -> EvaluationSummary:
    """The runs' results and those of every model that was asked the same items in the same way, the base first."""
    results = store.rows(
        "SELECT * FROM evaluation_results WHERE run_id = ANY($runs) "
        "OR run_id IN (SELECT other_run_id FROM evaluation_pairs WHERE run_id = ANY($runs)) "
        "ORDER BY base_fingerprint, setting, model_fingerprint <> base_fingerprint, model, started_at",
        {"runs": list(runs)},
    )
    tasks = list(dict.fromkeys(row["task"] for row in results))
    models: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in results:
        key = (row["method"], row["model"], row["setting"], row["dtype"], row["model_fingerprint"])
        models.setdefault(key, {})[row["task"]] = row
    head = ("method", "model", "setting", "dtype")
    table, shown = [], []
    for key, found in models.items():
        names = dict(zip(head, key, strict=False))
        table.append(names | {task: found[task]["accuracy"] if task in found else None for task in tasks})
        shown.append(names | {task: _cell(found.get(task)) for task in tasks})
    return EvaluationSummary(
        results=results,
        table=table,
        shown=shown,
        remarks=_remarks([row for row in results if row["run_id"] in runs]),
        queries=[
            "SELECT * FROM evaluation_table",
            "SELECT model, task, n, accuracy, low, high, difference, p_value, q_value FROM evaluation_results",
            f"SELECT item_id, correct, predicted, target, response FROM evaluations WHERE run_id = {quoted(runs[0])}",
        ],
    )


def _cell(row: Row | None) -> str | None:
    if row is None:
        return None
    cell = f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
    if row["difference"] is not None:
        cell += f" ({100 * row['difference']:+.1f}, p {row['p_value']:.2g})"
    return cell


def _remarks(rows: Sequence[Row]) -> list[str]:
    """How many items each task has, and what went wrong with some of them."""
    lines = ["Items: " + ", ".join(f"{row['task']} {row['n']:,}" for row in rows) + "."]
    for row in rows:
        if row["truncated"]:
            lines.append(f"{row['task']}: {row['truncated']} contexts were cut on the left to fit the model.")
        if row["unread"]:
            lines.append(f"{row['task']}: no answer could be read from {row['unread']} responses.")
    return lines
