"""Attribution methods against what they say they are, in float64: finite differences, exact patching, conservation."""

import numpy as np
import pytest
import torch

from mathinterp.engine.attribution import methods
from mathinterp.engine.attribution.estimate import estimate
from mathinterp.engine.attribution.methods import METHODS, passes_of
from mathinterp.engine.attribution.pairs import places_of
from mathinterp.engine.pairs import CleanPairs, Pairs, ends_of
from mathinterp.engine.paths.attribution import first_order
from mathinterp.engine.paths.patching import EndPatching
from mathinterp.models.anatomy import Anatomy
from tests import attribution_twin as twin
from tests.attribution_twin import contrasts
from tests.tiny import MIXTURES, TINY_FAMILIES, of_neurons, tiny_model

PROMPTS = contrasts()
CLOSE = {"rtol": 1e-6, "atol": 1e-9}
EMBEDDING = ("residual", 0)


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    return twin.precise(request.param, monkeypatch)


def found(anatomy: Anatomy, method: str, places=None, **asked) -> dict[tuple[str, int], np.ndarray]:
    places = places_of(anatomy) if places is None else places
    return {place: v.numpy() for place, v in estimate(anatomy, PROMPTS, places, method=method, **asked)[0].items()}


def hooks_of(anatomy: Anatomy) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in anatomy.model.modules())


@pytest.mark.slow
def test_atp_is_the_slope_of_m_along_the_way_to_the_counterfactual(anatomy: Anatomy) -> None:
    values = found(anatomy, "atp", max_tokens=20)  # several batches
    for p, item in list(enumerate(PROMPTS))[::2]:
        for layer in range(anatomy.shape.n_layers):
            change = twin.change_of(anatomy, item, ("head", layer))
            slopes = [
                twin.slope(anatomy, item, ("head", layer), head, change=change) for head in range(anatomy.shape.n_heads)
            ]
            np.testing.assert_allclose(values["head", layer][p], slopes, **CLOSE)
            np.testing.assert_allclose(
                values["mlp", layer][p], [twin.slope(anatomy, item, ("mlp", layer), None)], **CLOSE
            )


def test_at_end_alone_the_slope_is_that_of_the_last_token(anatomy: Anatomy) -> None:
    values = found(anatomy, "atp", positions="end")
    for layer in range(anatomy.shape.n_layers):
        slopes = [twin.slope(anatomy, PROMPTS[1], ("head", layer), head, end_only=True) for head in (0, 3)]
        np.testing.assert_allclose(values["head", layer][1, [0, 3]], slopes, **CLOSE)
        np.testing.assert_allclose(
            values["mlp", layer][1], [twin.slope(anatomy, PROMPTS[1], ("mlp", layer), None, end_only=True)], **CLOSE
        )


smooth = pytest.mark.parametrize(  # a mixture's output jumps where a token goes to other experts
    "anatomy", sorted(set(TINY_FAMILIES) - MIXTURES), indirect=True
)


@pytest.mark.slow
@smooth
def test_integrated_gradients_of_the_embedding_sum_to_the_whole_difference(anatomy: Anatomy) -> None:
    values = found(anatomy, "eap-ig-inputs", [EMBEDDING], steps=100)[EMBEDDING]
    whole = [twin.m(anatomy, item, item.counterfactual_ids) - twin.m(anatomy, item) for item in PROMPTS]
    np.testing.assert_allclose(values[:, 0], whole, rtol=5e-3, atol=1e-2)


@pytest.mark.slow
@smooth
def test_integrated_gradients_of_activations_sum_to_exact_patching(anatomy: Anatomy) -> None:
    close = {"rtol": 2e-3, "atol": 0.03 if anatomy.shape.model_type == "opt" else 0.01}  # OPT's ReLU has kinks
    values = found(anatomy, "eap-ig-activations", steps=40)
    for layer in range(anatomy.shape.n_layers):
        together = [twin.exact(anatomy, item, ("head", layer)) for item in PROMPTS]
        np.testing.assert_allclose(values["head", layer].sum(1), together, **close)
        mlp = [twin.exact(anatomy, item, ("mlp", layer)) for item in PROMPTS]
        np.testing.assert_allclose(values["mlp", layer][:, 0], mlp, **close)


