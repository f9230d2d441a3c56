"""The learned mask: its passes against plain hooks, its distribution, seeds, and a model in which one head is all."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

import mathinterp as mi
from mathinterp.engine.attribution.mask import (
    MaskSettings,
    drawn,
    learn,
    masked_metric,
    open_probability,
)
from mathinterp.engine.attribution.pairs import activations, pair_batches, places_of
from mathinterp.experiments.attribution.ranking import node_scores
from mathinterp.experiments.mask import Mask
from mathinterp.models.anatomy import Anatomy
from tests import attribution_twin as twin
from tests.attribution_twin import contrasts
from tests.charts import table_of
from tests.tiny import tiny_model

PROMPTS = contrasts(6)
SETTINGS = MaskSettings(steps=30, learning_rate=0.2, budget=0.2, penalty=10.0, batch=4, seed=3)


def test_a_masked_pass_is_one_with_plain_hooks(anatomy: Anatomy) -> None:
    shape = anatomy.shape
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(shape.n_layers * (shape.n_heads + 1), dtype=torch.float64, generator=generator)
    mask[:3] = torch.tensor([0.0, 1.0, 0.0])
    for batch in pair_batches(PROMPTS, anatomy):
        other = activations(anatomy, batch, batch.other, places_of(anatomy))
        found = masked_metric(anatomy, batch, other, mask).detach()
        for row, value in zip(batch.clean.rows.tolist(), found.tolist(), strict=True):
            assert value == pytest.approx(_by_hand(anatomy, PROMPTS[row], mask), rel=1e-6, abs=1e-7)


def _by_hand(anatomy: Anatomy, item, mask: torch.Tensor) -> float:
    heads, d = anatomy.shape.n_heads, anatomy.shape.d_head
    with ExitStack() as hooks:
        stored = {
            (site, layer): twin.value(anatomy, item, (site, layer), True)
            for site in ("head", "mlp")
            for layer in range(anatomy.shape.n_layers)
        }
        for (site, layer), other in stored.items():
            own = mask[layer * (heads + 1) : (layer + 1) * (heads + 1)]

            def edit(x, other=other, own=own, site=site):
                mixed = x.clone()
                if site == "mlp":
                    return other + own[-1] * (mixed - other)
                for head in range(heads):
                    part = slice(head * d, (head + 1) * d)
                    mixed[..., part] = other[..., part] * (1 - own[head]) + own[head] * x[..., part]
                return mixed

            hooks.enter_context(twin.put(anatomy, (site, layer), edit))
        return twin.m(anatomy, item)


def test_a_node_is_open_as_often_as_said() -> None:
    location = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    uniform = torch.rand(20_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = (drawn(location, uniform) > 0).double().mean(0)
    np.testing.assert_allclose(shares, open_probability(location), atol=0.01)


def test_the_budget_falls_over_the_first_half() -> None:
    allowed = [SETTINGS.allowed(step) for step in range(30)]
    assert allowed == sorted(allowed, reverse=True)
    assert allowed[14:] == [0.2] * 16
    assert allowed[0] == pytest.approx(1 - 0.8 / 15)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    one, two = (learn(anatomy, PROMPTS, SETTINGS) for _ in range(2))
    assert torch.equal(one.location_N, two.location_N)
    assert one.steps == two.steps
    other = learn(anatomy, PROMPTS, MaskSettings(**{**vars(SETTINGS), "seed": 4}))
    assert not torch.equal(one.location_N, other.location_N)
    assert one.passes.forwards == 2 * len(PROMPTS) + 2 * 30 * 4
    assert one.passes.backwards == 30 * 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in anatomy.model.modules())


@pytest.mark.slow
def test_the_one_head_that_matters_stays_open() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    for layer in range(3):
        anatomy.mlp(layer).down_proj.weight.zero_()
        for head in range(4):
            if (layer, head) != (1, 2):
                anatomy.output_projection(layer).weight[:, anatomy.head_slice(head)] = 0
    learned = learn(anatomy, PROMPTS, MaskSettings(80, 0.2, 0.1, 10.0, 6, 0))
    assert int(learned.location_N.argmax()) == 1 * 5 + 2
    assert open_probability(learned.location_N)[7] > 0.9
    assert learned.steps[-1][2] < 0.3


@pytest.mark.bundled
def test_rows_are_one_training(tmp_path) -> None:
    model, prompts = mi.load("bundled", device="cpu"), mi.prompts("operand_pairs", limit=4)
    run = mi.run(Mask(steps=4, batch=2), model, prompts, store=str(tmp_path), progress=False)
    scores, course = run.table("mask_scores"), run.table("mask_training")
    assert (len(scores), list(course["step"])) == (72, [1, 2, 3, 4])
    assert course["loss"].iloc[0] >= course["change"].iloc[0]
    ranked = node_scores(mi.open_store(tmp_path), run.id)
    assert len(ranked) == 72
    first = ranked.sort_values("score").iloc[0]
    best = scores.sort_values("open", ascending=False).iloc[0]
    assert (first["node"], first["layer"]) == (best["node"], best["layer"])
    assert "a node is open with probability" in str(run.summary)
    figure = run.figure()
    assert list(table_of(figure, "step")["change"]) == pytest.approx(list(course["change"]), rel=1e-3)
    assert sorted(table_of(figure, "log_alpha")["open"]) == pytest.approx(sorted(scores["open"]), rel=1e-3)
