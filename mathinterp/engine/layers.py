"""Call single decoder layers of any family with the arguments the model itself gave them.

In one clean forward pass, pre-hooks record what each decoder layer and its attention module were called
with. Replaying is calling layers again with those arguments, the batch axis expanded and the hidden states
replaced: no per-family code. Knows modules and masks; knows nothing about heads or scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mathinterp.engine.parts import Idle, Twin
from mathinterp.engine.tree.forest import Forest
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.masks import LOWEST


@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments of one module call, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Call ``module`` on new hidden states; returns its output hidden states."""
        output = module(hidden, *self.args, **self.kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def repeated(self, batch: int, times: int, memo: dict[int, Any]) -> "Call":
        """The same call for ``times`` copies of the ``batch`` rows, one copy of all rows after another."""
        args = tuple(_repeat(value, batch, times, memo) for value in self.args)
        return Call(args, {name: _repeat(value, batch, times, memo) for name, value in self.kwargs.items()})


def _repeat(value: Any, batch: int, times: int, memo: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_repeat(item, batch, times, memo) for item in value)
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] not in (1, batch):
        return value
    if id(value) not in memo:  # masks and rotary tables are shared between layers: expand them once
        if value.shape[0] == 1:
            memo[id(value)] = value.expand(batch * times, *value.shape[1:])
        else:
            memo[id(value)] = value.repeat(times, *[1] * (value.ndim - 1))
    return memo[id(value)]


@dataclass
class RecordedCalls:
    """What a clean pass over a batch of packs told every layer and every attention module."""

    batch: int
    embedded_PND: torch.Tensor  # input of layer 0
    layer: list[Call]
    attention: list[Call]

    def repeated(self, times: int) -> "RecordedCalls":
        """For ``times`` interventions on each pack."""
        memo: dict[int, Any] = {}
        return RecordedCalls(
            self.batch * times,
            self.embedded_PND,
            [call.repeated(self.batch, times, memo) for call in self.layer],
            [call.repeated(self.batch, times, memo) for call in self.attention],
        )


def joined(recordings: Sequence[RecordedCalls]) -> RecordedCalls:
    """Several recordings of one pack size as one larger batch."""
    first = recordings[0]
    embedded = torch.cat([recording.embedded_PND for recording in recordings])
    memo: dict[int, Any] = {}

    def join(calls: Sequence[Call], batches: Sequence[int]) -> Call:
        args = tuple(_join(values, batches, memo) for values in zip(*(call.args for call in calls), strict=True))
        names = calls[0].kwargs
        kwargs = {name: _join([call.kwargs[name] for call in calls], batches, memo) for name in names}
        return Call(args, kwargs)

    batches = [recording.batch for recording in recordings]
    return RecordedCalls(
        sum(batches),
        embedded,
        [join([r.layer[i] for r in recordings], batches) for i in range(len(first.layer))],
        [join([r.attention[i] for r in recordings], batches) for i in range(len(first.attention))],
    )


def _join(values: Sequence[Any], batches: Sequence[int], memo: dict[int, Any]) -> Any:
    first = values[0]
    if isinstance(first, tuple):
        return tuple(_join(items, batches, memo) for items in zip(*values, strict=True))
    if not isinstance(first, torch.Tensor) or first.ndim < 2 or first.shape[0] not in (1, batches[0]):
        return first
    if id(first) not in memo:
        rows = [value.expand(batch, *value.shape[1:]) for value, batch in zip(values, batches, strict=True)]
        memo[id(first)] = torch.cat(rows)
    return memo[id(first)]


