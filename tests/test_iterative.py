"""Iterative masking: greedy, one step after another, against plain passes over every set."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mathinterp.cluster.run import open_run, prepare_work
from mathinterp.engine.choose import many_layers
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores, answers_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Context, Subject
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.controls import Head
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.iterative.rows import operation_means
from mathinterp.experiments.iterative.tables import ITERATIVE_SCAN
from mathinterp.experiments.knockout import Knockout
from mathinterp.models.anatomy import model_shape
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts import Prompt
from mathinterp.store import Store
from tests import ablation_twin
from tests.head_sets import RANKING
from tests.statistics_twin import Unit, effects_by_operation
from tests.tiny import save_tiny, tiny_config

SUM = Prompt("p", "3 plus 5 is", "8", operation="add", operand_a="3", operand_b="5")


def greedy(on: Subject, steps: int) -> list[tuple[Head, float, float]]:
    """Head, accuracy and log-probability of each step, by plain full passes over every set."""
    runner, every, masked, found = (
        PlainEngine(on.anatomy, on.prompts),
        chosen_heads(on.anatomy.shape, None, None),
        [],
        [],
    )
    for _ in range(steps):
        left = [head for head in every if head not in masked]
        means = []
        for head in left:
            scores = runner.run([zeroed(on.anatomy, [head, *masked])])
            units = units_of(on, scores)
            effect = effects_by_operation(units)["all"]
            means.append((round(effect.accuracy, 12), round(effect.logprob_change, 12), head))
        accuracy, logprob, head = min(means)
        masked.append(head)
        found.append((head, accuracy, logprob))
    return found


def units_of(on: Subject, scores: Scores) -> list[Unit]:
    answers = answers_of(on.prompts)
    prompts = [on.prompts[p].prompt for p in answers.prompt_A]
    return [
        Unit(p.prompt_id, int(position), p.operation or "none", True, bool(correct), 0.0, float(logprob))
        for p, position, correct, logprob in zip(
            prompts, answers.position_A, scores.correct_EA[0], scores.logprob_EA[0], strict=True
        )
    ]


def test_iterative_masking_is_greedy_and_resumes_by_step() -> None:
    on = ablation_twin.subject(ablation_twin.tiny_model("llama"))
    scan = Iterative("zero", steps=3)
    shards = scan.shards(on.anatomy.shape, on.prompts)
    assert [shard.cost for shard in shards] == [12, 11, 10], "the first step is dispatched first"
    state = scan.prepare(on)
    steps = [scan.run(state, shard) for shard in shards]
    expected = greedy(on, 3)
    unedited = effects_by_operation(units_of(on, state.ablation.engine.baseline()))["all"]
    for step, (rows, (head, accuracy, logprob)) in enumerate(zip(steps, expected, strict=True)):
        assert rows.num_rows == 12 - step
        (chosen,) = [row for row in rows.to_pylist() if row["masked"]]
        assert (chosen["layer"], chosen["head"]) == head
        np.testing.assert_allclose(chosen["accuracy"], accuracy, rtol=1e-6)
        before = expected[step - 1][2] if step else unedited.logprob_change
        np.testing.assert_allclose(chosen["logprob_change"], logprob - before, rtol=1e-4, atol=1e-6)
    alone = scan.run(scan.prepare(on), shards[2])  # a replica that lost its steps finds them again
    resumed = replace(scan, known=(expected[0][0], expected[1][0]))
    assert resumed.parameters() == scan.parameters()
    resumed_state = resumed.prepare(on)
    assert alone.equals(steps[2])
    assert resumed.run(resumed_state, shards[2]).equals(steps[2])
    assert resumed.run(resumed_state, shards[0]).equals(steps[0]), "a lost file of an early step is made again"


@pytest.mark.parametrize("scoring", ["token", "first_token", "exact_match"])
def test_operation_means_are_those_of_the_statistics(scoring: str) -> None:
    on = ablation_twin.subject(ablation_twin.tiny_model("llama"))
    scan = Knockout("zero", scoring=scoring, heads=RANKING, key=())
    state = scan.prepare(on)
    scores = many_layers(state.engine).run([zeroed(on.anatomy, RANKING[:1])])
    lucky = np.random.default_rng(0).random(scores.correct_EA.shape) < 0.6  # a random model is never right
    scores = replace(scores, correct_EA=lucky)
    accuracy, logprob = operation_means(state, scores, scoring)
    expected = effects_by_operation(units_of(on, scores), scoring)["all"]
    np.testing.assert_allclose([accuracy[0], logprob[0]], [expected.accuracy, expected.logprob_change], rtol=1e-12)
    assert 0 < accuracy[0] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 13}, "cannot mask 13"),
        ({"steps": 0}, "`steps` 0 is too small; give 1 or more"),
        ({"rank_by": "luck"}, "accuracy, logprob"),
        ({"layers": (1,), "steps": 5}, "there are 4"),
        ({"layers": (7,)}, "layer 7 does not exist"),
    ],
)
def test_mistakes_in_iterative_masking(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Iterative(**changes).shards(model_shape(tiny_config("llama")), [])


@pytest.mark.slow
def test_steps_that_the_store_has_are_known_before_anything_loads(tmp_path: Path) -> None:
    store, spec, prompts = Store(tmp_path / "s"), ModelSpec(str(save_tiny(tmp_path / "llama", "llama"))), [SUM]
    asked = Iterative("zero", steps=2)
    work = prepare_work(asked, spec, prompts, on_gpu=False, store=store)
    assert work.scan.known == ()
    run = open_run(store, work)
    assert run.run_id == Context(work.model, prompts, store).run_id(asked)
    rows = [{"step": 0, "layer": 1, "head": head, "masked": head == 3} for head in range(4)]
    store.write_shard(run.run_id, "iterative_scan", 0, pa.Table.from_pylist(rows, ITERATIVE_SCAN), {})
    resumed = prepare_work(asked, spec, prompts, on_gpu=False, store=store)
    assert resumed.scan.known == ((1, 3),)
    other = prepare_work(replace(asked, rank_by="logprob"), spec, prompts, on_gpu=False, store=store)
    assert other.scan.known == (), "another run's steps"
