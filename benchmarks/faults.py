"""What is lost, doubled or changed when something breaks in the middle of a scan: `python benchmarks/faults.py`.

    python benchmarks/faults.py --repeat 20                 # every fault twenty times
    python benchmarks/faults.py --only replica_kill --only raylet_kill
    python benchmarks/faults.py --other-processor           # as MKL computes on processors that are not Intel's

Three Ray nodes on this machine, a head scan of the bundled model by the command line, in the middle of which one thing
breaks; where that ends the command, the same command follows. Then the tables are compared with those of a run in this
process, without Ray. Where a replica was killed: seconds until another process began its shard.

The nodes notice a dead one after about 3 s, not after Ray's 12 to 65 s (tests/ray_nodes.py). A full disk needs the
right to mount; without it that fault is left out.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402
import pyarrow as pa  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from benchmarks.disturbed import Disturbed  # noqa: E402
from benchmarks.service import service  # noqa: E402
from benchmarks.trial import (  # noqa: E402
    LIMIT,
    NODES,
    SHARDS,
    Trial,
    compare,
    doomed_node,
    expect,
    fill,
    may_mount,
    small_disk,
    tables,
)
from mathinterp.cluster.run import run_scan  # noqa: E402
from mathinterp.models.catalog import ModelSpec  # noqa: E402
from mathinterp.prompts.given import prompts_of  # noqa: E402
from tests.ray_nodes import NODE, ray_nodes  # noqa: E402

SHARD = "head_scan/00005"  # that fails
AWAY = 30.0  # seconds for which the store is gone
NOT_INTEL = """
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
"""


def replica_kill(trial: Trial) -> None:
    """Kill -9 of two replicas of three, each in the middle of a shard."""
    driver, killed = trial.start(), list[tuple[int, str, float]]()
    for files in (2 + 3 * trial.turn % 8, 5 + 3 * trial.turn % 8):
        trial.under_way(driver, files)
        pid, key = trial.at_work(trial.replicas() - {dead for dead, _, _ in killed})
        killed.append((pid, key, time.time()))
        os.kill(pid, signal.SIGKILL)
    expect(trial, driver, 0)
    for dead in killed:
        trial.measure(*dead)


def raylet_kill(trial: Trial) -> None:
    """Kill -9 of a node's raylet."""
    driver = trial.start()
    trial.under_way(driver)
    with doomed_node(trial) as (raylet, workers):
        pid, key = trial.at_work(workers)
        since = time.time()
        raylet.kill()
        expect(trial, driver, 0)
    trial.measure(pid, key, since)


def raylet_hang(trial: Trial) -> None:
    """SIGSTOP of a node's raylet."""
    driver = trial.start()
    trial.under_way(driver)
    with doomed_node(trial) as (raylet, _):
        raylet.suspend()
        expect(trial, driver, 0)


def node_hang(trial: Trial) -> None:
    """SIGSTOP of a node's raylet and all that it started."""
    driver = trial.start()
    trial.under_way(driver)
    with doomed_node(trial) as (raylet, workers):
        pid, key = trial.at_work(workers)
        since = time.time()
        for process in [raylet, *raylet.children(recursive=True)]:
            process.suspend()
        expect(trial, driver, 0)
    trial.measure(pid, key, since)


def driver_kill(trial: Trial) -> None:
    """Kill -9 of the driver."""
    driver = trial.start()
    trial.under_way(driver)
    driver.kill()
    expect(trial, driver, -signal.SIGKILL)
    trial.again()


def driver_sigterm(trial: Trial) -> None:
    """SIGTERM of the driver, as `ray job stop` sends it; tests/test_jobs.py stops a real job."""
    driver = trial.start()
    trial.under_way(driver)
    driver.terminate()
    expect(trial, driver, 143)
    trial.again()


