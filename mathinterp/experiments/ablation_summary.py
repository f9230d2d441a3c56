"""What an ablation scan says, from the stored rows alone: top nodes, a verdict on sparsity, queries to go on with.

Knows the views of head and MLP scans; knows nothing about models or how rows were computed.
"""

from collections.abc import Mapping, Sequence

from mathinterp.experiments.reach import noise_warnings, prompts_of, reach_warnings, rough_warnings, unrankable
from mathinterp.experiments.results import SIGNIFICANT, Results, Row, Shown, Summary, per_operation
from mathinterp.experiments.stability import stability_lines
from mathinterp.experiments.thin_means import thin_mean_warnings

COSTLY, NEGLIGIBLE = 10, 2  # points of accuracy: paper A counts heads that cost 10 or more, and under 2
NATS = "logprob_change"
DIFFERENCES = "Largest losses of the logit difference, answer minus distractor (95 % interval)"
EFFECTS = "SELECT * FROM logit_difference_effects WHERE run_id = $run"
UNITS = {"accuracy": "%", "drop": "points", "low": "points", "high": "points", "relative": "%"}


def summarize_ablation(
    results: Results, view: str, node: str, word: str, queries: Sequence[str] = (), top: int = 3, columns: int = 5
) -> Summary:
    """Summarize a scan that ablates one node at a time; where accuracy ranks nothing, by changes of log-probability.

    Args:
        view: of effects: a row a node and operation.
        node: SQL of a node's name.
        word: what a node is called, in the singular.
        queries: more SQL to go on with.
        top: nodes shown per operation.
        columns: nodes whose accuracies are shown side by side (paper A, Table 1).
    """
    effects = f"(SELECT {node} AS node, * FROM {view} WHERE run_id = $run)"
    cells = results.rows(f"SELECT operation, node, accuracy, baseline_accuracy, drop, sure, {NATS} FROM {effects}")
    baseline = {row["operation"]: row["baseline_accuracy"] for row in cells}
    operations = sorted(baseline, key=lambda operation: (operation != "all", operation))
    baseline = {operation: baseline[operation] for operation in operations}
    why = unrankable(results, view)
    ranked = _ranked(results, effects, top, list(why))
    verdict = "" if "all" in why else _verdict(cells, word)
    stable = [] if "all" in why else stability_lines(results)
    doubts = [_doubt(word, why)] if why else []
    differences = _differences(results, node, top)
    prompts, tests = prompts_of(results), len({row["node"] for row in cells})
    return Summary(
        parts=[
            *doubts,
            _side_by_side(cells, operations, word, columns, by_nats="all" in why),
            *_tables(ranked, why),
            *([Shown(DIFFERENCES, per_operation(differences))] if differences else []),
            verdict,
            *stable,
        ],
        data={
            "baseline": baseline,
            "verdict": verdict or " ".join(doubts),
            "top": ranked,
            "stability": stable,
            "accuracy_ranks_nothing": why,
            **({"logit_differences": differences} if differences else {}),
        },
        queries=[
            results.query(
                f"SELECT * FROM {view} WHERE run_id = $run AND operation = 'all' ORDER BY"
                f" {NATS + ' LIMIT 10' if 'all' in why else 'drop DESC LIMIT 10'}"
            ),
            *([results.query(f"{EFFECTS} AND operation = 'all' ORDER BY change LIMIT 10")] if differences else []),
            *queries,
        ],
        warnings=[
            *thin_mean_warnings(results.store, results.run_id),
            *noise_warnings(results),
            *rough_warnings(prompts),
            *([] if "all" in why else reach_warnings(prompts, tests, word)),
        ],
    )


def _ranked(results: Results, effects: str, top: int, by_nats: Sequence[str]) -> list[Row]:
    """The first nodes of each operation: by drop, or of those ``by_nats`` by loss of log-probability."""
    return results.rows(
        f"""SELECT operation, node, accuracy, drop, drop_low AS low, drop_high AS high, relative_drop AS relative,
               q_value AS q, sure, {NATS}
            FROM (SELECT *, CASE WHEN operation IN (SELECT unnest($by_nats)) THEN -{NATS} ELSE drop END AS harm
                  FROM {effects})
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY harm DESC, node) <= {top}
            ORDER BY operation = 'all' DESC, operation, harm DESC, node""",
        by_nats=list(by_nats) or [""],
    )


def _differences(results: Results, node: str, top: int) -> list[Row]:
    """The nodes of each operation whose ablation favours the distractors most; none where there are no distractors."""
    return results.rows(
        f"""SELECT operation, {node} AS node, n, baseline, ablated, change, change_low AS low, change_high AS high
            FROM ({EFFECTS})
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY change, layer, head) <= {top}
            ORDER BY operation = 'all' DESC, operation, change, layer, head"""
    )


def _side_by_side(cells: Sequence[Row], operations: Sequence[str], word: str, columns: int, *, by_nats: bool) -> Shown:
    """A row per operation and a column for each of the nodes that matter most over all of them."""
    worst, sign = (NATS, 1) if by_nats else ("drop", -1)
    overall = sorted(
        (row for row in cells if row["operation"] == "all"), key=lambda row: (sign * row[worst], row["node"])
    )
    leaders = [row["node"] for row in overall[:columns]]
    found = {(row["operation"], row["node"]): row for row in cells}
    rows: list[Row] = []
    for operation in operations:
        row: Row = {"operation": operation}
        if not by_nats:
            row["original"] = found[operation, leaders[0]]["baseline_accuracy"]
        rows.append(row | {name: found[operation, name][NATS if by_nats else "accuracy"] for name in leaders})
    if by_nats:
        return Shown(f"Change of log-probability (nats per unit), one {word} ablated", per_operation(rows))
    return Shown(f"Accuracy (%), one {word} ablated", per_operation(rows), dict.fromkeys(["original", *leaders], ""))


def _tables(ranked: Sequence[Row], why: Mapping[str, str]) -> list[Shown]:
    by_drop = [row for row in per_operation(ranked) if row["operation"] not in why]
    by_nats = [row for row in per_operation(ranked) if row["operation"] in why]
    shown = []
    if by_drop:
        rows = [{name: value for name, value in row.items() if name != NATS} for row in by_drop]
        shown.append(Shown("Largest drops (95 % interval, relative to the original, BH q)", rows, UNITS))
    if by_nats:
        rows = [{"operation": row["operation"], "node": row["node"], f"{NATS} (nats)": row[NATS]} for row in by_nats]
        shown.append(Shown("Largest losses of log-probability, where accuracy ranks nothing", rows))
    return shown


def _doubt(word: str, why: Mapping[str, str]) -> str:
    """Why accuracy is not shown, operation by operation."""
    single = {operation: reason for operation, reason in why.items() if operation != "all"}
    reasons = "; ".join(f"{operation}: {reason}" for operation, reason in single.items())
    return f"Accuracy cannot rank {word}s here, so changes of log-probability are shown instead ({reasons})."


def _verdict(cells: Sequence[Row], word: str) -> str:
    overall = [row for row in cells if row["operation"] == "all"]
    points = [(100 * row["drop"], row["sure"]) for row in overall if row["drop"] is not None]
    costly = [sure for drop, sure in points if drop > COSTLY]
    return (
        f"{len(costly)} of {len(overall)} {word}s cost more than {COSTLY} points of accuracy over all operations"
        f" ({sum(map(bool, costly))} of them surely, q < {SIGNIFICANT});"
        f" {sum(drop < NEGLIGIBLE for drop, _ in points)} cost less than {NEGLIGIBLE} points."
    )
