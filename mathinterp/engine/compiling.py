"""Compiled functions whose kernels are chosen by rule: equal replicas must give equal rows.

Left alone, torch's compiler times several ways to cut a sum (norms, softmax, log-sum-exp) into blocks on the machine it
runs on and keeps the fastest, and so two replicas that compile at the same time may add the same numbers in another
order. Its deterministic mode takes one way by rule and pads no product by timing; what is still timed are blocks of
elementwise kernels, which change no number.
"""

from collections.abc import Callable
from typing import Any

import torch

INDUCTOR = "inductor"  # torch's own compiler
COMPILER: str | Callable[..., Any] = INDUCTOR  # the backend of the packed engine


def compiled(function: Callable[..., Any], *, dynamic: bool, backend: str | Callable[..., Any] = INDUCTOR) -> Any:
    """``torch.compile`` of a function or module, with no kernel of it chosen by timing that could change a number."""
    options = by_rule() if backend == INDUCTOR else None
    return torch.compile(function, dynamic=dynamic, backend=backend, options=options)


def by_rule() -> dict[str, Any]:
    """The compiler's options. They go with each function: torch sets its global ones back whenever it has compiled.

    A version of torch without the deterministic mode at least pads nothing; whether replicas then agree is checked when
    they join (cluster/agreement.py).
    """
    from torch._inductor import config  # a slow import

    return {"deterministic": True} if hasattr(config, "deterministic") else {"shape_padding": False}
