"""How does a store answer when it has grown? 300 runs in 20,000 files, and a driver with 200,000 prompts.

    python benchmarks/store_growth.py                                  # builds the store anew, a minute
    python benchmarks/store_growth.py --folder grown                   # keeps it there for the next time
    python benchmarks/store_growth.py --runs 30 --driver-prompts 20000 # a tenth of it

Every command is run as a process of its own; ``start`` is what the same command takes with a store of nothing else, so
that the difference is what growth costs. Files are written by the store's own writer, with random scores. Needs no GPU.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.store import Run, Store, prompts_fingerprint

LAYERS, HEADS, PROMPTS = 8, 8, 32
SCAN = ["scan", "heads", "--limit", str(PROMPTS)]
TARGETS = {"runs": 1.0, "effects of one run": 2.0, "finished scan again": 3.0, "report of one run": 5.0}
DRIVER_SECONDS, DRIVER_BYTES = 30.0, 0.6e9


def synthetic_prompts() -> list[TokenizedPrompt]:
    """Prompts of four operations, each with one or two scored tokens."""
    found = []
    for number in range(PROMPTS):
        prompt = Prompt(
            f"{number}", f"prompt {number} is", "12", ("add", "sub", "mul", "div")[number % 4], "25", "10", "t"
        )
        scored = tuple(ScoredToken(place, 5 + place, 7, "7", "digit", "memorize") for place in range(1 + number % 2))
        found.append(TokenizedPrompt(prompt, tuple(range(7)), scored))
    return found


def score_columns(units: list[tuple[str, int]], random: np.random.Generator) -> dict[str, pa.Array]:
    """Columns of a token score for each (prompt_id, position)."""
    count = len(units)
    return {
        "prompt_id": pa.array([prompt for prompt, _ in units]),
        "position": pa.array([position for _, position in units], pa.int16()),
        "correct": pa.array(random.random(count) < 0.75),
        "logprob": pa.array(-random.exponential(size=count).astype(np.float32)),
        "logit": pa.array(random.normal(size=count).astype(np.float32)),
        "predicted_id": pa.array(random.integers(0, 32_000, count).astype(np.int32)),
    }


def open_synthetic(store: Store, seed: int, fingerprint: str) -> Run:
    """The record of run number ``seed``: a baseline and one shard a head."""
    return store.open_run(
        scan="heads", model=f"model {seed}", model_fingerprint=f"{seed:016x}", prompts="synthetic",
        prompts_fingerprint=fingerprint, dtype="bfloat16", parameters={"scoring": "token", "ablation": "zero"},
        code_version="benchmark", shards=["baseline/00000", *(f"head_scan/{i:05d}" for i in range(LAYERS * HEADS + 1))],
    )  # fmt: skip


def build(folder: Path, runs: int) -> str:
    """Write ``runs`` finished runs of 66 files each; returns the id of the last one. One that is there is kept."""
    marker = folder.with_name(f"{folder.name}.built")
    if marker.exists() and (known := json.loads(marker.read_text()))["runs"] == runs:
        return str(known["run"])
    prompts = synthetic_prompts()
    fingerprint = prompts_fingerprint(prompts)
    units = [(prompt.prompt.prompt_id, token.position) for prompt in prompts for token in prompt.scored]
    random, run = np.random.default_rng(0), None
    with mock.patch("os.fsync"):  # a made store need not outlive a power cut
        for seed in range(runs):
            store = Store(folder)
            # Views and surveys of what is there are not what is timed here: a long life is made in a short one.
            with mock.patch.object(Store, "write_views"):
                run = open_synthetic(store, seed, fingerprint)
                store.write_prompts(fingerprint, prompts)
                store.write_shard(run.run_id, "baseline", 0, pa.table(score_columns(units, random)), {"scan": "heads"})
                for index in range(LAYERS * HEADS + 1):
                    ids = {name: pa.array(np.full(len(units), value, np.int16))
                           for name, value in zip(("layer", "head"), divmod(index, HEADS), strict=True)}  # fmt: skip
                    table = pa.table({**ids, **score_columns(units, random)})
                    store.write_shard(run.run_id, "head_scan", index, table, {"scan": "heads"})
                assert run.finish() == []
    assert run is not None
    Store(folder).write_views()
    marker.write_text(json.dumps({"runs": runs, "run": run.run_id}))
    return run.run_id


def command_seconds(words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of a command of mathinterp."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "mathinterp", *words], capture_output=True, text=True, env=dict(os.environ)
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(folder: Path, run: str, scanned: str, out: Path) -> dict[str, list[str]]:
    """What is timed, by its name in the table; ``scanned`` is a run of the bundled model in the store."""
    effects = f"SELECT * FROM head_effects WHERE run_id = '{run}'"
    return {
        "runs": ["sql", "--store", str(folder), "SELECT run_id, scan, status FROM runs"],
        "effects of one run": ["sql", "--store", str(folder), effects],
        "finished scan again": [*SCAN, "--store", str(folder)],
        "report of one run": ["report", "--store", str(folder), "--run", scanned, "--out", str(out)],
    }


def scanned_run(folder: Path) -> str:
    """Scan the bundled model into the store, or find that scan there; returns its run id."""
    done = subprocess.run(
        [sys.executable, "-m", "mathinterp", *SCAN, "--store", str(folder), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return str(json.loads(done.stdout)["run_id"])


DRIVER = """
import json, resource, sys, time
start = time.perf_counter()
from mathinterp.cluster.run import open_run, prepare_work
from mathinterp.experiments.heads import Heads
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.given import prompts_of
from mathinterp.store import Store
imported, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = Store(sys.argv[2])
work = prepare_work(Heads(), ModelSpec("bundled"), prompts_of(sys.argv[1]), on_gpu=False, store=store)
prepared = time.perf_counter()
open_run(store, work)
told = {"imports": imported - start, "prompts": prepared - imported, "store": time.perf_counter() - prepared}
print(json.dumps({**told, "bytes_before": before * 1024,
                  "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def driver_figures(count: int, folder: Path) -> dict[str, float]:
    """What a driver takes to read, tokenize, cut and keep ``count`` prompts, before any replica starts."""
    from mathinterp.prompts import load_prompts
    from mathinterp.prompts.files import write_prompts

    base = load_prompts("two_digit")
    many = [replace(base[number % len(base)], prompt_id=f"p{number}") for number in range(count)]
    write_prompts(many, folder / "many.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder / "many.jsonl"), str(folder / "driver-store")],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Build, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--driver-prompts", type=int, default=200_000, help="0: leave the driver out")
    parser.add_argument("--folder", type=Path, default=None, help="keep the store here, and use one that is here")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place, few = Path(scratch), Path(scratch) / "few"
        folder = (options.folder or place / "grown").absolute()
        start = time.perf_counter()
        run = build(folder, options.runs)
        figures: dict[str, dict[str, float]] = {"build": {"seconds": time.perf_counter() - start}}
        small, scanned = build(few, 1), scanned_run(few)
        scanned_run(folder)
        for name, words in commands(folder, run, scanned, place / "page").items():
            start_wall, start_cpu = command_seconds(commands(few, small, scanned, place / "page")[name])
            wall, cpu = command_seconds(words)
            figures[name] = {"seconds": wall, "cpu": cpu, "start": start_wall, "start_cpu": start_cpu}
        files = sum(1 for _ in folder.rglob("*.parquet"))
        if options.driver_prompts:
            figures["driver"] = driver_figures(options.driver_prompts, place)
    if options.json:
        print(json.dumps({"runs": options.runs, "files": files, **figures}))
        return
    print(f"{options.runs} runs in {files:,} files")
    for name, target in TARGETS.items():
        at = figures[name]
        print(f"{name:22s} {at['seconds']:7.2f} s ({at['cpu']:.2f} s of processor); with little in the store"
              f" {at['start']:.2f} ({at['start_cpu']:.2f}); target under {target:g} s")  # fmt: skip
    if driver := figures.get("driver"):
        gigabytes, before = driver["bytes"] / 1e9, driver["bytes_before"] / 1e9
        print(f"driver, {options.driver_prompts:,} prompts: {driver['prompts'] + driver['store']:.1f} s"
              f" ({driver['store']:.1f} in the store), {gigabytes:.2f} GB at most ({before:.2f} before);"
              f" targets {DRIVER_SECONDS:g} s, {DRIVER_BYTES / 1e9:g} GB")  # fmt: skip


if __name__ == "__main__":
    main()
