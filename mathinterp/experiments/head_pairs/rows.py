"""How the rows of head pairs are computed: many sets of heads a batch, each from its lowest layer on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mathinterp.engine.edits import Replacement
from mathinterp.engine.head_sets import NO_HEADS, HeadSets, head_sets
from mathinterp.experiments.ablated import AblationState, prepare, replacement, score_rows
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import BASELINE
from mathinterp.experiments.head_pairs.tables import HEAD_PAIR_SCAN

if TYPE_CHECKING:
    from mathinterp.experiments.head_pairs import HeadPairs, HeadSet

AT_ONCE = 16  # sets that the engine is asked for together; the baseline is computed in the same shape


@dataclass
class PairState:
    """What a replica keeps between shards."""

    ablation: AblationState
    runner: HeadSets
    replacements: dict[int, Replacement] = field(default_factory=dict)  # layer -> what its heads become


def prepare_pairs(scan: HeadPairs, subject: Subject) -> PairState:
    """Clean pass (and counterfactual pass) over all prompts."""
    ablation = prepare(scan, subject, edits_per_batch=AT_ONCE, edits_in_all=0)
    return PairState(ablation, head_sets(ablation.engine))


def baseline_of(state: PairState) -> pa.Table:
    """Rows of the unchanged model, in the batch shape of the sets."""
    unedited = state.runner.run_sets([NO_HEADS] * AT_ONCE, {})
    return score_rows(state.ablation, unedited.first(), BASELINE, {})


def rows_of(scan: HeadPairs, state: PairState, sets: Sequence[HeadSet]) -> pa.Table:
    """Rows of each set by itself."""
    parts = [_rows_of_batch(scan, state, sets[start : start + AT_ONCE]) for start in range(0, len(sets), AT_ONCE)]
    return pa.concat_tables(parts)


def _rows_of_batch(scan: HeadPairs, state: PairState, sets: Sequence[HeadSet]) -> pa.Table:
    out = [each.out(tuple(scan.given or ())) for each in sets]
    for layer in sorted({layer for heads in out for layer, _ in heads} - state.replacements.keys()):
        state.replacements[layer] = replacement(scan, state.ablation, "head", layer)
    scores = state.runner.run_sets(out, state.replacements)
    ids: dict[str, list[Any]] = {
        "layer": [None if each.first is None else each.first.layer for each in sets],
        "head": [None if each.first is None else each.first.head for each in sets],
        "other_layer": [None if each.second is None else each.second.layer for each in sets],
        "other_head": [None if each.second is None else each.second.head for each in sets],
        "given": [each.given for each in sets],
    }
    return score_rows(state.ablation, scores, HEAD_PAIR_SCAN, ids)
