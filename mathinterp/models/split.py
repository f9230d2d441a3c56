"""One model over several cards: which card holds which layer, and how a call finds its way there and back.

The first card, ``home``, holds embeddings, norms, unembedding and whatever engines keep; layers are dealt out in turn,
the last one to home. Whichever layer a replay starts from, what is left lies evenly on all cards, in work as in bytes:
ablating heads of every layer of 32 costs the busier of two cards 272 of 528 layer runs, where one cut between lower
and upper layers leaves it at least 353, because no lower layer runs for a head of an upper one.

A layer that lies elsewhere is called from home as any other: its arguments are brought to its card, and what it gives
comes back. The same holds for each of its modules when called alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig

from mathinterp.models.families import family_for
from mathinterp.models.random_shapes import without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COURIER = "_mathinterp_courier"  # attribute of every module of a layer that lies elsewhere
_HOOKS = "_mathinterp_courier_hooks"  # and what takes the courier's hooks away again


def dealt(n_layers: int, cards: int) -> list[int]:
    """The card of each layer, home being 0: from the last layer down, home first, then the others in turn."""
    return [(n_layers - 1 - layer) % cards for layer in range(n_layers)]


def devices_of(device: str, cards: int) -> list[str]:
    """The devices of a process with so many cards, home first; one card is the process's current one."""
    return [device] if cards == 1 else [f"{device}:{card}" for card in range(cards)]


def split_note(n_layers: int, cards: int) -> dict[str, Any]:
    """What a run keeps of it; home is card 0."""
    return {"cards": cards, "card_of_layer": dealt(n_layers, cards)}


def device_map(config: PreTrainedConfig, cards: Sequence[torch.device]) -> dict[str, torch.device]:
    """Module name -> device, as transformers takes it: each layer by itself, and what holds no layer at home."""
    prefix = layers_name(config)
    found = {f"{prefix}.{layer}": cards[card] for layer, card in enumerate(dealt(config.num_hidden_layers, len(cards)))}
    model, above = without_weights(config), ["", *_ancestors(prefix)]
    for name in above:
        for child, _ in model.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if path not in above and path != prefix:
                found[path] = cards[0]
    return found


def place_of_tensor(config: PreTrainedConfig, cards: Sequence[str]) -> Callable[[str], str]:
    """Which card a tensor lies on, by its name."""
    prefix, places = layers_name(config) + ".", dealt(config.num_hidden_layers, len(cards))

    def place(name: str) -> str:
        layer = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        return cards[places[int(layer)]] if layer else cards[0]

    return place


def spread(layers: Sequence[nn.Module], cards: Sequence[torch.device]) -> None:
    """Move the layers of a model that lies whole on ``cards[0]`` to their cards."""
    for layer, card in zip(layers, dealt(len(layers), len(cards)), strict=True):
        layer.to(cards[card])


def bring(model: "PreTrainedModel", cards: Sequence[torch.device]) -> None:
    """Move a model, wherever it lies: layers to their cards, all else home; no card is given more than its own part.

    Whoever asks the model next connects it anew, see ``connect``.
    """
    layers = list(layers_of(model))
    for layer, card in zip(layers, dealt(len(layers), len(cards)), strict=True):
        layer._apply(partial(_brought, card=cards[card]))
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        if module not in inside:
            module._apply(partial(_brought, card=cards[0]), recurse=False)


def _brought(tensor: torch.Tensor, card: torch.device) -> torch.Tensor:
    """The tensor there, or itself if it is.

    From a GPU to the host the memory is written to first, by all of torch's threads: the copy would make the system
    find it page by page, in one thread, which took 10 s for 13 GB instead of 1.8 (docs/log.md).
    """
    if not (tensor.is_cuda and card.type == "cpu"):
        return tensor.to(card)
    there = torch.empty_like(tensor, device=card)
    there.fill_(0)
    return there.copy_(tensor)


def layers_of(model: "PreTrainedModel") -> nn.ModuleList:
    """The model's decoder layers."""
    found = model.get_submodule(layers_name(model.config))
    assert isinstance(found, nn.ModuleList)
    return found


