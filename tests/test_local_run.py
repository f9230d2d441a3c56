"""A run in this process, without Ray: the dispatcher's rules, and the rows of Ray's replicas; wrapped models."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import torch

import mathinterp as mi
from mathinterp.cli.running import resumable
from mathinterp.cli.verbosity import Failure, set_level
from mathinterp.cluster.agreement import DEVIATION, PROBE
from mathinterp.cluster.events import CardLost
from mathinterp.cluster.places import THREAD_BYTES, Here, threads_for
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments import Experiment, Results, Shard, Table
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.tiny import tiny_model, tiny_tokenizer
from tests.toy_scan import ToyScan

MODEL = ModelSpec("random:llama-tiny")
PROMPTS = [Prompt(f"p{a}", f"{a} plus 5 is", str(a + 5), operation="add") for a in (3, 14, 62)]
ROOT = Path(__file__).parents[1]
WIDTHS = {"widths": Table(pa.schema([pa.field("layer", pa.int16()), pa.field("norm", pa.float64())]), doc="norms.")}


@dataclass(frozen=True)
class Widths(Experiment):
    """The norm of each layer's value vectors: an experiment of the weights alone."""

    again: bool = False

    name: ClassVar[str] = "widths"
    tables: ClassVar[Mapping[str, Table]] = WIDTHS
    prompt_set: ClassVar[str | None] = None

    def parameters(self) -> dict[str, Any]:
        return {"again": self.again}

    def shards(self, shape: Any, prompts: Any) -> list[Shard]:
        return [Shard("widths", layer, {"layer": layer}) for layer in range(shape.n_layers)]

    def prepare(self, subject: Any) -> Any:
        assert not subject.prompts
        return subject.anatomy

    def run(self, state: Any, shard: Shard) -> pa.Table:
        layer = shard.work["layer"]
        row = {"layer": layer, "norm": float(state.value_vectors(layer).double().norm())}
        return pa.Table.from_pylist([row], schema=WIDTHS["widths"].schema)

    def follow_up(self, results: Results, shown: Any) -> Experiment | None:
        return Widths(again=True) if not self.again else None


def run(scan: ToyScan, store: Path, **options: Any) -> RunSummary:
    return run_scan(scan, MODEL, PROMPTS, str(store), progress=False, **options)


def rows(store: Path, table: str = "mlp_scan") -> pa.Table:
    return Store(store).arrow(f"SELECT * FROM {table} ORDER BY ALL")


def record(store: Path) -> dict[str, Any]:
    (path,) = (store / "runs").glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_run_ends_and_a_second_one_computes_nothing(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        summary = run(ToyScan(5), tmp_path)
        assert torch.get_num_threads() == 2, "as many as before"
    finally:
        torch.set_num_threads(threads)
    assert summary.complete
    assert (summary.done, summary.reused, summary.replicas, summary.device) == (5, 0, 1, "cpu")
    assert summary.rows == rows(tmp_path).num_rows
    notes = record(tmp_path)["notes"]
    assert notes["threads"] == 1
    assert PROBE in notes
    assert DEVIATION not in notes
    assert (run(ToyScan(5), tmp_path).done, run(ToyScan(5), tmp_path).reused) == (0, 5)


@pytest.mark.slow
def test_only_what_is_missing_is_computed(tmp_path: Path) -> None:
    run(ToyScan(5), tmp_path)
    whole = rows(tmp_path)
    (victim,) = tmp_path.glob("mlp_scan/run_id=*/shard-00002.parquet")
    victim.unlink()
    summary = run(ToyScan(5), tmp_path)
    assert (summary.done, summary.reused) == (1, 4)
    assert rows(tmp_path).equals(whole)


def test_faults_are_retried_and_what_fails_always_is_reported(tmp_path: Path) -> None:
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    scan = ToyScan(6, notebook=str(notebook), always={1: "raise", 3: "nan"}, once={2: "raise"})
    summary = run(scan, tmp_path / "store")
    assert not summary.complete
    assert summary.done == 4
    failed = {failure.key: failure for failure in summary.failed}
    assert failed.keys() == {"mlp_scan/00001", "mlp_scan/00003"}
    assert failed["mlp_scan/00001"].error == "RuntimeError: layer 1 is broken"
    assert "toy_scan.py" in failed["mlp_scan/00001"].traceback
    assert failed["mlp_scan/00001"].attempts == 3
    assert "logprob is nan at layer 3" in failed["mlp_scan/00003"].error
    kept = record(tmp_path / "store")
    assert kept["attempts"] == {"mlp_scan/00001": 3, "mlp_scan/00002": 2, "mlp_scan/00003": 3}
    assert "layer 1 is broken" in kept["errors"]["mlp_scan/00001"]
    assert run(ToyScan(6), tmp_path / "store").complete


class Unprepared(ToyScan):
    """An experiment of one's own with a mistake where it prepares."""

    def prepare(self, subject: Any) -> Any:
        raise KeyError("nothing of that name")


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_where_a_replica_fails_to_prepare_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: int
) -> None:
    """As a note of the exception, which a notebook shows; a command shows it under --verbose."""
    before = logging.getLogger("mathinterp").level
    set_level(level)
    try:
        with pytest.raises(Failure, match="could not load: KeyError") as told, resumable():
            run(Unprepared(1), tmp_path)
    finally:
        set_level(before)
    (note,) = told.value.__cause__.__notes__
    assert 'raise KeyError("nothing of that name")' in note
    assert (note in capsys.readouterr().err) == (level == logging.INFO)


