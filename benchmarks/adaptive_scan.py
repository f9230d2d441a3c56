"""How long an adaptive head scan takes beside the full one, and what smaller blocks of prompts cost it.

    python benchmarks/adaptive_scan.py                                     # bundled model on CPU, --decide 5
    python benchmarks/adaptive_scan.py --decide 2 --record profile.json    # keep the drops that the full scan found
    python benchmarks/adaptive_scan.py --model random:llama-2-7b --profile profile.json     # H100: 1,024 x 1,600

Both scans run in this process from the loaded model to files in a store, the full one first. Seconds are told from the
loaded model on (as the run's notes have them), and as this process' CPU time, which other programs hardly disturb.
``lost``: CPU seconds of the adaptive scan beyond those of a full scan's clean pass and of as many layers of as many
cells of a full scan: for smaller trees, and more and smaller batches.

A model of random weights answers nothing, so with ``--profile`` decisions come from recorded drops: the file is a JSON
list of the probabilities with which a right answer turns wrong, one per head. The model's heads take them in a random
order, repeated as often as there are heads; flags of right and wrong are drawn accordingly, all else is computed.

A second full scan then takes over what the adaptive one computed (``--reuse``), and its rows are compared.

Prints one JSON line last.
"""

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np
import pyarrow as pa
import torch

import mathinterp as mi
from mathinterp.experiments.base import Shard
from mathinterp.experiments.heads import Heads

COLUMNS = "drop FROM head_effects WHERE run_id = $run AND operation = 'all' ORDER BY drop DESC"


@dataclass(frozen=True)
class ProfiledHeads(Heads):
    """A head scan whose flags of right and wrong follow recorded drops."""

    profile: tuple[float, ...] = ()

    name: ClassVar[str] = "profiled_heads"
    computed: ClassVar[dict[str, float]] = {
        "cells": 0.0,
        "layers": 0.0,
        "cpu": 0.0,
        "prepare": 0.0,
    }  # of this process, summed up

    def parameters(self) -> dict[str, Any]:
        """The profile decides rows."""
        return {**super().parameters(), **({"profile": list(self.profile)} if self.profile else {})}

    def run(self, state: Any, shard: Shard) -> pa.Table:
        """As without a profile, but for the column correct; counts what was computed."""
        started = time.process_time()
        table = super().run(state, shard)
        if shard.table == "head_scan":
            prompts = len(set(table["prompt_id"].to_pylist()))
            self.computed["cells"] += prompts * len(shard.work["heads"])
            depth = state.anatomy.shape.n_layers
            self.computed["layers"] += prompts * sum(depth - layer for layer, _ in shard.work["heads"])
        if self.profile:
            flags = pa.array(self._flags(table, state.anatomy.shape.n_heads))
            table = table.set_column(table.schema.get_field_index("correct"), "correct", flags)
        self.computed["cpu"] += time.process_time() - started
        return table

    def prepare(self, subject: Any) -> Any:
        """Counted too."""
        started = time.process_time()
        state = super().prepare(subject)
        self.computed["prepare"] += time.process_time() - started
        return state

    def _flags(self, table: pa.Table, n_heads: int) -> np.ndarray:
        if "head" not in table.column_names:
            return np.ones(len(table), bool)
        draws = np.random.default_rng(0)
        count = max(len(self.profile), 4096)
        drops = draws.permutation(np.resize(np.array(self.profile), count))
        head = table["layer"].to_numpy().astype(np.int64) * n_heads + table["head"].to_numpy()
        keys = zip(head, table["prompt_id"].to_pylist(), table["position"].to_pylist(), strict=True)
        chance = np.array([(hash((int(h), hash_of(p), q)) & 0xFFFFFFFF) / 2**32 for h, p, q in keys])
        return np.asarray(chance >= drops[head % count])


def hash_of(text: str) -> int:
    """The same in every process."""
    return int.from_bytes(text.encode(), "little") % (2**61 - 1)


