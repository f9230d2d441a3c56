"""The trainings of a reproduction: what they are asked, where they leave what they learn, whose benchmarks are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.evaluation import jobs
from mathinterp.models.handle import Model
from mathinterp.store import Store
from mathinterp.tuning import pruning, sweep
from mathinterp.workflows.papers.paper_b import BENCHMARKS
from mathinterp.workflows.stages import Asked
from mathinterp.workflows.trainings import Training, train
from tests.test_evaluate import fill

PLACE = {"replicas": 1, "gpus_per_replica": None, "address": "local"}


def training(folder: Path, steps: int | None = 3, seed: int = 0, **changes: Any) -> Training:
    """Of the bundled model."""
    model = mi.load("bundled", dtype="float32")
    asked = Asked(model.described, "", Store(folder / "store"), 8, seed, changes.get("data"))
    tuned = Model(replace(model.spec, adapter=changes.get("adapter")))
    return Training(tuned, asked, steps, folder / "trained", PLACE)


@pytest.mark.bundled
def test_sweep_and_pruning_are_asked_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Path]] = []

    def ask(spec: Any, settings: Any, out: Path, say: Any) -> None:
        seen.append((settings, out))
        raise UserError("enough")

    monkeypatch.setattr(sweep, "sweep", ask)
    monkeypatch.setattr(pruning, "prune", ask)
    for name in ("sweep", "prune"):
        with pytest.raises(UserError, match="enough"):
            train(name, training(tmp_path, seed=3), print)
    for settings, _ in seen:
        asked = {name: getattr(settings, name) for name in ("steps", "epochs", "seed", "test_limit", "case_limit")}
        assert asked == {"steps": 3, "epochs": None, "seed": 3, "test_limit": 8, "case_limit": 8}
        assert (settings.store, settings.replicas, settings.address) == (str(tmp_path / "store"), 1, "local")
    assert [out.name for _, out in seen] == ["sweep", "prune"]


@pytest.mark.bundled
def test_another_seed_or_length_does_not_meet_what_the_first_one_left(tmp_path: Path) -> None:
    asked = [training(tmp_path), training(tmp_path, seed=1), training(tmp_path, steps=4), training(tmp_path, None)]
    assert len({each.folder for each in asked}) == len(asked)
    assert training(tmp_path).folder == asked[0].folder
    assert training(tmp_path, None).length == {"steps": None, "epochs": 4.0}


@pytest.mark.bundled
def test_benchmarks_are_read_of_a_model_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "svamp").mkdir(parents=True)
    with pytest.raises(UserError, match="public files"):
        train("benchmarks", training(tmp_path, adapter="mine"), print)
    seen = []

    def evaluate(tasks: list[str], model: Any, **settings: Any) -> None:
        seen.append((tasks, model.spec.adapter))
        raise UserError("enough")

    monkeypatch.setattr(jobs, "evaluate", evaluate)
    with pytest.raises(UserError, match="enough"):
        train("benchmarks", training(tmp_path, adapter="mine", data=tmp_path / "data"), print)
    assert seen == [(["svamp"], "mine")]
    with pytest.raises(UserError, match="without an adapter"):
        train("sweep", training(tmp_path, adapter="mine"), print)


def test_of_several_evaluations_the_whole_and_newest_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, "b", "svamp", "1000", setting="limit=4", items="few")
    fill(store, "b", "svamp", "11110000")
    fill(store, "b+one", "svamp", "11111100", "precise")
    fill(store, "b+two", "svamp", "11111110", "precise")

    def read(model: str) -> dict[str, tuple[float, int]]:
        rows = store.rows(BENCHMARKS, {"fingerprint": model})
        assert len({row["what"] for row in rows}) == len(rows)
        return {row["what"]: (row["value"], row["n"]) for row in rows}

    assert read("b") == {"base svamp": (0.5, 8), "precise svamp": (0.875, 8)}
    assert read("b+one") == {"base svamp": (0.75, 8)}  # with its adapter a model is its own base
