"""Logits of answer tokens -> the four numbers every scan stores.

Knows scoring (method.md section 1: right iff argmax equals gold); knows nothing about interventions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from mathinterp.forward.edits import Edit
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

LOGITS_AT_ONCE = 2**28  # float32 logits held at once: 1 GiB


@dataclass(frozen=True)
class Answers:
    """The scored answer tokens of a prompt set, flat: A rows, prompts in order, positions ascending."""

    prompt_A: np.ndarray  # index into the prompts
    position_A: np.ndarray  # index among the prompt's scored tokens
    row_A: np.ndarray  # token index in the prompt whose logits predict the answer token
    gold_A: np.ndarray  # token id of the answer token

    def __len__(self) -> int:
        return len(self.prompt_A)


def answers_of(prompts: Sequence[TokenizedPrompt]) -> Answers:
    """All scored tokens of ``prompts``."""
    rows = [
        (i, token.position, token.index - 1, token.token_id)
        for i, prompt in enumerate(prompts)
        for token in prompt.scored
    ]
    columns = np.array(rows, dtype=np.int64).T
    return Answers(columns[0], columns[1], columns[2], columns[3])


@dataclass(frozen=True)
class Scores:
    """E edits x A answer tokens; log-probability (nats) and logit of the gold token in float32, float64 in float64."""

    correct_EA: np.ndarray
    logprob_EA: np.ndarray
    logit_EA: np.ndarray
    predicted_EA: np.ndarray

    @staticmethod
    def empty(edits: int, answers: int, dtype: torch.dtype) -> "Scores":
        """Arrays to be filled; NaN and -1 where nothing has been written yet."""
        real = np.float64 if dtype == torch.float64 else np.float32
        shape = (edits, answers)
        return Scores(
            np.zeros(shape, bool),
            np.full(shape, np.nan, real),
            np.full(shape, np.nan, real),
            np.full(shape, -1, np.int32),
        )

    def first(self) -> "Scores":
        """The first edit's scores alone (1 x A)."""
        return Scores(self.correct_EA[:1], self.logprob_EA[:1], self.logit_EA[:1], self.predicted_EA[:1])

    def fill(self, edits: slice | np.ndarray, answers: np.ndarray, part: "Scores") -> None:
        """Write ``part`` (len(edits) x len(answers)) at the given rows and columns."""
        index = np.ix_(np.arange(self.correct_EA.shape[0])[edits], answers)
        self.correct_EA[index] = part.correct_EA
        self.logprob_EA[index] = part.logprob_EA
        self.logit_EA[index] = part.logit_EA
        self.predicted_EA[index] = part.predicted_EA


def answer_logits(anatomy: Anatomy, hidden: torch.Tensor) -> torch.Tensor:
    """Final norm, unembedding and soft-cap; half-precision models keep the product's float32 accumulators.

    A bf16 logit near 20 is known to 0.125 only, too coarse for log-probability changes and full of ties.

    Args:
        hidden: R D, the last layer's output at answer positions.
    Returns:
        R V, float32 (float64 for a float64 model).
    """
    normed = anatomy.final_norm(hidden)
    unembedding = anatomy.unembedding
    if normed.dtype in (torch.float32, torch.float64):
        logits = unembedding(normed)
    else:
        logits = _matmul_float32(normed, unembedding)
    cap = anatomy.shape.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _matmul_float32(normed: torch.Tensor, unembedding: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = unembedding.get_parameter("weight")
    bias = getattr(unembedding, "bias", None)
    if normed.is_cuda:
        logits = torch.mm(normed, weight.T, out_dtype=torch.float32)
    else:
        logits = normed.float() @ weight.float().T
    return logits if bias is None else logits + bias.float()


def score(anatomy: Anatomy, hidden_EAD: torch.Tensor, gold_A: torch.Tensor) -> Scores:
    """Score the last layer's output at A answer positions under E edits.

    Args:
        hidden_EAD: output of the last decoder layer, before the final norm.
        gold_A: gold token ids, on the same device.
    """
    edits, answers, width = hidden_EAD.shape
    gold = gold_A.expand(edits, answers).reshape(-1)
    rows = hidden_EAD.reshape(-1, width)
    step = max(1, LOGITS_AT_ONCE // anatomy.shape.vocabulary)
    parts = [_score_rows(anatomy, rows[i : i + step], gold[i : i + step]) for i in range(0, len(rows), step)]
    correct, logprob, logit, predicted = (
        torch.cat(column).reshape(edits, answers).cpu().numpy() for column in zip(*parts, strict=True)
    )
    return Scores(correct, logprob, logit, predicted.astype(np.int32))


def _score_rows(anatomy: Anatomy, hidden_RD: torch.Tensor, gold_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = answer_logits(anatomy, hidden_RD)
    logit = logits.gather(1, gold_R[:, None])[:, 0]
    logprob = logit - logits.logsumexp(dim=1)
    predicted = logits.argmax(dim=1)
    return predicted == gold_R, logprob, logit, predicted


def check_finite(scores: Scores, edits: Sequence[Edit], answers: Answers, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise FloatingPointError naming layer, head and prompt where a score is NaN or infinite."""
    bad = np.argwhere(~np.isfinite(scores.logprob_EA))
    if len(bad):
        edit, answer = bad[0]
        prompt = prompts[answers.prompt_A[answer]].prompt.prompt_id
        raise FloatingPointError(
            f"{edits[edit].label} edited: log-probability of prompt {prompt} is {scores.logprob_EA[edit, answer]}"
        )
