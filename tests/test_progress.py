"""Time to go: within a factor of 2 from a tenth of the way on, by the recorded pace of scans; never from too little."""

import heapq
import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from benchmarks.dispatch import receipt_for
from mathinterp.cluster.dispatch import Finished, Pulse, Ready
from mathinterp.cluster.progress import Pace, ScanProgress
from mathinterp.experiments.base import Shard

# (cost, seconds on one replica) in the order in which shards were handed out, and whether replicas told of parts.
# heads: the bundled model, 64 heads and 200 prompts on two cores. paths: a shard that costs next to nothing but a
# second, beside dear ones. even: many equal shards. slow start: compiling takes the first shard ten times as long.
RECORDED = {
    "heads": ([(120.0, 20.4), (88.0, 14.9), (56.0, 9.8), (24.0, 4.4), (0.5, 0.3)], True),
    "paths": ([(96.0, 131.0), *[(8.0, 10.5)] * 20, (0.1, 1.0)], True),
    "even": ([(1.0, 8.0 + index % 3) for index in range(40)], False),
    "slow start": ([(4.0, 40.0), (4.0, 40.0), *[(4.0, 4.1)] * 198], False),
}


def replayed(name: str, replicas: int) -> Iterator[tuple[float, float, Pace]]:
    """The time, the seconds truly left and the pace as it then is, once a second."""
    recorded, tells = RECORDED[name]
    pieces = [Shard("toy", index, cost=cost) for index, (cost, _) in enumerate(recorded)]
    free = [(0.0, slot) for slot in range(replicas)]
    runs = []
    for piece, (_, seconds) in zip(pieces, recorded, strict=True):
        begin, slot = heapq.heappop(free)
        runs.append((begin, begin + seconds, slot, piece))
        heapq.heappush(free, (begin + seconds, slot))
    end = max(run[1] for run in runs)
    pace, left = Pace(pieces), sorted(runs, key=lambda run: run[1])
    for slot in range(replicas):
        pace.ready(slot, 0.0)
    for now in range(1, int(end)):
        while left and left[0][1] <= now:
            _, ended, slot, piece = left.pop(0)
            pace.finished(Finished(slot, piece, receipt_for(piece, 1.0)), ended)
        for begin, ended, slot, _ in left:
            if tells and begin <= now:
                pace.tell(slot, (now - begin) / (ended - begin))
        yield now, end - now, pace


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("name", ["heads", "paths", "even"])
def test_time_to_go_is_within_a_factor_of_two_from_a_tenth_on(name, replicas):
    checked = 0
    for now, left, pace in replayed(name, replicas):
        told = pace.to_go(now)
        if now < 0.12 * (now + left) or left < 2:
            continue
        assert told is not None
        assert left / 2 <= told <= left * 2, (now, left, told)
        checked += 1
    assert checked > 10


def test_what_little_is_done_promises_nothing():
    for name, replicas in (("paths", 4), ("slow start", 2)):
        told = [(now, left, pace.to_go(now), pace.done(now)) for now, left, pace in replayed(name, replicas)]
        assert all(seconds is None for _, _, seconds, done in told if done < 0.1)
        assert all(seconds < 12 * (now + left) for now, left, seconds, _ in told if seconds is not None)


def test_a_line_before_the_first_shard_ends(monkeypatch):
    now = [50.0]
    monkeypatch.setattr("mathinterp.cluster.progress.time.monotonic", lambda: now[0])
    output, pieces = io.StringIO(), [Shard("toy", index) for index in range(4)]
    console = Console(file=output, width=200)
    with ScanProgress(pieces, dict.fromkeys([piece.key for piece in pieces], 10), 2, console) as progress:
        for slot in (0, 1):
            progress.ready(Ready(slot))
        now[0] += 15
        progress.pulse(Pulse(0, 0.5))
        progress.pulse(Pulse(1, 0.5))
        progress.tick(2, 0)
    told = "shards 0/4, 25% done, first shards running, 15 s so far, about 45 s to go, 2 of 2 replicas"
    assert output.getvalue().splitlines() == [told]


def test_a_replica_of_this_process_is_watched_while_it_computes(monkeypatch):
    monkeypatch.setattr("mathinterp.cluster.progress.LINE_SECONDS", 0.5)
    output = io.StringIO()
    console = Console(file=output, width=200)
    with ScanProgress([Shard("toy", 0)], {"toy/00000": 10}, 1, console, inside=lambda: 0.4) as progress:
        progress.ready(Ready(0))
        time.sleep(2.5)  # as a shard that computes in this thread
    assert "40% done, first shards running" in output.getvalue()
