"""What an ablation scan says, from the stored rows alone: top nodes, a verdict on sparsity, queries to go on with.

Knows the views of head and MLP scans; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence

from mathinterp.experiments.results import SIGNIFICANT, Results, Row, Shown, Summary
from mathinterp.experiments.thin_means import thin_mean_warnings

COSTLY, NEGLIGIBLE = 10, 2  # points of accuracy: paper A counts heads that cost 10 or more, and under 2


def summarize_ablation(
    results: Results, view: str, node: str, word: str, queries: Sequence[str] = (), top: int = 3, columns: int = 5
) -> Summary:
    """Summarize a scan that ablates one node at a time.

    Args:
        view: of effects: a row a node and operation.
        node: SQL of a node's name.
        word: what a node is called, in the singular.
        queries: more SQL to go on with.
        top: nodes shown per operation.
        columns: nodes whose accuracies are shown side by side (paper A, Table 1).
    """
    effects = f"(SELECT {node} AS node, * FROM {view} WHERE run_id = $run)"
    cells = results.rows(f"SELECT operation, node, accuracy, baseline_accuracy, drop FROM {effects}")
    baseline = {row["operation"]: row["baseline_accuracy"] for row in cells}
    operations = sorted(baseline, key=lambda operation: (operation != "all", operation))
    baseline = {operation: baseline[operation] for operation in operations}
    ranked = results.rows(
        f"""SELECT operation, node, 100 * accuracy AS "accuracy", 100 * drop AS "drop", 100 * drop_low AS "low",
               100 * drop_high AS "high", 100 * relative_drop AS "relative", q_value AS q FROM {effects}
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY drop DESC, node) <= {top}
            ORDER BY operation = 'all' DESC, operation, drop DESC, node"""
    )
    overall = sorted((row for row in cells if row["operation"] == "all"), key=lambda row: (-row["drop"], row["node"]))
    leaders = [row["node"] for row in overall[:columns]]
    accuracies = {(row["operation"], row["node"]): row["accuracy"] for row in cells}
    table = [
        {"operation": operation, "original": 100 * baseline[operation]}
        | {leader: 100 * accuracies[operation, leader] for leader in leaders}
        for operation in operations
    ]
    verdict = _verdict(results, effects, word)
    return Summary(
        parts=[
            Shown(f"Accuracy (%), one {word} ablated", table),
            Shown("Largest drops (points, 95 % interval, relative %, BH q)", ranked),
            verdict,
        ],
        data={"baseline": baseline, "verdict": verdict, "top": ranked},
        queries=[
            results.query(
                f"SELECT * FROM {view} WHERE run_id = $run AND operation = 'all' ORDER BY drop DESC LIMIT 10"
            ),
            *queries,
        ],
        warnings=thin_mean_warnings(results.store, results.run_id),
    )


def _verdict(results: Results, effects: str, word: str) -> str:
    counts: Row = results.rows(
        f"""SELECT count(*) AS n, count(*) FILTER (100 * drop > {COSTLY}) AS costly,
               count(*) FILTER (100 * drop > {COSTLY} AND q_value < {SIGNIFICANT}) AS sure,
               count(*) FILTER (100 * drop < {NEGLIGIBLE}) AS negligible
            FROM {effects} WHERE operation = 'all'"""
    )[0]
    return (
        f"{counts['costly']} of {counts['n']} {word}s cost more than {COSTLY} points of accuracy over all operations"
        f" ({counts['sure']} of them with q < {SIGNIFICANT});"
        f" {counts['negligible']} cost less than {NEGLIGIBLE} points."
    )
