"""Interventions of one's own through ``mi.ablate`` equal transformers with a hook, one prompt at a time, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import mathinterp as mi
from mathinterp.engine.intervention import Change, Tokens, Value
from mathinterp.errors import UserError
from mathinterp.experiments.question import Answered
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.handle import Model
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.given import Prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from tests.tiny import tiny_model, tiny_tokenizer

LAYER, HEAD = 1, 1
PROMPTS = Prompts(tuple(load_prompts("two_digit", limit=6)), "six")
TOKENIZED = tokenize_prompts(PROMPTS, tiny_tokenizer())
OTHERS = Prompts(tuple(reversed(PROMPTS)), "six others")
TOKENIZED_OTHERS = list(reversed(TOKENIZED))
Edit = Callable[[torch.Tensor, int], torch.Tensor]  # (activations T Z of a prompt, its number) -> the new ones


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3"])
def pair(request: pytest.FixtureRequest) -> tuple[Model, Anatomy]:
    """The model for ``ablate``, and its parts, to hook by hand."""
    model = tiny_model(request.param)
    return mi.wrap(model, tiny_tokenizer(), name=request.param), Anatomy(model)


def logprobs_with_hook(anatomy: Anatomy, site: torch.nn.Module, edit: Edit) -> list[float]:
    """Log-probability of every scored token, the input of ``site`` edited, by transformers alone."""
    found = []
    for number, item in enumerate(TOKENIZED):

        def edited(_: Any, given: tuple[torch.Tensor, ...], i: int = number) -> tuple[torch.Tensor, ...]:
            return edit(given[0][0].clone(), i)[None], *given[1:]

        hook = site.register_forward_pre_hook(edited)
        with torch.inference_mode():
            logits_TV = anatomy.model(torch.tensor([item.fed])).logits[0]
        hook.remove()
        found += [logits_TV[token.index - 1].log_softmax(-1)[token.token_id].item() for token in item.scored]
    return found


def input_of(anatomy: Anatomy, site: torch.nn.Module, item: TokenizedPrompt) -> torch.Tensor:
    caught: list[torch.Tensor] = []
    hook = site.register_forward_pre_hook(lambda _, given: caught.append(given[0][0]))
    with torch.inference_mode():
        anatomy.model(torch.tensor([item.fed]))
    hook.remove()
    return caught[0]


def agrees(answer: Answered, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(answer.rows["logprob"], expected, atol=1e-6)  # rows are float32 where the scores are
    assert np.abs(answer.rows["logprob"] - answer.rows["baseline_logprob"]).max() > 1e-4


def own_slice(anatomy: Anatomy) -> slice:
    d_head = anatomy.shape.d_head
    return slice(HEAD * d_head, (HEAD + 1) * d_head)


def test_a_factor_a_vector_and_a_value_at_some_tokens(pair) -> None:
    model, anatomy = pair
    site, part = anatomy.output_projection(LAYER), own_slice(anatomy)
    vector = torch.linspace(-2, 2, anatomy.shape.d_head, dtype=torch.float64)

    def halved(rows_TZ: torch.Tensor, number: int) -> torch.Tensor:
        rows_TZ[:, part] *= 0.5
        return rows_TZ

    def at_two_tokens(rows_TZ: torch.Tensor, number: int) -> torch.Tensor:
        rows_TZ[[1, 2], part] = vector
        return rows_TZ

    def everywhere(rows_TZ: torch.Tensor, number: int) -> torch.Tensor:
        rows_TZ[:, part] = vector
        return rows_TZ

    asked: dict[str, Any] = {"heads": [(LAYER, HEAD)]}
    agrees(mi.ablate(model, PROMPTS, value=0.5, **asked), logprobs_with_hook(anatomy, site, halved))
    expected = logprobs_with_hook(anatomy, site, at_two_tokens)
    agrees(mi.ablate(model, PROMPTS, value=vector, tokens=[1, 2], **asked), expected)
    whole = Value(vector.repeat(anatomy.shape.n_heads))
    agrees(mi.ablate(model, PROMPTS, value=whole, tokens=[1, 2], **asked), expected)
    agrees(mi.ablate(model, PROMPTS, value=vector.tolist(), **asked), logprobs_with_hook(anatomy, site, everywhere))


def test_activations_of_other_prompts_at_end(pair) -> None:
    model, anatomy = pair
    site, part = anatomy.output_projection(LAYER), own_slice(anatomy)
    theirs = [input_of(anatomy, site, item)[item.end, part] for item in TOKENIZED_OTHERS]

    def patched(rows_TZ: torch.Tensor, number: int) -> torch.Tensor:
        rows_TZ[TOKENIZED[number].end, part] = theirs[number]
        return rows_TZ

    answer = mi.ablate(model, PROMPTS, heads=[(LAYER, HEAD)], value=OTHERS)
    agrees(answer, logprobs_with_hook(anatomy, site, patched))
    assert answer.effects["n"].iloc[0] == len(PROMPTS), "END alone is edited: the first token counts"


def test_an_intervention_and_token_types(pair) -> None:
    model, anatomy = pair
    site, part = anatomy.output_projection(LAYER), own_slice(anatomy)
    ends = Tokens.ends(TOKENIZED)
    rows = torch.randn(len(TOKENIZED), anatomy.shape.n_heads * anatomy.shape.d_head, dtype=torch.float64)

    def at_end(rows_TZ: torch.Tensor, number: int) -> torch.Tensor:
        rows_TZ[TOKENIZED[number].end, part] = rows[number, part]
        return rows_TZ

    changes = (Change("head", LAYER, (HEAD,), Value(rows, ends)),)
    agrees(mi.ablate(model, PROMPTS, value=changes), logprobs_with_hook(anatomy, site, at_end))
    by_type = mi.ablate(model, PROMPTS, heads=[(LAYER, HEAD)], tokens=["operand_a"])
    everywhere = mi.ablate(model, PROMPTS, heads=[(LAYER, HEAD)])
    assert by_type.what == f"head {LAYER}.{HEAD} replaced (zero, operand_a)"
    assert np.abs(by_type.rows["logprob"] - by_type.rows["baseline_logprob"]).max() > 1e-6
    assert np.abs(by_type.rows["logprob"] - everywhere.rows["logprob"]).max() > 1e-6


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"heads": "0.1", "value": [1.0, 2.0]}, r"`value` has 2 numbers; the site head"),
        ({"heads": "0.1", "value": float("nan")}, "finite number"),
        ({"heads": "0.1", "value": "word"}, "`value` 'word' is not known"),
        ({"heads": "0.1", "value": "mean", "tokens": [0]}, "not to `value` 'mean'"),
        ({"heads": "0.1", "tokens": [99]}, r"has tokens 0 to"),
        ({"heads": "0.1", "tokens": ["verb"]}, "'verb' is no type"),
        ({"heads": "0.1", "tokens": []}, "`tokens` cannot be read"),
        ({"heads": "0.1", "value": 0.5, "positions": "end"}, "say in `tokens` where"),
        ({"heads": "0.1", "value": PROMPTS[:2]}, "cannot be read as a vector|prompts to take activations from"),
        ({"value": 0.5}, "nothing is named to replace"),
        ({"heads": "0.1", "value": (Change("head", 0, (0,), Value(factor=0.0)),)}, "names its units and tokens itself"),
    ],
)
def test_mistakes_are_told_in_one_line(asked: dict[str, Any], told: str) -> None:
    model = mi.wrap(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    with pytest.raises(UserError, match=told) as error:
        mi.ablate(model, PROMPTS, **asked)
    assert "\n" not in str(error.value)


def test_experiments_list_themselves() -> None:
    assert {"Heads", "Paths", "HeadPairs", "Experiment", "option"} <= set(dir(mi.experiments))
    assert mi.experiments.HeadPairs.name == "head_pairs"
