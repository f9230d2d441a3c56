"""What is lost, doubled or changed when something breaks in the middle of a scan: `python benchmarks/faults.py`.

    python benchmarks/faults.py --repeat 20                 # every fault twenty times
    python benchmarks/faults.py --only replica_kill --only raylet_kill
    python benchmarks/faults.py --other-processor           # as MKL computes on processors that are not Intel's

Three Ray nodes on this machine, a head scan of the bundled model by the command line, in the middle of which one thing
breaks; where that ends the command, the same command follows. Then the tables are compared with those of a run in this
process, without Ray. Where a replica was killed: seconds until another process began its shard.

The nodes notice a dead one after about 3 s, not after Ray's 12 to 65 s (tests/ray_nodes.py). A full disk needs the right
to mount; without it that fault is left out.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402
import psutil  # noqa: E402
import pyarrow as pa  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from benchmarks.disturbed import Disturbed, began  # noqa: E402
from mathinterp.cluster.run import run_scan  # noqa: E402
from mathinterp.models.catalog import ModelSpec  # noqa: E402
from mathinterp.prompts.given import prompts_of  # noqa: E402
from mathinterp.store import Store  # noqa: E402
from tests.ray_nodes import NODE, ray_nodes  # noqa: E402

NODES = 3
LIMIT = 20  # prompts
SHARD = "head_scan/00005"  # that fails
AWAY = 30.0  # seconds for which the store is gone
KEYS = {"baseline": "prompt_id, position", "head_scan": "layer, head, prompt_id, position"}
NOT_INTEL = """
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
"""


@dataclass
class Trial:
    """One disturbed run: its places, its commands, and what is seen of it."""

    cluster: Cluster
    folder: Path
    turn: int  # which repetition this is
    seconds: float  # of a shard
    taken_over: list[float] = field(default_factory=list)  # seconds from each kill
    codes: list[int] = field(default_factory=list)  # exit codes of the commands
    said: list[str] = field(default_factory=list)  # what they printed

    def __post_init__(self) -> None:
        self.store, self.notebook = self.folder / "store", self.folder / "notebook"
        self.notebook.mkdir(parents=True)
        self.order()

    def order(self, **faults: str) -> None:
        """Tell replicas which shards fail, by name with __ for /."""
        named = {name.replace("__", "/"): fault for name, fault in faults.items()}
        orders = {"seconds": self.seconds, "together": NODES, "faults": named}
        (self.notebook / "orders.json").write_text(json.dumps(orders))

    def start(self) -> subprocess.Popen[str]:
        """The command, as the driver of a submitted job."""
        words = ["scan", "benchmarks.disturbed:Disturbed", "--notebook", str(self.notebook), "--store", str(self.store),
                 "--limit", str(LIMIT), "--replicas", str(NODES), "--quiet"]  # fmt: skip
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
        command = [sys.executable, "-m", "mathinterp.cli.entry", *words]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def end(self, driver: subprocess.Popen[str]) -> int:
        """Wait for a command; its exit code."""
        said, _ = driver.communicate(timeout=400)
        self.codes.append(driver.returncode)
        self.said.append(said)
        return driver.returncode

    def again(self) -> None:
        """The same command, to its end."""
        if self.end(self.start()) != 0:
            raise AssertionError(f"the same command did not finish the run: {self.said[-1]}")

    def files(self) -> int:
        """Shards that are written."""
        return len(list(self.store.glob("*/run_id=*/shard-*.parquet")))

    def under_way(self, driver: subprocess.Popen[str], files: int | None = None) -> None:
        """Wait until so many shards are written, by default another number in each repetition."""
        wanted = 2 + 3 * self.turn % 13 if files is None else files
        deadline = time.monotonic() + 300
        while self.files() < wanted:
            if driver.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the scan did not get under way: {self.end(driver)} {self.said[-1]}")
            time.sleep(0.02)

    def at_work(self, among: set[int]) -> tuple[int, str]:
        """A process and the shard that it began last, of those of ``among`` that are within one."""
        while True:
            last = {line["pid"]: line["what"] for line in began(self.notebook) if line["pid"] in among}
            for pid, key in last.items():
                if key != "replica" and not list(self.store.glob(f"{key.replace('/', '/run_id=*/shard-')}.parquet")):
                    return pid, key
            time.sleep(0.01)

    def replicas(self) -> set[int]:
        """Their processes, dead ones too."""
        return {line["pid"] for line in began(self.notebook)}

    def measure(self, pid: int, key: str, since: float) -> None:
        """Seconds until another process began what ``pid`` was at, if any had to."""
        later = [line["at"] for line in began(self.notebook)
                 if line["what"] == key and line["pid"] != pid and line["at"] > since]  # fmt: skip
        self.taken_over += [min(later) - since] if later else []


def replica_kill(trial: Trial) -> None:
    """Kill -9 of a replica in the middle of a shard."""
    driver = trial.start()
    trial.under_way(driver)
    pid, key = trial.at_work(trial.replicas())
    since = time.time()
    os.kill(pid, signal.SIGKILL)
    expect(trial, driver, 0)
    trial.measure(pid, key, since)


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
    """SIGTERM of the driver, as `ray job stop` sends it."""
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
    trial.order(**{SHARD.replace("/", "__"): "memory"})
    expect(trial, trial.start(), 0)


def memory_of_a_batch(trial: Trial) -> None:
    """The GPU is full within a batch, and half as much is tried (simulated)."""
    trial.order(**{SHARD.replace("/", "__"): "batch"})
    expect(trial, trial.start(), 0)


def poison(trial: Trial) -> None:
    """A shard that always raises; the second command finds it mended."""
    trial.order(**{SHARD.replace("/", "__"): "poison"})
    expect(trial, trial.start(), 1)
    if SHARD not in trial.said[-1] or trial.files() != 16:
        raise AssertionError(f"{trial.files()} shards, {trial.said[-1]}")
    trial.order()
    trial.again()


def two_drivers(trial: Trial) -> None:
    """The same command twice at once."""
    drivers = [trial.start(), trial.start()]
    for driver in drivers:
        expect(trial, driver, 0)


FAULTS: dict[str, Callable[[Trial], None]] = {
    fault.__name__: fault
    for fault in (
        replica_kill, raylet_kill, raylet_hang, node_hang, driver_kill, driver_sigterm, full_store, store_away,
        memory_of_a_shard, memory_of_a_batch, poison, two_drivers,
    )
}  # fmt: skip


def expect(trial: Trial, driver: subprocess.Popen[str], code: int) -> None:
    """Wait for a command that has to end with ``code``."""
    if trial.end(driver) != code:
        raise AssertionError(f"exit code {driver.returncode} and not {code}: {trial.said[-1]}")


@contextmanager
def doomed_node(trial: Trial) -> Iterator[tuple[psutil.Process, set[int]]]:
    """The raylet of a node that holds a replica, and its replicas; afterwards a fresh node takes its place."""
    (node, raylet, workers), *_ = [
        (node, raylet, workers)
        for node in trial.cluster.worker_nodes
        for raylet in [psutil.Process(node.all_processes["raylet"][0].process.pid)]
        if (workers := {child.pid for child in raylet.children(recursive=True)} & trial.replicas())
    ]
    started = [raylet, *raylet.children(recursive=True)]
    yield raylet, workers
    for process in started:
        if process.is_running():
            process.kill()
    trial.cluster.remove_node(node, allow_graceful=False)
    trial.cluster.add_node(**NODE)
    trial.cluster.wait_for_nodes()


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of 4 MB."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def may_mount() -> bool:
    """Whether this process may make a file system."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder, "disk")):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def fill(ballast: Path) -> None:
    """Write until nothing more fits."""
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def tables(store: Path) -> dict[str, pa.Table]:
    """All rows of the run."""
    return {name: Store(store).arrow(f"SELECT * FROM {name} ORDER BY {keys}") for name, keys in KEYS.items()}


