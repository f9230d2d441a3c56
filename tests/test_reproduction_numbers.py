"""Numbers that a reproduction reads from a store, a second time in plain Python, and the queries that read them."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mathinterp.store import Store
from mathinterp.workflows.papers import ITEMS
from mathinterp.workflows.papers.item import Item
from mathinterp.workflows.papers.queries import costly_heads
from tests.explorer_pages import HEADS, PROMPTS, answered, head_store
from tests.small_store import fill
from tests.statistics_twin import mean_variance, part_of

OPERATIONS = ("add", "sub", "mul")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return head_store(tmp_path_factory.mktemp("numbers"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("item", [item for item in ITEMS if item.sql], ids=lambda item: item.id)
def test_a_query_that_is_asked_after_hours_of_work_is_no_broken_one(item: Item, store: Store) -> None:
    given = dict.fromkeys(item.stages, "none") | {"units": list(item.units)}
    asked = f"SELECT what, unit, rank, value, low, high, n FROM ({item.sql})"
    assert store.rows(f"EXPLAIN {asked}", {name: given[name] for name in item.stages})


@pytest.mark.slow
def test_costly_heads_are_counted_with_an_interval_for_all_of_them_together(tmp_path: Path) -> None:
    store, run = head_store(tmp_path)
    was = {(row["prompt_id"], row["position"]): row["correct"] for row in store.rows("SELECT * FROM baseline")}
    least = most = count = 0
    for layer, head in HEADS:
        rows = store.rows(f"SELECT * FROM head_scan WHERE layer = {layer} AND head = {head}")
        parts = []
        for operation in OPERATIONS:
            names = [item.prompt.prompt_id for item in PROMPTS if item.prompt.operation == operation]
            own = [[row for row in rows if row["prompt_id"] == name] for name in names]
            lost = [sum(was[row["prompt_id"], row["position"]] and not row["correct"] for row in of) for of in own]
            won = [sum(row["correct"] and not was[row["prompt_id"], row["position"]] for row in of) for of in own]
            parts.append(part_of(lost, won, [2] * len(own)))
        drop = float(np.mean([part.drop for part in parts]))
        p = 2 * stats.norm.sf(abs(drop - 0.1) / np.sqrt(mean_variance(parts, 0.1)))
        sure = p * len(HEADS) < 0.05
        count += drop >= 0.1
        least += drop >= 0.1 and sure
        most += drop >= 0.1 or not sure
    assert least < count <= most
    row = store.rows(costly_heads("run"), {"run": run})[0]
    assert (row["value"], row["low"], row["high"], row["n"]) == (count, least, most, 3)


@pytest.mark.slow
def test_among_hundreds_of_heads_that_cost_less_none_is_surely_costly(tmp_path: Path) -> None:
    """Each costs 9.9 points in truth; with an interval for each by itself some lie above 10 by chance."""
    rng, prompts = np.random.default_rng(1), [answered(i, "add", f"{i} plus 1 equals", ("1",)) for i in range(200)]
    names = [item.prompt.prompt_id for item in prompts]
    heads = [
        {"layer": 0, "head": head, "prompt_id": name, "correct": bool(hit)}
        for head in range(300)
        for name, hit in zip(names, rng.random(200) >= 0.099, strict=True)
    ]
    store = Store(tmp_path)
    run = fill(store, prompts, [{"prompt_id": name} for name in names], heads)
    alone = store.rows(
        f"SELECT count_if(drop_low >= 0.1) AS n FROM head_effects WHERE run_id = '{run}' AND operation = 'all'"
    )
    assert alone[0]["n"] > 0
    row = store.rows(costly_heads("run"), {"run": run})[0]
    assert (row["low"], row["high"]) == (0, 300)
    assert 0 < row["value"] < 300
