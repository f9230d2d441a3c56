"""How a knock-out's rows are computed: sets of heads, taken out together, and the next tokens of shown sentences."""

from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.engine.choose import many_layers
from mathinterp.engine.intervention import CLEAN, Intervention, Tokens, Value, intervention
from mathinterp.engine.plain import next_token_probabilities
from mathinterp.experiments.ablated import AblationState, ablated, prepare, score_rows
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.columns import BASELINE
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.knockout.tables import KNOCKOUT_EXAMPLES, KNOCKOUT_HEADS, KNOCKOUT_SCAN, SHOWN_TOKENS
from mathinterp.models.anatomy import ModelShape


def prepare_sets(scan: Knockout, subject: Subject) -> AblationState:
    """Clean pass (and counterfactual pass) over all prompts."""
    points = len(scan.chosen_ks(subject.anatomy.shape))
    return prepare(scan, subject, edits_per_batch=points, edits_in_all=0)


def notes(state: AblationState) -> dict[str, Any]:
    """Engine, packing and noise floor; how far passes without a head out stray from the engine's baseline."""
    deviation = many_layers(state.engine).run([CLEAN]).difference(state.engine.baseline())
    return {**state.notes, "no_head_deviation": deviation}


def unedited_rows(scan: Knockout, state: AblationState) -> pa.Table:
    """The baseline, in the curves' batch shape."""
    points = len(scan.chosen_ks(state.anatomy.shape))
    return score_rows(state, many_layers(state.engine).run([CLEAN] * points).first(), BASELINE, {})


def curve_rows(scan: Knockout, state: AblationState, shard: Shard) -> pa.Table:
    """Every point of one curve."""
    ranking, seed, ks = shard.work["ranking"], shard.work["seed"], shard.work["ks"]
    sets = [ablated(scan, state, scan.heads_of(state.anatomy.shape, ranking, seed, k)) for k in ks]
    ids: dict[str, Any] = {"ranking": [ranking] * len(ks), "seed": [seed] * len(ks), "k": ks}
    return score_rows(state, many_layers(state.engine).run(sets), KNOCKOUT_SCAN, ids)


def head_rows(scan: Knockout, shape: ModelShape) -> pa.Table:
    """The heads that are out at every point of every curve."""
    rows = [
        {"ranking": ranking, "seed": seed, "k": k, "place": place, "layer": layer, "head": head}
        for ranking, seed, ks in scan.curves(shape)
        for k in ks
        for place, (layer, head) in enumerate(scan.heads_of(shape, ranking, seed, k), start=1)
    ]
    return pa.Table.from_pylist(rows, KNOCKOUT_HEADS)


def example_rows(scan: Knockout, state: AblationState) -> pa.Table:
    """The likeliest next tokens of each sentence, for k = 0 and every other k."""
    assert scan.tokenizer is not None, "sentences need a tokenizer to name their next tokens"
    ks = [0, *scan.chosen_ks(state.anatomy.shape)]
    rows = []
    for sentence in scan.sentences:
        end = Tokens(np.array([0]), np.array([len(sentence.token_ids) - 1]))
        for k in ks:
            changes = _for_any_sentence(scan, state, k, end)
            found = next_token_probabilities(state.anatomy, sentence.token_ids, changes)
            top = found.topk(min(SHOWN_TOKENS, len(found)))
            for rank, (probability, token_id) in enumerate(zip(*map(list, top), strict=True), start=1):
                token = scan.tokenizer.decode([int(token_id)])
                row = {"sentence": sentence.text, "k": k, "rank": rank, "token_id": int(token_id), "token": token}
                rows.append({**row, "probability": float(probability)})
    return pa.Table.from_pylist(rows, KNOCKOUT_EXAMPLES)


def _for_any_sentence(scan: Knockout, state: AblationState, k: int, end: Tokens) -> Intervention:
    """The first k heads out in a sentence that is no prompt: their values' mean over the prompts."""

    def mean(site: str, layer: int) -> Value:
        (change,) = ablated(scan, state, [head for head in scan.ranking[:k] if head.layer == layer])
        assert change.value.rows is not None
        return change.value if change.value.tokens is None else Value(change.value.rows.mean(dim=0))

    return intervention(scan.ranking[:k], mean, end if scan.edited_positions == "end" else None)
