"""A GPU that gives nothing but errors until its process ends: another process computes the rest. Needs a GPU.

An assertion that fails on the GPU is what breaks it. Without GPUs test_faults.py, test_local_run.py, test_replica.py
and test_service_cards.py play this with errors of their own.
"""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import mathinterp as mi
from benchmarks.service import service
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.toy_scan import ToyScan

pytestmark = [
    pytest.mark.gpu, pytest.mark.ray, pytest.mark.own_ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip

MODEL = ModelSpec("random:llama-tiny")
PROMPTS = [Prompt(f"p{a}", f"{a} plus 5 is", str(a + 5), operation="add") for a in (3, 14, 62)]
LAYERS = 6
ROOT = Path(__file__).parents[1]


@pytest.fixture
def notebook(tmp_path: Path) -> str:
    (tmp_path / "notebook").mkdir()
    return str(tmp_path / "notebook")


def run(scan: ToyScan, store: Path, address: str | None = "local") -> RunSummary:
    replicas = None if address is None else 1
    return run_scan(scan, MODEL, PROMPTS, str(store), replicas=replicas, address=address, progress=False)


def rows(store: Path) -> pa.Table:
    return Store(str(store)).arrow("SELECT * EXCLUDE (run_id) FROM mlp_scan ORDER BY ALL")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    store = tmp_path_factory.mktemp("whole")
    summary = run(ToyScan(LAYERS), store)
    assert (summary.complete, summary.device, summary.replicas_lost) == (True, "cuda", 0)
    return rows(store)


def test_a_replica_is_replaced(undisturbed: pa.Table, notebook: str, tmp_path: Path) -> None:
    summary = run(ToyScan(LAYERS, notebook=notebook, once={2: "break card"}), tmp_path / "store")
    assert (summary.complete, summary.replicas_lost) == (True, 1)
    assert rows(tmp_path / "store").equals(undisturbed)


def test_a_shard_that_breaks_every_card_is_given_up(undisturbed: pa.Table, notebook: str, tmp_path: Path) -> None:
    summary = run(ToyScan(LAYERS, notebook=notebook, always={2: "break card"}), tmp_path / "store")
    (failed,) = summary.failed
    assert (failed.key, failed.attempts, failed.losses, summary.done) == ("mlp_scan/00002", 0, 5, LAYERS - 1)
    assert failed.error.startswith("its replica died 5 times: its GPU gives nothing but errors: ")
    assert "device-side assert" in failed.error
    assert 'torch.zeros(1, device="cuda")' in failed.traceback  # where, and not only where it was noticed
    assert run(ToyScan(LAYERS), tmp_path / "store").done == 1
    assert rows(tmp_path / "store").equals(undisturbed)


def test_a_run_in_its_own_process_ends_and_goes_on(undisturbed: pa.Table, notebook: str, tmp_path: Path) -> None:
    scan = f"ToyScan(LAYERS, notebook={notebook!r}, once={{2: 'break card'}})"
    program = f"from tests.test_broken_card import *; run({scan}, Path({str(tmp_path / 'store')!r}), None)"
    first, again = (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 1
    last = first.stderr.strip().splitlines()[-1]
    assert "Unfinished: its GPU gives nothing but errors" in last
    assert last.endswith("; the same call in a new process goes on")
    assert again.returncode == 0, again.stderr
    assert rows(tmp_path / "store").equals(undisturbed)


def test_a_process_of_the_service_is_replaced(undisturbed: pa.Table, notebook: str, tmp_path: Path) -> None:
    with service(str(tmp_path), 1, "--experiment", "tests.toy_scan:ToyScan") as (url, _, _):
        asked = mi.connect(url)
        scan = ToyScan(LAYERS, notebook=notebook, once={2: "break card"})
        ended = asked.run(scan, MODEL.name, mi.prompts(PROMPTS), store=str(tmp_path / "store"), progress=False)
        assert ended.complete
        assert asked.status()["replaced"] == 1
        answered = asked.ablate(MODEL.name, mi.prompts(PROMPTS), heads=["0.1"])
        assert len(answered.effects)
    assert rows(tmp_path / "store").equals(undisturbed)
