"""Masks of eager attention in float64: what is masked must stay a number.

transformers masks with the lowest number of the model's dtype and takes the softmax in float32, where float64's lowest
number is minus infinity. A row that may see nothing (padding before a text, or behind it under a window) then becomes
NaN, and every token of a later layer with it, as 0 times NaN.
"""

from typing import Any

import torch
from torch import nn

LOWEST = torch.finfo(torch.float32).min  # masks as well: its exponential is 0 beside any number that is not masked
_DONE = "_masks_stay_finite"


def keep_masks_finite(attention: nn.Module) -> None:
    """Raise the masks that ``attention`` is called with to float32's lowest number; once for each module."""
    if not hasattr(attention, _DONE):
        setattr(attention, _DONE, True)
        attention.register_forward_pre_hook(_raise, with_kwargs=True)


def _raise(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        return args, {**kwargs, "attention_mask": mask.clamp(min=LOWEST)}
    return args, kwargs
