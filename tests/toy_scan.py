"""A scan that computes little and misbehaves on request, for the tests of the cluster room.

Its faults are no parameters: a disturbed and an undisturbed run have the same run id and must have the same rows.
"""

import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch

from mathinterp.cluster.events import CardLost
from mathinterp.engine.cells import Cells
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.experiments.table import Table
from mathinterp.store.catalog import catalog


@dataclass
class ToyScan(Experiment):
    """One shard a layer into ``mlp_scan``; a row's logprob is minus its layer, its logit a fact about the weights."""

    layers: int = 4
    seconds: float = 0.0  # each shard sleeps so long
    notebook: str = ""  # a folder: each replica writes its pid here, each fault its marker
    together: int = 0  # shards wait until so many replicas have loaded (needs the notebook)
    alone: int = 0  # but the first so many do not
    always: dict[int, str] = field(default_factory=dict)  # layer -> fault, see run
    once: dict[int, str] = field(default_factory=dict)  # the same, but only the first time
    astray: float = 0.0  # so much higher are the cells of every replica but the first (needs the notebook)

    name: ClassVar[str] = "toy"
    tables: ClassVar[dict[str, Table]] = {"mlp_scan": catalog().tables["mlp_scan"]}

    def parameters(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def shards(self, shape, prompts) -> list[Shard]:
        return [Shard("mlp_scan", layer, {"layer": layer}, cost=self.layers - layer) for layer in range(self.layers)]

    def prepare(self, subject) -> Any:
        if self.notebook:
            Path(self.notebook, f"pid-{os.getpid()}").touch()
        return subject

    def notes(self, state) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}

    def cells(self, state, subject) -> Cells:
        cells = super().cells(state, subject)
        if not self.astray or self._is_first("replica"):
            return cells
        return replace(cells, values_n=cells.values_n + self.astray)

    def run(self, state, shard: Shard) -> pa.Table:
        layer = shard.work["layer"]
        wanted = 0 if layer < self.alone else self.together
        while wanted and len(list(Path(self.notebook).glob("pid-*"))) < wanted:
            time.sleep(0.05)
        time.sleep(self.seconds)
        fault = self.always.get(layer) or self._first_time(layer)
        if fault == "raise":
            raise RuntimeError(f"layer {layer} is broken\nsecond line")
        if fault == "card lost":
            raise CardLost("its GPU gives nothing but errors")
        if fault == "break card":
            torch.zeros(1, device="cuda")[torch.tensor([9], device="cuda")].cpu()  # an assertion on the GPU
        if fault == "hang":
            time.sleep(3600)
        if fault == "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if fault == "busy":
            until = time.monotonic() + 20
            while time.monotonic() < until:
                pass
        weight = float(state.anatomy.value_vectors(layer % state.anatomy.shape.n_layers).double().sum())
        rows = [
            {
                "layer": layer,
                "prompt_id": prompt.prompt.prompt_id,
                "position": token.position,
                "correct": True,
                "logprob": float("nan") if fault == "nan" else -float(layer),
                "logit": weight,
                "predicted_id": token.token_id,
            }
            for prompt in state.prompts
            for token in prompt.scored
        ]
        table = pa.Table.from_pylist(rows, schema=self.tables["mlp_scan"].schema)
        return table.drop_columns(["logit"]) if fault == "columns" else table

    def _first_time(self, layer: int) -> str | None:
        return self.once[layer] if layer in self.once and self._is_first(f"fault-{layer}") else None

    def _is_first(self, what: str) -> bool:
        try:
            Path(self.notebook, what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
