"""Replicas that join compute the same few cells: equal ones agree bit for bit, others are told and remembered."""

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mathinterp
from mathinterp.cluster import ray_cluster
from mathinterp.cluster.agreement import DEVIATION, PROBE, Agreement, device_name, probe_note
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Observer, Ready
from mathinterp.cluster.ray_cluster import place
from mathinterp.cluster.run import close_run
from mathinterp.engine import batching
from mathinterp.engine.cells import MOST_CELLS, Cells, Difference, evenly
from mathinterp.engine.compiling import compiled
from mathinterp.engine.model_cells import model_cells
from mathinterp.experiments.base import Experiment, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.mask_keep import MaskKeep
from mathinterp.experiments.mlps import Mlps
from mathinterp.models.alignment import BOUNDARY, align
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.store import Run, Store
from tests.exact import PROMPTS
from tests.scripted_workers import ScriptedWorkers, shards
from tests.small_store import open_run
from tests.tiny import save_tiny, tiny_model

CELLS = Cells(np.array([-1.5, 2.25, 0.0]), np.array([3, 4]))
GIB = 2**30


def note(cells: Cells, node: str = "a", device: str = "H200") -> dict:
    return {**probe_note(cells, "cpu", node), "device": device}


# ---- cells ----


def test_cells_survive_json_bit_for_bit() -> None:
    cells = Cells(np.array([np.pi, -0.0, np.nan, np.inf, np.float32(0.1)]), np.array([7]))
    back = Cells.from_json(cells.as_json())
    assert back.digest == cells.digest == cells.as_json()["digest"]
    assert back.difference(cells) is None
    assert cells.as_json()["cells"] == 6


def test_the_smallest_step_is_a_difference() -> None:
    step = float(np.spacing(np.float64(2.25)))
    other = replace(CELLS, values_n=CELLS.values_n + np.array([0, step, 0]))
    assert CELLS.difference(other) == Difference(step, 1, 0)
    assert CELLS.difference(replace(CELLS, values_n=np.array([-1.5, 2.25, -0.0]))) == Difference(0.0, 1, 0)
    assert CELLS.difference(replace(CELLS, predicted_m=np.array([3, 5]))) == Difference(0.0, 0, 1)
    assert CELLS.difference(replace(CELLS, values_n=np.array([np.nan, 2.25, 0]))) == Difference(None, 1, 0)
    assert CELLS.difference(Cells(CELLS.values_n[:2], CELLS.predicted_m)).largest is None


def test_few_cells_of_many_first_and_last_included() -> None:
    assert evenly(3).tolist() == [0, 1, 2]
    chosen = evenly(10_000)
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 9_999, MOST_CELLS)


# ---- every scan ----


def all_scans() -> list[type[Experiment]]:
    for module in pkgutil.walk_packages(mathinterp.__path__, "mathinterp."):
        if module.name.split(".")[1] in ("scans", "evaluation", "tuning"):
            importlib.import_module(module.name)
    found, todo = [], [Experiment]
    while todo:
        below = [kind for kind in todo.pop().__subclasses__() if kind.__module__.startswith("mathinterp.")]
        found += below
        todo += below
    return found


