"""Adaptive path scans: decided about the pairs that the clean pass keeps, as the slow twin says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mathinterp as mi
from mathinterp.cluster.replica import Replica
from mathinterp.experiments.paths import Paths
from mathinterp.face import Run
from tests.adaptive_case import model, path_twin, prompts

SCANS = [
    Paths(decide=20),
    Paths(decide=20, freeze="all", order_seed=3),
    Paths(decide=20, freeze="none", keep_all=True),
    Paths(decide=20, receiver="2.mlp", effect="centred"),
    Paths(decide=20, freeze="none", positions="all", effect="logprob"),
]


def run(scan: Any, store: Path) -> Run:
    return mi.run(scan, model(), list(prompts()), store=str(store), progress=False)


def assert_judged(scan: Any, found: Run, folder: Path) -> None:
    expected = path_twin(scan, folder, prompts())
    rows = found.table("path_scan").fillna({"head": -1})
    assert set(zip(rows["layer"], rows["head"], rows["prompt_id"], strict=True)) == expected.cells
    assert not rows.duplicated(["layer", "head", "prompt_id"]).any()
    decisions = found.table("path_decisions").fillna({"head": -1}).sort_values(["layer", "head"])
    assert [*zip(decisions["layer"], decisions["head"], strict=True)] == expected.nodes
    assert [*decisions["node"]] == ["mlp" if head < 0 else "head" for _, head in expected.nodes]
    verdicts = expected.verdicts
    assert [*decisions["decision"]] == [{1: "above", -1: "not above"}[one] for one in verdicts.decision_N]
    assert [*decisions["prompts_used"]] == [*verdicts.used_N]
    np.testing.assert_allclose(decisions["estimate"], verdicts.estimate_N, rtol=0, atol=1e-6)
    assert set(decisions["cells"]) == {len(expected.prompt_ids)}


@pytest.mark.slow
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: f"{scan.freeze} {scan.effect} {scan.receiver}")
def test_rows_and_verdicts_are_those_of_the_full_scan_judged(scan: Any, tmp_path: Path) -> None:
    found = run(scan, tmp_path / "adaptive")
    assert_judged(scan, found, tmp_path / "twin")
    assert found.table("path_decisions")["prompts_used"].min() < len(prompts())
    for view in ("path_effects", "path_logit_differences", "attribution_effects", "head_rankings"):
        assert len(found.table(view)) == 0, view
    assert found.figure() is not None


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_run_that_is_stopped_anywhere_goes_on(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, compute = [], Replica.run

    def stops(replica: Replica, shard: Any) -> Any:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(shard.key)
        return compute(replica, shard)

    monkeypatch.setattr(Replica, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        run(SCANS[0], tmp_path / "stopped")
    monkeypatch.setattr(Replica, "run", compute)
    resumed = run(SCANS[0], tmp_path / "stopped")
    assert resumed.ended.reused == after
    assert_judged(SCANS[0], resumed, tmp_path / "twin")
