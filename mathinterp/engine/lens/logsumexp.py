"""Log-probability increases: what adding a little to all logits does to the log-probability of one token.

With base logits b and a shift t over the vocabulary, the increase of token w is

    t[w] - (LSE(b + t) - LSE(b)) = -log(1 + sum_v p_v (exp(t_v - t_w) - 1)),    p = softmax(b),

a sum over the vocabulary that needs no second log-sum-exp and, for small shifts, loses no digits. The shifts of
neurons are products t = a * T_k (T_k one row for each neuron, a one number for each prompt and neuron), so that they
are never held for all prompts at once. Ways that agree: torch (here, the reference), a Triton kernel
(logsumexp_triton.py) that fuses product, exponential and sum, and moments for small shifts (neuron_increases.py, which
chooses). A final soft-cap is applied to base and sum directly.

Shape legend: B prompts, K neurons (or other units), V vocabulary.
"""

from dataclasses import dataclass

import torch

CPU_ELEMENTS = 2**17  # shifts held at once: 512 KB fit a core's cache
GPU_ELEMENTS = 2**28
SURE_ABOVE = -0.5  # 1 + sum keeps its digits above this


@dataclass(frozen=True)
class Base:
    """Logits that something is added to, and the token that is looked at.

    logits_BV: before a final soft-cap. logprobs_BV: after it. target_B: token ids.
    """

    logits_BV: torch.Tensor
    logprobs_BV: torch.Tensor
    target_B: torch.Tensor
    softcap: float | None = None

    @staticmethod
    def of(logits_BV: torch.Tensor, target_B: torch.Tensor, softcap: float | None = None) -> "Base":
        """A base from its logits."""
        return Base(logits_BV, capped(logits_BV, softcap).log_softmax(dim=-1), target_B, softcap)

    def rows(self, rows: slice) -> "Base":
        """Some prompts' base alone."""
        return Base(self.logits_BV[rows], self.logprobs_BV[rows], self.target_B[rows], self.softcap)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The logits after a final soft-cap, if there is one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def increases(base: Base, shifts_BKV: torch.Tensor) -> torch.Tensor:
    """Log-probability increase of each prompt's token under each shift of the logits before the soft-cap: B K."""
    moved = _moved(base, shifts_BKV)
    relative = moved - _at_target(moved, base.target_B)
    total_BK = torch.matmul(relative.expm1(), base.logprobs_BV.exp()[:, :, None])[..., 0]
    result_BK = -total_BK.log1p()
    unsure = ~result_BK.isfinite() | (total_BK < SURE_ABOVE)
    if unsure.any():  # few: units that change the probability by much
        prompt, unit = unsure.nonzero(as_tuple=True)
        result_BK[prompt, unit] = -(base.logprobs_BV[prompt] + relative[prompt, unit]).logsumexp(dim=-1)
    return result_BK


def _moved(base: Base, shifts_BKV: torch.Tensor) -> torch.Tensor:
    """How far each final logit moves: the shift itself, less under a soft-cap."""
    if base.softcap is None:
        return shifts_BKV
    before_BV = capped(base.logits_BV, base.softcap)
    return capped(base.logits_BV[:, None] + shifts_BKV, base.softcap) - before_BV[:, None]


def _at_target(values_BKV: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """The target token's entries: B K 1."""
    return values_BKV.gather(2, target_B[:, None, None].expand(-1, values_BKV.shape[1], 1))


def neuron_increases_torch(
    base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor, elements: int | None = None
) -> torch.Tensor:
    """The torch way, in blocks of prompts and neurons; ``elements`` shifts at once (None = by device)."""
    elements = elements or (GPU_ELEMENTS if directions_KV.is_cuda else CPU_ELEMENTS)
    (prompts, neurons), vocabulary = amounts_BK.shape, directions_KV.shape[1]
    neurons_at_once = max(1, min(neurons, elements // vocabulary))
    prompts_at_once = max(1, elements // (vocabulary * neurons_at_once))
    result = torch.empty_like(amounts_BK)
    for start in range(0, prompts, prompts_at_once):
        rows = slice(start, start + prompts_at_once)
        part = base.rows(rows)
        for first in range(0, neurons, neurons_at_once):
            columns = slice(first, first + neurons_at_once)
            shifts_BKV = amounts_BK[rows, columns, None] * directions_KV[columns]
            result[rows, columns] = increases(part, shifts_BKV)
    return result


def slow_increases(base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor) -> torch.Tensor:
    """The vectorised direct form: log_softmax with and without each neuron, one prompt after another."""
    rows = []
    for logits_V, amounts_K, target in zip(base.logits_BV, amounts_BK, base.target_B, strict=True):
        with_neuron_KV = capped(logits_V + amounts_K[:, None] * directions_KV, base.softcap)
        before_V = capped(logits_V, base.softcap)
        rows.append(with_neuron_KV.log_softmax(dim=-1)[:, target] - before_V.log_softmax(dim=-1)[target])
    return torch.stack(rows)