def test_no_scan_leaves_the_models_own_cells_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a scan adds, what it inherits is asked for, with the model and prompts of the replica."""
    asked: list[Subject] = []

    def own(scan: Experiment, state: object, subject: Subject) -> Cells:
        asked.append(subject)
        return CELLS

    overridden = [kind for kind in all_scans() if "cells" in vars(kind)]
    assert len(all_scans()) >= 18
    assert {kind.__name__ for kind in overridden} == {"Ablation", "Paths"}
    monkeypatch.setattr(Experiment, "cells", own)
    anatomy = Anatomy(tiny_model("llama"))
    subject = Subject(anatomy, PROMPTS)
    for scan in (Heads(), Mlps(), Knockout(ablation="zero", heads=((0, 1), (2, 3)), ks=(1, 2))):
        cells = scan.cells(scan.prepare(subject), subject)
        assert asked.pop() is subject
        assert len(cells.values_n) > len(CELLS.values_n), "the engine's are joined to them"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("scan", [Heads(), Mlps(engine="plain"), MaskKeep])
def test_one_bit_of_one_weight_shows(family: str, scan: Experiment | type) -> None:
    """Of any scan: here of the packed engine, of the plain one, and of a scan that has no engine."""
    chosen = Heads() if isinstance(scan, type) else scan

    def cells(change: bool) -> Cells:
        anatomy = Anatomy(tiny_model(family, dtype=torch.float32))
        if change:
            with torch.no_grad():
                weight = anatomy.down_projection(1).weight.view(-1)
                weight[: len(weight) // 2] = torch.nextafter(weight[: len(weight) // 2], torch.tensor(torch.inf))
        subject = Subject(anatomy, PROMPTS)
        if isinstance(scan, type):
            return Experiment.cells(chosen, None, subject)
        return chosen.cells(chosen.prepare(subject), subject)

    assert cells(False).difference(cells(False)) is None
    difference = cells(False).difference(cells(True))
    assert difference is not None
    assert difference.largest is not None
    assert 0 < difference.largest < 1e-3


def test_model_cells_are_those_of_prompts_alone() -> None:
    anatomy = Anatomy(tiny_model("qwen3"))
    longest = sorted(PROMPTS, key=lambda prompt: len(prompt.fed))[-1]
    cells = model_cells(anatomy, PROMPTS)
    logits = anatomy.model(torch.tensor([longest.fed])).logits[0]
    tokens = len(longest.fed)
    np.testing.assert_array_equal(cells.predicted_m[-tokens:], logits.argmax(-1).numpy())
    np.testing.assert_allclose(cells.values_n[-tokens:], logits.log_softmax(-1).amax(-1).numpy(), atol=1e-12)


# ---- what the driver makes of it ----


class Replicas(ScriptedWorkers):
    """Replicas that tell the notes given, slot by slot."""

    def __init__(self, told: list[dict]):
        super().__init__()
        self._told = told

    def start(self, slot: int) -> None:
        self._pending.append(Ready(slot, {"engine": "scripted", PROBE: self._told[slot]}))


class Heard(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def trouble(self, message: str) -> None:
        self.lines.append(message)


def dispatched(run: Run, told: list[dict]) -> list[str]:
    """The warnings of a run on replicas that tell these notes."""
    heard = Heard()
    dispatcher = Dispatcher(
        Replicas(told), shards(4), replicas=len(told), observer=heard, check=Agreement(run).joined
    )  # fmt: skip
    assert len(dispatcher.run().receipts) == 4, "replicas that differ go on"
    close_run(run, replace(dispatcher.outcome, receipts=[]))
    return heard.lines


def test_equal_replicas_are_not_spoken_of(tmp_path: Path) -> None:
    run = open_run(Store(tmp_path))
    assert dispatched(run, [note(CELLS, node) for node in "abcd"]) == []
    assert run.record["notes"][PROBE] == note(CELLS, "a")
    assert DEVIATION not in run.record["notes"]


def test_a_replica_that_differs_is_told_once_and_kept(tmp_path: Path) -> None:
    run = open_run(Store(tmp_path))
    far = replace(CELLS, values_n=CELLS.values_n + np.array([0.5, 0, 0]), predicted_m=np.array([3, 9]))
    near = replace(CELLS, values_n=CELLS.values_n + np.array([0.25, 0, 0]))
    told = [note(CELLS), note(far, "b", "H100"), note(near, "c"), note(far, "b", "H100"), note(CELLS, "d")]
    (line,) = dispatched(run, told)
    assert line == (
        "rows of this run depend on the replica: what H100 on b computes and what H200 on a computed first differ by"
        " up to 0.5 nats (2 of 5 checked cells, 1 predictions); kept in the run's notes as replica_deviation"
    )
    kept = open_run(Store(tmp_path)).record["notes"][DEVIATION]
    assert (kept["largest"], kept["cells"], kept["first"]) == (0.5, 5, {"node": "a", "device": "H200"})
    assert [(r["node"], r["largest"], r["values"], r["predictions"]) for r in kept["replicas"]] == [
        ("b", 0.5, 1, 1), ("c", 0.25, 1, 0),
    ]  # fmt: skip


def test_a_run_that_is_resumed_compares_with_its_first_replica(tmp_path: Path) -> None:
    assert dispatched(open_run(Store(tmp_path)), [note(CELLS, "a")]) == []
    (path,) = (tmp_path / "runs").glob("*.json")
    again = open_run(Store(tmp_path))
    assert dispatched(again, [note(CELLS, "b")]) == []
    (line,) = dispatched(open_run(Store(tmp_path)), [note(replace(CELLS, values_n=CELLS.values_n * 2), "c")])
    assert "what H200 on c computes and what H200 on a computed first differ by up to 2.25 nats" in line
    assert open_run(Store(tmp_path)).record["notes"][PROBE]["node"] == "a"
    assert path.is_file()


def test_what_cannot_be_compared_is_said_to_be_so(tmp_path: Path) -> None:
    run = open_run(Store(tmp_path))
    lost = replace(CELLS, values_n=np.array([np.nan, 0, 0]))
    near = replace(CELLS, values_n=CELLS.values_n + 1)
    (line,) = dispatched(run, [note(CELLS), note(lost, "b"), note(near, "c")])
    assert "computed first cannot be compared; kept" in line
    assert run.record["notes"][DEVIATION]["largest"] is None


# ---- why equal replicas compute alike ----


def machine(monkeypatch: pytest.MonkeyPatch, cpus: int, memory: float) -> None:
    has = {"CPU": cpus, "memory": memory, "GPU": 8.0}
    monkeypatch.setattr(ray_cluster, "cluster_total", has.__getitem__)
    monkeypatch.setattr(ray_cluster, "largest_node", has.__getitem__)


@pytest.mark.parametrize(("weights", "threads"), [(2**20, 1), (GIB, 1), (13 * GIB, 6), (400 * GIB, 16)])
def test_threads_follow_from_the_model_and_the_cores_alone(
    monkeypatch: pytest.MonkeyPatch, weights: int, threads: int
) -> None:
    machine(monkeypatch, 16, 256 * GIB)
    assert {place(n, 0, left, weights).threads for n in (None, 1, 2, 4, 16) for left in (1, 2, 100)} == {threads}
    machine(monkeypatch, 16, 20 * GIB)
    assert place(None, 0, 100, weights).threads == threads, "nor from the memory that is free just now"
    assert place(None, 1, 100, weights).threads == 1


def test_default_replicas_leave_each_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16, 2000 * GIB)
    assert place(None, 0, 100, 2**20).replicas == 16
    assert place(None, 0, 100, 13 * GIB).replicas == 2


def test_weights_start_at_boundaries_whatever_they_were_read_from(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / "llama", "llama")
    model = load(ModelSpec(str(saved)), "cpu").model
    assert {tensor.data_ptr() % BOUNDARY for tensor in (*model.parameters(), *model.buffers())} == {0}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():  # as from NumPy or a mapped file
        room = torch.empty(parameter.numel() + 1, dtype=parameter.dtype)[1:].view(parameter.shape)
        parameter.data = room.copy_(parameter)
    assert any(parameter.data_ptr() % BOUNDARY for parameter in model.parameters())
    align(model)
    assert not any(parameter.data_ptr() % BOUNDARY for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_no_kernel_is_chosen_by_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no compilation of a function: torch sets its compiler's global options back after the first."""
    from torch._inductor import config

    if not hasattr(config, "deterministic"):
        pytest.skip("this version of torch has no such mode")
    chosen: list[bool] = []

    def compile_nothing(graph: torch.fx.GraphModule, inputs: object, *, config_patches: dict, **_: object) -> object:
        with config.patch(config_patches):
            chosen.append(config.deterministic)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_nothing)
    torch._dynamo.reset()
    for function in (lambda x: 2 * x, lambda x: x + 1):
        ours = compiled(function, dynamic=False)
        for size in (2, 3):
            assert ours(torch.ones(size)).tolist() == [2] * size
    torch._dynamo.reset()
    assert chosen == [True] * 4


def test_every_compiled_function_of_a_scan_is_compiled_by_rule() -> None:
    names = ("engine", "experiments", "evaluation", "cluster", "models")
    rooms = [Path(mathinterp.__path__[0], name) for name in names]
    code = [path for room in rooms for path in room.rglob("*.py") if "torch.compile(" in path.read_text()]
    assert [path.name for path in code] == ["compiling.py"]


def test_batches_that_were_halved_are_counted() -> None:
    before = batching.halved

    def run(start: int, stop: int) -> None:
        if stop - start > 3:
            raise torch.cuda.OutOfMemoryError

    assert batching.in_batches(16, 16, run) == 2
    assert batching.halved == before + 3


def test_a_processor_is_named_with_its_threads() -> None:
    threads = torch.get_num_threads()
    assert device_name("cpu").endswith(f", {threads} thread" + "s" * (threads > 1))
