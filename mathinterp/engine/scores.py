"""Logits of answer tokens -> the four numbers every scan stores.

Knows scoring (method.md section 1: right iff argmax equals gold); knows nothing about interventions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

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
    """E interventions x A answer tokens; log-probability (nats) and logit of the gold token, float32 or float64."""

    correct_EA: np.ndarray
    logprob_EA: np.ndarray
    logit_EA: np.ndarray
    predicted_EA: np.ndarray

    def difference(self, other: "Scores") -> float:
        """Largest difference of log-probabilities and logits; NaN if either has one.

        A sure answer's log-probability is near 0 whatever its logit: alone it would hide much.
        """
        pairs = ((self.logprob_EA, other.logprob_EA), (self.logit_EA, other.logit_EA))
        return float(np.max([np.abs(mine - theirs).max() for mine, theirs in pairs]))

    def noise(self, baseline: "Scores") -> dict[str, float]:
        """How far passes that change nothing (E x A) stray from the baseline: most nats, logits and flips in a pass."""
        flips_EA = self.predicted_EA != baseline.predicted_EA
        return {
            "max_logprob_deviation": float(np.abs(self.logprob_EA - baseline.logprob_EA).max()),
            "max_logit_deviation": float(np.abs(self.logit_EA - baseline.logit_EA).max()),
            "flipped_predictions": int(flips_EA.sum(axis=1).max()),
            "answers": flips_EA.shape[1],
        }

    @staticmethod
    def together(parts: Sequence["Scores"]) -> "Scores":
        """The interventions of all parts, in their order."""
        return Scores(*(np.concatenate(columns) for columns in zip(*(part._columns for part in parts), strict=True)))

    def at(self, answers_A: np.ndarray) -> "Scores":
        """The scores of some answer tokens alone."""
        return Scores(*(column[:, answers_A] for column in self._columns))

    def of(self, interventions: Sequence[int] | np.ndarray) -> "Scores":
        """The scores under some interventions alone."""
        return Scores(*(column[interventions] for column in self._columns))

    def first(self) -> "Scores":
        """The first intervention's scores alone (1 x A)."""
        return self.of([0])

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.correct_EA, self.logprob_EA, self.logit_EA, self.predicted_EA


class ScoreBoard:
    """Scores in the making, on the model's device: fetched once, so that a GPU never waits for the host."""

    def __init__(self, edits: int, answers: int, anatomy: Anatomy):
        real = torch.float64 if anatomy.dtype == torch.float64 else torch.float32
        self.logprob_EA = torch.full((edits, answers), torch.nan, dtype=real, device=anatomy.device)
        self.logit_EA = self.logprob_EA.clone()
        self.predicted_EA = torch.full((edits, answers), -1, dtype=torch.int32, device=anatomy.device)

    def fill(self, start: int, answers: torch.Tensor, part: tuple[torch.Tensor, ...]) -> None:
        """Write log-probabilities, logits and predictions (E' x A') from row ``start`` at the columns ``answers``."""
        for whole, values in zip((self.logprob_EA, self.logit_EA, self.predicted_EA), part, strict=True):
            whole[start : start + values.shape[0], answers] = values.to(whole.dtype)

    def scores(self, gold_A: np.ndarray) -> Scores:
        """The finished scores; an answer is right iff its predicted token is the gold one."""
        predicted = self.predicted_EA.cpu().numpy()
        correct = predicted == gold_A.astype(np.int32)
        return Scores(correct, self.logprob_EA.cpu().numpy(), self.logit_EA.cpu().numpy(), predicted)


def answer_logits(anatomy: Anatomy, hidden: torch.Tensor) -> torch.Tensor:
    """Final norm, unembedding and soft-cap; half-precision models keep the product's float32 accumulators.

    A bf16 logit near 20 is known to 0.125 only, too coarse for log-probability changes and full of ties.

    Args:
        hidden: R D, the last layer's output at answer positions.
    Returns:
        R V, float32 (float64 for a float64 model).
    """
    return unembedded(anatomy, anatomy.final_norm(hidden))


def unembedded(anatomy: Anatomy, normed: torch.Tensor) -> torch.Tensor:
    """The part of ``answer_logits`` behind the final norm."""
    unembedding = anatomy.unembedding
    if normed.dtype in (torch.float32, torch.float64):
        logits = unembedding(normed)
    else:
        logits = _matmul_float32(normed, unembedding)
    return anatomy.finished(logits)


def _matmul_float32(normed: torch.Tensor, unembedding: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = unembedding.get_parameter("weight")
    bias = getattr(unembedding, "bias", None)
    if normed.is_cuda:
        logits = torch.mm(normed, weight.T, out_dtype=torch.float32)
    else:
        logits = normed.float() @ weight.float().T
    return logits if bias is None else logits + bias.float()


def score_logits(logits_RV: torch.Tensor, gold_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and logit of each row's gold token, and the row's likeliest token: R each."""
    logit = logits_RV.gather(1, gold_R[:, None])[:, 0]
    return logit - logits_RV.logsumexp(dim=1), logit, logits_RV.argmax(dim=1)


@torch.inference_mode()
def score(
    anatomy: Anatomy,
    hidden_EAD: torch.Tensor,
    gold_A: torch.Tensor,
    score_logits: Callable[..., tuple[torch.Tensor, ...]] = score_logits,
) -> tuple[torch.Tensor, ...]:
    """Score the last layer's output at A answer positions under E edits.

    Args:
        hidden_EAD: output of the last decoder layer, before the final norm.
        gold_A: gold token ids, on the same device.
        score_logits: the function above, or a compiled version of it.
    Returns:
        log-probability and logit of the gold token, and the predicted token: E x A each, on the device.
    """
    edits, answers, width = hidden_EAD.shape
    gold = gold_A.expand(edits, answers).reshape(-1)
    rows = hidden_EAD.reshape(-1, width)
    step = max(1, LOGITS_AT_ONCE // anatomy.shape.vocabulary)
    parts = [
        score_logits(answer_logits(anatomy, rows[i : i + step]), gold[i : i + step]) for i in range(0, len(rows), step)
    ]
    return tuple(torch.cat(column).reshape(edits, answers) for column in zip(*parts, strict=True))


def check_finite(scores: Scores, labels: Sequence[str], answers: Answers, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise FloatingPointError naming the edit by its label, and the prompt, where a score is NaN or infinite."""
    bad = np.argwhere(~np.isfinite(scores.logprob_EA))
    if len(bad):
        edit, answer = bad[0]
        prompt = prompts[answers.prompt_A[answer]].prompt.prompt_id
        raise FloatingPointError(
            f"{labels[edit]} edited: log-probability of prompt {prompt} is {scores.logprob_EA[edit, answer]}"
        )


def worst_noise(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """What ``Scores.noise`` says of several passes as one: flips of that with the largest share, deviations of any."""
    worst = max(passes, key=lambda found: found["flipped_predictions"] / found["answers"])
    return worst | {
        name: max(found[name] for found in passes) for name in ("max_logprob_deviation", "max_logit_deviation")
    }
