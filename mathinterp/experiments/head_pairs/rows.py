"""How the rows of head pairs are computed: many sets of heads a batch, each from its lowest layer on."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from mathinterp.engine.choose import many_layers
from mathinterp.engine.intervention import CLEAN
from mathinterp.experiments.ablated import AblationState, ablated, prepare, score_rows
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import BASELINE
from mathinterp.experiments.head_pairs import HeadPairs, HeadsOut
from mathinterp.experiments.head_pairs.tables import HEAD_PAIR_SCAN

AT_ONCE = 16  # sets that the engine is asked for together; the baseline is computed in the same shape


def prepare_pairs(scan: HeadPairs, subject: Subject) -> AblationState:
    """Clean pass (and counterfactual pass) over all prompts."""
    return prepare(scan, subject, edits_per_batch=AT_ONCE, edits_in_all=0)


def baseline_of(state: AblationState) -> pa.Table:
    """Rows of the unchanged model, in the batch shape of the sets."""
    return score_rows(state, many_layers(state.engine).run([CLEAN] * AT_ONCE).first(), BASELINE, {})


def rows_of(scan: HeadPairs, state: AblationState, sets: Sequence[HeadsOut]) -> pa.Table:
    """Rows of each set by itself."""
    parts = [_rows_of_batch(scan, state, sets[start : start + AT_ONCE]) for start in range(0, len(sets), AT_ONCE)]
    return pa.concat_tables(parts)


def _rows_of_batch(scan: HeadPairs, state: AblationState, sets: Sequence[HeadsOut]) -> pa.Table:
    out = [ablated(scan, state, each.out(tuple(scan.given or ()))) for each in sets]
    scores = many_layers(state.engine).run(out)
    ids: dict[str, list[Any]] = {
        "layer": [None if each.first is None else each.first.layer for each in sets],
        "head": [None if each.first is None else each.first.head for each in sets],
        "other_layer": [None if each.second is None else each.second.layer for each in sets],
        "other_head": [None if each.second is None else each.second.head for each in sets],
        "given": [each.given for each in sets],
    }
    return score_rows(state, scores, HEAD_PAIR_SCAN, ids)
