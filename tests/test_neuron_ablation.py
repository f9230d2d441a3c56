"""Zeroed neurons against zeroed columns of down_proj, in float64 on every tiny family."""

import pytest
import torch

from mathinterp.engine.lens.neurons import end_activations
from mathinterp.engine.neuron_sets import NeuronSets, neuron_mask, zeroed_neurons
from mathinterp.models.anatomy import Anatomy
from tests.exact import PROMPTS, assert_same, random_prompts
from tests.tiny import of_neurons

EXACT = 1e-11
NEURONS = [(0, 3), (0, 17), (2, 39)]


def zero_columns(anatomy: Anatomy, neurons: list[tuple[int, int]]) -> None:
    with torch.no_grad():
        for layer, neuron in neurons:
            anatomy.value_vectors(layer)[neuron] = 0  # a view of down_proj's weight


@of_neurons
def test_zeroed_neurons_equal_zeroed_columns(anatomy: Anatomy) -> None:
    engine = NeuronSets(anatomy, PROMPTS, batch_size=5)
    clean = engine.baseline()
    scores = engine.run_masks([{}, neuron_mask(anatomy, NEURONS)])
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
    engine = NeuronSets(anatomy, PROMPTS, batch_size=4)
    torch.manual_seed(1)
    mask_PK = torch.rand(len(PROMPTS), anatomy.shape.n_neurons) < 0.5
    together = engine.run_masks([{1: mask_PK}])
    for number in (0, 3, len(PROMPTS) - 1):
        alone = engine.run_masks([{1: mask_PK[number]}])
        of_prompt = engine.answers.prompt_A == number
        assert abs(together.logit_EA - alone.logit_EA)[:, of_prompt].max() < EXACT


@of_neurons
def test_activations_at_end_under_a_mask(anatomy: Anatomy) -> None:
    prompts = random_prompts(4)
    sequences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
    mask_PK = torch.zeros(len(prompts), anatomy.shape.n_neurons, dtype=torch.bool)
    mask_PK[torch.arange(len(prompts)), torch.arange(len(prompts)) + 5] = True
    masked = end_activations(anatomy, sequences, zeroed_mask={0: mask_PK})
    clean = end_activations(anatomy, sequences)
    assert (masked.coefficients_PK[0][mask_PK] == 0).all()
    assert torch.equal(masked.coefficients_PK[0][~mask_PK], clean.coefficients_PK[0][~mask_PK])
    alone = end_activations(anatomy, sequences[2:3], zeroed_mask={0: mask_PK[2]})
    assert abs(masked.coefficients_PK[2][2] - alone.coefficients_PK[2][0]).max() < EXACT
    assert abs(masked.coefficients_PK[2] - clean.coefficients_PK[2]).max() > 1e-6


@of_neurons
def test_nothing_stays_hooked_and_a_silent_hook_is_an_error(anatomy: Anatomy) -> None:
    mask = neuron_mask(anatomy, NEURONS)
    with pytest.raises(AssertionError, match="never fired"), zeroed_neurons(anatomy, mask):
        pass
    with pytest.raises(ZeroDivisionError), zeroed_neurons(anatomy, mask):
        raise ZeroDivisionError
    assert not any(anatomy.down_projection(layer)._forward_pre_hooks for layer in range(3))
