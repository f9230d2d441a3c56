"""Zeroed neurons against zeroed columns of down_proj, in float64 on every tiny family."""

import pytest
import torch

from mathinterp.engine.intervention import CLEAN, Change, Intervention, Value, zeroed
from mathinterp.engine.lens.neurons import end_activations
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron
from tests.exact import PROMPTS, assert_same, random_prompts
from tests.neuron_twin import zero_columns
from tests.tiny import of_neurons

EXACT = 1e-11
NEURONS = [Neuron(0, 3), Neuron(0, 17), Neuron(2, 39)]


def masked(anatomy: Anatomy, layer: int, mask: torch.Tensor) -> Intervention:
    """The neurons of a mask at zero: K, or P K."""
    return (Change("neuron", layer, mask, Value.zero(anatomy, "neuron", layer)),)


@of_neurons
def test_zeroed_neurons_equal_zeroed_columns(anatomy: Anatomy) -> None:
    engine = PlainEngine(anatomy, PROMPTS, batch_size=5)
    clean = engine.baseline()
    scores = engine.run([CLEAN, zeroed(anatomy, NEURONS)])
    assert_same(scores.first(), clean)
    assert scores.difference(clean) > 1e-3
    saved = {name: value.clone() for name, value in anatomy.model.state_dict().items()}
    zero_columns(anatomy, NEURONS)
    try:
        cut = engine.baseline()
    finally:
        anatomy.model.load_state_dict(saved)
    assert abs(scores.logit_EA[1] - cut.logit_EA[0]).max() < EXACT
    assert abs(scores.logprob_EA[1] - cut.logprob_EA[0]).max() < EXACT


@of_neurons
def test_a_mask_of_its_own_for_each_prompt(anatomy: Anatomy) -> None:
    engine = PlainEngine(anatomy, PROMPTS, batch_size=4)
    torch.manual_seed(1)
    mask_PK = torch.rand(len(PROMPTS), anatomy.shape.n_neurons) < 0.5
    together = engine.run([masked(anatomy, 1, mask_PK)])
    for number in (0, 3, len(PROMPTS) - 1):
        alone = engine.run([masked(anatomy, 1, mask_PK[number])])
        of_prompt = engine.answers.prompt_A == number
        assert abs(together.logit_EA - alone.logit_EA)[:, of_prompt].max() < EXACT


@of_neurons
def test_activations_at_end_under_a_mask(anatomy: Anatomy) -> None:
    prompts = random_prompts(4)
    sequences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
    mask_PK = torch.zeros(len(prompts), anatomy.shape.n_neurons, dtype=torch.bool)
    mask_PK[torch.arange(len(prompts)), torch.arange(len(prompts)) + 5] = True
    cut = end_activations(anatomy, sequences, masked(anatomy, 0, mask_PK))
    clean = end_activations(anatomy, sequences)
    assert (cut.coefficients_PK[0][mask_PK] == 0).all()
    assert torch.equal(cut.coefficients_PK[0][~mask_PK], clean.coefficients_PK[0][~mask_PK])
    alone = end_activations(anatomy, sequences[2:3], masked(anatomy, 0, mask_PK[2]))
    assert abs(cut.coefficients_PK[2][2] - alone.coefficients_PK[2][0]).max() < EXACT
    assert abs(cut.coefficients_PK[2] - clean.coefficients_PK[2]).max() > 1e-6


@of_neurons
def test_nothing_stays_hooked_and_a_silent_hook_is_an_error(anatomy: Anatomy) -> None:
    placement, changes = everywhere(anatomy), zeroed(anatomy, NEURONS)
    with pytest.raises(AssertionError, match="never fired"), hooked(placement, [changes]):
        pass
    with pytest.raises(ZeroDivisionError), hooked(placement, [changes]):
        raise ZeroDivisionError
    assert not any(anatomy.down_projection(layer)._forward_pre_hooks for layer in range(3))
