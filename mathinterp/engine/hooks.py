"""Counted hooks: the ordinary way to intervene, and the slow twin of every fast path.

A hook that never fires is an error, and nothing stays hooked after an exception (method.md section 7). Of a model that
lies on several cards, hooks see and give activations at home, wherever the layer lies (models/split.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import at_home

Edit = Callable[[torch.Tensor], torch.Tensor]  # what an activation becomes
Look = Callable[[torch.Tensor], object]


def edited_input(module: nn.Module, edit: Edit) -> AbstractContextManager[None]:
    """Within the block, ``module`` reads ``edit(input)`` instead of its input."""
    return _input_hook(module, _edited_at_home(module, edit))


def edited_output(module: nn.Module, edit: Edit) -> AbstractContextManager[None]:
    """Within the block, ``module`` gives ``edit(output)`` instead of its output (the first item of a tuple)."""
    return _output_hook(module, _edited_at_home(module, edit))


def _edited_at_home(module: nn.Module, edit: Edit) -> Edit:
    return lambda value: edit(at_home(module, value)).to(value.device)


def _input_hook(module: nn.Module, edit: Edit) -> AbstractContextManager[None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (edit(args[0]), *args[1:])

    return _counted(module, module.register_forward_pre_hook, hook)


def _output_hook(module: nn.Module, edit: Edit) -> AbstractContextManager[None]:
    def hook(_: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    return _counted(module, module.register_forward_hook, hook)


@contextmanager
def _counted(
    module: nn.Module, register: Callable[[Callable[..., Any]], RemovableHandle], hook: Callable[..., Any]
) -> Iterator[None]:
    fired = 0

    def counted(*given: Any) -> Any:
        nonlocal fired
        fired += 1
        return hook(*given)

    handle = register(counted)
    try:
        yield
        assert fired > 0, f"the hook on {type(module).__name__} never fired"
    finally:
        handle.remove()


def watched(module: nn.Module, of_input: bool, look: Look) -> AbstractContextManager[None]:
    """Within the block, ``look`` gets ``module``'s input (else its output), and nothing changes."""

    def edit(value: torch.Tensor) -> torch.Tensor:
        look(at_home(module, value))
        return value

    return (_input_hook if of_input else _output_hook)(module, edit)


def caught_input(module: nn.Module) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects ``module``'s inputs within the block."""
    return _caught(module, True)


def caught_output(module: nn.Module) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects ``module``'s outputs within the block."""
    return _caught(module, False)


def edited_site(anatomy: Anatomy, site: str, layer: int, edit: Edit) -> AbstractContextManager[None]:
    """Within the block the activations at a site (intervention.py) are edited."""
    module, is_input = _module(anatomy, site, layer)
    return (edited_input if is_input else edited_output)(module, edit)


def caught_site(anatomy: Anatomy, site: str, layer: int) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects the activations at a site within the block."""
    return _caught(*_module(anatomy, site, layer))


def _module(anatomy: Anatomy, site: str, layer: int) -> tuple[nn.Module, bool]:
    """Where a site is read, and whether it is that module's input (else its output)."""
    if site in ("head", "attention"):
        return anatomy.output_projection(layer), site == "head"
    if site == "residual":
        return anatomy.final_norm if layer == anatomy.shape.n_layers else anatomy.layers[layer], True
    if site == "input":  # the token embeddings, before positions are added
        return anatomy.model.get_input_embeddings(), False
    return (anatomy.mlp(layer), False) if site == "mlp" else (anatomy.down_projection(layer), True)


@contextmanager
def _caught(module: nn.Module, of_input: bool) -> Iterator[list[torch.Tensor]]:
    caught: list[torch.Tensor] = []
    with watched(module, of_input, lambda value: caught.append(value if of_input else value.clone())):
        yield caught  # outputs are copies: Falcon adds into what a module gave


@contextmanager
def zeroed_columns(anatomy: Anatomy, layer: int, head: int) -> Iterator[None]:
    """Within the block, the head's columns of o_proj's weight are zero: paper A's own way of ablating a head."""
    with torch.no_grad():
        part = anatomy.output_weight(layer)[anatomy.head_slice(head)]
        saved = part.clone()
        part.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            part.copy_(saved)
