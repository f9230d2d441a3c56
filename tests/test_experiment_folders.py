"""What an experiment's folder holds is found by its class: ``summary.py``, ``figure.py`` and ``cost.py``."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from mathinterp.experiments import Results, Summary
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.head_pairs import HeadPairs, ShownPairs
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.registry import experiments
from mathinterp.store import Store
from tests.toy_scan import ToyScan


class OfAnotherModule(HeadPairs):
    """A class from elsewhere that changes nothing."""


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(Store(tmp_path), "run")


def folder_of(experiment: type[Experiment]) -> Path:
    return Path(importlib.import_module(experiment.__module__).__file__ or "").parent


@pytest.mark.parametrize("name", experiments())
def test_a_figure_is_drawn_where_the_folder_or_the_class_has_one(name: str) -> None:
    experiment = experiments()[name]
    assert experiment.draws() == ((folder_of(experiment) / "figure.py").is_file() or "figure" in vars(experiment))


def test_functions_of_the_folder_get_what_is_shown(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    for part, function in (("summary", "summarize"), ("figure", "draw")):
        for folder in ("head_pairs", "mlp_probe"):
            module = importlib.import_module(f"mathinterp.experiments.{folder}.{part}")
            monkeypatch.setattr(module, function, lambda *given: asked.append(given))
    shown = ShownPairs(top=3)
    for experiment in (HeadPairs, OfAnotherModule):
        experiment.summarize(results, shown)
        experiment.figure(results, shown)
    MlpProbe.summarize(results, MlpProbe.show_options())
    MlpProbe.figure(results, MlpProbe.show_options())
    assert asked == [(results, shown)] * 4 + [(results,)] * 2


def test_without_such_files_there_are_queries_alone(results: Results) -> None:
    summary = ToyScan.summarize(results, ToyScan.show_options())
    assert isinstance(summary, Summary)
    assert len(summary.queries) == len(ToyScan.tables)
    assert ToyScan.figure(results, ToyScan.show_options()) is None
    assert not ToyScan.draws()
