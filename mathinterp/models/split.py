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
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel

from mathinterp.errors import UserError
from mathinterp.models.families import family_for
from mathinterp.models.random_shapes import without_weights

_COURIER = "_mathinterp_courier"  # attribute of every module of a layer that lies elsewhere
ROOM = 0.92  # of a card's memory that weights may take: the rest is for the context, activations and kernels
COUNTED_IN = {None: 1.0, "8bit": 0.5, "4bit": 0.28}  # of 16 bits a weight of a layer takes, scales included


def dealt(n_layers: int, cards: int) -> list[int]:
    """The card of each layer, home being 0: from the last layer down, home first, then the others in turn."""
    return [(n_layers - 1 - layer) % cards for layer in range(n_layers)]


@dataclass(frozen=True)
class Weights:
    """What a model's weights take, in bytes; weights that are tied count once, and lie at home."""

    layers: tuple[int, ...]
    rest: int  # embeddings, norms, unembedding

    def on_cards(self, cards: int) -> list[int]:
        """Bytes on each card."""
        found = [self.rest] + [0] * (cards - 1)
        for size, card in zip(self.layers, dealt(len(self.layers), cards), strict=True):
            found[card] += size
        return found

    def cards_needed(self, card_bytes: int) -> int | None:
        """The fewest cards of that memory that hold the weights; None: no number of them does."""
        fitting = (n for n in range(1, len(self.layers) + 1) if max(self.on_cards(n)) <= ROOM * card_bytes)
        return next(fitting, None)


def weights_of(config: PreTrainedConfig, bytes_each: int, load_in: str | None = None) -> Weights:
    """From the config alone: the model is built without weights and its parameters are counted."""
    model, prefix = without_weights(config), _layers_name(config) + "."
    layers, rest = [0] * config.num_hidden_layers, 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * bytes_each
        if name.startswith(prefix):
            matrix = parameter.ndim > 1 and load_in is not None
            layers[int(name.removeprefix(prefix).partition(".")[0])] += (
                int(parameter.numel() * 2 * COUNTED_IN[load_in]) if matrix else size
            )
        else:
            rest += size
    return Weights(tuple(layers), rest)


def check_fits(label: str, weights: Weights, cards: int, card_bytes: int) -> None:
    """Raise UserError, naming the number of cards that would do, for weights that ``cards`` cards cannot hold."""
    most = max(weights.on_cards(cards))
    if most <= ROOM * card_bytes:
        return
    needed = weights.cards_needed(card_bytes)
    helps = (
        "no number of such cards holds it" if needed is None else
        f"give `gpus_per_replica` {needed}, or a narrower `dtype` or `load_in`"
    )  # fmt: skip
    share = "" if cards == 1 else f", {most / 1e9:.1f} GB of them on one of {cards} cards"
    total = (sum(weights.layers) + weights.rest) / 1e9
    raise UserError(
        f"model '{label}' has {total:.1f} GB of weights{share}, and a card here has {card_bytes / 1e9:.0f} GB, of which"
        f" {ROOM:.0%} may be weights: {helps}"
    )


def check_cards(label: str, n_layers: int, cards: int) -> None:
    """Raise UserError for more cards than layers."""
    if cards > n_layers:
        raise UserError(f"`gpus_per_replica` {cards}: model '{label}' has only {n_layers} layers to deal out")


def device_map(config: PreTrainedConfig, cards: Sequence[torch.device]) -> dict[str, torch.device]:
    """Module name -> device, as transformers takes it: each layer by itself, and what holds no layer at home."""
    prefix = _layers_name(config)
    found = {f"{prefix}.{layer}": cards[card] for layer, card in enumerate(dealt(config.num_hidden_layers, len(cards)))}
    model, above = without_weights(config), ["", *_ancestors(prefix)]
    for name in above:
        for child, _ in model.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if path not in above and path != prefix:
                found[path] = cards[0]
    return found


def spread(layers: Sequence[nn.Module], cards: Sequence[torch.device]) -> None:
    """Move the layers of a model that lies whole on ``cards[0]`` to their cards."""
    for layer, card in zip(layers, dealt(len(layers), len(cards)), strict=True):
        layer.to(cards[card])


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers."""
    found = model.get_submodule(_layers_name(model.config))
    assert isinstance(found, nn.ModuleList)
    return found


def connect(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """Make layers that do not lie at home work from there; returns all cards, home first."""
    home, couriers = model.get_input_embeddings().weight.device, dict[torch.device, Courier]()
    for layer in layers_of(model):
        card = next(layer.parameters()).device
        if card == home:
            continue
        courier = getattr(layer, _COURIER, None) or couriers.setdefault(card, Courier(card, home))
        couriers[card] = courier
        for module in layer.modules():
            courier.serve(module)
    return home, *couriers


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
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after)

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
        if found is None or (found.is_inference() and not torch.is_inference_mode_enabled()):
            self._brought[given] = found = given.to(self.card)
        assert isinstance(found, torch.Tensor)
        return found


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


def _layers_name(config: PreTrainedConfig) -> str:
    family = family_for(config)
    return f"{family.decoder}.{family.layers}"


def _ancestors(name: str) -> list[str]:
    """ "a.b.c" -> "a", "a.b"."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
