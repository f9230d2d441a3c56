"""Circuits against each prompt alone under plain transformers hooks, in float64 on every family."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mathinterp.engine.attribution.circuit import circuit_metrics, mean_activations, places_in
from mathinterp.experiments.circuit.ranking import NodeScores, nothing
from mathinterp.models.anatomy import Anatomy
from tests import attribution_twin as twin
from tests.attribution_twin import contrasts
from tests.tiny import MIXTURES, TINY_FAMILIES, tiny_model

PROMPTS = contrasts(3)
CLOSE = {"rtol": 1e-7, "atol": 1e-8}


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    return twin.precise(request.param, monkeypatch)


def drawn(anatomy: Anatomy, rng: np.random.Generator, level: str) -> dict[tuple[str, int], np.ndarray]:
    """A circuit in which each unit is with probability 1/2."""
    shape = anatomy.shape
    coordinates = (shape.d_model,) if level == "coordinates" else ()
    found = {("input", 0): rng.random(coordinates or 1) < 0.5}
    for layer in range(shape.n_layers):
        if level == "neurons":
            found["neuron", layer] = rng.random(shape.n_neurons) < 0.5
            continue
        found["head", layer] = rng.random((shape.n_heads, *coordinates)) < 0.5
        found["mlp", layer] = rng.random(coordinates or 1) < 0.5
    return found


def values_of(anatomy: Anatomy, place, ablation: str) -> list[torch.Tensor]:
    """What a node outside the circuit has, prompt by prompt: 1 T Z, or (a mean) 1 1 Z."""
    found = []
    for item in PROMPTS:
        if place[0] == "input":
            ids = torch.tensor([item.counterfactual_ids[: item.end + 1]])
            found.append(anatomy.model.get_input_embeddings()(ids))
        else:
            found.append(twin.value(anatomy, item, place, True))
    if ablation == "mean":
        return [torch.cat([values[0] for values in found]).mean(0)[None, None]] * len(found)
    return [torch.zeros_like(values) for values in found] if ablation == "zero" else found


def alone(anatomy: Anatomy, item, circuit, given) -> float:
    """m of one pair, every node of the model mixed by hand."""
    embedded = anatomy.model.get_input_embeddings()(torch.tensor([item.input_ids[: item.end + 1]]))
    with ExitStack() as hooks:
        for place, kept in circuit.items():
            mask, other = torch.from_numpy(kept), given[place]
            if place[0] == "input":
                embedded = torch.where(mask, embedded, other)
            elif kept.ndim == 2:
                hooks.enter_context(_written(anatomy, place[1], mask, other))
            else:
                wide = mask.repeat_interleave(anatomy.shape.d_head) if place[0] == "head" else mask
                mix = lambda x, wide=wide, other=other: torch.where(wide, x, other.expand_as(x))  # noqa: E731
                hooks.enter_context(twin.put(anatomy, place, mix))
        with torch.no_grad():
            logits = anatomy.model(inputs_embeds=embedded).logits[0, -1]
    return float(logits[item.scored[0].token_id] - logits[item.distractor.token_id])


def _written(anatomy: Anatomy, layer: int, kept_HD: torch.Tensor, other_BTZ: torch.Tensor) -> ExitStack:
    """o_proj replaced by the sum of what it makes of each head alone, coordinates taken from one or the other."""
    projection, plain = anatomy.output_projection(layer), type(anatomy.output_projection(layer)).forward

    def parts(z: torch.Tensor) -> list[torch.Tensor]:
        bias = plain(projection, torch.zeros_like(z))
        found = []
        for head in range(anatomy.shape.n_heads):
            single = torch.zeros_like(z)
            single[..., anatomy.head_slice(head)] = z[..., anatomy.head_slice(head)]
            found.append(plain(projection, single) - bias)
        return [bias, *found]

    def forward(z: torch.Tensor) -> torch.Tensor:
        (bias, *own), (_, *other) = parts(z), parts(other_BTZ.expand_as(z))
        return bias + sum(torch.where(kept, a, b) for kept, a, b in zip(kept_HD, own, other, strict=True))

    stack = ExitStack()
    projection.forward = forward
    stack.callback(lambda: projection.__dict__.pop("forward"))
    return stack


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["resample", "zero", "mean"])
def test_the_metric_is_that_of_each_pair_alone(anatomy: Anatomy, ablation: str) -> None:
    rng = np.random.default_rng(0)
    levels = ["nodes", "coordinates"] + (["neurons"] if anatomy.shape.model_type not in MIXTURES else [])
    circuits = [nothing(anatomy.shape), {}, *(drawn(anatomy, rng, level) for level in levels)]
    means = mean_activations(anatomy, PROMPTS, places_in(circuits), 20) if ablation == "mean" else {}
    found_CP = circuit_metrics(anatomy, PROMPTS, circuits, ablation, means, 20)  # several batches
    given = {place: values_of(anatomy, place, ablation) for circuit in circuits for place in circuit}
    expected = [
        [alone(anatomy, item, circuit, {place: given[place][p] for place in circuit}) for p, item in enumerate(PROMPTS)]
        for circuit in circuits
    ]
    np.testing.assert_allclose(found_CP, expected, **CLOSE)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in anatomy.model.modules())


def test_nothing_is_the_counterfactual_and_everything_is_the_model(anatomy: Anatomy) -> None:
    everything = {place: np.ones_like(kept) for place, kept in nothing(anatomy.shape).items()}
    found_CP = circuit_metrics(anatomy, PROMPTS, [nothing(anatomy.shape), everything, {}], "resample", {})
    np.testing.assert_allclose(
        found_CP[0], [twin.m(anatomy, item, item.counterfactual_ids) for item in PROMPTS], **CLOSE
    )
    assert (found_CP[1] == found_CP[2]).all()
    np.testing.assert_allclose(found_CP[1], [twin.m(anatomy, item) for item in PROMPTS], **CLOSE)


def test_a_circuit_of_all_but_one_node_is_exact_patching(anatomy: Anatomy) -> None:
    shape = anatomy.shape
    circuits = [{("head", 1): np.arange(shape.n_heads) != 2}, {("mlp", 1): np.zeros(1, bool)}]
    found_CP = circuit_metrics(anatomy, PROMPTS, circuits, "resample", {})
    clean = np.array([twin.m(anatomy, item) for item in PROMPTS])
    for found_P, unit in zip(found_CP, ((("head", 1), 2), (("mlp", 1), None)), strict=True):
        np.testing.assert_allclose(found_P - clean, [twin.exact(anatomy, item, *unit) for item in PROMPTS], **CLOSE)


def test_memory_that_runs_out_halves_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    circuits = [nothing(anatomy.shape), drawn(anatomy, np.random.default_rng(1), "nodes")]
    whole = circuit_metrics(anatomy, PROMPTS, circuits, "resample", {})
    from mathinterp.engine.attribution import circuit

    real = circuit._metrics

    def short_of_memory(anatomy, prompts, *given):
        if len(prompts) > 1:
            raise torch.cuda.OutOfMemoryError
        return real(anatomy, prompts, *given)

    monkeypatch.setattr(circuit, "_metrics", short_of_memory)
    np.testing.assert_allclose(circuit_metrics(anatomy, PROMPTS, circuits, "resample", {}), whole, rtol=1e-9)


def test_a_metric_that_is_no_number_names_the_prompt() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    anatomy.unembedding.weight[PROMPTS[1].scored[0].token_id] = torch.nan
    with pytest.raises(FloatingPointError, match="prompt p1"):
        circuit_metrics(anatomy, PROMPTS, [{}], "resample", {})


def test_the_first_nodes_are_those_of_a_plain_sort() -> None:
    rng = np.random.default_rng(2)
    scores = {
        ("mlp", 1): rng.normal(size=1), ("head", 1): rng.normal(size=4), ("input", 0): rng.normal(size=1),
        ("head", 0): np.array([0.5, np.nan, -0.5, 0.5]), ("mlp", 0): np.array([-2.0]),
    }  # fmt: skip
    ranked = NodeScores("any", "run", scores)
    names = [("input", 0, 0), *(("head", 0, h) for h in range(4)), ("mlp", 0, 0), *(("head", 1, h) for h in range(4)),
             ("mlp", 1, 0)]  # fmt: skip
    value = {(site, layer, unit): scores[site, layer][unit] for site, layer, unit in names}
    known = [name for name in names if value[name] == value[name]]
    assert ranked.scored == len(known) == 10
    for ordering, key in (("signed", lambda n: -value[n]), ("absolute", lambda n: -abs(value[n]))):
        for count in range(11):
            held = {*sorted(known, key=key)[:count], ("head", 0, 1)}  # what is not scored is always in
            found = ranked.first(count, ordering)
            assert {n for n in names if found[n[:2]][n[2]]} == held, (ordering, count)


def test_the_fingerprint_is_of_nodes_and_scores_in_whatever_order() -> None:
    one = {("head", 0): np.array([1.0, np.nan]), ("mlp", 0): np.array([2.0])}
    same = NodeScores("other", "elsewhere", dict(reversed(one.items())))
    assert NodeScores("m", "r", one).fingerprint == same.fingerprint
    for changed in (
        {**one, ("mlp", 0): np.array([3.0])},
        {**one, ("mlp", 1): np.array([2.0])},
        {("head", 0): one["head", 0]},
    ):
        assert NodeScores("m", "r", changed).fingerprint != same.fingerprint
