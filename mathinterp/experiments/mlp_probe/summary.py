"""What a finished MLP probe says, from the stored rows alone: the curves, and where the answer overtakes the operands.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from dataclasses import dataclass
from typing import Any

from mathinterp.store import Store


@dataclass(frozen=True)
class ProbeSummary:
    """The answer of an MLP probe.

    curve: over all operations, layer by layer (rows of paper_b_mlp_probe).
    overtakes: operation -> first layer from which on the MLP's output is closest to the answer, None where the last
        layer's is not.
    """

    curve: list[dict[str, Any]]
    overtakes: dict[str, int | None]
    verdict: str
    queries: list[str]


def summarize_probe(store: Store, run_id: str) -> ProbeSummary:
    """Summarize an MLP probe."""
    curve = store.rows(
        f"""SELECT layer, in_a, in_b, in_c, out_a, out_b, out_c, difference_a, difference_b, difference_c, leader
            FROM paper_b_mlp_probe WHERE run_id = '{run_id}' AND operation = 'all' ORDER BY layer"""
    )
    found = store.rows(
        f"""SELECT operation, min(layer) FILTER (settled) AS layer FROM paper_b_mlp_probe
            WHERE run_id = '{run_id}' GROUP BY operation ORDER BY operation = 'all' DESC, operation"""
    )
    overtakes = {row["operation"]: row["layer"] for row in found}
    queries = [
        f"SELECT * FROM paper_b_mlp_probe WHERE run_id = '{run_id}' AND operation <> 'all' ORDER BY operation, layer",
        f"SELECT layer, target, mlp_out, mlp_out_low, mlp_out_high FROM mlp_probe_curve WHERE run_id = '{run_id}'"
        " AND operation = 'all' ORDER BY layer, target",
    ]
    return ProbeSummary(curve, overtakes, _verdict(overtakes), queries)


def _verdict(overtakes: dict[str, int | None]) -> str:
    places = ", ".join(
        f"{operation} {'never' if layer is None else f'from layer {layer}'}" for operation, layer in overtakes.items()
    )
    return f"The MLP's output is closest to the answer's first digit, and stays so to the last probed layer: {places}."
