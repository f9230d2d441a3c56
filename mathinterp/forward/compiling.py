"""Compiled functions whose kernels are chosen by rule: equal replicas must give equal rows.

Left alone, torch's compiler times several ways to cut a sum (norms, softmax, log-sum-exp) into blocks on the machine it
runs on and keeps the fastest, and so two replicas that compile at the same time may add the same numbers in another
order. Its deterministic mode takes one way by rule and pads no product by timing; what is still timed are blocks of
elementwise kernels, which change no number.
"""

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], *, dynamic: bool, backend: str | Callable[..., Any] = "inductor") -> Any:
    """``torch.compile`` of a function or module, with no kernel of it chosen by timing."""
    choose_by_rule()
    return torch.compile(function, dynamic=dynamic, backend=backend)


def choose_by_rule() -> None:
    """Put torch's compiler into its deterministic mode, in this process and in the workers that compile for it.

    A version of torch that has no such mode loses what is timed and can be turned off by itself; whether replicas then
    agree is checked when they join (cluster/agreement.py).
    """
    from torch._inductor import config  # a slow import

    if hasattr(config, "deterministic"):
        config.deterministic = True
    else:
        config.shape_padding = False