def compare(mine: dict[str, pa.Table], whole: dict[str, pa.Table]) -> dict[str, Any]:
    """Rows lost and doubled, whether all are equal bit for bit, and the largest difference of a log-probability."""
    lost = doubled = 0
    apart = 0.0
    for name, keys in KEYS.items():
        found, asked = (list(zip(*(each[key.strip()].to_pylist() for key in keys.split(",")), strict=True))
                        for each in (mine[name], whole[name]))  # fmt: skip
        lost += len(set(asked) - set(found))
        doubled += len(found) - len(set(found)) + len(set(found) - set(asked))
        if found == asked:
            pairs = zip(mine[name]["logprob"].to_pylist(), whole[name]["logprob"].to_pylist(), strict=True)
            apart = max(apart, *(abs(one - other) for one, other in pairs))
    return {"lost": lost, "doubled": doubled, "equal": mine == whole, "apart": apart}


def try_once(cluster: Cluster, name: str, turn: int, seconds: float, whole: dict[str, pa.Table]) -> dict[str, Any]:
    """One repetition of a fault, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trial, started = Trial(cluster, Path(folder), turn, seconds), time.monotonic()
        try:
            FAULTS[name](trial)
            came = compare(tables(trial.store), whole) | {"error": None}
        except (AssertionError, subprocess.TimeoutExpired) as error:
            came = {"lost": 0, "doubled": 0, "equal": False, "apart": 0.0, "error": str(error)[-2000:]}
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
def main(repeat: int, only: tuple[str, ...], seconds: float, other_processor: bool, as_json: bool) -> None:
    """Break things, and count what came of it; exits with 1 if anything was lost, doubled or unexpected."""
    if other_processor:
        as_not_intel()
    names = [name for name in FAULTS if not only or name in only]
    if "full_store" in names and not may_mount():
        click.echo("full_store is left out: it needs the right to mount")
        names.remove("full_store")
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_scan(Disturbed(), ModelSpec(), prompts_of("two_digit", limit=LIMIT), folder, progress=False)
        whole = tables(Path(folder))
    with ray_nodes() as cluster:
        for _ in range(NODES - 1):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        for name in names:
            trials = [try_once(cluster, name, turn, seconds, whole) for turn in range(repeat)]
            found[name] = figures_of(trials)
            click.echo(shown(name, found[name]))
            for error in found[name]["errors"]:
                click.echo(f"  {error}")
        assert ray.is_initialized()
    if as_json:
        click.echo(json.dumps({"nodes": NODES, "shard_s": seconds, "faults": found}))
    good = all(each["as_expected"] == each["repetitions"] and not each["rows_lost"] + each["rows_doubled"]
               for each in found.values())  # fmt: skip
    sys.exit(not good)


if __name__ == "__main__":
    main()