def test_a_process_whose_card_is_lost_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """It cannot replace itself; the same command goes on."""
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    scan = ToyScan(4, notebook=str(notebook), once={1: "card lost"})
    with pytest.raises(Unfinished, match=r"^its GPU gives nothing but errors; the same call in a new process") as lost:
        run(scan, tmp_path / "store")
    assert isinstance(lost.value.__cause__, CardLost)  # whose traceback leads into the experiment
    assert record(tmp_path / "store")["errors"] == {}
    again = run(scan, tmp_path / "store")
    assert (again.done, again.reused) == (3, 1)
    run(ToyScan(4), tmp_path / "whole")
    assert rows(tmp_path / "store").equals(rows(tmp_path / "whole"))


def test_a_mistake_of_the_user_and_a_key_press_end_the_run_at_once(tmp_path: Path) -> None:
    class Stopped(ToyScan):
        def run(self, state: Any, shard: Shard) -> pa.Table:
            raise KeyboardInterrupt if self.layers > 1 else UserError("not so")

    with pytest.raises(UserError, match="not so"):
        run(Stopped(1), tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run(Stopped(2), tmp_path / "b")
    assert record(tmp_path / "b")["finished_at"] is None


@pytest.mark.bundled
def test_ray_is_not_even_imported(tmp_path: Path) -> None:
    code = f"""
import sys
import mathinterp as mi
run = mi.run(mi.experiments.Heads(heads=["0.6"]), mi.load("bundled", device="cpu"), mi.prompts("two_digit", limit=4),
             store={str(tmp_path)!r}, progress=False)
print(run.complete, "ray" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_an_experiment_that_needs_no_prompts_and_what_follows_it(tmp_path: Path) -> None:
    model = mi.wrap(tiny_model("llama"), tiny_tokenizer(), name="mine")
    done = mi.run(Widths(), model, store=str(tmp_path), progress=False)
    assert done.complete
    assert done.table("widths")["layer"].tolist() == [0, 1, 2]
    assert [following.experiment for following in done.follow_ups] == [Widths(again=True)]
    assert done.follow_ups[0].id != done.id
    assert mi.plan(Widths(), model, store=str(tmp_path)) is None


@pytest.mark.slow
def test_a_model_in_memory_is_resumed_by_its_content(tmp_path: Path) -> None:
    experiment, prompts = mi.experiments.Heads(), mi.prompts("two_digit", limit=6)
    options = {"store": str(tmp_path), "progress": False}
    first = mi.run(experiment, mi.wrap(tiny_model("qwen2"), tiny_tokenizer(), name="a"), prompts, **options)
    again = mi.run(experiment, mi.wrap(tiny_model("qwen2").train(), tiny_tokenizer(), name="b"), prompts, **options)
    other = mi.run(experiment, mi.wrap(tiny_model("qwen2", seed=1), tiny_tokenizer(), name="a"), prompts, **options)
    assert (first.complete, first.ended.reused) == (True, 0)
    assert again.id == first.id
    assert again.ended.done == 0
    assert other.id != first.id


def test_threads_follow_from_the_model_and_the_machine_alone() -> None:
    assert [threads_for(size, 8) for size in (0, THREAD_BYTES, 3 * THREAD_BYTES, 99 * THREAD_BYTES)] == [1, 1, 3, 8]
    model = mi.load("bundled", device="cpu")
    assert Here(model).placement(9, 100).threads == 1
    assert Here(model).placement(9, 99 * THREAD_BYTES).threads >= 1


@pytest.mark.ray
def test_rows_are_the_same_here_and_on_ray_also_of_a_model_in_memory(tmp_path: Path) -> None:
    experiment = mi.experiments.Heads(heads=["0.2", "1.1", "1.2"])
    prompts = mi.prompts("two_digit", limit=6)
    named = mi.load("bundled", device="cpu", dtype="float32")
    wrapped = mi.wrap(tiny_model("llama", dtype=torch.float32).train(), tiny_tokenizer(), name="mine")
    tables = ("baseline", "head_scan")
    for name, model in (("named", named), ("wrapped", wrapped)):
        here, there = tmp_path / f"{name}-here", tmp_path / f"{name}-there"
        one = mi.run(experiment, model, prompts, store=str(here), progress=False)
        cpus = {"gpus_per_replica": 0, "progress": False}
        two = mi.run(experiment, model, prompts, store=str(there), replicas=2, **cpus)
        assert (one.complete, two.complete, two.ended.replicas) == (True, True, 2)
        assert one.id == two.id
        for table in tables:
            assert rows(here, table).equals(rows(there, table)), (name, table)
        assert record(here)["notes"][PROBE] == record(there)["notes"][PROBE]
        (victim,) = there.glob("baseline/run_id=*/shard-00000.parquet")
        victim.unlink()
        resumed = mi.run(experiment, model, prompts, store=str(there), address="local", **cpus)
        assert (resumed.ended.done, resumed.ended.reused) == (1, 1)
        assert rows(here, "baseline").equals(rows(there, "baseline"))
        assert DEVIATION not in record(there)["notes"]
