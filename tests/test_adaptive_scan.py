"""Adaptive scans in this process: rows and verdicts of the slow twin, whatever happens on the way; what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mathinterp as mi
from mathinterp.cluster.replica import Replica
from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import ranking_from
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.face import Run
from mathinterp.store import Store
from tests.adaptive_case import cells, model, prompts, twin

SCANS = [
    Heads(decide=20),
    Heads(decide=20, fdr=0.2, order_seed=5, scoring="first_token"),
    Heads(decide=12, scoring="exact_match", heads=["0.0", "0.2", "1.3", "2.1"]),
    Heads(decide=10, ablation="dataset_mean"),
    Heads(decide=10, ablation="mean"),
    Heads(decide=10, ablation="resample", engine="plain"),
    Mlps(decide=30),
]


def run(scan: Any, store: Path, asked: Any = None) -> Run:
    return mi.run(scan, model(), list(asked or prompts()), store=str(store), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: f"{scan.name} {scan.ablation} {scan.scoring} {scan.decide}")
def test_rows_and_verdicts_are_those_of_the_full_scan_judged(scan: Any, tmp_path: Path) -> None:
    expected, found = twin(scan, tmp_path / "twin", prompts()), run(scan, tmp_path / "adaptive")
    rows = cells(found, scan.node_table)
    assert set(zip(rows["layer"], rows["head"], rows["prompt_id"], strict=True)) == expected.cells
    decisions = found.table("decisions").sort_values(["layer", "head"]).fillna({"head": -1})
    assert [*zip(decisions["layer"], decisions["head"], strict=True)] == expected.nodes
    verdicts = expected.verdicts
    words = {1: "above", -1: "not above"}
    assert [*decisions["decision"]] == [words[decision] for decision in verdicts.decision_N]
    assert 0 < (decisions["decision"] == "above").sum() < len(decisions), "the case shows both"
    assert decisions["prompts_used"].min() < len(prompts()), "some stop early"
    for column, values in {
        "prompts_used": verdicts.used_N, "prompts_run": verdicts.used_N, "exact": verdicts.exact_N,
        "e_above": verdicts.e_above_N, "e_below": verdicts.e_below_N, "estimate": verdicts.estimate_N,
        "low": verdicts.low_N, "high": verdicts.high_N,
    }.items():  # fmt: skip
        np.testing.assert_allclose(decisions[column].to_numpy(float), values.astype(float), rtol=1e-12, err_msg=column)


@pytest.mark.slow
@pytest.mark.parametrize("scan", SCANS[:1] + SCANS[3:], ids=lambda scan: f"{scan.name} {scan.ablation}")
def test_the_rows_are_those_of_an_undisturbed_full_scan(scan: Any, tmp_path: Path) -> None:
    full = cells(run(scan.whole(), tmp_path), scan.node_table)
    own = cells(run(scan, tmp_path), scan.node_table)
    key = ["layer", "head", "prompt_id", "position"]
    both = own.merge(full, on=key, suffixes=("", "_full"), validate="one_to_one")
    assert len(both) == len(own) > 0
    assert (both["correct"] == both["correct_full"]).all()
    assert (both["predicted_id"] == both["predicted_id_full"]).all()
    np.testing.assert_allclose(both["logprob"], both["logprob_full"], rtol=0, atol=1e-6)  # stored in float32
    base = run(scan, tmp_path).table("baseline")
    assert not base.duplicated(["prompt_id", "position"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 3, 6, 9])
def test_a_run_that_is_stopped_anywhere_goes_on_with_the_same_rows(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(SCANS[0], tmp_path / "undisturbed")
    written, compute = [], Replica.run

    def stops(replica: Replica, shard: Any) -> Any:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(shard.key)
        return compute(replica, shard)

    monkeypatch.setattr(Replica, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        run(SCANS[0], tmp_path / "stopped")
    store = mi.open_store(tmp_path / "stopped")
    assert [*store.sql("SELECT status FROM runs")["status"]] == ["unfinished"]
    monkeypatch.setattr(Replica, "run", compute)
    resumed = run(SCANS[0], tmp_path / "stopped")
    assert resumed.ended.reused == after
    assert resumed.ended.done == undisturbed.ended.done - after
    for table in ("head_scan", "baseline", "decisions"):
        mine, theirs = (r.table(table).drop(columns="run_id") for r in (resumed, undisturbed))
        order = [name for name in ("layer", "head", "prompt_id", "position") if name in mine]
        mine, theirs = (t.sort_values(order).reset_index(drop=True) for t in (mine, theirs))
        pd.testing.assert_frame_equal(mine, theirs)
    assert run(SCANS[0], tmp_path / "stopped").ended.done == 0


@pytest.mark.slow
def test_a_file_that_was_lost_is_computed_again_and_judged_again(tmp_path: Path) -> None:
    first = run(SCANS[0], tmp_path)
    before = first.table("decisions")
    lost = sorted(tmp_path.glob("head_scan/*/shard-*.parquet"))[1]
    lost.unlink()
    again = run(SCANS[0], tmp_path)
    assert again.ended.done == 2, "the shard and the decisions"
    assert lost.exists()
    pd.testing.assert_frame_equal(before, again.table("decisions"))


@pytest.mark.slow
def test_rows_that_are_not_of_their_shard_are_refused(tmp_path: Path) -> None:
    first = run(SCANS[0], tmp_path)
    (tmp_path / f"decisions/run_id={first.id}/shard-00000.parquet").unlink()
    rows = Store(tmp_path).arrow("SELECT layer, head, prompt_id, position, correct, logprob, logit, predicted_id"
                                 " FROM head_scan ORDER BY layer DESC, head LIMIT 90")  # fmt: skip
    Store(tmp_path).write_shard(first.id, "head_scan", 0, rows, {})
    record = tmp_path / "runs" / f"{first.id}.json"
    kept = json.loads(record.read_text())
    kept["files"] = {}
    record.write_text(json.dumps(kept))
    with pytest.raises(UserError, match="head_scan/00000 are not those that it is said to have"):
        run(SCANS[0], tmp_path)


@pytest.mark.slow
def test_adaptive_runs_are_in_no_view_of_effects(tmp_path: Path) -> None:
    adaptive = run(SCANS[0], tmp_path)
    for view in ("head_effects", "head_operations", "head_rankings", "paper_a_table1", "ablated_prompts"):
        assert len(adaptive.table(view)) == 0, view
    assert len(adaptive.table("head_decisions")) == 12
    assert "run_id" in adaptive.table("mlp_decisions").columns
    assert len(adaptive.table("mlp_decisions")) == 0
    with pytest.raises(UserError, match="that is no ranking"):
        ranking_from(adaptive.store, adaptive.id)
    full = run(SCANS[0].whole(), tmp_path)
    assert len(full.table("head_effects")) == 3 * 12
    latest = full.store.sql("SELECT run_id, adaptive FROM latest_runs ORDER BY adaptive")
    assert [*latest["run_id"]] == [full.id, adaptive.id]


@pytest.mark.slow
def test_the_summary_says_how_many_after_how_little(tmp_path: Path) -> None:
    found = run(SCANS[0], tmp_path)
    table = found.table("decisions")
    share = table["prompts_run"].sum() / table["cells"].sum()
    above = (table["decision"] == "above").sum()
    assert found.summary.data["verdict"] == (
        f"{above} heads drop by more than 20 points, {12 - above} do not, at 5 % FDR, after {100 * share:.2g} % of the"
        " cells."
    )
    assert found.summary.data["cells_run"] == table["prompts_run"].sum()
    assert len(found.summary.data["above"]) == above
    assert found.figure() is not None


@pytest.mark.parametrize("value", [0, -1, 100, 1000, float("nan"), float("inf"), True])
def test_thresholds_that_mean_nothing_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="`decide`"):
        Heads(decide=value)


@pytest.mark.parametrize("changes", [{"fdr": 0}, {"fdr": 1}, {"fdr": float("nan")}, {"order_seed": -1}])
def test_rates_and_seeds_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"`{next(iter(changes))}`"):
        Heads(decide=5, **changes)
    with pytest.raises(UserError):
        Heads(**changes)


def test_a_full_scan_keeps_its_parameters() -> None:
    assert not {"decide", "fdr", "order_seed"} & Heads().parameters().keys()
    assert replace(Heads(decide=3), decide=None) == Heads() == Heads(decide=3, fdr=0.1, order_seed=4).whole()


@pytest.mark.slow
def test_one_prompt_is_a_population(tmp_path: Path) -> None:
    found = run(SCANS[0], tmp_path, prompts()[1:2])
    assert set(found.table("decisions")["prompts_used"]) == {1}
    assert found.table("decisions")["exact"].all()


@pytest.mark.parametrize("scan", [SCANS[0], SCANS[-1]], ids=lambda scan: scan.name)
def test_plan_gives_the_full_grid_as_the_most_it_can_be(scan: Any) -> None:
    bound, full = (mi.plan(each, model(), list(prompts())) for each in (scan, scan.whole()))
    assert bound is not None
    assert full is not None
    assert (bound.at_most, full.at_most) == (True, False)
    assert (bound.flops, bound.rows, bound.evaluations) == (full.flops, full.rows, full.evaluations)
    assert "depends on the data" in str(bound)
    assert "depends on the data" not in str(full)
