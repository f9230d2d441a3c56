"""Experiments that installed packages announce; imports none of them, nor anything else that takes long."""

import importlib.metadata

GROUP = "mathinterp.experiments"


def announced() -> tuple[importlib.metadata.EntryPoint, ...]:
    """What is installed under the entry-point group of experiments."""
    return tuple(importlib.metadata.entry_points(group=GROUP))
