"""What exactness tests share: random prompts, and two ways to the same scores, equal to float64's rounding."""

import numpy as np
import torch

from mathinterp.engine.scores import Scores
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from tests.tiny import VOCABULARY

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def random_prompts(count: int = 24, seed: int = 0) -> list[TokenizedPrompt]:
    """Prompts of 6 to 11 tokens that share prefixes, with 1 to 3 scored tokens at the end."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(4, VOCABULARY, size=6) for _ in range(3)]
    prompts = []
    for i in range(count):
        stem = stems[i % 3][: rng.integers(3, 7)]
        ids = (1, *stem.tolist(), *rng.integers(4, VOCABULARY, size=int(rng.integers(2, 5))).tolist())
        first = len(ids) - int(rng.integers(1, 4 if len(ids) > 6 else 2))
        scored = tuple(ScoredToken(p, k, ids[k], "", "digit", None) for p, k in enumerate(range(first, len(ids))))
        prompts.append(TokenizedPrompt(Prompt(str(i), f"prompt {i}", "0"), ids, scored))
    return prompts


PROMPTS = random_prompts()


def assert_same(a: Scores, b: Scores) -> None:
    np.testing.assert_allclose(a.logprob_EA, b.logprob_EA, **EXACT)
    np.testing.assert_allclose(a.logit_EA, b.logit_EA, **EXACT)
    np.testing.assert_array_equal(a.predicted_EA, b.predicted_EA)
    np.testing.assert_array_equal(a.correct_EA, b.correct_EA)


def one_at_a_time(anatomy: Anatomy, prompts: list[TokenizedPrompt]) -> np.ndarray:
    """Log-probabilities of the scored tokens from the model itself, one unpadded prompt a forward pass."""
    values = []
    for prompt in prompts:
        logprobs = anatomy.model(torch.tensor([prompt.fed])).logits[0].log_softmax(-1)
        values += [float(logprobs[token.index - 1, token.token_id]) for token in prompt.scored]
    return np.array(values)