def connect(model: "PreTrainedModel") -> tuple[torch.device, ...]:
    """Make layers that do not lie at home work from there; returns all cards, home first.

    Couriers of where a layer lay before the model was moved are taken away.
    """
    home, couriers = cast(torch.Tensor, model.get_input_embeddings().weight).device, dict[torch.device, Courier]()
    for layer in layers_of(model):
        card, courier = next(layer.parameters()).device, getattr(layer, _COURIER, None)
        if courier is not None and (courier.card, courier.home) != (card, home):
            _dismiss(layer)
            courier = None
        if card == home:
            continue
        courier = courier or couriers.setdefault(card, Courier(card, home))
        couriers[card] = courier
        for module in layer.modules():
            courier.serve(module)
    return home, *couriers


@dataclass(frozen=True)
class Brought:
    """What a courier brought and keeps; ``there``: when it has come, None where nothing runs asynchronously."""

    value: torch.Tensor
    there: torch.cuda.Event | None

    @classmethod
    def of(cls, given: torch.Tensor, card: torch.device) -> "Brought":
        """``given``, on its way to ``card`` from now on."""
        value, there = given.to(card), torch.cuda.Event() if card.type == "cuda" else None
        if there is not None:
            there.record(torch.cuda.current_stream(card))
        return cls(value, there)

    def taken(self) -> torch.Tensor:
        """To be read by what is queued from now on; that may be in another stream than brought it (in_flight.py)."""
        if self.there is not None:
            torch.cuda.current_stream(self.value.device).wait_event(self.there)
        return self.value


class Courier:
    """Brings the arguments of modules that lie on ``card`` there, and what they give back to where it was asked for."""

    def __init__(self, card: torch.device, home: torch.device):
        self.card, self.home = card, home
        self._asked_from: list[torch.device] = []  # of calls within calls
        self._brought = WeakTensorKeyDictionary()  # masks and rotary tables, which all layers are given

    def serve(self, module: nn.Module) -> None:
        """Stand before and behind every call of the module; one without weights computes wherever it is asked."""
        if getattr(module, _COURIER, None) is not None:
            return
        setattr(module, _COURIER, self)
        if next(module.parameters(), None) is not None:
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            setattr(module, _HOOKS, (before, module.register_forward_hook(self._after)))

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():  # whoever compiles brings the arguments beforehand
            return None
        given = list(_tensors((args, kwargs)))
        self._asked_from.append(given[0].device if given else self.card)
        if all(each.device == self.card for each in given):
            return None

        def bring(value: torch.Tensor) -> torch.Tensor:
            return value.to(self.card) if value is given[0] else self._once(value)  # hidden states are new each time

        return _each(args, bring), _each(kwargs, bring)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        asked_from = self._asked_from.pop()
        return None if asked_from == self.card else _each(output, lambda given: given.to(asked_from))

    def _once(self, given: torch.Tensor) -> torch.Tensor:
        """On the card; what was brought is kept as long as the original is."""
        if given.device == self.card:
            return given
        found = self._brought.get(given)
        if found is None or (found.value.is_inference() and not torch.is_inference_mode_enabled()):
            self._brought[given] = found = Brought.of(given, self.card)
        assert isinstance(found, Brought)
        return found.taken()


def _dismiss(layer: nn.Module) -> None:
    """Nobody stands before and behind the calls of the layer's modules any more."""
    for module in layer.modules():
        vars(module).pop(_COURIER, None)
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()


def at_home(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """What a hook on ``module`` sees, where everything outside of layers is computed."""
    courier = getattr(module, _COURIER, None)
    return value if courier is None else value.to(courier.home)


def at_module(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """What is to be used inside of ``module``, on its card."""
    courier = getattr(module, _COURIER, None)
    return value if courier is None else value.to(courier.card)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with every tensor in it changed; tuples, lists and dicts are entered."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_each(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def layers_name(config: PreTrainedConfig) -> str:
    """Where the model keeps its decoder layers, as a dotted name."""
    family = family_for(config)
    return f"{family.decoder}.{family.layers}"


def _ancestors(name: str) -> list[str]:
    """ "a.b.c" -> "a", "a.b"."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
