"""What a finished MLP probe says: the curves, and where the answer overtakes the operands (paper B, section 4.2)."""

from collections.abc import Sequence

from mathinterp.experiments.kept import kept_line
from mathinterp.experiments.results import Results, Row, Shown, Summary


def summarize(results: Results) -> Summary:
    """Over all operations, layer by layer; and per operation the first layer from which on the answer is closest."""
    curve = results.rows(
        """SELECT layer, in_a, in_b, in_c, out_a, out_b, out_c, difference_a, difference_b, difference_c, leader
           FROM paper_b_mlp_probe WHERE run_id = $run AND operation = 'all' ORDER BY layer"""
    )
    found = results.rows(
        """SELECT operation, min(layer) FILTER (settled) AS layer FROM paper_b_mlp_probe
           WHERE run_id = $run GROUP BY operation ORDER BY operation = 'all' DESC, operation"""
    )
    overtakes = {row["operation"]: row["layer"] for row in found}
    verdict = _verdict(overtakes)
    others = _others(results)
    return Summary(
        parts=[
            *(
                [Shown("Mean cosine with operand A, operand B and answer C, all operations", curve)]
                if _arithmetic(curve)
                else []
            ),
            *([Shown("Mean cosine of the MLPs' output, all operations (c: the answer)", others)] if others else []),
            kept_line(results),
            verdict,
        ],
        data={"curve": curve, "others": others, "overtakes": overtakes, "verdict": verdict},
        queries=[
            results.query(
                "SELECT * FROM paper_b_mlp_probe WHERE run_id = $run ORDER BY operation = 'all', operation, layer"
            ),
            results.query(
                "SELECT layer, target, mlp_out, mlp_out_low, mlp_out_high FROM mlp_probe_curve"
                " WHERE run_id = $run AND operation = 'all' ORDER BY layer, target"
            ),
        ],
    )


def _arithmetic(curve: Sequence[Row]) -> bool:
    return any(row["out_a"] is not None for row in curve)


def _others(results: Results) -> list[Row]:
    """Layer by layer, mean cosines with the answer and what is no operand, if the run has such targets."""
    found = results.rows(
        """SELECT layer, target, mlp_out FROM mlp_probe_curve WHERE run_id = $run AND operation = 'all'
           AND target NOT IN ('a', 'b') ORDER BY layer, target = 'c' DESC, target"""
    )
    rows: dict[int, Row] = {}
    for row in found:
        rows.setdefault(row["layer"], {"layer": row["layer"]})[row["target"]] = row["mlp_out"]
    return list(rows.values()) if any(row["target"] != "c" for row in found) else []


def _verdict(overtakes: dict[str, int | None]) -> str:
    overtakes = {"all": overtakes["all"]} if len(overtakes) == 2 else overtakes  # a single operation has the same
    places = ", ".join(
        f"{operation} {'never' if layer is None else f'from layer {layer}'}" for operation, layer in overtakes.items()
    )
    return f"The MLP's output is closest to the answer's first token, and stays so to the last probed layer: {places}."
