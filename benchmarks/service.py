"""How long does a follow-up question take at a warm service, and how long from a cold start?

    python benchmarks/service.py                              # the bundled model, 5 heads x 20 prompts
    python benchmarks/service.py --model random:llama-2-7b    # on a GPU

Cold: ``mathinterp scan heads`` in a new process, which starts Ray and loads the model. Warm: a service that has loaded
the model (`mathinterp serve start`), asked from a Python process that is running: other heads and other prompts each
time, until the rows of the heads are there, and until the run is finished and stored. Targets: under 1 s on the bundled
model, under 3 s for a 7B shape on an H100. Warm command: the same questions by ``mathinterp scan heads --service URL``,
each in a new process, from its start to its end; the target is 2 s on an idle core. Rows of both ways are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

import mathinterp as mi
from mathinterp.connected import Service
from mathinterp.experiments.heads import Heads
from mathinterp.models.units import Head
from mathinterp.prompts.given import Prompts
from mathinterp.store import Store

HEADS = 5
COMMAND = [sys.executable, "-m", "mathinterp"]
ROWS = "SELECT * FROM head_scan WHERE run_id = $run ORDER BY ALL"


def main() -> None:
    """Start, ask, print, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--limit", type=int, default=20, help="prompts of a question")
    parser.add_argument("--repeats", type=int, default=8, help="warm questions; the first is left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cold, run_id = cold_start(options.model, options.limit, f"{folder}/cold")
        with service(folder) as (url, front, start):
            client = mi.connect(url)
            figures = follow_ups(client, front, options.model, options.limit, options.repeats, folder)
            figures |= commands(url, options.model, options.limit, options.repeats, folder)
            again = client.run(question(0), options.model, prompts(options.limit, 0), store=f"{folder}/same")
            same = again.id == run_id and Store(f"{folder}/cold").arrow(ROWS, {"run": run_id}).equals(
                Store(f"{folder}/same").arrow(ROWS, {"run": run_id})
            )
    figures = {"cold start": cold, **figures, "service start": start, "ratio": cold / figures["first rows"]}
    if options.json:
        print(json.dumps({"model": options.model, "prompts": options.limit, "rows equal": same, **figures}))
        return
    print(f"{HEADS} heads x {options.limit} prompts, {options.model}")
    print(f"cold start, to the end of the command   {cold:6.2f} s")
    print(f"warm, to the first rows (median)        {figures['first rows']:6.2f} s, best {figures['best']:.2f} s")
    print(f"warm, to the end of the run (median)    {figures['whole run']:6.2f} s")
    print(f"    its processor time                  {figures['processor']:6.2f} s, client, front and replica")
    print(f"warm command, to its end (median)       {figures['command']:6.2f} s")
    print(f"    its processor time                  {figures['command processor']:6.2f} s, the command alone")
    print(f"in this process, model loaded (median)  {figures['here']:6.2f} s")
    print(f"warm, ablate (median)                   {figures['ablate']:6.2f} s")
    print(f"starting the service                    {start:6.2f} s")
    print(f"cold start / first rows: {figures['ratio']:.0f} times; rows equal: {same}")


def question(number: int) -> Heads:
    """Five heads of the first layer, others each time where there are more."""
    return Heads(heads=tuple(Head(0, (number + head) % 8) for head in range(HEADS)))


def prompts(limit: int, seed: int) -> Prompts:
    """Of other operands for each seed."""
    return mi.prompts("two_digit", limit=limit, seed=seed)


def cold_start(model: str, limit: int, store: str) -> tuple[float, str]:
    """Seconds of a scan in a new process, and its run's id."""
    return command(0, 0, model, limit, store)


def command(number: int, seed: int, model: str, limit: int, store: str, *more: str) -> tuple[float, str]:
    """Seconds of a question by the command line, and its run's id."""
    heads = ",".join(f"{layer}.{head}" for layer, head in question(number).heads or ())
    words = ["--heads", heads, "--limit", str(limit), "--seed", str(seed), "--model", model, "--store", store]
    given = [*COMMAND, "scan", "heads", *words, "--json", "-q", *more]
    started = time.perf_counter()
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, str(json.loads(done.stdout)["run_id"])


def commands(url: str, model: str, limit: int, repeats: int, folder: str) -> dict[str, float]:
    """Median seconds of commands that ask the service what was not asked before; the first looks at the model."""
    seconds, busy = list[float](), list[float]()
    for number in range(repeats):
        before = os.times()
        took, _ = command(number, repeats + number + 1, model, limit, f"{folder}/commands", "--service", url)
        after = os.times()
        seconds.append(took)
        busy.append(sum(after[2:4]) - sum(before[2:4]))  # of children that have ended
    return {"command": statistics.median(seconds[1:]), "command processor": statistics.median(busy[1:])}


@contextmanager
def service(folder: str, replicas: int = 1, *more: str) -> Iterator[tuple[str, int, float]]:
    """The URL of a service with ``more`` options, its process, and the seconds until it answered."""
    told = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
    started = time.perf_counter()
    words = ["serve", "start", "--port", "0", "--replicas", str(replicas), *more]
    done = subprocess.run([*COMMAND, *words], env=told, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    seconds = time.perf_counter() - started
    try:
        (state,) = Path(folder, "cache/mathinterp/services").glob("*.json")
        running = json.loads(state.read_text())
        yield running["url"], running["pid"], seconds
    finally:
        done = subprocess.run([*COMMAND, "serve", "stop"], env=told, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


def follow_ups(client: Service, front: int, model: str, limit: int, repeats: int, folder: str) -> dict[str, float]:
    """Median seconds of questions that were not asked before, here and there."""
    first, whole, here, ablate, busy = (list[float]() for _ in range(5))
    pids = [os.getpid(), front, *(row["pid"] for row in client.status()["replicas"])]
    processes = [psutil.Process(pid) for pid in pids]
    local = mi.load(model)
    for number in range(repeats):
        asked, scan = prompts(limit, number + 1), question(number)
        started, before = time.perf_counter(), processor_seconds(processes)
        for cell in client.stream(scan, model, asked, store=f"{folder}/warm"):
            if cell.shard.startswith("head_scan/"):
                first.append(time.perf_counter() - started)
        whole.append(time.perf_counter() - started)
        busy.append(processor_seconds(processes) - before)
        started = time.perf_counter()
        mi.run(scan, local, asked, store=f"{folder}/here", progress=False)
        here.append(time.perf_counter() - started)
        started = time.perf_counter()
        client.ablate(model, asked, heads=scan.heads)
        ablate.append(time.perf_counter() - started)
    measured = {"first rows": first, "whole run": whole, "here": here, "ablate": ablate, "processor": busy}
    return {**{name: statistics.median(each[1:]) for name, each in measured.items()}, "best": min(first[1:])}


def processor_seconds(processes: list[psutil.Process]) -> float:
    """What they took so far; on a busy machine this says more than the clock."""
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in processes)))


if __name__ == "__main__":
    main()
