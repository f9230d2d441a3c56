"""What is measured: one folder an experiment, and what they share.

Knows engines and prompts; knows nothing about stores, clusters or the command line. ``mathinterp.experiments.Heads``
and the like are found by class name, on first use.
"""

from typing import Any

from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.options import option
from mathinterp.experiments.ranking import Ranking
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head, Neuron

__all__ = [
    "Context",
    "Experiment",
    "Head",
    "Neuron",
    "Ranking",
    "Results",
    "Shard",
    "Shown",
    "Subject",
    "Summary",
    "Table",
    "option",
]


def __dir__() -> list[str]:
    """Also the experiments, which are imported when they are first used."""
    from mathinterp.experiments.registry import experiments

    return sorted({*globals(), *__all__, *(experiment.__name__ for experiment in experiments().values())})


def __getattr__(name: str) -> Any:
    """An experiment's class, by its name."""
    if name[:1].isupper():
        from mathinterp.experiments.registry import experiments

        for experiment in experiments().values():
            if experiment.__name__ == name:
                return experiment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