def full_store(trial: Trial) -> None:
    """A disk that is full after a few shards, and has room again for the second command."""
    with small_disk(trial.store):
        ballast = trial.store / "ballast"
        trial.store.mkdir(exist_ok=True)
        driver = trial.start()
        trial.under_way(driver)
        fill(ballast)
        expect(trial, driver, 1)
        if "No space left on device" not in trial.said[-1]:
            raise AssertionError(trial.said[-1])
        ballast.unlink()
        trial.again()
        shutil.copytree(trial.store, trial.folder / "kept")
    trial.store.rmdir()
    (trial.folder / "kept").rename(trial.store)


def store_away(trial: Trial) -> None:
    """The store's folder is gone for 30 s."""
    driver = trial.start()
    trial.under_way(driver)
    elsewhere = trial.folder / "elsewhere"
    trial.store.rename(elsewhere)
    time.sleep(AWAY)
    if trial.store.exists():
        raise AssertionError("another store was begun while the store was away")
    elsewhere.rename(trial.store)
    expect(trial, driver, 0)


def memory_of_a_shard(trial: Trial) -> None:
    """The GPU is full within a shard, where nothing halves the batch (simulated)."""
    trial.order({SHARD: "memory"})
    expect(trial, trial.start(), 0)
    if trial.record()["attempts"] != {SHARD: 2}:
        raise AssertionError(trial.record()["attempts"])


def memory_of_a_batch(trial: Trial) -> None:
    """The GPU is full within a batch, and half as much is tried (simulated)."""
    trial.order({SHARD: "batch"})
    expect(trial, trial.start(), 0)
    if "memory_ran_out" not in trial.record()["notes"]:
        raise AssertionError("no batch was halved")


def poison(trial: Trial) -> None:
    """A shard that always raises; the second command finds it mended."""
    trial.order({SHARD: "poison"})
    expect(trial, trial.start(), 1)
    if SHARD not in trial.said[-1] or trial.files() != SHARDS - 1:
        raise AssertionError(f"{trial.files()} shards, {trial.said[-1]}")
    trial.order()
    trial.again()


def two_drivers(trial: Trial) -> None:
    """The same command twice at once."""
    drivers = [trial.start(), trial.start()]
    for driver in drivers:
        expect(trial, driver, 0)


def service_replica_kill(trial: Trial) -> None:
    """Kill -9 of one of three replicas of a warm service, in the middle of a shard that it was asked for."""
    trial.order(together=1)  # a service loads a model where it is asked first
    with service(str(trial.folder), NODES, "--experiment", "benchmarks.disturbed:Disturbed") as (url, _, _):
        driver = trial.start("--service", url)
        trial.under_way(driver)
        pid, key = trial.at_work(trial.replicas())
        since = time.time()
        os.kill(pid, signal.SIGKILL)
        expect(trial, driver, 0)
    trial.measure(pid, key, since)


FAULTS: dict[str, Callable[[Trial], None]] = {
    fault.__name__: fault
    for fault in (
        replica_kill, raylet_kill, raylet_hang, node_hang, driver_kill, driver_sigterm, full_store, store_away,
        memory_of_a_shard, memory_of_a_batch, poison, two_drivers, service_replica_kill,
    )
}  # fmt: skip


