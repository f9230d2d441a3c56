"""A stored run that others build on: heads and neurons are looked up with the same checks and the same lines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import finished_run, ranking_from
from mathinterp.experiments.neurons.stored import neuron_run
from mathinterp.store import Store
from tests.small_store import fill, open_run, prompt

UNFINISHED = "run {run} has 0 of 2 shards: a ranking of some {ranked} would mislead; finish it with the same command"


def line_of(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("find", "ranked", "scan", "wrong", "known"),
    [
        (ranking_from, "heads", "paths", "neurons", "'heads', 'iterative', 'paths'"),
        (neuron_run, "neurons", "neurons", "heads", "'neurons'"),
    ],
)
def test_heads_and_neurons_are_refused_alike(
    tmp_path: Path, find: Callable[..., Any], ranked: str, scan: str, wrong: str, known: str
) -> None:
    store = Store(tmp_path)
    unfinished, other = open_run(store, scan=scan).run_id, open_run(store, scan=wrong).run_id
    assert line_of(find, store, "none") == (
        f"no run 'none' in {store.url}; see: mathinterp sql \"SELECT run_id, scan, model, prompts, status FROM runs\""
    )
    assert line_of(find, store, other) == (
        f"run {other} is a scan of {wrong}, which ranks no {ranked}; take one of {known}"
    )
    assert line_of(find, store, unfinished) == UNFINISHED.format(run=unfinished, ranked=ranked)


def test_a_finished_run_is_its_row_of_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run_id = fill(store, [prompt("a")], [{"prompt_id": "a"}], [{"layer": 0, "head": 1, "prompt_id": "a"}])
    found = finished_run(store, run_id, "heads", ("heads", "paths"))
    assert (found["run_id"], found["scan"], found["status"], found["shards_done"]) == (run_id, "heads", "finished", 2)
    assert "parameters" not in found
