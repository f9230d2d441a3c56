"""One replica by itself: on a GPU a file is written while the next shard computes, all computing in one thread."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from mathinterp.cluster.events import CardLost
from mathinterp.cluster.replica import AT_ONCE, Replica, ReplicaJob
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.experiments.table import Table
from mathinterp.models.catalog import ModelSpec
from mathinterp.models.handle import NamedSource
from mathinterp.store.catalog import catalog

SCHEMA = catalog().tables["tuning_runs"].schema


@dataclass
class Counting(Experiment):
    """A row a shard; notes in which thread each was computed."""

    threads: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    name: ClassVar[str] = "counting"
    tables: ClassVar[dict[str, Table]] = {"tuning_runs": catalog().tables["tuning_runs"]}

    def parameters(self) -> dict[str, Any]:
        return {}

    def shards(self, shape, prompts) -> list[Shard]:
        return [Shard("tuning_runs", index) for index in range(4)]

    def prepare(self, subject) -> None:
        return None

    def run(self, state, shard: Shard) -> pa.Table:
        self.threads.append(threading.get_ident())
        self.order.append(shard.index)
        if shard.index == 3:
            raise RuntimeError("shard 3 is broken")
        row = dict.fromkeys(SCHEMA.names, 1)
        return pa.Table.from_pylist([row], schema=SCHEMA)


class Meeting:
    """A store whose first file is not written before the second shard has begun to compute."""

    def __init__(self, scan: Counting):
        self.scan, self.written = scan, []

    @property
    def files(self) -> "Meeting":
        return self

    def require_local(self, name: str) -> None:
        """The store is there."""

    def write_shard(self, run: str, table: str, index: int, rows: pa.Table, metadata: dict[str, Any]) -> dict[str, Any]:
        if index == 0:
            for _ in range(1000):
                if 1 in self.scan.order:
                    break
                threading.Event().wait(0.01)
            assert 1 in self.scan.order, "the next shard did not compute while this one was written"
        self.written.append(index)
        return {"bytes": 1, "sha256": ""}


def replica_of(scan: Counting, store: Meeting, device: str, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr("mathinterp.cluster.replica._peak_memory", lambda device, cards: 0)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda card: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda card: None)
    replica = Replica(ReplicaJob(scan, NamedSource(ModelSpec()), (), "", "", "memory://replica", "run", device, 1))
    replica._store = store
    return replica


def test_writing_and_computing_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Counting()
    store = Meeting(scan)
    replica = replica_of(scan, store, "cuda", monkeypatch)
    with ThreadPoolExecutor(AT_ONCE) as calls:
        receipts = list(calls.map(replica.run, scan.shards(None, ())[:3]))
    assert sorted(store.written) == [0, 1, 2]
    assert [receipt.key for receipt in receipts] == [f"tuning_runs/0000{index}" for index in range(3)]
    assert len(set(scan.threads)) == 1, "one thread computes"
    with pytest.raises(RuntimeError, match="shard 3 is broken"):
        replica.run(scan.shards(None, ())[3])


def test_a_cpu_replica_computes_and_writes_in_the_thread_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Counting()
    store = Meeting(scan)
    replica = replica_of(scan, store, "cpu", monkeypatch)
    replica.run(scan.shards(None, ())[1])
    assert scan.threads == [threading.get_ident()]
    assert store.written == [1]


def test_a_replica_whose_card_gives_nothing_but_errors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a shard raised; on a CPU, and on a GPU that goes on, that is what is raised."""
    scan = Counting()
    broken = scan.shards(None, ())[3]
    for device in ("cpu", "cuda"):
        with pytest.raises(RuntimeError, match=r"^shard 3 is broken$"):
            replica_of(scan, Meeting(scan), device, monkeypatch).run(broken)

    def fail(card: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    replica = replica_of(scan, Meeting(scan), "cuda", monkeypatch)
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    said = "^its GPU gives nothing but errors: RuntimeError: CUDA error: device-side assert triggered$"
    with pytest.raises(CardLost, match=said):
        replica.run(broken)
