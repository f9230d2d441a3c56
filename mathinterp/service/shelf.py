"""Models of one process on three levels: on its card (or dealt out to its cards, split.py), in host memory, on disk.

The one that was used longest ago goes down a level when another needs its room: from the card into host memory, from
there back to its files. A process without a card computes in host memory and has two levels. A quantised model goes
from the card straight to its files: what bitsandbytes keeps beside the weights does not lie in modules, and does not
move with them. Knows models and bytes; knows nothing about requests.

A model that comes back from host memory leaves its weights there, too, while there is room: they do not change, and so
nothing need be copied when it goes down again. Such copies are the first to go.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mathinterp.cluster.events import first_line
from mathinterp.cluster.ray_private import machine_cores
from mathinterp.experiments.costs import layer_parameters, parameters
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.card_memory import QUANTISED_BYTES
from mathinterp.models.catalog import LoadedModel, ResolvedModel, resolve
from mathinterp.models.handle import load_unchanged
from mathinterp.models.recalled import Resolving as Resolving
from mathinterp.models.resolved import DTYPE_BYTES
from mathinterp.models.split import bring, devices_of

logger = logging.getLogger(__name__)

CARD, MEMORY, DISK = "card", "memory", "disk"
COPYING_THREADS = 8  # more would not make memory faster
Key = tuple[str, str]  # a model's fingerprint, which counts how it is quantised, and its dtype


@dataclass(frozen=True)
class Limits:
    """Most bytes of weights that one process keeps on all of its cards together and in host memory; card 0: a share.

    One model always has room.
    """

    card: int
    memory: int


@dataclass
class Held:
    """A model that this process has, or had."""

    label: str
    dtype: str
    level: str
    bytes: int
    quantised: bool
    loaded: LoadedModel | None = field(default=None, repr=False)
    copy: dict[str, torch.Tensor] | None = field(default=None, repr=False)  # its weights in host memory, if on the card

    @property
    def in_memory(self) -> bool:
        """Whether its weights take host memory."""
        return self.level == MEMORY or self.copy is not None


def key_of(resolved: ResolvedModel) -> Key:
    """What a model is on the shelf."""
    return resolved.fingerprint, resolved.dtype


class Shelf:
    """Models in their order of use.

    Args:
        device: where they compute, "cuda" or "cpu".
        limits: of each level.
        leaves: told the key of a model before it leaves the level where it computes.
        loads, moves: of a model onto a device, and its layers onto further ones where there are several cards.
        cards: of this process, to all of which the layers of each model are dealt out.
    """

    def __init__(
        self,
        device: str,
        limits: Limits,
        leaves: Callable[[Key], None] = lambda key: None,
        loads: Callable[..., LoadedModel] = load_unchanged,
        moves: Callable[..., LoadedModel] | None = None,
        cards: int = 1,
    ):
        self._device, self._limits, self._leaves = device, limits, leaves
        self._load, self._move = loads, moves or moved
        self.cards = cards
        home, *further = devices_of(device, cards)
        self._places = (home, further) if further else (home,)
        self._held: dict[Key, Held] = {}  # used longest ago first
        self.resolve = Resolving(resolve)

    @property
    def computing(self) -> str:
        """The level where models compute."""
        return CARD if self._device == "cuda" else MEMORY

    def take(self, resolved: ResolvedModel) -> LoadedModel:
        """The model, ready to compute; now the one used last."""
        key = key_of(resolved)
        expected, quantised = expected_bytes(resolved), resolved.spec.load_in is not None
        held = self._held.pop(key, None) or Held(resolved.label, resolved.dtype, DISK, expected, quantised)
        if held.level != self.computing:
            self._make_room(held.bytes)
            if not self._fits(held, resolved):
                logger.warning(f"{held.label} finds no room on {self._device}: all other models leave it")
                self._make_room(sys.maxsize)
                torch.cuda.empty_cache()
                self._bring(held, resolved)
            if quantised:
                held.bytes = max(held.bytes, expected)  # scales are no parameters
            held.level = self.computing
            logger.info(f"{held.label} ({held.dtype}, {held.bytes:,} bytes) is ready on {self._device}")
        self._held[key] = held
        assert held.loaded is not None
        return held.loaded

    def _fits(self, held: Held, resolved: ResolvedModel) -> bool:
        """Bring a model where it computes, if there is memory for it."""
        try:
            self._bring(held, resolved)
        except torch.cuda.OutOfMemoryError:
            if not self.ready_bytes():
                raise
            return False  # and not from here: the error holds on to what was brought
        return True

    def _bring(self, held: Held, resolved: ResolvedModel) -> None:
        if held.loaded is None:
            held.loaded = self._load(resolved, *self._places)
            held.bytes = weight_bytes(held.loaded)
        else:
            copy = host_weights(held.loaded)
            try:
                held.loaded = self._move(held.loaded, *self._places)
            except torch.cuda.OutOfMemoryError:
                put_back(held.loaded, copy)  # a part was moved
                raise
            held.copy = copy if self._in_memory() + held.bytes <= self._limits.memory else None

    def report(self) -> list[dict[str, Any]]:
        """What there is, used last first; plain JSON."""
        return [
            {"fingerprint": key[0], "label": held.label, "dtype": held.dtype, "level": held.level, "bytes": held.bytes,
             "in_memory": held.bytes if held.in_memory else 0}
            for key, held in reversed(self._held.items())
        ]  # fmt: skip

    def ready_bytes(self) -> int:
        """Of the models that are ready to compute."""
        return sum(held.bytes for held in self._held.values() if held.level == self.computing)

    def _make_room(self, needed: int) -> None:
        """On the level where models compute, for ``needed`` bytes."""
        most = self._limits.card if self.computing == CARD else self._limits.memory
        for key in self._over(self.computing, most - needed):
            self._leaves(key)
            if self.computing == CARD and not self._held[key].quantised:
                self._to_memory(key)
            else:
                self._drop(key)

    def _over(self, level: str, most: int) -> list[Key]:
        """The models of a level to let go, used longest ago first, until at most so many bytes are left."""
        there = {key: held.bytes for key, held in self._held.items() if held.level == level}
        left, gone = sum(there.values()), []
        for key, size in there.items():
            if left <= most:
                break
            gone.append(key)
            left -= size
        return gone

    def _to_memory(self, key: Key) -> None:
        held = self._held[key]
        if held.bytes > self._limits.memory:
            self._drop(key)
            return
        assert held.loaded is not None
        if held.copy is not None and held.copy.keys() == host_weights(held.loaded).keys():
            put_back(held.loaded, held.copy)
        else:  # or an experiment from outside has left something in the model
            held.copy = None
            self._make_room_in_memory(held.bytes)
        try:
            held.loaded, held.level, held.copy = self._move(held.loaded, "cpu"), MEMORY, None
            return
        except (MemoryError, RuntimeError) as error:  # a part of it may have been moved
            logger.warning(f"{held.label} could not go to host memory and goes back to its files: {first_line(error)}")
        self._drop(key)  # not from there: the error holds on to the model

    def _in_memory(self) -> int:
        """Bytes in host memory of a process with a card, copies of what is on it included."""
        return sum(held.bytes for held in self._held.values() if held.in_memory)

    def _make_room_in_memory(self, needed: int) -> None:
        most = self._limits.memory - needed
        for held in self._held.values():
            if self._in_memory() > most:
                held.copy = None
        if self._in_memory() > most:
            for key in self._over(MEMORY, most):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        held = self._held[key]
        held.loaded, held.level, held.copy = None, DISK, None
        if self._device == "cuda":
            torch.cuda.empty_cache()


def expected_bytes(resolved: ResolvedModel) -> int:
    """Of a model's matrices as they will lie in memory, scales of quantised ones included."""
    each, load_in = DTYPE_BYTES[resolved.dtype], resolved.spec.load_in
    whole = each * parameters(resolved.shape)
    if load_in is None:
        return whole
    return whole - int(resolved.shape.n_layers * layer_parameters(resolved.shape) * (each - QUANTISED_BYTES[load_in]))