def record(
    anatomy: Anatomy, forest: Forest, packs: np.ndarray, observe: Callable[[int, torch.Tensor], None] | None = None
) -> RecordedCalls:
    """Run the decoder once over ``packs`` and record the arguments of every layer and attention module.

    ``observe`` is shown each layer's number and its input hidden states (P N D). Without it only arguments are wanted,
    which do not depend on hidden states: then neither attention nor MLPs are computed.
    """
    embedded: list[torch.Tensor] = []

    def see(layer: int, hidden: torch.Tensor) -> None:
        if layer == 0:
            embedded.append(hidden.to(anatomy.device))
        if observe is not None:
            observe(layer, hidden)

    device = anatomy.device
    decoder = anatomy.decoder if observe is not None else idle_decoder(anatomy)
    layers = list(getattr(decoder, anatomy.family.layers))
    attentions = [getattr(layer, anatomy.family.attention) for layer in layers]
    with recorded(layers, see) as layer_calls, recorded(attentions) as attention_calls:
        decoder(
            input_ids=torch.from_numpy(forest.token_ids_PN[packs]).to(device),
            position_ids=torch.from_numpy(forest.depths_PN[packs]).to(device),
            attention_mask=tree_mask(anatomy, forest, packs),
            use_cache=False,
        )
    assert len(layer_calls) == len(attention_calls) == anatomy.shape.n_layers, "a decoder layer did not run"
    return RecordedCalls(len(packs), embedded[0], layer_calls, attention_calls)


def idle_decoder(anatomy: Anatomy) -> nn.Module:
    """The decoder with attention and MLPs that pass on what they get; the model itself stays as it is."""
    family = anatomy.family
    layers = [
        Twin(layer, {family.attention: Idle(as_tuple=True), family.mlp: Idle()}).module for layer in anatomy.layers
    ]
    return Twin(anatomy.decoder, {family.layers: nn.ModuleList(layers)}).module


@contextmanager
def recorded(
    modules: Sequence[nn.Module], see: Callable[[int, torch.Tensor], None] | None = None
) -> Iterator[list[Call]]:
    """Collects the arguments of every call of the modules within the block, in order.

    ``see`` is shown the number of each call and its hidden states.
    """
    calls: list[Call] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = dict(kwargs)
        hidden = rest.pop("hidden_states") if "hidden_states" in rest else args[0]
        if see is not None:
            see(len(calls), hidden)
        calls.append(Call(args if "hidden_states" in kwargs else args[1:], rest))

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def tree_mask(anatomy: Anatomy, forest: Forest, packs: np.ndarray) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive 4-D mask(s) P 1 N N of the packs, in the form the family's decoder takes.

    Additive on purpose: eager attention takes a boolean 4-D mask silently wrong. A sliding window is part of
    the mask, because a model given its own mask does not apply it. Families with per-layer attention types
    take a dict of masks.
    """
    windows = set(anatomy.shape.attention_windows)
    if getattr(anatomy.model.config, "layer_types", None):
        sliding = next((w for w in windows if w is not None), None)
        return {
            "full_attention": _additive(anatomy, forest, packs, None),
            "sliding_attention": _additive(anatomy, forest, packs, sliding),
        }
    assert len(windows) == 1, "layers of different windows need layer_types in the config"
    return _additive(anatomy, forest, packs, windows.pop())


def _additive(anatomy: Anatomy, forest: Forest, packs: np.ndarray, window: int | None) -> torch.Tensor:
    allowed = torch.from_numpy(np.stack([forest.ancestors(int(pack), window) for pack in packs])).to(anatomy.device)
    mask = torch.zeros(allowed.shape, dtype=anatomy.dtype, device=anatomy.device)
    return mask.masked_fill_(~allowed, max(torch.finfo(anatomy.dtype).min, LOWEST))[:, None]


def call_layer(layer: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A decoder layer as a plain function, a unit that torch.compile sees."""
    output = layer(hidden, *args, **kwargs)
    hidden = output[0] if isinstance(output, tuple) else output
    return hidden


def call_attention(
    norm: nn.Module, attention: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The norm and the attention of a decoder layer as a plain function, the other unit that torch.compile sees."""
    output = attention(norm(hidden), *args, **kwargs)
    hidden = output[0] if isinstance(output, tuple) else output
    return hidden
