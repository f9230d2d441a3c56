"""Log-probability increases: sums over the vocabulary against log-softmax itself, and the kernel against torch."""

import numpy as np
import pytest
import torch

from mathinterp.forward.logsumexp import Base, increases, neuron_increases_torch, slow_increases


def case(
    dtype: torch.dtype, prompts: int = 5, neurons: int = 23, vocabulary: int = 77, size: float = 0.3
) -> tuple[Base, torch.Tensor, torch.Tensor]:
    """Random logits, amounts and directions; the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(3)
    logits, amounts, directions = (
        torch.randn(shape, generator=draw, dtype=torch.float64).float()
        for shape in ((prompts, vocabulary), (prompts, neurons), (neurons, vocabulary))
    )
    target = torch.randint(vocabulary, (prompts,), generator=draw)
    return Base.of(4 * logits.to(dtype), target), size * amounts.to(dtype), directions.to(dtype)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [1e-6, 0.3, 30.0])
def test_sum_over_the_vocabulary_is_the_direct_form(softcap: float | None, size: float) -> None:
    base, amounts, directions = case(torch.float64, size=size)
    base = Base.of(base.logits_BV, base.target_B, softcap)
    expected = slow_increases(base, amounts, directions)
    for elements in (1, 500, 10**6):  # one shift, some, all at once
        found = neuron_increases_torch(base, amounts, directions, elements)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)
    assert expected.abs().max() > size / 10


@pytest.mark.parametrize("size", [1e-6, 0.3, 30.0])
def test_float32_keeps_five_digits_where_the_direct_form_does_not(size: float) -> None:
    exact = slow_increases(*case(torch.float64, size=size))
    found = neuron_increases_torch(*case(torch.float32, size=size)).double()
    direct = slow_increases(*case(torch.float32, size=size)).double()
    assert (found - exact).norm() / exact.norm() < 1e-6
    if size == 1e-6:
        assert (direct - exact).norm() / exact.norm() > 1e-2, "the direct form loses small importances"


def test_sure_and_hopeless_tokens_lose_nothing() -> None:
    """A target of probability 1 - 1e-12 taken away, one of 1e-30 made sure, and shifts beyond exp's range."""
    logits = torch.tensor([[28.0, 0.0, 0.0], [0.0, -70.0, 0.0], [0.0, 0.0, -120.0]])
    shifts = torch.tensor([[[-60.0, 0, 0], [-200, 0, 0]], [[0, 150, 0], [0, 1e-3, 0]], [[0, 0, 300], [0, 95, 0]]])
    target = torch.tensor([0, 1, 0])
    exact = [
        [float((b + s).log_softmax(0)[w] - b.log_softmax(0)[w]) for s in t]
        for b, t, w in zip(logits.double(), shifts.double(), target, strict=True)
    ]
    found = increases(Base.of(logits, target), shifts)
    np.testing.assert_allclose(found, exact, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1e-6, 0.3, 30.0])
def test_kernel_is_the_torch_way(size: float) -> None:
    from mathinterp.forward.logsumexp_triton import fused_increases

    sizes = {"prompts": 37, "neurons": 70, "vocabulary": 1003}
    exact = slow_increases(*case(torch.float64, size=size, **sizes))
    base, amounts, directions = case(torch.float32, size=size, **sizes)
    base = Base(*(t.cuda() for t in (base.logits_BV, base.logprobs_BV, base.target_B)))
    found = fused_increases(base, amounts.cuda(), directions.cuda()).cpu().double()
    assert (found - exact).norm() / exact.norm() < 1e-5
