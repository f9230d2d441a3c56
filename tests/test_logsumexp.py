"""Log-probability increases: sums over the vocabulary against log-softmax itself, and the kernel against torch."""

import math

import numpy as np
import pytest
import torch

from mathinterp.engine.lens.increases import (
    ROUNDING,
    SMALL,
    middle_and_half,
    moments_needed,
    neuron_increases,
    reach,
    small_increases,
)
from mathinterp.engine.lens.logsumexp import Base, increases, neuron_increases_torch, slow_increases


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


def sure(dtype: torch.dtype, size: float) -> tuple[Base, torch.Tensor, torch.Tensor]:
    """A case whose targets have probabilities from 1e-8 to 1 - 1e-8."""
    base, amounts, directions = case(torch.float64, size=size)
    raised = base.logits_BV.scatter_add(1, base.target_B[:, None], torch.linspace(-10, 40, 5).double()[:, None])
    return Base.of(raised.to(dtype), base.target_B), amounts.to(dtype), directions.to(dtype)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.03, 0.3, 3.0])
def test_moments_are_the_direct_form(size: float) -> None:
    base, amounts, directions = case(torch.float64, size=size)
    expected = slow_increases(base, amounts, directions)
    np.testing.assert_allclose(neuron_increases(base, amounts, directions), expected, rtol=1e-9, atol=1e-13)
    small_K = reach(amounts, middle_and_half(directions)[1]) <= SMALL
    assert bool(small_K.all()) == (size <= 0.03), "all by moments"
    assert bool(small_K.any()) == (size <= 0.3), "some by moments"
    if small_K.any():
        alone = small_increases(base, amounts, directions, small_K.nonzero()[:, 0], *middle_and_half(directions))
        np.testing.assert_allclose(alone, expected[:, small_K], rtol=1e-9, atol=1e-13)


def test_moments_in_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    base, amounts, directions = sure(torch.float64, 0.1)
    every = torch.arange(len(directions))
    ranges = middle_and_half(directions)
    whole = small_increases(base, amounts, directions, every, *ranges)
    monkeypatch.setattr("mathinterp.engine.lens.increases.CPU_DIRECTIONS", 300)  # three neurons of 77 tokens
    np.testing.assert_allclose(
        small_increases(base, amounts, directions, every, *middle_and_half(directions)), whole, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.03, 0.3])
def test_moments_keep_five_digits_in_float32(size: float) -> None:
    base, amounts, directions = sure(torch.float32, size)
    wide = Base.of(base.logits_BV.double(), base.target_B)
    exact = neuron_increases_torch(wide, amounts.double(), directions.double())
    found = neuron_increases(base, amounts, directions).double()
    for row, exact_row in zip(found, exact, strict=True):  # prompts' importances differ by powers of ten
        assert (row - exact_row).norm() / exact_row.norm() < 1e-5


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 1e4, 1e7])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0])
def test_neither_the_size_of_directions_nor_what_they_share_matters(size: float, offset: float) -> None:
    base, amounts, directions = case(torch.float32, size=0.05)
    amounts, directions = amounts / size, (directions + offset) * size
    wide = Base.of(base.logits_BV.double(), base.target_B)
    exact = neuron_increases_torch(wide, amounts.double(), directions.double())
    found, others = (way(base, amounts, directions).double() for way in (neuron_increases, neuron_increases_torch))
    assert (reach(amounts, middle_and_half(directions)[1]) <= SMALL).any()
    assert (found - exact).norm() < max(1e-6 * exact.norm(), 2 * (others - exact).norm())


def test_a_direction_that_is_the_same_for_all_tokens_changes_nothing() -> None:
    base, amounts, directions = case(torch.float32, size=0.1)
    directions[4], directions[9] = 3.0, 0.0
    assert neuron_increases(base, amounts, directions)[:, [4, 9]].abs().max() < 1e-6


@pytest.mark.parametrize("where", ["amounts", "directions"])
def test_what_is_not_a_number_stays_so(where: str) -> None:
    base, amounts, directions = case(torch.float32, size=0.01)
    {"amounts": amounts[2], "directions": directions[:, 5]}[where][7] = torch.nan
    found = neuron_increases(base, amounts, directions)
    assert found[:, 7].isnan().any()
    assert not found.isnan().all(dim=0)[:7].any()


def test_what_moments_leave_out_is_rounding_and_no_moment_is_too_many() -> None:
    _, amounts, directions = sure(torch.float64, 0.1)
    reached = reach(amounts, middle_and_half(directions)[1])
    needed = moments_needed(reached)
    allowed = ROUNDING * torch.finfo(torch.float64).eps
    assert needed.min() > 1
    for r, count in zip(reached.tolist(), needed.tolist(), strict=True):
        assert r**count / math.factorial(count + 1) <= allowed < r ** (count - 1) / math.factorial(count)
    assert moments_needed(torch.tensor([0.0, 1e-7, 0.067, 1.0], dtype=torch.float32)).tolist() == [1, 1, 4, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1e-6, 0.3, 30.0])
def test_kernel_is_the_torch_way(size: float) -> None:
    from mathinterp.engine.lens.logsumexp_triton import fused_increases

    sizes = {"prompts": 37, "neurons": 70, "vocabulary": 1003}
    exact = slow_increases(*case(torch.float64, size=size, **sizes))
    base, amounts, directions = case(torch.float32, size=size, **sizes)
    base = Base(*(t.cuda() for t in (base.logits_BV, base.logprobs_BV, base.target_B)))
    for way in (fused_increases, neuron_increases):
        found = way(base, amounts.cuda(), directions.cuda()).cpu().double()
        assert (found - exact).norm() / exact.norm() < 1e-5
