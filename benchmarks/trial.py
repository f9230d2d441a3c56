"""One disturbed run of benchmarks/faults.py: its places and commands, what may be broken, and what is compared."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from ray.cluster_utils import Cluster

from benchmarks.disturbed import began
from mathinterp.store import Store
from tests.ray_nodes import NODE

ROOT = Path(__file__).resolve().parents[1]
NODES = 3
LIMIT = 20  # prompts
SHARDS = 17
KEYS = {"baseline": "prompt_id, position", "head_scan": "layer, head, prompt_id, position"}


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
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store, self.notebook = self.folder / "store", self.folder / "notebook"
        self.notebook.mkdir(parents=True)
        self.order()

    def order(self, faults: Mapping[str, str] | None = None, together: int = NODES) -> None:
        """Tell replicas which shards fail, by key, and how many of them begin together."""
        orders = {"seconds": self.seconds, "together": together, "faults": dict(faults or {})}
        (self.notebook / "orders.json").write_text(json.dumps(orders))

    def start(self, *more: str) -> subprocess.Popen[str]:
        """The command with ``more`` words, as the driver of a submitted job."""
        words = ["scan", "benchmarks.disturbed:Disturbed", "--notebook", str(self.notebook), "--store", str(self.store),
                 "--limit", str(LIMIT), "--replicas", str(NODES), "--quiet", *more]  # fmt: skip
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
        command = [sys.executable, "-m", "mathinterp", *words]
        driver = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.drivers.append(driver)
        return driver

    def close(self) -> None:
        """Leave no command running."""
        for driver in self.drivers:
            driver.kill()

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

    def record(self) -> dict[str, Any]:
        """Of the run, as the store has it."""
        (place,) = (self.store / "runs").glob("*.json")
        found: dict[str, Any] = json.loads(place.read_text())
        return found

    def under_way(self, driver: subprocess.Popen[str], files: int | None = None) -> None:
        """Wait until so many shards are written, by default another number in each repetition."""
        wanted = 2 + 3 * self.turn % 10 if files is None else files
        deadline = time.monotonic() + 300
        while self.files() < wanted:
            if driver.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the scan did not get under way: {self.end(driver)} {self.said[-1]}")
            time.sleep(0.02)

    def at_work(self, among: set[int]) -> tuple[int, str]:
        """A process and the shard that it began last, of those of ``among`` that are within one."""
        while self.files() < SHARDS:
            last = {line["pid"]: line["what"] for line in began(self.notebook) if line["pid"] in among}
            for pid, key in last.items():
                if key != "replica" and not list(self.store.glob(f"{key.replace('/', '/run_id=*/shard-')}.parquet")):
                    return pid, key
            time.sleep(0.01)
        raise AssertionError("the scan was through before anything could be broken")

    def replicas(self) -> set[int]:
        """Their processes, dead ones too."""
        return {line["pid"] for line in began(self.notebook)}

    def measure(self, pid: int, key: str, since: float) -> None:
        """Seconds until another process began what ``pid`` was at, if any had to."""
        later = [line["at"] for line in began(self.notebook)
                 if line["what"] == key and line["pid"] != pid and line["at"] > since]  # fmt: skip
        self.taken_over += [min(later) - since] if later else []


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
