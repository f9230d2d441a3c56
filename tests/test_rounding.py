"""A large difference in half precision is refused where the mask is wrong, and taken where it is only rounding."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mathinterp.engine import rounding
from mathinterp.engine.choose import Engine, build_engine, packing_deviation
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.rounding import in_float32
from mathinterp.models.anatomy import Anatomy
from tests.test_selftest import PROMPTS, mask_that_shows_siblings, mask_without_window
from tests.tiny import tiny_model

HALVES = [torch.bfloat16, torch.float16]


def loud(family: str, dtype: torch.dtype) -> Anatomy:
    """A model whose logits are so large that half precision rounds them by more than a nat."""
    anatomy = Anatomy(tiny_model(family, dtype=dtype))
    with torch.no_grad():
        anatomy.final_norm.weight.fill_(3000.0 if dtype == torch.bfloat16 else 12_000.0)
    return anatomy


def rounding_size(anatomy: Anatomy) -> float:
    """How far prompts alone are from float32, in nats."""
    exact = in_float32(anatomy)
    assert exact is not None
    alone, truth = (PlainEngine(each, PROMPTS, batch_size=1).baseline() for each in (anatomy, exact))
    return alone.difference(truth)


def strayed(anatomy: Anatomy, asked: str, nats: float, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine one of whose logits is as far off; tiny models round alike in all batches."""
    engine = build_engine(anatomy, PROMPTS, asked=asked)
    found = engine.baseline()
    found.logit_EA[0, 0] += nats
    monkeypatch.setattr(engine, "baseline", lambda: found)
    return engine


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("asked", ["packed", "plain"])
def test_rounding_alone_is_taken_and_told(
    dtype: torch.dtype, asked: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    anatomy = loud("llama", dtype)
    engine = strayed(anatomy, asked, 1.5 * rounding_size(anatomy), monkeypatch)
    before = {name: weight.clone() for name, weight in anatomy.model.named_parameters()}
    with caplog.at_level(logging.WARNING):
        worst = packing_deviation(engine, anatomy, PROMPTS)
    assert worst > 1, "else this shows nothing"
    (told,) = caplog.messages
    name = str(dtype).removeprefix("torch.")
    assert f"the {asked} engine strays {worst:.3g} nats from plain forward passes (limit 1 in {name})" in told
    assert f"{name}'s rounding, not a wrong mask (in float32 they differ by" in told
    assert "`dtype` float32" in told
    assert all(torch.equal(weight, before[name]) for name, weight in anatomy.model.named_parameters())
    assert anatomy.model.dtype == dtype


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("family", "break_mask"), [("mistral-window", mask_without_window), ("llama", mask_that_shows_siblings)]
)
def test_a_wrong_mask_is_found_beneath_the_rounding(
    dtype: torch.dtype, family: str, break_mask: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    anatomy = loud(family, dtype)
    break_mask(anatomy, monkeypatch)
    with pytest.raises(RuntimeError, match=r"does not take the tree mask as expected .*in float32 they differ by"):
        packing_deviation(build_engine(anatomy, PROMPTS, asked="packed"), anatomy, PROMPTS)


def test_passes_wrong_in_half_precision_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel could be that float32 does not use."""
    anatomy = loud("llama", torch.bfloat16)
    engine = strayed(anatomy, "packed", 10 * rounding_size(anatomy), monkeypatch)
    with pytest.raises(RuntimeError, match="strays"):
        packing_deviation(engine, anatomy, PROMPTS)


def test_without_room_for_float32_it_is_refused_and_said_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = loud("llama", torch.bfloat16)
    monkeypatch.setattr(rounding, "in_float32", lambda anatomy: None)
    with pytest.raises(RuntimeError, match=r"limit 1 in bfloat16.*`dtype` float32") as error:
        packing_deviation(strayed(anatomy, "packed", 1.5, monkeypatch), anatomy, PROMPTS)
    assert "\n" not in str(error.value)


def test_what_is_compared_is_the_same_model_in_float32() -> None:
    anatomy = loud("llama", torch.bfloat16)
    exact = in_float32(anatomy)
    assert exact is not None
    assert exact.dtype == torch.float32
    for (name, weight), (other, copied) in zip(
        anatomy.model.named_parameters(), exact.model.named_parameters(), strict=True
    ):
        assert name == other
        np.testing.assert_array_equal(weight.float().numpy(force=True), copied.numpy(force=True))
    assert in_float32(exact) is None
    assert PackedEngine(exact, PROMPTS).baseline().difference(PackedEngine(exact, PROMPTS).baseline()) == 0
