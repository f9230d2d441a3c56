"""benchmarks/adaptive_orders.py: what it reads from a store is what the views state, and its figures add up."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.adaptive_orders import grids, replay
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.small_store import FINGERPRINT, fill, open_run, prompt

PROMPTS = 120


def scanned(store: Store) -> None:
    """Heads that cost nothing, about 8 and 60 points, over operations of unlike numbers of tokens; a path scan."""
    random = np.random.default_rng(0)
    prompts = [
        prompt(f"{number:03d}", ("add", "mul")[number % 2], ("memorize",) * (1 + number % 2 * (1 + number % 3)))
        for number in range(PROMPTS)
    ]
    units = [(item.prompt.prompt_id, token.position) for item in prompts for token in item.scored]
    baseline = [{"prompt_id": name, "position": place, "correct": random.random() < 0.9} for name, place in units]
    heads: list[dict[str, Any]] = [
        {"layer": 1, "head": head, **row, "correct": row["correct"] and random.random() >= cost}
        for head, cost in enumerate((0.0, 0.08, 0.6))
        for row in baseline
    ]
    fill(store, prompts, baseline, heads)
    run = open_run(store, ["path_scan/00000"], scan="paths", parameters={"effect": "logit"})
    store.write_prompts(FINGERPRINT, prompts)
    schema = catalog().tables["path_scan"].schema
    values = dict.fromkeys(schema.names, 0.0)
    rows = [
        {**values, "node": node, "layer": 0, "head": head, "prompt_id": item.prompt.prompt_id, "effect": effect}
        for node, head, effect in (("head", 0, -0.25), ("mlp", None, -1.5))
        for item in prompts
    ]
    store.write_shard(run.run_id, "path_scan", 0, pa.Table.from_pylist(rows, schema), {"scan": "paths"})
    assert run.finish() == []


@pytest.mark.slow
def test_figures_of_stored_scans(tmp_path: Path) -> None:
    store = Store(tmp_path)
    scanned(store)
    heads, paths = grids(store, None)
    assert heads.values_NP.shape == (3, PROMPTS)
    views = store.connect().execute("SELECT drop FROM head_effects WHERE operation = 'all' ORDER BY head").fetchall()
    np.testing.assert_allclose(heads.truth_N, [drop for (drop,) in views], atol=1e-12)
    assert heads.values_NP.mean(axis=1)[2] != pytest.approx(heads.truth_N[2], abs=1e-3)  # weights matter here
    np.testing.assert_allclose(paths.truth_N, [0.25, 1])  # clipped
    np.testing.assert_allclose(paths.view_N, [0.25, 1.5])
    for grid, above in ((heads, 1), (paths, 2)):
        figures = replay(grid, 20, 0.05, orders=10)
        assert (figures["truly_above"], figures["undecided"], figures["false_decisions_max"]) == (above, 0, 0)
        assert figures["fdr_above"] == figures["fdr_not_above"] == figures["view_differs"] == 0
        assert 1 < float(figures["cells_saved_times_worst"]) <= float(figures["cells_saved_times"]) < PROMPTS
        assert float(figures["interval_coverage"]) > 0.9


@pytest.mark.slow
def test_incomplete_grids_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    prompts = [prompt("0"), prompt("1")]
    rows = [{"prompt_id": "0"}, {"prompt_id": "1"}]
    heads = [{"layer": 1, "head": 0, **row} for row in rows] + [{"layer": 1, "head": 1, **rows[0]}]
    run = fill(store, prompts, rows, heads)
    with pytest.raises(SystemExit, match=f"run {run} has no complete grid"):
        next(grids(store, run))
    with pytest.raises(SystemExit, match="no such finished scan"):
        next(grids(store, "unknown"))
