"""How far a model can read, and where what it makes of a position depends on the length of the text.

Two kinds of rotary embedding take their frequencies from the longest position of a forward pass: "longrope" (Phi-3) has
one set up to the original length and another beyond it, "dynamic" one up to the original length and beyond it another
for each length; transformers' module of the second also remembers the longest text that it has seen. Sentences that
share a pass must therefore be of one ``kind``, and a model's modules are made to forget (``without_memory``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from mathinterp.errors import UserError
from mathinterp.models.families import family_of
from mathinterp.models.shape import ANY_LENGTH as ANY_LENGTH
from mathinterp.models.shape import Positions as Positions

FORCED = "_read_as"  # attribute of a rotary module: the length to take the frequencies of, where it is not the input's


def positions_of(config: PretrainedConfig) -> Positions:
    """Read a config; raises UserError for layers whose rotary embeddings change with the length in several ways."""
    if family_of(config.model_type).position_table:
        return Positions(limit=config.max_position_embeddings)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    if any(_changes(part.get("rope_type")) for part in nested):
        raise UserError(
            f"model family '{config.model_type}': a rotary embedding that depends on the length and on the layer is not"
            " supported; take a model with one rotary embedding"
        )
    kind, limit = rope.get("rope_type", "default"), _reach(config.max_position_embeddings, nested or [rope])
    if kind == "longrope":
        return Positions(limit, alike_up_to=rope["original_max_position_embeddings"])
    if _changes(kind):
        return Positions(limit, alike_up_to=config.max_position_embeddings, each_length=True)
    return Positions(limit)


def _reach(longest: int, scalings: list[dict[str, Any]]) -> int:
    """The length that a rotary embedding is made for. Configs give the length before scaling or that after it: taken
    is the longer reading.
    """
    factor = max(part.get("factor") or 1.0 for part in scalings)
    before = min(part.get("original_max_position_embeddings") or longest for part in scalings)
    return max(longest, int(before * factor))


def _changes(rope_type: object) -> bool:
    return rope_type == "longrope" or "dynamic" in str(rope_type)


def without_memory(model: nn.Module) -> None:
    """Make every rotary module of ``model`` take its frequencies from the pass in hand alone, whatever ran before."""
    for module in rotary_modules(model):
        if not hasattr(module, FORCED):
            setattr(module, FORCED, None)
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after)


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose frequencies depend on the length of the text."""
    return [module for module in model.modules() if _changes(getattr(module, "rope_type", None))]


@contextmanager
def read_as(model: nn.Module, length: int) -> Iterator[None]:
    """Within the block positions are those of a sentence of ``length`` tokens, also where a pass reads a part of it."""
    modules = rotary_modules(model)
    for module in modules:
        assert getattr(module, FORCED, 0) is None, "without_memory was not called, or read_as was called twice"
        setattr(module, FORCED, length)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, FORCED, None)


def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forget earlier passes; under ``read_as`` add the sentence's last position, so that the module sees its length."""
    if "dynamic" in module.rope_type:
        module.max_seq_len_cached = module.original_max_seq_len
        module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
    length = getattr(module, FORCED)
    if length is None:
        return args, kwargs
    args, kwargs = tuple(args), dict(kwargs)
    position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = torch.full_like(position_ids[..., :1], length - 1)
    longer = torch.cat([position_ids, last], dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Leave out the position that was added: cosines and sines are B T d."""
    return output if getattr(module, FORCED) is None else tuple(table[:, :-1] for table in output)
