"""Full scans that take over the rows of an adaptive one: the rows of an undisturbed full scan, and of their own run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mathinterp as mi
from mathinterp.cluster.replica import Replica
from mathinterp.cluster.vital import Vital
from mathinterp.errors import UserError
from mathinterp.experiments.adaptive.reuse import CLEAN_PASSES, starting_points
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.paths import Paths
from mathinterp.face import Run
from mathinterp.store import Store
from tests.adaptive_case import model, prompts

SCANS = [
    Heads(decide=20),
    Heads(decide=12, scoring="exact_match", heads=["0.0", "0.2", "1.3", "2.1"]),
    Heads(decide=10, ablation="mean"),
    Heads(decide=10, ablation="resample", engine="plain"),
    Mlps(decide=30, order_seed=3),
    Paths(decide=20, keep_all=True),
]
KEYS = ["node", "layer", "head", "prompt_id", "position"]


def run(scan: Any, store: Path, asked: Any = None) -> Run:
    return mi.run(scan, model(), list(asked or prompts()), store=str(store), progress=False)


def rows(found: Run, table: str) -> pd.DataFrame:
    frame = found.table(table).drop(columns="run_id")
    frame["head"] = frame.get("head", pd.Series(-1, index=frame.index)).fillna(-1)
    return frame.sort_values([key for key in KEYS if key in frame]).reset_index(drop=True)


def assert_same_to_rounding(mine: pd.DataFrame, theirs: pd.DataFrame) -> None:
    assert [*mine.columns] == [*theirs.columns]
    assert len(mine) == len(theirs) > 0
    for name in mine.columns:
        if mine[name].dtype.kind == "f":
            np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=2e-6, err_msg=name)  # stored in float32
        else:
            assert (mine[name] == theirs[name]).all(), name


@pytest.fixture(params=[0.0, CLEAN_PASSES], ids=["every cell", "as counted"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Where clean passes cost nothing every cell is taken over."""
    monkeypatch.setattr("mathinterp.experiments.adaptive.reuse.CLEAN_PASSES", request.param)
    return float(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: f"{scan.name} {getattr(scan, 'ablation', '')} {scan.decide}")
def test_rows_are_those_of_an_undisturbed_full_scan(scan: Any, passes: float, tmp_path: Path) -> None:
    adaptive, full = run(scan, tmp_path), run(scan.whole(), tmp_path)
    taking = replace(scan.whole(), reuse=adaptive.id)
    found = run(taking, tmp_path)
    assert len({adaptive.id, full.id, found.id}) == 3
    for table in {scan.node_table, *({"baseline"} if scan.has_baseline else {"path_pairs", "attribution_scan"})}:
        assert_same_to_rounding(rows(found, table), rows(full, table))
    taken = found.summary.data["reused"]
    assert taken["run"] == adaptive.id
    assert 0 < taken["cells"] <= adaptive.summary.data["cells_run"]
    assert passes or taken["cells"] == adaptive.summary.data["cells_run"]
    assert f"are those of run {adaptive.id}." in str(found.summary)
    once = len(prompts()) if scan.has_baseline else 0
    assert found.ended.evaluations <= full.ended.evaluations - taken["cells"] + once
    assert run(taking, tmp_path).ended.done == 0


