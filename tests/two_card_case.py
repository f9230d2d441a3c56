"""What tests of models on the cards of a service share: two cards, where layers lie, what a model gives there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mathinterp as mi
from mathinterp.cluster import replica
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.models import catalog
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.card_memory import check_fits
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel, load
from mathinterp.models.split import layers_of
from mathinterp.models.units import Head, Mlp
from mathinterp.service import shelf
from mathinterp.service.shelf import Limits, moved
from tests.exact import PROMPTS as TOKENS
from tests.two_cards import CARDS, InThisThread, as_ever

built = as_ever(load)
PLACES = [str(card) for card in CARDS]
CPU = torch.device("cpu")
TINY, OTHER = (ModelSpec(f"random:llama-tiny{seed}", dtype="float32") for seed in ("", ":1"))
PROMPTS = mi.prompts([(f"{a} plus 5 is", str(a + 5)) for a in (3, 14, 62)])
CARD_BYTES = 2 * 10**9  # of a stand-in
NO_ROOM = Limits(card=1, memory=10**9)  # for a second model: the first one goes to host memory


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as torch tells of them; where tensors lie is up to two_cards.py."""

    def placed(wanted: ResolvedModel, device: str, further: Any = ()) -> LoadedModel:
        assert [device, *further] == PLACES
        return moved(built(wanted, "cpu"), device, further)

    patch.setattr(catalog, "load", placed)
    for module in (shelf, replica):
        patch.setattr(module, "devices_of", lambda device, cards: PLACES[:cards])
    patch.setattr(replica, "ThreadPoolExecutor", InThisThread)
    patch.setattr(replica, "check_fits", as_ever(check_fits))
    for name, value in {
        "is_available": True, "device_count": 2, "get_device_name": "a stand-in", "empty_cache": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "synchronize": None,
        "get_device_properties": SimpleNamespace(total_memory=CARD_BYTES),
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)


def places(model: Any) -> list[torch.device]:
    """Where each layer lies, whole; embeddings, norm and unembedding come last."""
    layers = layers_of(model)
    inside = {each for layer in layers for each in layer.parameters()}
    rest = {each.device for each in model.parameters() if each not in inside}
    found = [{each.device for each in layer.parameters()} for layer in layers]
    assert all(len(each) == 1 for each in (*found, rest))
    return [each.pop() for each in (*found, rest)]


def hooks(model: Any) -> list[tuple[int, ...]]:
    return [
        (len(each._forward_pre_hooks), len(each._forward_pre_hooks_with_kwargs), len(each._forward_hooks))
        for each in model.modules()
    ]


def changed(anatomy: Anatomy) -> list[torch.Tensor]:
    units = [*(Head(layer, 1) for layer in range(3)), Mlp(1)]
    scores = PackedEngine(anatomy, TOKENS, max_tokens=300).run([zeroed(anatomy, [unit]) for unit in units])
    return [torch.as_tensor(each) for each in (scores.logprob_EA, scores.predicted_EA)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
