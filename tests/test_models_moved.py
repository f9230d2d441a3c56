"""A model that goes to other cards, or to host memory and back: all of it lies there, and it gives what it gave.

The cards are those of two_cards.py, where any operation that mixes two fails.
"""

from typing import Any

import pytest
import torch

from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel, ResolvedModel, load, resolve
from mathinterp.models.split import bring, connect, dealt, devices_of
from mathinterp.service.shelf import Shelf, moved
from tests.tiny import tiny_model
from tests.two_card_case import CPU, NO_ROOM, OTHER, PLACES, TINY, changed, hooks, places, same
from tests.two_cards import CARDS, movable


@pytest.mark.slow
def test_a_split_model_goes_to_memory_and_comes_back_as_it_was() -> None:
    loaded = load(TINY, "cpu")
    with movable():
        model: Any = loaded.model
        bare, whole = hooks(model), changed(loaded.anatomy)
        there = [CARDS[card] for card in dealt(4, 2)] + [CARDS[0]]
        split = moved(loaded, PLACES[0], PLACES[1:])
        assert (places(model), split.anatomy.cards) == (there, CARDS)
        hooked, first = hooks(model), changed(split.anatomy)
        assert hooked != bare
        for _ in range(2):
            away = moved(split, "cpu")
            assert (places(model), away.anatomy.cards) == ([CPU] * 5, (CPU,))
            assert hooks(model) == bare, "couriers of a card stay where no card is"
            assert same(changed(away.anatomy), whole)
            split = moved(away, PLACES[0], PLACES[1:])
            assert (places(model), split.anatomy.cards) == (there, CARDS)
            assert hooks(model) == hooked
            assert same(changed(split.anatomy), first)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_layers_that_change_cards_are_served_from_where_they_lie(family: str) -> None:
    model: Any = tiny_model(family)
    with movable():
        bare, whole = hooks(model), changed(Anatomy(model))
        bring(model, CARDS)
        hooked = hooks(Anatomy(model).model)
        bring(model, CARDS[::-1])  # another home
        anatomy = Anatomy(model)
        assert anatomy.cards == CARDS[::-1]
        assert places(model) == [CARDS[::-1][card] for card in dealt(3, 2)] + [CARDS[1]]
        assert hooks(model) == hooked
        assert torch.allclose(changed(anatomy)[0], whole[0], atol=1e-9)
        bring(model, CARDS[:1])
        assert connect(model) == CARDS[:1]
        assert hooks(model) == bare
        assert torch.allclose(changed(Anatomy(model))[0], whole[0], atol=1e-9)


def test_no_card_is_given_more_than_its_own_part() -> None:
    """A model of two cards' size would not go through one of them."""
    seen: dict[str, set[str]] = {}
    model = tiny_model("llama")
    with movable():

        class Watched(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.Tensor.to and isinstance(args[0], torch.nn.Parameter):
                    told = next(each for each in args[1:] if isinstance(each, torch.device))
                    seen.setdefault(names[id(args[0])], set()).add(str(told))
                return func(*args, **(kwargs or {}))

        names = {id(each): name for name, each in model.named_parameters()}
        with Watched():
            bring(model, CARDS)
    assert len(seen) == len(names)
    assert {name: told for name, told in seen.items() if len(told) > 1} == {}


def test_one_card_is_the_process_s_current_one_and_several_are_numbered() -> None:
    assert devices_of("cuda", 1) == ["cuda"]
    assert devices_of("cpu", 1) == ["cpu"]
    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_shelf_of_two_cards_loads_and_moves_onto_both(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    loaded = load(TINY, "cpu")

    def loads(resolved: ResolvedModel, *where: Any) -> LoadedModel:
        done.append(("load", resolved.spec.name, *where))
        return loaded

    def moves(given: LoadedModel, *where: Any) -> LoadedModel:
        done.append(("move", *where))
        return given

    both = ("cuda:0", ["cuda:1"])
    kept = Shelf("cuda", NO_ROOM, lambda key: None, loads, moves, cards=2)
    for spec in (TINY, OTHER, TINY):
        kept.take(resolve(spec))
    assert done == [
        ("load", TINY.name, *both), ("move", "cpu"), ("load", OTHER.name, *both), ("move", "cpu"), ("move", *both),
    ]  # fmt: skip