def timed(scan: ProfiledHeads, model: Any, prompts: Any, store: str) -> dict[str, Any]:
    """Run a scan: seconds from the loaded model on, CPU seconds, and what was computed."""
    for name in scan.computed:
        scan.computed[name] = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    run = mi.run(scan, model, prompts, store=store)
    if model.device == "cuda":
        torch.cuda.synchronize()
    notes = json.loads(run.sql("SELECT notes FROM runs WHERE run_id = $run")["notes"][0])
    return {
        "run": run, "seconds": notes["seconds_from_loaded_model"], "wall": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu, **scan.computed,
    }  # fmt: skip


def apart(full: Any, taking: Any) -> dict[str, float]:
    """How far the rows of two full scans are apart: rows, unlike predictions and flags, most nats."""
    key = ["layer", "head", "prompt_id", "position"]
    both = full.table("head_scan").merge(taking.table("head_scan"), on=key, suffixes=("", "_taking"), validate="1:1")
    assert len(both) == len(full.table("head_scan")) == len(taking.table("head_scan"))
    return {
        "rows": len(both),
        "other_predictions": int((both["predicted_id"] != both["predicted_id_taking"]).sum()),
        "other_flags": int((both["correct"] != both["correct_taking"]).sum()),
        "most_nats": float((both["logprob"] - both["logprob_taking"]).abs().max()),
    }


@click.command()
@click.option("--model", default="bundled")
@click.option("--dtype", default="auto")
@click.option("--prompts", default="two_digit")
@click.option("--limit", default=None, type=int)
@click.option("--decide", default=5.0, help="Points.")
@click.option("--order-seed", default=0)
@click.option("--profile", default=None, type=click.Path(exists=True, path_type=Path), help="Drops, see above.")
@click.option("--record", default=None, type=click.Path(path_type=Path), help="Write the full scan's drops there.")
@click.option("--skip-full", is_flag=True, help="The adaptive scan alone.")
def main(
    model: str, dtype: str, prompts: str, limit: int | None, decide: float, order_seed: int, profile: Path | None,
    record: Path | None, skip_full: bool,
) -> None:  # fmt: skip
    """Run both and compare."""
    loaded, asked = mi.load(model, dtype=dtype), mi.prompts(prompts, limit=limit)
    drops = tuple(max(0.0, float(drop)) for drop in json.loads(profile.read_text())) if profile else ()
    adaptive = ProfiledHeads(decide=decide, order_seed=order_seed, profile=drops)
    with tempfile.TemporaryDirectory() as folder:
        full = None if skip_full else timed(adaptive.whole(), loaded, asked, f"{folder}/full")
        own = timed(adaptive, loaded, asked, f"{folder}/adaptive")
        said = own["run"].summary.data
        told = {
            "model": model, "device": loaded.device, "prompts": len(asked), "decide": decide,
            "verdict": said["verdict"],
            "seconds": own["seconds"], "cpu_seconds": own["cpu_seconds"], "cells": said["cells_run"] / said["cells"],
        }  # fmt: skip
        if full is not None:
            lost = own["cpu"] + own["prepare"] - own["layers"] * full["cpu"] / full["layers"] - full["prepare"]
            told |= {
                "full_seconds": full["seconds"], "full_cpu_seconds": full["cpu_seconds"],
                "times_faster": full["seconds"] / own["seconds"],
                "times_faster_cpu": full["cpu_seconds"] / own["cpu_seconds"],
                "layers_share": own["layers"] / full["layers"], "lost": lost,
            }  # fmt: skip
            taking = replace(adaptive.whole(), reuse=own["run"].id)
            taken = timed(taking, loaded, asked, f"{folder}/adaptive")
            told |= {
                "reusing_seconds": taken["seconds"], "reusing_cpu_seconds": taken["cpu_seconds"],
                "reused": taken["run"].summary.data["reused"]["cells"] / said["cells"],
                **apart(full["run"], taken["run"]),
            }  # fmt: skip
            if record is not None:
                record.write_text(json.dumps([float(drop) for drop in full["run"].sql(f"SELECT {COLUMNS}")["drop"]]))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
