"""Rows of a training in a store: written again by one that goes on, or is begun anew; lost ones have a mend."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Run, Store
from mathinterp.tuning.sft_ray import fit, open_run
from mathinterp.tuning.sft_workers import TABLE
from mathinterp.tuning.training.tables import TUNING_RUNS
from tests.small_store import FINGERPRINT

METADATA = {
    "scan": "tune_precise", "model": "m", "model_fingerprint": "weights-1", "prompts": "data", "dtype": "float32",
    "prompts_fingerprint": FINGERPRINT, "parameters": {"steps": 2}, "code_version": "0.1.0",
}  # fmt: skip


def tuning(place: Path) -> SimpleNamespace:
    """As ``named`` makes one, but for what is trained."""
    given = {name: METADATA[name] for name in ("scan", "parameters", "dtype", "model_fingerprint")}
    run = Store.run_id(**given, prompts_fingerprint=FINGERPRINT)
    config = SimpleNamespace(steps=2, checkpoint_every=1)
    return SimpleNamespace(store_url=str(place), run_id=run, metadata=METADATA, config=config)


def train(place: Path, pace: float) -> Run:
    """Every step at this pace."""
    run = open_run(tuning(place))  # type: ignore[arg-type]
    for step in (1, 2):
        row = {"step": step, "loss": 0.5, "lr": 0.1, "samples_per_second": pace, "tokens_per_second": pace, "memory": 1}
        rows = pa.Table.from_pylist([{**row, "trained_parameters": 1}], TUNING_RUNS)
        Store(place).write_shard(run.run_id, TABLE, step - 1, rows, {})
    assert run.finish() == []
    return run


def test_steps_that_are_trained_again_are_not_damaged(tmp_path: Path) -> None:
    """Their files may be as long as those of before."""
    first = train(tmp_path, 1.0)
    sizes = [entry["bytes"] for entry in first.record["files"].values()]
    assert [entry["bytes"] for entry in train(tmp_path, 2.0).record["files"].values()] == sizes
    assert Store(tmp_path).runs.check().faults == []
    train(tmp_path, 3.0)
    open_run(tuning(tmp_path))  # type: ignore[arg-type]  # a training that is killed before its end
    Store(tmp_path).write_shard(first.run_id, TABLE, 0, Store(tmp_path).read_shard(first.run_id, f"{TABLE}/00001"), {})
    assert Store(tmp_path).runs.check().faults == []


def test_lost_rows_of_a_training_are_told_and_mended_by_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["mathinterp", "tune", "precise", "--heads", "0.1", "--out", "my out"])
    asked, run = tuning(store), train(store, 1.0)
    monkeypatch.setattr("mathinterp.tuning.sft_ray.earlier_result", lambda out, run: {"run_id": run})
    again = {"workers": 1, "gpu": None, "out": out, "storage": None, "address": None, "say": print}
    assert not fit(asked, **again).trained_now  # type: ignore[arg-type]
    assert caplog.messages == []
    next(store.glob(f"{TABLE}/*/shard-00001.parquet")).unlink()
    assert not fit(asked, **again).trained_now  # type: ignore[arg-type]
    assert caplog.messages == [
        f"run {run.run_id}: not all rows of its training are in {store}; another `out` trains it again, and writes them"
    ]
    told = CliRunner().invoke(main, ["check", "--store", str(store)]).stdout
    *words, place = shlex.split(told.partition("Mend: ")[2].partition("\n")[0])
    assert words == ["mathinterp", "tune", "precise", "--heads", "0.1", "--out", "my out-again", "--store"]
    assert Path(place).resolve() == store.resolve()  # shorter from here