@pytest.mark.parametrize("method", ["eap-ig-inputs", "eap-ig-activations"])
def test_one_step_of_a_thousandth_of_the_way_is_atp(anatomy: Anatomy, method: str, monkeypatch) -> None:
    monkeypatch.setattr(methods, "midpoints", lambda steps: [0.0])
    ours, plain = found(anatomy, method, steps=1), found(anatomy, "atp")
    for place, values in plain.items():
        np.testing.assert_allclose(ours[place], values, rtol=1e-9, atol=1e-11)


def test_atp_star_without_dropped_layers_is_atp(anatomy: Anatomy) -> None:
    plain = found(anatomy, "atp")
    monkey = dict(METHODS)
    try:
        METHODS["atp-star"] = lambda *given: methods.atp_star(*given, drop=False)
        ours = found(anatomy, "atp-star")
    finally:
        METHODS.update(monkey)
    for place, values in plain.items():
        np.testing.assert_allclose(ours[place], values, rtol=1e-9, atol=1e-11)


def test_first_order_of_path_patching_is_atp_at_end_of_one_logit(anatomy: Anatomy) -> None:
    ids = [[p.input_ids[: p.end + 1] for p in PROMPTS], [p.counterfactual_ids[: p.end + 1] for p in PROMPTS]]
    ends = [ends_of(anatomy, sentences) for sentences in ids]
    shares = []
    for tokens in ([p.scored[0].token_id for p in PROMPTS], [p.distractor.token_id for p in PROMPTS]):
        pairs = Pairs(tuple(ids[0]), tuple(ids[1]), np.array(tokens))
        shares.append(first_order(EndPatching(anatomy, CleanPairs(pairs, *ends)), "none"))
    values = found(anatomy, "atp", positions="end")
    for layer in range(anatomy.shape.n_layers):
        heads, mlps = ((getattr(shares[0], n) - getattr(shares[1], n))[layer].numpy() for n in ("heads_LHP", "mlps_LP"))
        np.testing.assert_allclose(values["head", layer], heads.T, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(values["mlp", layer][:, 0], mlps, rtol=1e-6, atol=1e-8)


def test_grad_drop_is_the_slope_with_one_layers_additions_held(anatomy: Anatomy) -> None:
    """Where layer l adds what it adds on X_r, whatever it reads: with hooks that put back what was there."""
    values, plain = found(anatomy, "atp-star"), found(anatomy, "atp")
    item, layers = PROMPTS[0], anatomy.shape.n_layers

    def held(layer: int, site, unit) -> float:
        change = twin.change_of(anatomy, item, site)
        kept = [twin.value(anatomy, item, ("mlp", layer), False), _attention_output(anatomy, item, layer)]
        with (
            twin.put(anatomy, ("mlp", layer), lambda _: kept[0].clone()),
            _output_put(anatomy.output_projection(layer), kept[1]),
        ):
            return twin.slope(anatomy, item, site, unit, change=change)

    for site, unit in ((("head", 0), 1), (("mlp", 0), None), (("head", layers - 1), 2)):
        dropped = [held(layer, site, unit) for layer in range(layers) if layer != site[1]]  # its own: nothing is left
        expected = np.abs(dropped).sum() / (layers - 1) * np.sign(plain[site][0, unit or 0])
        np.testing.assert_allclose(values[site][0, unit or 0], expected, **CLOSE)


def _attention_output(anatomy: Anatomy, item, layer: int) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = anatomy.output_projection(layer).register_forward_hook(lambda _, args, output: kept.append(output.clone()))
    twin.m(anatomy, item)
    handle.remove()
    return kept[0]


class _output_put:
    def __init__(self, module: torch.nn.Module, value: torch.Tensor):
        self.module, self.value = module, value

    def __enter__(self) -> None:
        self.handle = self.module.register_forward_hook(lambda *_: self.value.clone())

    def __exit__(self, *_) -> None:
        self.handle.remove()


@of_neurons
@pytest.mark.parametrize("method", ["atp", "eap-ig-inputs", "eap-ig-activations", "relp"])
def test_neurons_sum_to_their_mlp(anatomy: Anatomy, method: str) -> None:
    values = found(anatomy, method, places_of(anatomy, neurons=True), steps=2)
    for layer in range(anatomy.shape.n_layers):
        assert values["neuron", layer].shape == (len(PROMPTS), anatomy.shape.n_neurons)
        np.testing.assert_allclose(values["neuron", layer].sum(1), values["mlp", layer][:, 0], rtol=1e-8, atol=1e-10)
    without = found(anatomy, method, steps=2)
    for place, expected in without.items():
        np.testing.assert_allclose(values[place], expected, rtol=1e-9, atol=1e-11)


@of_neurons
def test_a_neurons_atp_is_its_slope(anatomy: Anatomy) -> None:
    values = found(anatomy, "atp", places_of(anatomy, neurons=True))
    for neuron in (0, 7, anatomy.shape.n_neurons - 1):
        slope = twin.slope(anatomy, PROMPTS[2], ("neuron", 1), neuron)
        np.testing.assert_allclose(values["neuron", 1][2, neuron], slope, **CLOSE)


@pytest.mark.parametrize("method", METHODS)
def test_passes_are_counted_as_said_and_nothing_stays_hooked(anatomy: Anatomy, method: str) -> None:
    if method == "relp" and anatomy.shape.n_experts:
        pytest.skip("no rules for mixtures")
    before, calls = hooks_of(anatomy), []
    handle = anatomy.decoder.register_forward_hook(lambda *_: calls.append(1))
    _, passes = estimate(anatomy, PROMPTS[:1], places_of(anatomy), method=method, steps=3)
    handle.remove()
    assert (passes.forwards, passes.backwards) == passes_of(method, anatomy.shape.n_layers, 3)
    assert len(calls) == passes.forwards
    assert hooks_of(anatomy) == before


@pytest.fixture(params=sorted(set(TINY_FAMILIES) - MIXTURES))
def unbiased(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    """A model whose biases are all 0: with them relevance is not conserved, and the paper says so."""
    anatomy = twin.precise(request.param, monkeypatch)
    for name, parameter in anatomy.model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return anatomy


def test_relevance_is_conserved(unbiased: Anatomy) -> None:
    """Embedding x coefficient sums to m: with X_c's embedding 0, the change of the embedding is minus itself."""
    monkey = methods.changes
    try:
        methods.changes = lambda clean, other, batch, positions: dict(clean)  # value x coefficient
        values = found(unbiased, "relp", [EMBEDDING])[EMBEDDING][:, 0]
    finally:
        methods.changes = monkey
    np.testing.assert_allclose(values, [twin.m(unbiased, item) for item in PROMPTS], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_on_a_linear_model_every_gradient_is_exact() -> None:
    """No norms, no activation function, attention that no token can move: relp is atp is exact patching."""
    anatomy = Anatomy(tiny_model("gpt2"))
    for layer in anatomy.layers:
        layer.ln_1, layer.ln_2, layer.mlp.act = torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity()
        layer.attn.c_attn.weight[:, : 2 * anatomy.shape.d_model] = 0
    anatomy.decoder.ln_f = torch.nn.Identity()
    anatomy = Anatomy(anatomy.model)
    exact = {
        (site, layer): [
            [twin.exact(anatomy, item, (site, layer), unit) for unit in range(4 if site == "head" else 1)]
            for item in PROMPTS
        ]
        for site, layer in places_of(anatomy)
    }
    for method in ("atp", "relp", "eap-ig-inputs", "eap-ig-activations"):
        for place, values in found(anatomy, method, steps=2).items():
            np.testing.assert_allclose(values, exact[place], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_hook_that_fires_twice_or_never_is_an_error(method: str, layer: int, monkeypatch) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    before = hooks_of(anatomy)
    monkeypatch.setattr(anatomy.layers[layer], "mlp", torch.nn.Identity())  # the projection below is never called
    stray = Anatomy(tiny_model("llama")).mlp(layer)
    monkeypatch.setattr(anatomy, "mlp", lambda at, own=anatomy.mlp: stray if at == layer else own(at))
    with pytest.raises(AssertionError, match="fired"):
        found(anatomy, method)
    assert hooks_of(anatomy) == before
