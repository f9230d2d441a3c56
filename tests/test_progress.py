"""Time to go: within a factor of 2 from a tenth of the way on, by the recorded pace of scans; never from too little."""

import heapq
import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from benchmarks.dispatch import receipt_for
from mathinterp.cluster.events import Finished, Pulse, Ready
from mathinterp.cluster.progress import Pace, ScanProgress
from mathinterp.experiments.base import Shard

# Recorded: `scan mlps --limit 400` of the bundled model in one process on a busy machine. Seconds since the
# replica was ready, and the part of the running shard that is done, once a second, or the shard that ended.
COSTS = {"mlp_scan/00000": 26.0, "mlp_scan/00001": 10.0, "baseline/00000": 0.5}
RECORDED: list[tuple[float, float | str]] = [
    (0.1, 0.0), (1.2, 0.0), (2.2, 0.08), (3.2, 0.08), (4.2, 0.159), (5.2, 0.25), (6.2, 0.25), (7.2, 0.33), (8.3, 0.33),
    (9.3, 0.409), (10.3, 0.489), (11.3, 0.5), (12.3, 0.58), (13.3, 0.659), (14.3, 0.659), (15.4, 0.75), (16.4, 0.83),
    (17.4, 0.909), (18.4, 0.989), (18.9, "mlp_scan/00000"), (19.4, 0.0), (20.4, 0.08), (21.4, 0.159), (22.4, 0.25),
    (23.4, 0.33), (24.4, 0.489), (25.4, 0.58), (26.5, 0.75), (27.5, 0.989), (27.6, "mlp_scan/00001"),
    (27.6, "baseline/00000"),
]  # fmt: skip
# Made up, (cost, seconds) in the order in which they are handed out: many equal shards whose replicas tell no parts,
# and the same where compiling takes the first ones ten times as long, and shards that cost next to nothing.
EVEN = [(1.0, 8.0 + index % 3) for index in range(40)]
SLOW_START = [(4.0, 40.0), (4.0, 40.0), *[(4.0, 4.1)] * 198]
UNEVEN = [(96.0, 131.0), *[(8.0, 10.5)] * 20, (0.1, 1.0)]


def shard(key: str, cost: float) -> Shard:
    table, _, index = key.partition("/")
    return Shard(table, int(index), cost=cost)


def replayed(made_up: list[tuple[float, float]], replicas: int) -> Iterator[tuple[float, float, Pace]]:
    """The time, the seconds truly left and the pace as it then is, once a second."""
    pieces = [Shard("toy", index, cost=cost) for index, (cost, _) in enumerate(made_up)]
    free = [(0.0, slot) for slot in range(replicas)]
    runs = []
    for piece, (_, seconds) in zip(pieces, made_up, strict=True):
        begin, slot = heapq.heappop(free)
        runs.append((begin + seconds, slot, piece))
        heapq.heappush(free, (begin + seconds, slot))
    end = max(ended for ended, _, _ in runs)
    pace, left = Pace(pieces), sorted(runs, key=lambda run: run[0])
    for slot in range(replicas):
        pace.ready(slot, 0.0)
    for now in range(1, int(end)):
        while left and left[0][0] <= now:
            ended, slot, piece = left.pop(0)
            pace.finished(Finished(slot, piece, receipt_for(piece, 1.0)), ended)
        yield now, end - now, pace


def test_time_to_go_of_a_recorded_scan_is_within_a_factor_of_two_from_a_tenth_on():
    pace, end, checked = Pace([shard(*item) for item in COSTS.items()]), RECORDED[-1][0], 0
    pace.ready(0, 0.0)
    for now, what in RECORDED:
        if isinstance(what, str):
            piece = shard(what, COSTS[what])
            pace.finished(Finished(0, piece, receipt_for(piece, 1.0)), now)
        else:
            pace.tell(0, what)
        told, left = pace.to_go(now), end - now
        assert (told is None) == (pace.done(now) < 0.1)
        if told is not None and left > 2:  # parts are told once a second
            assert left / 2 <= told <= left * 2, (now, left, told)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_time_to_go_where_replicas_tell_no_parts(replicas):
    found = [(left, pace.to_go(now)) for now, left, pace in replayed(EVEN, replicas) if now > 0.1 * (now + left)]
    assert all(told is not None and left / 2 <= told <= left * 2 for left, told in found[10:] if left > 2)
    assert len(found) > 50


def test_what_little_is_done_promises_nothing():
    for made_up, replicas in ((UNEVEN, 4), (SLOW_START, 2)):
        told = [(now, left, pace.to_go(now), pace.done(now)) for now, left, pace in replayed(made_up, replicas)]
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


@pytest.mark.slow
def test_a_replica_of_this_process_is_watched_while_it_computes(monkeypatch):
    monkeypatch.setattr("mathinterp.cluster.progress.LINE_SECONDS", 0.5)
    output = io.StringIO()
    console = Console(file=output, width=200)
    with ScanProgress([Shard("toy", 0)], {"toy/00000": 10}, 1, console, inside=lambda: 0.4) as progress:
        progress.ready(Ready(0))
        time.sleep(2.5)  # as a shard that computes in this thread
    assert "40% done, first shards running" in output.getvalue()
