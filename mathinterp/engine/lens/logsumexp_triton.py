"""The fused kernel of logsumexp.py for CUDA: product, exponential and sum over the vocabulary in one pass.

Each program holds some neurons and some prompts, walks over the vocabulary, reads each neuron's row once for all its
prompts, and accumulates in float32. Nothing of size prompts x neurons x vocabulary is ever written. Needs Triton, which
comes with CUDA builds of torch; logsumexp.neuron_increases_torch is the reference.
"""

import torch
import triton
import triton.language as tl

from mathinterp.engine.lens.logsumexp import SURE_ABOVE, Base

PROMPTS, NEURONS, TOKENS, WARPS = 16, 8, 64, 4  # of one program and step; the fastest of nine tried on an H200
UNSURE_AT_ONCE = 2**27  # elements: results that are computed again through logsumexp


@triton.jit
def _sum_kernel(
    directions, amounts, at_target, probabilities, totals,
    prompts, neurons, vocabulary,
    PROMPTS: tl.constexpr, NEURONS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """totals[b, k] = sum over v of p[b, v] * expm1(a[b, k] * T[k, v] - t[b, k])."""
    prompt = tl.program_id(0) * PROMPTS + tl.arange(0, PROMPTS)
    neuron = tl.program_id(1).to(tl.int64) * NEURONS + tl.arange(0, NEURONS)
    pairs = prompt[:, None].to(tl.int64) * neurons + neuron[None, :]
    inside = (prompt < prompts)[:, None] & (neuron < neurons)[None, :]
    amount = tl.load(amounts + pairs, mask=inside, other=0.0)[:, :, None]
    shift = tl.load(at_target + pairs, mask=inside, other=0.0)[:, :, None]
    total = tl.zeros((PROMPTS, NEURONS, TOKENS), dtype=tl.float32)
    for start in range(0, vocabulary, TOKENS):
        token = start + tl.arange(0, TOKENS)
        known = token < vocabulary
        direction = tl.load(
            directions + neuron[:, None] * vocabulary + token[None, :],
            mask=(neuron < neurons)[:, None] & known[None, :],
            other=0.0,
        )
        probability = tl.load(
            probabilities + prompt[:, None].to(tl.int64) * vocabulary + token[None, :],
            mask=(prompt < prompts)[:, None] & known[None, :],
            other=0.0,
        )
        x = amount * direction[None, :, :] - shift
        # exp(x) - 1 loses digits near 0: there its series, to x^7 / 5040.
        series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
        change = tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1)
        total += probability[:, None, :] * change
    tl.store(totals + pairs, tl.sum(total, axis=2), mask=inside)


def fused_increases(base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor) -> torch.Tensor:
    """As ``logsumexp.neuron_increases_torch``: B K, float32; no soft-cap."""
    assert base.softcap is None
    assert directions_KV.dtype == amounts_BK.dtype == base.logprobs_BV.dtype == torch.float32
    amounts, directions = amounts_BK.contiguous(), directions_KV.contiguous()
    probabilities = base.logprobs_BV.exp().contiguous()
    (prompts, neurons), vocabulary = amounts.shape, directions.shape[1]
    shift_BK = amounts * directions[:, base.target_B].T
    totals = torch.empty_like(amounts)
    grid = (triton.cdiv(prompts, PROMPTS), triton.cdiv(neurons, NEURONS))  # prompts vary first: a row stays in cache
    _sum_kernel[grid](
        directions, amounts, shift_BK, probabilities, totals, prompts, neurons, vocabulary,
        PROMPTS=PROMPTS, NEURONS=NEURONS, TOKENS=TOKENS, num_warps=WARPS,
    )  # fmt: skip
    result = -totals.log1p()
    _recompute(result, ~result.isfinite() | (totals < SURE_ABOVE), base, amounts, shift_BK, directions)
    return result


def _recompute(
    result_BK: torch.Tensor,
    unsure_BK: torch.Tensor,
    base: Base,
    amounts_BK: torch.Tensor,
    shift_BK: torch.Tensor,
    directions_KV: torch.Tensor,
) -> None:
    """Replace the results marked in ``unsure_BK`` (few) by log-sum-exps that cannot overflow."""
    prompt, neuron = unsure_BK.nonzero(as_tuple=True)
    step = max(1, UNSURE_AT_ONCE // directions_KV.shape[1])
    for start in range(0, len(prompt), step):
        b, k = prompt[start : start + step], neuron[start : start + step]
        relative = amounts_BK[b, k, None] * directions_KV[k] - shift_BK[b, k, None]
        result_BK[b, k] = -(base.logprobs_BV[b] + relative).logsumexp(dim=-1)
