"""What would an adaptive scan have decided? A stored full scan replayed in many random orders of its prompts.

    python benchmarks/adaptive_orders.py                            # bundled model: makes its head grid first
    python benchmarks/adaptive_orders.py --store results            # every complete head, MLP and path scan in it
    python benchmarks/adaptive_orders.py --store results --run 255c23c80468 --orders 100

The full scan knows the truth: the drop of ``head_effects`` over all operations, for paths the mean of -effect, clipped
to -100 to 100 per cent. Prints one JSON line per run and threshold: cells (a node on a prompt) saved, false decisions,
and how often intervals hold the truth. See docs/statistics.md. Needs no GPU and, with a store, no model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb
import numpy as np

from mathinterp.experiments.adaptive.betting import FloatArray
from mathinterp.experiments.adaptive.judge import ABOVE, OPEN, SAME, Rule, accuracy_weights, judge, prompt_order
from mathinterp.experiments.adaptive.looks import looks
from mathinterp.store import Store

Figures = dict[str, float | int | str]
COVERED_ORDERS = 100  # of which intervals are computed, too
ABLATED = """
    SELECT node, layer, head, prompt_id, operation, n, (fell - rose) / n AS value
    FROM ablated_prompts WHERE run_id = $run ORDER BY node, layer, head, prompt_id
"""
PATHS = """
    SELECT node, layer, head, s.prompt_id, p.operation, 1 AS n, -least(greatest(effect::DOUBLE, -1), 1) AS value
    FROM path_scan AS s JOIN run_records AS r USING (run_id)
    JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id
    WHERE run_id = $run ORDER BY node, layer, head, prompt_id
"""
TRUTHS = {
    "heads": "SELECT drop FROM head_effects WHERE run_id = $run AND operation = 'all' ORDER BY layer, head",
    "mlps": "SELECT drop FROM mlp_effects WHERE run_id = $run AND operation = 'all' ORDER BY layer",
    "paths": "SELECT -mean FROM path_effects WHERE run_id = $run AND operation = 'all' ORDER BY node, layer, head",
}


@dataclass(frozen=True)
class Grid:
    """A complete scan: the effect of each node on each prompt, the prompts' weights, and each node's true mean."""

    run: str
    scan: str
    model: str
    values_NP: FloatArray
    weights_P: FloatArray
    truth_N: FloatArray
    view_N: FloatArray  # what the scan's own view says: of paths, without clipping


def read_grid(connection: duckdb.DuckDBPyConnection, run: str, scan: str, model: str) -> Grid:
    """Rows of a run as a grid; exits unless there is exactly one value for each node and prompt."""
    query = PATHS if scan == "paths" else ABLATED
    columns = connection.execute(query, {"run": run}).fetchnumpy()
    prompts = len(np.unique(columns["prompt_id"]))
    if not prompts or len(columns["value"]) % prompts:
        raise SystemExit(f"run {run} has no complete grid of nodes and prompts")
    values_NP = np.asarray(columns["value"], float).reshape(-1, prompts)
    ids_NP = columns["prompt_id"].reshape(-1, prompts)
    assert (ids_NP == ids_NP[0]).all()
    units, operations = map(int, columns["n"][:prompts]), map(str, columns["operation"][:prompts])
    weights_P = accuracy_weights(list(units), list(operations))
    truth_N = values_NP @ weights_P / weights_P.sum()
    view_N = np.array(connection.execute(TRUTHS[scan], {"run": run}).fetchall(), float)[:, 0]
    if scan != "paths":
        np.testing.assert_allclose(truth_N, view_N, atol=1e-9)  # decided is what the view states
    return Grid(run, scan, model, values_NP, weights_P, truth_N, view_N)


def replay(grid: Grid, points: float, fdr: float, orders: int) -> Figures:
    """Figures of one threshold over ``orders`` random orders."""
    rule = Rule(points / 100, fdr)
    nodes, prompts = grid.values_NP.shape
    ends = looks(prompts, rule)
    above_N = grid.truth_N > rule.threshold + SAME
    rows = []
    covered = []
    for seed in range(orders):
        order_P = prompt_order(grid.weights_P, seed)
        found = judge(rule, grid.values_NP[:, order_P], ends, len(ends), grid.weights_P[order_P])
        called_N = found.decision_N == ABOVE
        rows.append(
            {
                "used": found.used_N.sum(), "false": (called_N != above_N).sum(), "exact": found.exact_N.sum(),
                "open": (found.decision_N == OPEN).sum(),
                "false_above": (called_N & ~above_N).sum() / max(called_N.sum(), 1),
                "false_not": (~called_N & above_N).sum() / max((~called_N).sum(), 1),
                "looks": len(np.unique(found.used_N[~found.exact_N])),
            }
        )  # fmt: skip
        if seed < COVERED_ORDERS:
            inside_N = (found.low_N <= grid.truth_N + 1e-9) & (grid.truth_N <= found.high_N + 1e-9)
            covered.append(inside_N.mean())
    each = {name: np.array([row[name] for row in rows], float) for name in rows[0]}
    return {
        "run": grid.run, "scan": grid.scan, "model": grid.model, "nodes": nodes, "prompts": prompts,
        "threshold_points": points, "fdr": fdr, "orders": orders, "truly_above": int(above_N.sum()),
        "view_differs": int((above_N != (grid.view_N > rule.threshold + SAME)).sum()),
        "closest_points": round(float(np.abs(grid.truth_N - rule.threshold).min()) * 100, 4),
        "cells_saved_times": round(nodes * prompts / float(each["used"].mean()), 2),
        "cells_saved_times_worst": round(nodes * prompts / float(each["used"].max()), 2),
        "false_decisions_mean": float(each["false"].mean()), "false_decisions_max": int(each["false"].max()),
        "fdr_above": float(each["false_above"].mean()), "fdr_not_above": float(each["false_not"].mean()),
        "undecided": int(each["open"].max()), "exact_mean": round(float(each["exact"].mean()), 2),
        "looks": len(ends), "first_look": ends[0], "interval_coverage": round(float(np.mean(covered)), 4),
    }  # fmt: skip


def grids(store: Store, run: str | None) -> Iterator[Grid]:
    """The finished head, MLP and path scans of a store, or one run of it."""
    connection = store.connect()
    known = connection.execute(
        "SELECT run_id, scan, model FROM runs WHERE scan IN ('heads', 'mlps', 'paths') AND status = 'finished'"
        " AND coalesce(run_id = $run, true) ORDER BY scan, run_id",
        {"run": run},
    ).fetchall()
    if not known:
        raise SystemExit("there is no such finished scan of heads, MLPs or paths")
    for run_id, scan, model in known:
        yield read_grid(connection, run_id, scan, model)


def main() -> None:
    """Replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="of full scans; without it, the bundled model's heads are scanned anew")
    parser.add_argument("--run", help="one run of the store; all by default")
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[10, 5, 2], help="points; paths: per cent")
    parser.add_argument("--fdr", type=float, default=0.05)
    parser.add_argument("--json", action="store_true", help="one JSON object with all lines at the end")
    asked = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        if asked.store is None:
            scan = [sys.executable, "-m", "mathinterp", "scan", "heads", "--store", folder, "--quiet"]
            subprocess.run(scan, check=True, stdout=subprocess.DEVNULL)
        for grid in grids(Store(asked.store or folder), asked.run):
            for points in asked.thresholds:
                lines.append(replay(grid, points, asked.fdr, asked.orders))
                print(json.dumps(lines[-1]), flush=True)
    if asked.json:
        print(json.dumps({"replays": lines}))


if __name__ == "__main__":
    main()
