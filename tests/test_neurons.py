"""Importance of neurons and heads at END: closed form against a hand-written direct form in float64."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from mathinterp.engine.hooks import zeroed_columns
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.lens.lens import Lens
from mathinterp.engine.lens.logsumexp import Base, slow_increases
from mathinterp.engine.lens.neurons import NeuronLens, end_activations
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from tests.neuron_twin import SEQUENCES, look, slow_head, slow_neuron
from tests.tiny import of_neurons, tiny_model

EXACTLY = {"rel": 1e-9, "abs": 1e-11}


@of_neurons
def test_closed_form_is_the_direct_form_original_and_ablated(anatomy: Anatomy) -> None:
    heads = [Head(0, 1), Head(1, 2)]
    lens = NeuronLens(anatomy)
    clean, ablated = end_activations(anatomy, SEQUENCES), end_activations(anatomy, SEQUENCES, zeroed(anatomy, heads))
    scales = lens.frozen_scales(clean)
    target = lens.logits(clean).argmax(dim=-1)
    for prompt in (0, 7, 13):
        seen = look(anatomy, SEQUENCES[prompt])
        with ExitStack() as cut:
            for layer, head in heads:
                cut.enter_context(zeroed_columns(anatomy, layer, head))
            changed = look(anatomy, SEQUENCES[prompt])
        token = int(seen.logits.argmax())
        assert token == target[prompt]
        for layer in range(anatomy.shape.n_layers):
            directions = lens.directions(layer)
            for found_run, run in ((clean, seen), (ablated, changed)):
                found = lens.layer(layer, found_run, scales, target, directions)
                np.testing.assert_allclose(
                    found_run.coefficients_PK[layer][prompt], run.c[layer], rtol=1e-9, atol=1e-11
                )
                if layer > 1 and found_run is ablated:
                    assert (found.neurons_PK - lens.layer(layer, clean, scales, target, directions).neurons_PK).any()
                for k in (0, 17, 39):
                    expected = slow_neuron(anatomy, layer, k, run, seen, token)
                    assert float(found.neurons_PK[prompt, k]) == pytest.approx(expected, **EXACTLY)
                for head in range(4):
                    gone = run is changed and (layer, head) in heads
                    expected = 0.0 if gone else slow_head(anatomy, layer, head, run, seen, token)
                    assert float(found.heads_PH[prompt, head]) == pytest.approx(expected, **EXACTLY)


def test_norms_that_are_not_what_the_family_says_are_refused() -> None:
    wrong = Anatomy(tiny_model("gemma2"))
    wrong.family = replace(wrong.family, norm_offset=0.0)
    with pytest.raises(UserError, match="see norm_offset"):
        Lens(wrong).check(torch.randn(4, 32, dtype=torch.float64))


@of_neurons
def test_nothing_stays_hooked_and_a_silent_hook_is_noticed(anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    end_activations(anatomy, SEQUENCES[:3], zeroed(anatomy, [Head(0, 1)]))
    in_a_tuple = anatomy.shape.model_type == "falcon"  # what its layers give
    skipped = lambda hidden, *args, **kwargs: (hidden, None) if in_a_tuple else hidden  # noqa: E731
    monkeypatch.setattr(anatomy.layers[1], "forward", skipped)
    with pytest.raises(AssertionError, match="fire"):
        end_activations(anatomy, SEQUENCES[:3])
    for module in anatomy.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_low_precision_stays_near_the_float64_direct_form(name: str, dtype: torch.dtype, limit: float) -> None:
    """The same activations and weights, rounded once to ``dtype``: in it, and exactly."""
    model = Anatomy(tiny_model(name, dtype=dtype))
    lens, seen = NeuronLens(model), end_activations(model, SEQUENCES)
    scales, exact_model = lens.frozen_scales(seen), Anatomy(tiny_model(name, dtype=dtype).double())
    exact_lens = NeuronLens(exact_model)
    target = lens.logits(seen).argmax(dim=-1)
    for layer in range(model.shape.n_layers):
        found = lens.layer(layer, seen, scales, target, lens.directions(layer)).neurons_PK.double()
        norm = exact_lens.lens.norm
        base = exact_lens.lens.logits(seen.before_mlp_PD[layer], norm.scale(seen.final_PD))
        amounts = seen.coefficients_PK[layer].double() / norm.scale(seen.final_PD)[:, None]
        exact = slow_increases(Base.of(base, target), amounts, exact_lens.directions(layer))
        assert (found - exact).norm() / exact.norm() < limit
