"""A head scan that goes wrong where its notebook says so, and notes there what it began: for benchmarks/faults.py.

The notebook is a folder: ``orders.json`` says how long shards take and which of them fail, ``began.jsonl`` has a line
for every shard that a replica began. It is no parameter, so disturbed and undisturbed runs are the same run.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa
import torch

from mathinterp.engine import batching
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.options import option

HEADS_EACH = 4  # of a file: more files than the heads of a small model would fill


@dataclass(frozen=True)
class Disturbed(Heads):
    """A head scan that goes wrong on request."""

    notebook: str = option("", "Folder of what is to go wrong, and of what was begun.")

    name: ClassVar[str] = "disturbed_heads"
    command_examples: ClassVar[tuple[str, ...]] = ()

    def files(self, nodes: Any) -> Any:
        """Few heads a file, so that there is something to disturb."""
        return [list(nodes[start : start + HEADS_EACH]) for start in range(0, len(nodes), HEADS_EACH)]

    def shards(self, shape: Any, prompts: Any) -> list[Shard]:
        """As of the head scan, in smaller files."""
        heads = [(layer, head) for layer, head in self.chosen(shape)]
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, file in enumerate(self.files(heads)):
            cost = float(sum(shape.n_layers - layer for layer, _ in file))
            pieces.append(Shard("head_scan", index, {"heads": [list(head) for head in file]}, cost))
        return pieces

    def prepare(self, subject: Subject) -> Any:
        """Note that this replica is there."""
        state = super().prepare(subject)
        self._note("replica")
        return state

    def run(self, state: Any, shard: Shard) -> pa.Table:
        """Note it, take some time, and fail as ordered."""
        self._note(shard.key)
        orders = self._orders()
        while len({line["pid"] for line in began(self.notebook) if line["what"] == "replica"}) < orders["together"]:
            time.sleep(0.05)
        time.sleep(orders["seconds"])
        fault = orders["faults"].get(shard.key)
        if fault == "poison":
            raise RuntimeError(f"{shard.key} is poison")
        if fault == "memory" and self._is_first(shard):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")
        if fault == "batch" and self._is_first(shard):
            with memory_runs_out_once():
                return super().run(state, shard)
        return super().run(state, shard)

    def _orders(self) -> dict[str, Any]:
        quiet = {"seconds": 0.0, "together": 0, "faults": {}}
        place = Path(self.notebook, "orders.json")
        return quiet | json.loads(place.read_text()) if self.notebook and place.exists() else quiet

    def _note(self, what: str) -> None:
        if self.notebook:
            with Path(self.notebook, "began.jsonl").open("a") as file:
                file.write(json.dumps({"what": what, "pid": os.getpid(), "at": time.time()}) + "\n")

    def _is_first(self, shard: Shard) -> bool:
        return [line["what"] for line in began(self.notebook)].count(shard.key) == 1


def began(notebook: str | Path) -> list[dict[str, Any]]:
    """What replicas noted, oldest first: ``what`` ("replica" or a shard's key), ``pid``, ``at``."""
    place = Path(notebook, "began.jsonl")
    return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []


@contextmanager
def memory_runs_out_once() -> Iterator[None]:
    """Within the block the engine's first batch finds the GPU full."""
    asked = [0]

    def in_batches(count: int, at_once: int, run: Callable[[int, int], None], evaluations: float = 0.0) -> int:
        def batch(start: int, stop: int) -> None:
            asked[0] += 1
            if asked[0] == 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")
            run(start, stop)

        return batching.in_batches(count, at_once, batch, evaluations)

    with mock.patch("mathinterp.engine.packed.in_batches", in_batches):
        yield