@pytest.mark.slow
def test_what_is_taken_over_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mathinterp.experiments.adaptive.reuse.CLEAN_PASSES", 0.0)
    adaptive = run(SCANS[0], tmp_path)
    asked, compute = [], Heads.run

    def seen(scan: Heads, state: Any, shard: Any) -> Any:
        asked.extend((*node, *shard.work["prompts"]) for node in shard.work.get("heads", []))
        return compute(scan, state, shard)

    monkeypatch.setattr(Heads, "run", seen)
    found = run(replace(SCANS[0].whole(), reuse=adaptive.id), tmp_path)
    used = adaptive.table("decisions").set_index(["layer", "head"])["prompts_run"]
    every = len(prompts())
    assert sorted(asked) == [(*node, int(count), every) for node, count in used.items() if count < every]
    old, new = (rows(each, "head_scan").set_index(KEYS[1:]) for each in (adaptive, found))
    pd.testing.assert_frame_equal(old, new.loc[old.index])


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stopped", "undisturbed"):
        adaptive = run(SCANS[0], tmp_path / name)
    scan = replace(SCANS[0].whole(), reuse=adaptive.id)
    whole, written, compute = run(scan, tmp_path / "undisturbed"), [], Replica.run

    def stops(replica: Replica, shard: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(shard.key)
        return compute(replica, shard)

    monkeypatch.setattr(Replica, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        run(scan, tmp_path / "stopped")
    monkeypatch.setattr(Replica, "run", compute)
    resumed = run(scan, tmp_path / "stopped")
    assert resumed.id == whole.id
    assert resumed.ended.reused == 3
    for table in ("head_scan", "baseline"):
        pd.testing.assert_frame_equal(rows(resumed, table), rows(whole, table))


@pytest.mark.slow
def test_reading_what_is_stored_is_no_computing_that_may_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive, read, began = run(SCANS[-2], tmp_path), Store.read_shard, []
    monkeypatch.setattr(Vital, "begin", lambda vital: began.append("begin"))
    monkeypatch.setattr(Vital, "end", lambda vital: began.append("end"))

    def slow(store: Store, *stored: str) -> Any:
        began.append("read")
        return read(store, *stored)

    monkeypatch.setattr(Store, "read_shard", slow)
    run(replace(SCANS[-2].whole(), reuse=adaptive.id), tmp_path)
    assert "begin read" not in " ".join(began)
    assert {"begin", "read"} <= set(began)


@pytest.mark.slow
def test_rounding_between_batch_shapes_is_part_of_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mathinterp.experiments.adaptive.reuse.CLEAN_PASSES", 0.0)
    adaptive = run(SCANS[0], tmp_path)
    monkeypatch.setattr(
        "mathinterp.experiments.adaptive.blocks.noise_between",
        lambda wide, block: {
            "max_logprob_deviation": 9.0, "max_logit_deviation": 0.0, "flipped_predictions": 1, "answers": 2
        },
    )  # fmt: skip
    found = run(replace(SCANS[0].whole(), reuse=adaptive.id), tmp_path)
    (note,) = found.sql("SELECT noise FROM noise_shares WHERE run_id = $run")["noise"]
    assert note == 0.5


@pytest.mark.slow
def test_what_cannot_be_taken_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive, full = run(SCANS[0], tmp_path), run(Heads(), tmp_path)
    for scan, asked, what in [
        (Heads(reuse="0" * 12), None, "there is no run 000000000000"),
        (Heads(reuse=full.id), None, "is no adaptive heads scan"),
        (Mlps(reuse=adaptive.id), None, "is no adaptive mlps scan"),
        (Heads(reuse=adaptive.id, scoring="first_token"), None, "differs in `scoring`"),
        (Heads(reuse=adaptive.id, layers="0"), None, "differs in `layers`"),
        (Heads(reuse=adaptive.id), prompts()[:50], "is of other prompts"),
    ]:
        with pytest.raises(UserError, match=what):
            run(scan, tmp_path, asked)
    lost = sorted(tmp_path.glob(f"head_scan/run_id={adaptive.id}/*"))[-1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(UserError, match="is not finished"):
        run(Heads(reuse=adaptive.id), tmp_path)
    lost.write_bytes(content)
    for changes in ({"reuse": "../x"}, {"reuse": 3}, {"reuse": adaptive.id, "decide": 5}):
        with pytest.raises(UserError, match="`reuse`"):
            Heads(**changes)


@pytest.mark.parametrize("seed", range(8))
def test_starting_points_are_the_cheapest_of_all_choices(seed: int) -> None:
    random = np.random.default_rng(seed)
    ends = [40, 56, 80, 120, 200, 400][: 2 + seed % 5]
    stops = {(n, 0): int(random.choice(ends)) for n in range(int(random.integers(2, 200)))}
    weights = {node: float(random.uniform(0.1, 1)) for node in stops}

    def cost(points: list[int]) -> float:
        begins = [max(point for point in points if point <= stop) for stop in stops.values()]
        edits = sum(w * (400 - begin) for w, begin in zip(weights.values(), begins, strict=True))
        return edits + CLEAN_PASSES * sum(400 - point for point in points)

    present = sorted(set(stops.values()))
    choices = [
        [present[0], *(end for bit, end in enumerate(present[1:]) if mask >> bit & 1)]
        for mask in range(2 ** (len(present) - 1))
    ]
    assert cost(starting_points(stops, weights, 400)) == pytest.approx(min(map(cost, choices)))


@pytest.mark.slow
def test_a_run_that_decided_nothing_early_is_taken_over_as_a_whole(tmp_path: Path) -> None:
    scan = Mlps(decide=5, layers="0")
    adaptive, full = (run(each, tmp_path, prompts()[:24]) for each in (scan, scan.whole()))
    found = run(replace(scan.whole(), reuse=adaptive.id), tmp_path, prompts()[:24])
    assert found.summary.data["reused"]["cells"] == found.summary.data["reused"]["total"] == 24
    for table in ("mlp_scan", "baseline"):
        assert_same_to_rounding(rows(found, table), rows(full, table))


@pytest.mark.slow
def test_pairs_are_those_of_the_adaptive_run_whatever_a_near_tie_says_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mathinterp.experiments.paths import rows as path_rows

    adaptive, scorer = run(Paths(decide=20), tmp_path), path_rows.Scorer
    pairs = adaptive.table("path_pairs").set_index("prompt_id")["kept"]
    assert not pairs["p0"]
    assert pairs["p1"]

    def flipping(anatomy: Any) -> Any:
        def scored(final_PD: Any, gold_P: Any) -> Any:
            found = scorer(anatomy)(final_PD, gold_P)
            predicted = found.predicted.clone()
            predicted[0], predicted[1] = gold_P[0], gold_P[1] + 1
            return replace(found, predicted=predicted)

        return scored

    monkeypatch.setattr(path_rows, "Scorer", flipping)
    found = run(Paths(reuse=adaptive.id), tmp_path)
    pd.testing.assert_frame_equal(rows(found, "path_pairs"), rows(adaptive, "path_pairs"))
    cells = rows(found, "path_scan").groupby(["layer", "head"])["prompt_id"].apply(sorted)
    assert len(cells) == len(adaptive.table("decisions"))
    assert all(ids == sorted(pairs[pairs].index) for ids in cells)


@pytest.mark.slow
def test_baseline_and_noise_are_in_the_shapes_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mathinterp.experiments.adaptive import blocks

    monkeypatch.setattr("mathinterp.experiments.adaptive.reuse.CLEAN_PASSES", 0.0)
    adaptive, compute, asked = run(SCANS[0], tmp_path), Heads.run, []
    looked, shape_of, compared, noise = [], blocks.Blocks.of, [], blocks.noise_between

    def seen(scan: Heads, state: Any, shard: Any) -> Any:
        asked.append(shard)
        return compute(scan, state, shard)

    def of(kept: Any, shard: Any) -> Any:
        looked.append((*shard.work["prompts"], shard.work["per_layer"]))
        return shape_of(kept, shard)

    def between(wide: Any, block: Any) -> Any:
        compared.append((len(wide.prompts), len(block.prompts)))
        return noise(wide, block)

    monkeypatch.setattr(Heads, "run", seen)
    monkeypatch.setattr(blocks.Blocks, "of", of)
    monkeypatch.setattr(blocks, "noise_between", between)
    run(replace(SCANS[0].whole(), reuse=adaptive.id), tmp_path)
    nodes = {(*shard.work["prompts"], shard.work["per_layer"]) for shard in asked if shard.table == "head_scan"}
    (baseline,) = ((*shard.work["prompts"], shard.work["per_layer"]) for shard in asked if shard.table == "baseline")
    assert baseline in nodes
    every = len(prompts())
    points = sorted({start for start, *_ in nodes})
    assert len(points) > 2
    assert {wide for wide, _ in compared} == {every - points[0]}
    assert {every - point for point in points[1:]} <= {block for _, block in compared}
    record = adaptive.store.record(adaptive.id)
    assert record is not None
    stored = {(*shard["work"]["prompts"], shard["work"]["per_layer"]) for shard in record["grown"]}
    assert set(looked) <= nodes | stored
    assert set(looked) & stored


@pytest.mark.slow
def test_rows_of_a_finished_run_are_named_once_what_it_took_over_is_gone(tmp_path: Path) -> None:
    adaptive = run(SCANS[-2], tmp_path)
    found = run(replace(SCANS[-2].whole(), reuse=adaptive.id), tmp_path)
    (tmp_path / "runs" / f"{adaptive.id}.json").unlink()
    with pytest.raises(
        UserError, match=f"no run {adaptive.id} .* run {found.id}, which took over its rows, is finished"
    ):
        run(replace(SCANS[-2].whole(), reuse=adaptive.id), tmp_path)
