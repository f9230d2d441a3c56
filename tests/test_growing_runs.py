"""Shards that follow from others: the dispatch loop with a source, early starts on many replicas, kill -9 on Ray."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Event, Failed, Finished, Observer, Ready
from mathinterp.cluster.places import Here, Placement
from mathinterp.cluster.replica import Replica
from mathinterp.errors import Unfinished
from mathinterp.experiments.base import Shard
from mathinterp.experiments.heads import Heads
from mathinterp.models.handle import HeldSource
from mathinterp.store import Run, Store
from tests.adaptive_case import cells, model, prompts, twin
from tests.killing import FINISHED, kill_midway
from tests.scripted_workers import ScriptedWorkers, keys
from tests.tiny import save_tiny

SCAN = Heads(decide=20)


class Blocks:
    """A source of ``blocks`` blocks of ``width`` shards; each block follows when the one before is done."""

    def __init__(self, blocks: int, width: int):
        self.left = deque(
            [Shard("toy", width * block + index, {"block": block}, float(index)) for index in range(width)]
            for block in range(blocks)
        )
        self.block, self.waiting, self.early_ones = 0, width, []
        self.first = self.left.popleft()

    def finished(self, shard: Shard) -> Sequence[Shard]:
        if shard.work["block"] > self.block:
            self.early_done += 1
            return []
        self.waiting -= 1
        if self.waiting or not self.left:
            return []
        new = self.left.popleft()
        self.block, self.waiting = self.block + 1, len(new) + self.running_early()
        return new

    early_done = 0

    def running_early(self) -> int:
        begun = [shard for shard in self.early_ones if shard.work["block"] == self.block + 1]
        running, self.early_done = len(begun) - self.early_done, 0
        return running

    def early(self) -> Shard | None:
        if not self.left or not self.left[0]:
            return None
        self.early_ones.append(self.left[0].pop())
        return self.early_ones[-1]


def test_blocks_follow_each_other_and_a_lone_replica_never_begins_early() -> None:
    source, workers, told = Blocks(4, 3), ScriptedWorkers(), []

    class Counts(Observer):
        def added(self, shards: Sequence[Shard]) -> None:
            told.append(len(shards))

    outcome = Dispatcher(workers, source.first, replicas=1, source=source, observer=Counts()).run()
    assert len(keys(outcome)) == 12
    assert source.early_ones == []
    assert told == [3, 3, 3]
    blocks = [int(key[-5:]) // 3 for _, key in workers.submitted]
    assert blocks == sorted(blocks)


def test_replicas_that_would_idle_begin_the_next_block() -> None:
    source, workers = Blocks(5, 4), ScriptedWorkers()
    outcome = Dispatcher(workers, source.first, replicas=3, source=source).run()
    assert len(keys(outcome)) == len(set(keys(outcome))) == 20
    assert source.early_ones
    assert all(shard.work["block"] > 0 for shard in source.early_ones)


def test_failures_and_losses_are_retried_in_runs_that_grow() -> None:
    def unlucky(slot: int, shard: Shard, nth: int) -> Any:
        return {4: RuntimeError("hiccup"), 7: "killed"}.get(shard.index) if nth == 1 else None

    for replicas in (1, 3):
        source = Blocks(4, 3)
        outcome = Dispatcher(ScriptedWorkers(unlucky), source.first, replicas=replicas, source=source).run()
        assert len(set(keys(outcome))) == 12
        assert outcome.failures == []
        assert outcome.replicas_lost == 1


def test_a_poison_shard_ends_growth_and_the_loop() -> None:
    source = Blocks(4, 3)
    poison = ScriptedWorkers(lambda slot, shard, nth: RuntimeError("no") if shard.index == 4 else None)
    outcome = Dispatcher(poison, source.first, replicas=1, source=source).run()
    assert [failure.key for failure in outcome.failures] == ["toy/00004"]
    assert len(keys(outcome)) == 5, "the first block and what is left of the second"


class Several:
    """So many replicas in this process, which finish one shard each a turn, or in turns of unlike speed."""

    def __init__(self, job: Any, speeds: Sequence[int]):
        self._replicas = [Replica(job) for _ in speeds]
        self._speeds, self._turn = speeds, 0
        self._windows: list[deque[Shard]] = [deque() for _ in speeds]
        self._events: list[Event] = []

    def start(self, slot: int) -> None:
        self._events.append(Ready(slot, self._replicas[slot].load()))

    def submit(self, slot: int, shard: Shard) -> None:
        self._windows[slot].append(shard)

    def abandon(self, slot: int) -> None:
        raise AssertionError(slot)

    def wait(self, timeout: float) -> list[Event]:
        events, self._events = self._events, []
        self._turn += 1
        for slot, window in enumerate(self._windows):
            if window and self._turn % self._speeds[slot] == 0:
                shard = window.popleft()
                try:
                    events.append(Finished(slot, shard, self._replicas[slot].run(shard)))
                except Exception as error:
                    events.append(Failed(slot, shard, error))
        return events


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Runs in this process have as many replicas as the parameter has speeds."""

    @contextmanager
    def workers(place: Here, job: Any, placement: Placement) -> Iterator[Several]:
        with ExitStack() as lent:
            yield Several(replace(job, source=HeldSource(place.model, lent)), request.param)

    monkeypatch.setattr(Here, "workers", workers)
    monkeypatch.setattr(Here, "placement", lambda place, shards, size: Placement(len(request.param), 0, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("several", [(1, 1, 1, 1, 1), (1, 4, 2)], indirect=True)
def test_what_ran_too_much_is_kept_and_said_and_changes_no_decision(several: None, tmp_path: Path) -> None:
    expected = twin(SCAN, tmp_path / "twin", prompts())
    found = mi.run(SCAN, model(), list(prompts()), store=str(tmp_path / "adaptive"), progress=False)
    rows, decisions = cells(found, "head_scan"), found.table("decisions").sort_values(["layer", "head"])
    ran = set(zip(rows["layer"], rows["head"], rows["prompt_id"], strict=True))
    assert expected.cells <= ran
    assert not rows.duplicated(["layer", "head", "prompt_id", "position"]).any()
    assert [*decisions["prompts_used"]] == [*expected.verdicts.used_N]
    assert [*decisions["decision"]] == [{1: "above", -1: "not above"}[one] for one in expected.verdicts.decision_N]
    assert decisions["prompts_run"].sum() == len(ran)
    assert ran != expected.cells, "some replica began early"
    assert "began before they were known to be needed" in found.summary.data["verdict"]
    assert found.complete
    assert found.ended.done == found.ended.shards


@pytest.mark.slow
@pytest.mark.parametrize("several", [(1, 3, 2, 5)], indirect=True)
@pytest.mark.parametrize("after", [2, 5, 8])
def test_many_replicas_stopped_and_resumed_by_one(
    several: None, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = twin(SCAN, tmp_path / "twin", prompts())
    ran, compute = [], Replica.run

    def stops(replica: Replica, shard: Shard) -> Any:
        if len(ran) == after:
            raise KeyboardInterrupt
        ran.append(shard.key)
        return compute(replica, shard)

    monkeypatch.setattr(Replica, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        mi.run(SCAN, model(), list(prompts()), store=str(tmp_path / "adaptive"), progress=False)
    monkeypatch.undo()
    found = mi.run(SCAN, model(), list(prompts()), store=str(tmp_path / "adaptive"), progress=False)
    decisions = found.table("decisions").sort_values(["layer", "head"])
    assert [*decisions["decision"]] == [{1: "above", -1: "not above"}[one] for one in expected.verdicts.decision_N]
    assert [*decisions["prompts_used"]] == [*expected.verdicts.used_N]
    assert found.ended.reused == after


@pytest.mark.slow
@pytest.mark.parametrize("several", [(1, 1, 1), (1, 4, 2)], indirect=True)
def test_of_two_drivers_at_once_one_stops_before_its_shards_mix_with_the_others(
    several: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = twin(SCAN, tmp_path / "twin", prompts())
    grow, ended = Run.grow, []

    def run() -> Any:
        return mi.run(SCAN, model(), list(prompts()), store=str(tmp_path / "adaptive"), progress=False)

    def meanwhile(self: Run, shards: Sequence[Any]) -> None:
        """Another driver begins after the first growth of this one, and is through before the second."""
        if not ended and "grown" in self.record:
            ended.append(None)
            ended.append(run())
        grow(self, shards)

    monkeypatch.setattr(Run, "grow", meanwhile)
    with pytest.raises(Unfinished, match="computed by another process at the same time"):
        run()
    record = json.loads(next((tmp_path / "adaptive" / "runs").iterdir()).read_text())
    assert len(record["shards"]) == ended[1].ended.shards
    assert Store(tmp_path / "adaptive").check()[0].intact == ended[1].ended.shards
    decisions = run().table("decisions").sort_values(["layer", "head"])
    assert [*decisions["decision"]] == [{1: "above", -1: "not above"}[one] for one in expected.verdicts.decision_N]
    assert [*decisions["prompts_used"]] == [*expected.verdicts.used_N]


@pytest.mark.ray
def test_kill_9_of_the_driver_of_an_adaptive_scan(local_ray: dict[str, str], tmp_path: Path) -> None:
    folder, lines = str(save_tiny(tmp_path / "llama", "llama")), tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts()))
    words = ["scan", "heads", "--model", folder, "--prompts", str(lines), "--decide", "20", "--json"]

    def ended(store: str, *replicas: str) -> dict[str, Any]:
        done = CliRunner().invoke(main, [*words, "--store", str(tmp_path / store), *replicas])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    on_ray = ["--replicas", "2"]
    kill_midway(local_ray, "head_scan", [*words, "--store", str(tmp_path / "killed"), *on_ray], tmp_path / "killed")
    killed, undisturbed = ended("killed", *on_ray), ended("undisturbed")
    assert killed["shards_reused"] >= FINISHED
    assert killed["cells_run"] >= killed["cells_used"] == undisturbed["cells_used"]
    for name in ("node", "decision", "prompts_used", "e_above", "e_below", "estimate", "low", "high"):
        assert [row[name] for row in killed["decisions"]] == [row[name] for row in undisturbed["decisions"]], name
