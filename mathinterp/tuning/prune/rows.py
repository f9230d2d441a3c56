"""Rows of a pruning: scores under each condition, the model as loaded before and after each."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from mathinterp.engine.intervention import CLEAN, Change, Intervention, Value
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.experiments.scored import ScoredState, score_table, scores_of
from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.attached import attached
from mathinterp.tuning.prune import Condition
from mathinterp.tuning.prune.tables import PRUNE_NEURONS, PRUNE_SCAN


def condition_rows(state: ScoredState, condition: Condition, deep: Sequence[int]) -> pa.Table:
    """Scores under one condition; ``deep``: the layers that are pruned."""
    anatomy, prompts = state.subject.anatomy, state.subject.prompts
    with hooked(everywhere(anatomy), [_pruned(anatomy, condition, deep)]):
        if condition.adapter is None:
            scores = scores_of(anatomy, prompts)
        else:
            with attached(anatomy, Path(condition.adapter)):
                scores = scores_of(anatomy, prompts)
    same = {"condition": condition.name, "seed": condition.seed}
    return score_table(PRUNE_SCAN, prompts, state.answers, scores, same)


def neuron_rows(conditions: Sequence[Condition]) -> pa.Table:
    """The neurons that each condition keeps."""
    rows = [
        {"condition": each.name, "seed": each.seed, "layer": layer, "neuron": neuron}
        for each in conditions
        if each.kept is not None and each.adapter is None
        for layer, neuron in each.kept
    ]
    return pa.Table.from_pylist(rows, PRUNE_NEURONS)


def _pruned(anatomy: Anatomy, condition: Condition, deep: Sequence[int]) -> Intervention:
    """All neurons of the deep layers at zero but those that the condition keeps."""
    if condition.kept is None:
        return CLEAN
    pruned = {layer: torch.ones(anatomy.shape.n_neurons, dtype=torch.bool) for layer in deep}
    for layer, neuron in condition.kept:
        pruned[layer][neuron] = False
    return tuple(
        Change("neuron", layer, cut_K, Value.zero(anatomy, "neuron", layer)) for layer, cut_K in pruned.items()
    )
