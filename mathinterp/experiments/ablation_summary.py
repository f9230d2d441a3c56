"""What a finished run says, from the stored rows alone: top nodes, a verdict on sparsity, queries to go on with.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from dataclasses import dataclass
from typing import Any

from mathinterp.store import Store

COSTLY, NEGLIGIBLE = 10, 2  # points of accuracy: paper A counts heads that cost 10 or more, and under 2
SIGNIFICANT = 0.05  # Benjamini-Hochberg q


@dataclass(frozen=True)
class AblationSummary:
    """The answer of a head or MLP scan.

    baseline: operation -> accuracy (fraction) of the unedited model.
    top: per operation the nodes that cost most (rows of head_effects or mlp_effects).
    table: accuracy (%) per operation under each of the nodes that cost most over all operations.
    """

    baseline: dict[str, float]
    top: list[dict[str, Any]]
    table: list[dict[str, Any]]
    verdict: str
    queries: list[str]


def summarize_ablation(store: Store, run_id: str, node: str, top: int = 3, columns: int = 5) -> AblationSummary:
    """Summarize a head scan (``node="head"``) or an MLP scan (``node="mlp"``).

    Args:
        top: nodes shown per operation.
        columns: nodes whose accuracies are shown side by side (paper A, Table 1).
    """
    effects, name = ("head_effects", "layer || '.' || head") if node == "head" else ("mlp_effects", "'mlp ' || layer")
    connection = store.connect(effects)

    def rows(sql: str) -> list[dict[str, Any]]:
        return connection.sql(sql).to_arrow_table().to_pylist()

    connection.execute(
        f"CREATE TEMP TABLE effects AS SELECT {name} AS node, * FROM {effects} WHERE run_id = '{run_id}'"
    )
    baseline = {
        row["operation"]: row["accuracy"]
        for row in rows("SELECT operation, max(baseline_accuracy) AS accuracy FROM effects GROUP BY ALL")
    }
    ranked = rows(
        f"""SELECT operation, node, 100 * accuracy AS "accuracy", 100 * drop AS "drop",
               100 * drop_low AS "low", 100 * drop_high AS "high", 100 * relative_drop AS "relative", q_value AS q
            FROM effects
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY drop DESC, node) <= {top}
            ORDER BY operation = 'all' DESC, operation, drop DESC, node"""
    )
    leaders = [
        row["node"]
        for row in rows(f"SELECT node FROM effects WHERE operation = 'all' ORDER BY drop DESC, node LIMIT {columns}")
    ]
    cells = rows("SELECT operation, node, accuracy FROM effects")
    accuracies = {(row["operation"], row["node"]): row["accuracy"] for row in cells}
    operations = sorted(baseline, key=lambda operation: (operation != "all", operation))
    table = [
        {"operation": operation, "original": 100 * baseline[operation]}
        | {leader: 100 * accuracies[operation, leader] for leader in leaders}
        for operation in operations
    ]
    counts = rows(
        f"""SELECT count(*) AS n, count(*) FILTER (100 * drop > {COSTLY}) AS costly,
               count(*) FILTER (100 * drop > {COSTLY} AND q_value < {SIGNIFICANT}) AS sure,
               count(*) FILTER (100 * drop < {NEGLIGIBLE}) AS negligible
            FROM effects WHERE operation = 'all'"""
    )[0]
    queries = [
        f"SELECT * FROM {effects} WHERE run_id = '{run_id}' AND operation = 'all' ORDER BY drop DESC LIMIT 10",
    ]
    if node == "head":
        queries += [
            f"SELECT * FROM {view} WHERE run_id = '{run_id}'{limit}"
            for view, limit in (("paper_a_table1", " AND rank <= 5"), ("paper_a_table2", ""), ("paper_a_table3", ""))
        ]
    return AblationSummary(baseline, ranked, table, _verdict(counts, node), queries)


def _verdict(counts: dict[str, int], node: str) -> str:
    word = "heads" if node == "head" else "MLPs"
    return (
        f"{counts['costly']} of {counts['n']} {word} cost more than {COSTLY} points of accuracy over all operations"
        f" ({counts['sure']} of them with q < {SIGNIFICANT});"
        f" {counts['negligible']} cost less than {NEGLIGIBLE} points."
    )