def moved(loaded: LoadedModel, device: str, further: Sequence[str] = ()) -> LoadedModel:
    """The same weights on another device, layers dealt out to ``further`` ones, too; from wherever they lie."""
    model = loaded.model
    with _threads_to_copy():
        bring(model, [torch.device(each) for each in (device, *further)])
    if device == "cpu":
        torch.cuda.empty_cache()
    return LoadedModel(model, loaded.tokenizer, Anatomy(model), loaded.fingerprint, loaded.dtype)


@contextmanager
def _threads_to_copy() -> Iterator[None]:
    """Several, for memory that is written to; a process with a card computes with one (see ``bring``)."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(max(earlier, min(COPYING_THREADS, machine_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(earlier)


def host_weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The parameters of a model by name, as tensors that stay where they are when it is moved."""
    return {name: parameter.data for name, parameter in loaded.model.named_parameters()}


def put_back(loaded: LoadedModel, weights: dict[str, torch.Tensor]) -> None:
    """Let a model's parameters be these again."""
    own = {id(parameter): weights[name] for name, parameter in loaded.model.named_parameters()}
    loaded.model._apply(lambda tensor: own.get(id(tensor), tensor))


def weight_bytes(loaded: LoadedModel) -> int:
    """Of all parameters and buffers."""
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
