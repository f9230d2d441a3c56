"""How a knock-out's rows are computed: sets of heads, taken out together, and the next tokens of shown sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mathinterp.engine.head_sets import NO_HEADS, head_sets, next_token_probabilities
from mathinterp.experiments.ablated import HeadSetState, prepare, replacements_of, score_rows
from mathinterp.experiments.columns import BASELINE
from mathinterp.experiments.knockout.tables import KNOCKOUT_EXAMPLES, KNOCKOUT_HEADS, KNOCKOUT_SCAN, SHOWN_TOKENS

if TYPE_CHECKING:
    from mathinterp.experiments.base import Shard, Subject
    from mathinterp.experiments.knockout import Knockout
    from mathinterp.models.anatomy import ModelShape


def prepare_sets(scan: Knockout, subject: Subject) -> HeadSetState:
    """Clean pass (and counterfactual pass) over all prompts."""
    points = len(scan.chosen_ks(subject.anatomy.shape))
    ablation = prepare(scan, subject, edits_per_batch=points, edits_in_all=0)
    return HeadSetState(ablation, head_sets(ablation.engine), {})


def notes(state: HeadSetState) -> dict[str, Any]:
    """Engine, packing and noise floor; how far passes without a head out stray from the engine's baseline."""
    unedited = state.runner.run_sets([NO_HEADS], {})
    deviation = unedited.difference(state.ablation.engine.baseline())
    return {**state.ablation.notes, "no_head_deviation": deviation}


def unedited_rows(scan: Knockout, state: HeadSetState) -> pa.Table:
    """The baseline, in the curves' batch shape."""
    points = len(scan.chosen_ks(state.ablation.anatomy.shape))
    return score_rows(state.ablation, state.runner.run_sets([NO_HEADS] * points, {}).first(), BASELINE, {})


def curve_rows(scan: Knockout, state: HeadSetState, shard: Shard) -> pa.Table:
    """Every point of one curve."""
    ranking, seed, ks = shard.work["ranking"], shard.work["seed"], shard.work["ks"]
    sets = [frozenset(scan.heads_of(state.ablation.anatomy.shape, ranking, seed, k)) for k in ks]
    layers = {layer for heads in sets for layer, _ in heads}
    scores = state.runner.run_sets(sets, replacements_of(scan, state, layers))
    ids: dict[str, Any] = {"ranking": [ranking] * len(ks), "seed": [seed] * len(ks), "k": ks}
    return score_rows(state.ablation, scores, KNOCKOUT_SCAN, ids)


def head_rows(scan: Knockout, shape: ModelShape) -> pa.Table:
    """The heads that are out at every point of every curve."""
    rows = [
        {"ranking": ranking, "seed": seed, "k": k, "place": place, "layer": layer, "head": head}
        for ranking, seed, ks in scan.curves(shape)
        for k in ks
        for place, (layer, head) in enumerate(scan.heads_of(shape, ranking, seed, k), start=1)
    ]
    return pa.Table.from_pylist(rows, KNOCKOUT_HEADS)


def example_rows(scan: Knockout, state: HeadSetState) -> pa.Table:
    """The likeliest next tokens of each sentence, for k = 0 and every other k."""
    assert scan.tokenizer is not None, "sentences need a tokenizer to name their next tokens"
    anatomy, end_only = state.ablation.anatomy, scan.edited_positions == "end"
    ks = [0, *scan.chosen_ks(anatomy.shape)]
    layers = {layer for layer, _ in scan.ranking[: ks[-1]]}
    replaced = replacements_of(scan, state, layers)
    values = {layer: r.values if r.everywhere else r.values.mean(dim=0) for layer, r in replaced.items()}
    rows = []
    for sentence in scan.sentences:
        for k in ks:
            heads = frozenset(scan.ranking[:k])
            found = next_token_probabilities(anatomy, sentence.token_ids, heads, values, end_only)
            top = found.topk(min(SHOWN_TOKENS, len(found)))
            for rank, (probability, token_id) in enumerate(zip(*map(list, top), strict=True), start=1):
                token = scan.tokenizer.decode([int(token_id)])
                row = {"sentence": sentence.text, "k": k, "rank": rank, "token_id": int(token_id), "token": token}
                rows.append({**row, "probability": float(probability)})
    return pa.Table.from_pylist(rows, KNOCKOUT_EXAMPLES)