def try_once(cluster: Cluster, name: str, turn: int, seconds: float, whole: dict[str, pa.Table]) -> dict[str, Any]:
    """One repetition of a fault, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trial, started = Trial(cluster, Path(folder), turn, seconds), time.monotonic()
        try:
            FAULTS[name](trial)
            came = compare(tables(trial.store), whole) | {"error": None}
        except (AssertionError, subprocess.TimeoutExpired) as error:
            came = {"lost": 0, "doubled": 0, "equal": False, "apart": 0.0, "error": str(error)[-2000:]}
        finally:
            trial.close()
        return came | {"seconds": time.monotonic() - started, "taken_over": trial.taken_over}


def figures_of(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """What the repetitions of a fault come to."""
    taken_over = sorted(second for trial in trials for second in trial["taken_over"])
    return {
        "repetitions": len(trials),
        "as_expected": sum(trial["error"] is None for trial in trials),
        "rows_lost": sum(trial["lost"] for trial in trials),
        "rows_doubled": sum(trial["doubled"] for trial in trials),
        "equal": sum(trial["equal"] for trial in trials),
        "largest_difference": max(trial["apart"] for trial in trials),
        "taken_over_s": [round(seconds, 2) for seconds in taken_over],
        "mean_s": round(sum(trial["seconds"] for trial in trials) / len(trials), 1),
        "errors": [trial["error"] for trial in trials if trial["error"]],
    }


def shown(name: str, found: dict[str, Any]) -> str:
    """One line."""
    over = found["taken_over_s"]
    told = f", shard elsewhere after {over[len(over) // 2]:.1f} s (most {over[-1]:.1f} s)" if over else ""
    return (
        f"{name}: {found['as_expected']} of {found['repetitions']} as expected, {found['rows_lost']} rows lost,"
        f" {found['rows_doubled']} doubled, equal {found['equal']} times{told}, {found['mean_s']} s each"
    )


def as_not_intel() -> None:
    """Begin this program again with a library that hides from MKL that the processor is Intel's (needs cc).

    MKL takes other matrix products on AMD's processors, whose last bits depend on where data lie in memory.
    """
    if "LD_PRELOAD" not in os.environ:
        folder = Path(tempfile.mkdtemp())
        (folder / "not_intel.c").write_text(NOT_INTEL)
        library = str(folder / "not_intel.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(folder / "not_intel.c")], check=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})


@click.command()
@click.option("--repeat", default=2, show_default=True, help="Of each fault.")
@click.option("--only", multiple=True, type=click.Choice(list(FAULTS)), help="These faults; default: all.")
@click.option("--seconds", default=1.0, show_default=True, help="That a shard takes.")
@click.option("--other-processor", is_flag=True, help="As on a processor that is not Intel's.")
@click.option("--minutes", type=float, default=None, help="Begin no further repetition after so long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
def main(
    repeat: int, only: tuple[str, ...], seconds: float, other_processor: bool, minutes: float | None, as_json: bool
) -> None:
    """Break things, and count what came of it; exits with 1 if anything was lost, doubled or unexpected."""
    if other_processor:
        as_not_intel()
    names = [name for name in FAULTS if not only or name in only]
    if "full_store" in names and not may_mount():
        click.echo("full_store is left out: it needs the right to mount")
        names.remove("full_store")
    # Ray gives its workers little of a processor that others want, too; then times would be those of the others.
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    until = time.monotonic() + (float("inf") if minutes is None else 60 * minutes)
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        run_scan(Disturbed(), ModelSpec(), prompts_of("two_digit", limit=LIMIT), folder, progress=False)
        whole = tables(Path(folder))
    with ray_nodes() as cluster:
        ray.shutdown()  # commands connect, this process has no use for it
        for _ in range(NODES - 1):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        with suppress(KeyboardInterrupt):  # what is done counts
            for turn, name in ((turn, name) for turn in range(repeat) for name in names):
                if time.monotonic() < until:
                    trials[name].append(try_once(cluster, name, turn, seconds, whole))
                    click.echo(f"{turn + 1}: {shown(name, figures_of(trials[name][-1:]))}")
    found = {name: figures_of(done) for name, done in trials.items() if done}
    for name, figures in found.items():
        click.echo("\n  ".join([shown(name, figures), *figures["errors"]]))
    if as_json:
        click.echo(json.dumps({"nodes": NODES, "shard_s": seconds, "faults": found}))
    good = all(each["as_expected"] == each["repetitions"] and not each["rows_lost"] + each["rows_doubled"]
               for each in found.values())  # fmt: skip
    sys.exit(not good)


if __name__ == "__main__":
    main()
