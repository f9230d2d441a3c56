"""Norms in batches equal those of transformers' own hidden states, one prompt at a time."""

import numpy as np
import pytest
import torch
from residual_norms import ResidualNorms

from mathinterp.errors import UserError
from mathinterp.experiments import Subject
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts

MODEL = load(ModelSpec("bundled", dtype="float64"), "cpu")
PROMPTS = tokenize_prompts(load_prompts("two_digit", limit=6), MODEL.tokenizer)


@pytest.mark.parametrize(("measure", "order"), [("l2", 2), ("max", torch.inf)])
def test_norms_are_those_of_the_models_own_hidden_states(measure: str, order: float) -> None:
    experiment = ResidualNorms(measure=measure, layers="0-1,7")
    (shard,) = experiment.shards(MODEL.anatomy.shape, PROMPTS)
    rows = experiment.run(experiment.prepare(Subject(MODEL.anatomy, PROMPTS)), shard).to_pandas()
    assert len(rows) == 3 * len(PROMPTS)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt.input_ids[: prompt.end + 1]])
        states = MODEL.anatomy.model(ids, output_hidden_states=True).hidden_states
        found = rows[rows["prompt_id"] == prompt.prompt.prompt_id].set_index("layer")["norm"]
        for layer in (0, 1, 7):
            np.testing.assert_allclose(found[layer], states[layer][0, -1].norm(order).item(), rtol=1e-6)


def test_mistakes_are_told_in_one_line() -> None:
    with pytest.raises(UserError, match="`measure` 'l1' is not known"):
        ResidualNorms(measure="l1")
    with pytest.raises(UserError, match="layer 9 does not exist"):
        ResidualNorms(layers=[9]).shards(MODEL.anatomy.shape, PROMPTS)
