"""Do replicas that compile at the same moment, each from nothing, compute the same rows bit for bit?

    python benchmarks/replica_equality.py                                   # CPU, the bundled model: under a minute
    python benchmarks/replica_equality.py --model random:llama-2-7b --replicas 4 --gpus 0.25 --layers 0,16,31
    python benchmarks/replica_equality.py ... --by-timing                   # as torch compiles by itself, to compare

Every replica is a process of its own with an empty compiler cache. All start together, compute the same shards of a
head scan, and their rows and the cells they tell when they join (cluster/agreement.py) are compared. On several GPUs
replica number i takes GPU i * gpus, rounded down.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from mathinterp.engine.cells import Cells

HERE = Path(__file__).resolve()
FLOATS = ("logprob", "logit")


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--limit", default=160, show_default=True, help="Prompts of the set two_digit.")
@click.option("--layers", default="0,7", show_default=True, help="Of the heads that are zeroed.")
@click.option("--replicas", default=4, show_default=True)
@click.option("--gpus", default=0.0, show_default=True, help="Of one replica, at most 1; 0: CPU.")
@click.option("--rounds", default=2, show_default=True, help="Each with new processes and empty caches.")
@click.option("--shared-cache", is_flag=True, help="One compiler cache for all replicas of a round, as on one machine.")
@click.option("--by-timing", is_flag=True, help="Let torch's compiler choose kernels by timing them.")
@click.option("--compiled/--eager", default=None, help="Compile layers; default: on a GPU.")
def main(
    model: str, limit: int, layers: str, replicas: int, gpus: float, rounds: int, shared_cache: bool, by_timing: bool,
    compiled: bool | None,
) -> None:  # fmt: skip
    """Run all rounds and say what differs."""
    work = {
        "model": model,
        "limit": limit,
        "layers": [int(layer) for layer in layers.split(",")],
        "device": "cuda" if gpus else "cpu",
        "by_timing": by_timing,
        "compiled": bool(gpus) if compiled is None else compiled,
        "replicas": replicas,
    }
    with tempfile.TemporaryDirectory() as scratch:
        told = []
        for turn in range(rounds):
            folder = Path(scratch, str(turn))
            folder.mkdir()
            told += run_round(work, folder, replicas, gpus, shared_cache)
            print(f"round {turn + 1}: " + "; ".join(describe(one) for one in told[-replicas:]), flush=True)
        compare(told)


def run_round(
    work: dict[str, Any], folder: Path, replicas: int, gpus: float, shared_cache: bool
) -> list[dict[str, Any]]:
    """Start all replicas of a round together; what each tells."""
    processes = []
    for number in range(replicas):
        cache = folder / ("cache" if shared_cache else f"cache-{number}")
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(int(number * gpus))
        asked = json.dumps({**work, "number": number, "folder": str(folder)})
        processes.append(subprocess.Popen([sys.executable, str(HERE), "--replica", asked], env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"replicas ended with {codes}")
    return [json.loads((folder / f"told-{number}.json").read_text()) | {"rows": str(folder / f"rows-{number}.arrow")}
            for number in range(replicas)]  # fmt: skip


def replica(asked: dict[str, Any]) -> None:
    """One replica: load, prepare, tell its cells, compute all shards; rows and figures go to files."""
    from mathinterp.cluster.agreement import PROBE
    from mathinterp.cluster.places import Placement
    from mathinterp.cluster.replica import Replica
    from mathinterp.cluster.run import open_run, prepare_work, replica_job
    from mathinterp.engine import choose, compiling
    from mathinterp.experiments import ablated as ablation
    from mathinterp.experiments.heads import Heads
    from mathinterp.models.catalog import ModelSpec
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store

    if asked["by_timing"]:
        compiling.by_rule = dict
    pays = bool(asked["compiled"])
    for module in (choose, ablation):
        vars(module)["pays_to_compile"] = lambda *_: pays
    on_gpu = asked["device"] == "cuda"
    scan = Heads(layers=tuple(asked["layers"]))
    folder, number = Path(asked["folder"]), asked["number"]
    store = Store(folder / f"store-{number}")
    prompts = load_prompts("two_digit", limit=asked["limit"])
    work = prepare_work(scan, ModelSpec(asked["model"]), prompts, on_gpu=on_gpu, store=store)
    run = open_run(store, work)
    job = replica_job(work, run, store, Placement(asked["replicas"], 1.0 if on_gpu else 0.0, 1, 1))
    wait_for_all(folder, number, asked["replicas"])
    started = time.perf_counter()
    one = Replica(replace(job, store_url=store.url))
    notes = one.load()
    loaded = time.perf_counter()
    receipts = [one.run(shard) for shard in work.shards]
    seconds = [round(receipt.seconds, 2) for receipt in receipts]
    tables = [store.arrow(f"SELECT * EXCLUDE (run_id) FROM {table} ORDER BY ALL") for table in scan.tables]
    rows = pa.concat_tables(tables, promote_options="default")
    with pa.OSFile(str(folder / f"rows-{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    told = {
        "number": number, "cells": notes[PROBE], "load_seconds": round(loaded - started, 1),
        "probe_seconds": round(notes["probe_seconds"], 2), "shard_seconds": seconds,
        "halved": sum(receipt.halved for receipt in receipts), "engine": notes.get("attention", notes["engine"]),
    }  # fmt: skip
    (folder / f"told-{number}.json").write_text(json.dumps(told))


def wait_for_all(folder: Path, number: int, replicas: int) -> None:
    """Until every replica of the round has come this far."""
    (folder / f"here-{number}").touch()
    while len(list(folder.glob("here-*"))) < replicas:
        time.sleep(0.02)


def describe(told: dict[str, Any]) -> str:
    """One replica's figures."""
    return (
        f"replica {told['number']} ({told['engine']}) cells {told['cells']['digest'][:8]},"
        f" load {told['load_seconds']} s, cells {told['probe_seconds']} s,"
        f" shards {sum(told['shard_seconds']):.1f} s, halved {told['halved']}"
    )


def compare(told: list[dict[str, Any]]) -> None:
    """Every replica of every round against the very first."""
    first = told[0]
    expected, cells = read(first["rows"]), Cells.from_json(first["cells"])
    unequal = 0
    for one in told[1:]:
        rows = read(one["rows"])
        difference = cells.difference(Cells.from_json(one["cells"]))
        if rows.equals(expected) and difference is None:
            continue
        unequal += 1
        apart = {name: abs(rows[name].to_numpy() - expected[name].to_numpy()) for name in FLOATS}
        other = rows["predicted_id"].to_numpy() != expected["predicted_id"].to_numpy()
        told_by_cells = "no" if difference is None else f"{difference.largest} nats in {difference.values} values"
        print(
            f"replica {one['number']}: rows differ by up to {max(float(a.max()) for a in apart.values()):.4g} nats,"
            f" {int((apart['logprob'] > 0).sum())} log-probabilities and {int(other.sum())} predictions of {len(rows)};"
            f" its cells: {told_by_cells}; sum {rows['logprob'].to_numpy().sum(dtype='f8'):.2f}"
        )
    print(f"{len(expected)} rows, sum of log-probabilities {expected['logprob'].to_numpy().sum(dtype='f8'):.2f}")
    print(f"EQUAL: {len(told)} replicas, bit for bit" if not unequal else f"UNEQUAL: {unequal} of {len(told) - 1}")


def read(path: str) -> pa.Table:
    """The rows of a file."""
    with pa.memory_map(path) as source:
        return pa.ipc.open_file(source).read_all()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        replica(json.loads(sys.argv[2]))
    else:
        main()
