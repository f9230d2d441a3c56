"""Counted hooks: the ordinary way to intervene, and the slow twin of every fast path.

A hook that never fires is an error, and nothing stays hooked after an exception (method.md section 7).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from mathinterp.models.anatomy import Anatomy

Edit = Callable[[torch.Tensor], torch.Tensor]  # what an activation becomes


@contextmanager
def edited_input(module: nn.Module, edit: Edit) -> Iterator[None]:
    """Within the block, ``module`` reads ``edit(input)`` instead of its input."""
    fired = 0

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        nonlocal fired
        fired += 1
        return (edit(args[0]), *args[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
        assert fired > 0, f"the hook on {type(module).__name__} never fired"
    finally:
        handle.remove()


@contextmanager
def edited_output(module: nn.Module, edit: Edit) -> Iterator[None]:
    """Within the block, ``module`` gives ``edit(output)`` instead of its output (the first item of a tuple)."""
    fired = 0

    def hook(_: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        nonlocal fired
        fired += 1
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
        assert fired > 0, f"the hook on {type(module).__name__} never fired"
    finally:
        handle.remove()


def caught_input(module: nn.Module) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects ``module``'s inputs within the block."""
    return _caught(module, edited_input)


def caught_output(module: nn.Module) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects ``module``'s outputs within the block; the model goes on with a copy: Falcon adds into it."""
    return _caught(module, edited_output, go_on_with=torch.clone)


def edited_site(anatomy: Anatomy, site: str, layer: int, edit: Edit) -> AbstractContextManager[None]:
    """Within the block the activations at a site (intervention.py) are edited."""
    module, is_input = _module(anatomy, site, layer)
    return (edited_input if is_input else edited_output)(module, edit)


def caught_site(anatomy: Anatomy, site: str, layer: int) -> AbstractContextManager[list[torch.Tensor]]:
    """Collects the activations at a site within the block."""
    module, is_input = _module(anatomy, site, layer)
    return (caught_input if is_input else caught_output)(module)


def _module(anatomy: Anatomy, site: str, layer: int) -> tuple[nn.Module, bool]:
    """Where a site is read, and whether it is that module's input (else its output)."""
    if site in ("head", "attention"):
        return anatomy.output_projection(layer), site == "head"
    if site == "residual":
        return anatomy.layers[layer], True
    return (anatomy.mlp(layer), False) if site == "mlp" else (anatomy.down_projection(layer), True)


@contextmanager
def _caught(
    module: nn.Module,
    edited: Callable[[nn.Module, Edit], AbstractContextManager[None]],
    go_on_with: Edit = lambda value: value,
) -> Iterator[list[torch.Tensor]]:
    caught: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        caught.append(value)
        return go_on_with(value)

    with edited(module, keep):
        yield caught


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
