"""Log-probability increases of a layer's neurons: by moments where their shifts are small, else by exponentials.

Moments are matrix products in place of one exponential for each token. The sum of logsumexp.py, where t = a * T_w is
the shift of the target w, which has no share in it:

    S = sum_v p_v (exp(a T_v - t) - 1) = m_0 (exp(-t) - 1) + exp(-t) * sum_(n >= 1) a^n / n! * m_n,
    m_n = sum_(v != w) p_v T_v^n,

and m_n for all prompts and neurons is one matrix product of probabilities and n-th powers. S knows differences of T
alone, so T is taken from the middle of its range, and in units of half its width. A neuron's reach, its largest |a T_v|
from there, says how many moments it needs: N such that what is left out, reach^N / (N + 1)! of the first-order term, is
within rounding. Most neurons of a language model need four or five, and only those that reach farther than SMALL are
left to the exponentials.

Shape legend: B prompts, K neurons, V vocabulary.
"""

import torch

from mathinterp.engine.lens.logsumexp import GPU_ELEMENTS, Base, neuron_increases_torch

SMALL = 1.0  # largest reach: nine float32 products, about half of what the kernel takes on an H200
ROUNDING = 8.0  # times the dtype's epsilon
CPU_DIRECTIONS = 2**22  # numbers in the directions of the neurons in hand; on a GPU GPU_ELEMENTS


def neuron_increases(base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor) -> torch.Tensor:
    """Increases under shifts ``amounts[b, k] * directions[k]``: B K.

    Neurons that shift no logit by much go by moments; the others, and all under a soft-cap, by exponentials: the kernel
    on CUDA, torch elsewhere and for float64.
    """
    if base.softcap is not None:
        return neuron_increases_torch(base, amounts_BK, directions_KV)
    middle_K, half_K = middle_and_half(directions_KV)
    small_K = reach(amounts_BK, half_K) <= SMALL  # not so where a number is NaN, which comes out as it is
    result = torch.empty_like(amounts_BK)
    if small_K.any():
        small_k = small_K.nonzero()[:, 0]
        result[:, small_k] = small_increases(base, amounts_BK, directions_KV, small_k, middle_K, half_K)
    for block_k in (~small_K).nonzero()[:, 0].split(_at_once(directions_KV)):
        result[:, block_k] = _by_exponentials(base, amounts_BK[:, block_k], directions_KV[block_k])
    return result


def _at_once(directions_KV: torch.Tensor) -> int:
    """Neurons whose directions are copied together."""
    return max(1, (GPU_ELEMENTS if directions_KV.is_cuda else CPU_DIRECTIONS) // directions_KV.shape[1])


def _by_exponentials(base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor) -> torch.Tensor:
    if directions_KV.is_cuda and directions_KV.dtype == torch.float32:
        from mathinterp.engine.lens.logsumexp_triton import fused_increases

        return fused_increases(base, amounts_BK, directions_KV)
    return neuron_increases_torch(base, amounts_BK, directions_KV)


def reach(amounts_BK: torch.Tensor, half_K: torch.Tensor) -> torch.Tensor:
    """The largest distance of any logit's shift from the middle of all logits' shifts, for each neuron: K."""
    return amounts_BK.abs().amax(dim=0) * half_K


def middle_and_half(directions_KV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The middle of each neuron's range over the vocabulary, and half its width: K each."""
    lowest_K, highest_K = directions_KV.aminmax(dim=1)
    return lowest_K / 2 + highest_K / 2, highest_K / 2 - lowest_K / 2


def moments_needed(reach_K: torch.Tensor) -> torch.Tensor:
    """How many moments each neuron takes: K."""
    allowed = ROUNDING * torch.finfo(reach_K.dtype).eps
    needed_K = torch.ones_like(reach_K, dtype=torch.int64)
    count, left_out_K = 1, reach_K / 2
    while (more_K := left_out_K > allowed).any():
        count += 1
        needed_K[more_K] = count
        left_out_K = left_out_K * reach_K / (count + 1)
    return needed_K


def small_increases(
    base: Base, amounts_BK: torch.Tensor, directions_KV: torch.Tensor, neurons_k: torch.Tensor,
    middle_K: torch.Tensor, half_K: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As ``logsumexp.neuron_increases_torch``, of some neurons whose reach is at most SMALL: B k; no soft-cap.

    ``middle_K`` and ``half_K``: of all neurons' directions. In blocks of neurons that need alike many moments: no more
    than two blocks' directions are held beside the given.
    """
    assert base.softcap is None, "moments know no soft-cap"
    others_BV = base.logprobs_BV.exp().scatter(1, base.target_B[:, None], 0.0)
    needed_k = moments_needed(reach(amounts_BK, half_K)[neurons_k])
    result = amounts_BK.new_empty(len(amounts_BK), len(neurons_k))
    for block in needed_k.argsort(descending=True).split(_at_once(directions_KV)):
        chosen = neurons_k[block]
        size_k = half_K[chosen].clamp(min=torch.finfo(half_K.dtype).tiny)  # powers stay within 1 whatever the size
        relative_kV = directions_KV[chosen].sub_(middle_K[chosen, None]).div_(size_k[:, None])
        result[:, block] = _block(base, others_BV, amounts_BK[:, chosen] * size_k, relative_kV, needed_k[block])
    return result


def _block(
    base: Base, others_BV: torch.Tensor, amounts_BK: torch.Tensor, directions_KV: torch.Tensor, needed_K: torch.Tensor
) -> torch.Tensor:
    """Of some neurons, those that need most moments first."""
    shift_BK = amounts_BK * directions_KV[:, base.target_B].T
    raised_BK = torch.zeros_like(amounts_BK)
    powers_KV, factor_BK = directions_KV.clone(), amounts_BK.clone()
    for n in range(1, int(needed_K[0]) + 1):
        count = int((needed_K >= n).sum())
        powers_KV, factor_BK = powers_KV[:count], factor_BK[:, :count]
        if n > 1:
            powers_KV *= directions_KV[:count]
            factor_BK *= amounts_BK[:, :count] / n
        raised_BK[:, :count] += factor_BK * (others_BV @ powers_KV.T)
    total_BK = others_BV.sum(dim=1, keepdim=True) * torch.expm1(-shift_BK) + torch.exp(-shift_BK) * raised_BK
    return -total_BK.log1p()
