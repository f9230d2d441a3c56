"""Fixtures of several test files; helpers that are no fixtures are modules of their own (exact.py, tiny.py, ...)."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mathinterp.experiments import registry
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neurons import Neurons
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.store import Store
from tests.browser import chromium
from tests.job_service import job_service
from tests.larger_models import larger_models_seen
from tests.small_store import open_run
from tests.tiny import FIRST_FAMILIES, TINY_FAMILIES, tiny_model
from tests.warm_replicas import warm_replicas

ROOT = Path(__file__).parents[1]


def pytest_collection_finish() -> None:
    """Of what is there by now nothing is garbage: searches of old objects, the Trainer's too, need not look at it."""
    gc.freeze()


_running: list[pytest.Item] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]


@pytest.fixture(scope="session", autouse=True)
def larger_models_are_marked() -> Iterator[None]:
    with larger_models_seen(_running):
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; see browser.py."""
    with chromium() as started:
        yield started


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``make test``'s: not before all others have begun does a process run what needs the shared Ray."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.in_order import InOrder

    return InOrder(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make check` leaves out, and give tests of Ray the shared one.

    It comes after all tests without Ray or with one of their own: a process has one connection.
    """
    for item in items:
        if is_of_further_families(item):
            item.add_marker("families")
        if shares_ray(item):
            assert isinstance(item, pytest.Function)
            item.fixturenames.insert(0, "local_ray")
    items.sort(key=lambda item: (shares_ray(item), has_own_ray(item)))


def is_of_further_families(item: pytest.Item) -> bool:
    """Whether the test tries a tiny model whose family is none of the first three."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    families = {name for name in parameters if isinstance(name, str) and name in TINY_FAMILIES}
    return bool(families) and not families & set(FIRST_FAMILIES)


def shares_ray(item: pytest.Item) -> bool:
    """Whether the test uses the Ray of this machine that is started once for all tests of a process."""
    return item.get_closest_marker("ray") is not None and not has_own_ray(item)


def has_own_ray(item: pytest.Item) -> bool:
    """Whether the test starts a Ray of its own."""
    return item.get_closest_marker("own_ray") is not None


@pytest.fixture(scope="session", autouse=True)
def disks_need_not_keep_up() -> Iterator[None]:
    """Files of this process are not waited for until they are on the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def local_ray() -> Iterator[dict[str, str]]:
    """The Ray that tests of a process share, and the environment of drivers that join it as a submitted job does.

    Commands of this process find themselves connected and use it; workers know the modules of this checkout, and
    compute for one run after another, see warm_replicas.py.
    """
    import ray

    from mathinterp.cluster.ray_cluster import connection

    assert not ray.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("RAY_ADDRESS", raising=False)
        with connection(None), warm_replicas():
            address = ray.get_runtime_context().gcs_address
            yield {**os.environ, "RAY_ADDRESS": address, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def job_address() -> Iterator[str]:
    """The address of a job service that tests share, on a head node of its own."""
    with job_service() as address:
        yield address


@pytest.fixture(autouse=True)
def no_experiment_stays() -> Iterator[None]:
    """Forget experiments that a test makes known to its process."""
    before = dict(registry._added)
    yield
    if registry._added != before:
        registry._added.clear()
        registry._added.update(before)
        registry.stored.cache_clear()
        registry.experiments.cache_clear()


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    """A tiny random model in float64, of every family in turn (``of_neurons``: of every family with neurons)."""
    if (
        request.param == "gemma2"
    ):  # its eager attention sums the softmax in float32, whose error grows with the masked row
        softmax = torch.nn.functional.softmax
        in_own_dtype = lambda x, dim, dtype=None, **_: softmax(x, dim=dim)  # noqa: E731
        monkeypatch.setattr(torch.nn.functional, "softmax", in_own_dtype)
    return Anatomy(tiny_model(request.param))


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store with a neuron scan of the bundled model, made without Ray."""
    folder = tmp_path_factory.mktemp("graph")
    spec, store = ModelSpec(), Store(folder)
    loaded = load(spec, "cpu")
    prompts = tokenize_prompts(load_prompts("two_digit", limit=8), loaded.tokenizer)
    scan = Neurons("head:0.6", keep="topk:20")
    state = scan.prepare(Subject(loaded.anatomy, prompts))
    shards = scan.shards(loaded.anatomy.shape, prompts)
    fingerprint = prompts_fingerprint(prompts)
    run = open_run(store, [shard.key for shard in shards], scan="neurons", parameters=scan.parameters(),
                   model="bundled", model_fingerprint=resolve(spec).fingerprint,
                   prompts_fingerprint=fingerprint)  # fmt: skip
    store.write_prompts(fingerprint, prompts)
    for shard in shards:
        store.write_shard(run.run_id, shard.table, shard.index, scan.run(state, shard), {})
    run.finish()
    return folder, run.run_id
