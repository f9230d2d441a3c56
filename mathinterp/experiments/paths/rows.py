"""How a path scan's rows are computed: clean passes over X_r and X_c, the choice of pairs, and one node after another.

Shape legend: P pair, N node, L layer, H head, D model width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.pairs import CleanPairs, Ends, ends_of, pairs_of
from mathinterp.engine.paths.attribution import direct_shares, first_order
from mathinterp.engine.paths.frozen import Measures, PathEngine, Scorer
from mathinterp.engine.paths.nodes import Node, Receiver
from mathinterp.engine.paths.patching import EndPatching, EverywherePatching
from mathinterp.engine.paths.receivers import ReceiverEngine
from mathinterp.experiments.adaptive.order import block_of
from mathinterp.experiments.answered import kept_pairs
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.paths.tables import ATTRIBUTION_SCAN, PATH_DISTRACTORS, PATH_PAIRS, PATH_SCAN
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp

if TYPE_CHECKING:
    from mathinterp.experiments.base import Shard, Subject
    from mathinterp.experiments.paths import Paths


@dataclass
class PathState:
    """What a replica keeps between shards: of the kept pairs, but for ``pairs_table``."""

    anatomy: Anatomy
    names: pa.Array  # prompt ids
    original: Ends
    engine: PathEngine | EndPatching | EverywherePatching | ReceiverEngine
    pairs_table: pa.Table
    notes: dict[str, Any]
    distracted: PathState | None = None  # the kept pairs that have a distractor, with that scored for the answer
    blocks: Callable[[int, int], PathState] | None = None  # of adaptive scans: some pairs of the random order


def prepare(scan: Paths, subject: Subject) -> PathState:
    """Clean passes over X_r and X_c, the choice of pairs, and the engine."""
    anatomy = subject.anatomy
    pairs = pairs_of(subject.prompts)
    ends = [ends_of(anatomy, side, subject.max_tokens) for side in (pairs.original, pairs.counterfactual)]
    gold_P = torch.from_numpy(pairs.gold_P).to(anatomy.device)
    with torch.no_grad():
        original, counterfactual = (Scorer(anatomy)(side.final_PD, gold_P) for side in ends)
    correct_P = (original.predicted == gold_P).cpu().numpy()
    ids = [prompt.prompt.prompt_id for prompt in subject.prompts]
    names = pa.array(ids)
    if scan.reused is None:
        kept_P = kept_pairs(correct_P, scan.keep_all)
    else:  # those whose rows are taken over, whatever a near tie of these passes says
        assert scan.reused.chosen is not None
        kept_P = np.isin(ids, scan.reused.chosen)
    keep = np.flatnonzero(kept_P)
    table = _pairs_table(names, correct_P, kept_P, original, counterfactual)
    clean = CleanPairs(pairs, *ends)
    kept = clean.chosen(keep)
    engine = _engine(scan, anatomy, kept, subject.max_tokens)
    notes: dict[str, Any] = {
        "pairs": len(pairs),
        "pairs_kept": len(keep),
        "forward_deviation": engine.deviation(),
        "noise_floor": engine.noise_floor(),
    }
    state = PathState(anatomy, names.take(pa.array(keep)), kept.original, engine, table, notes)
    if scan.decide is None:
        state.distracted = _distracted(scan, subject, clean, keep, state)
    if not scan.by_blocks:
        return state
    if scan.reused is not None:
        notes["reused"] = {"cells": scan.reused.cells, "of": scan.reused.of}
    order_P = scan.order([subject.prompts[int(i)] for i in keep])

    @lru_cache(maxsize=2)  # near the end of a block, nodes of the next one run too
    def block(start: int, stop: int) -> PathState:
        at = keep[block_of(order_P, start, stop)]
        some = clean.chosen(at)
        engine = _engine(scan, anatomy, some, subject.max_tokens)
        return PathState(anatomy, names.take(pa.array(at)), some.original, engine, table, {})

    state.blocks = block
    return state


def _distracted(
    scan: Paths, subject: Subject, clean: CleanPairs, keep: np.ndarray, state: PathState
) -> PathState | None:
    """The same engine over the kept pairs with distractors, which it scores in place of the answers."""
    found = {i: item.distractor.token_id for i, item in enumerate(subject.prompts) if item.distractor is not None}
    at = np.array([i for i in keep if i in found], int)
    if not len(at):
        return None
    chosen = clean.chosen(at)
    chosen = replace(chosen, pairs=replace(chosen.pairs, gold_P=np.array([found[i] for i in at])))
    engine = _engine(scan, state.anatomy, chosen, subject.max_tokens)
    names = pa.array([subject.prompts[i].prompt.prompt_id for i in at])
    return PathState(state.anatomy, names, chosen.original, engine, state.pairs_table, {})


def block_rows(scan: Paths, state: PathState, shard: Shard) -> pa.Table:
    """The shard's nodes patched, on the pairs of its block."""
    assert state.blocks is not None
    block = state.blocks(*shard.work["prompts"])
    parts = []
    for layer, members in itertools.groupby(scan.nodes_in(shard), key=lambda node: node[0]):
        nodes: list[Node] = [Mlp(layer) if head is None else Head(layer, head) for _, head in members]
        parts.append(layer_rows(scan, block, nodes, block.engine.patched(nodes, scan.freeze)))
    return pa.concat_tables(parts)


def distractor_rows(scan: Paths, state: PathState, nodes: Sequence[Node]) -> pa.Table:
    """Each of ``nodes`` patched, on every kept pair with a distractor, whose token is scored."""
    if state.distracted is None:
        return PATH_DISTRACTORS.empty_table()
    engine = state.distracted.engine
    before, after = (m.numpy() for m in (engine.baseline, engine.patched(nodes, scan.freeze)))
    columns = {
        "logit_original": np.broadcast_to(before[0], after[0].shape),
        "logit_patched": after[0],
        "logprob_change": after[1] - before[1],
    }
    return _node_table(PATH_DISTRACTORS, state.distracted.names, nodes, columns)


def _engine(
    scan: Paths, anatomy: Anatomy, clean: CleanPairs, max_tokens: int | None
) -> PathEngine | EndPatching | EverywherePatching | ReceiverEngine:
    if scan.receiver is not None:
        return ReceiverEngine(anatomy, clean, Receiver.parse(scan.receiver), max_rows=max_tokens)
    if scan.positions == "all":
        return EverywherePatching(anatomy, clean.pairs, clean.original, max_tokens)
    engine = EndPatching if scan.freeze == "none" else PathEngine
    return engine(anatomy, clean, max_rows=max_tokens)


def layer_rows(scan: Paths, state: PathState, nodes: Sequence[Node], patched: Measures) -> pa.Table:
    """Each of ``nodes`` patched, on every kept pair."""
    before, after = (m.numpy() for m in (state.engine.baseline, patched))
    logit, logprob, centred = (a - b for a, b in zip(after, before, strict=True))
    probability = np.exp(after[1]) - np.exp(before[1])
    relative = dict(zip(("logit", "logprob", "centred"), before, strict=True))
    change = {"logit": logit, "logprob": logprob, "centred": centred, "probability": probability}[scan.effect]
    if scan.effect in ("logit", "centred"):
        scale = relative[scan.effect]
        change = change / (np.abs(scale) if scan.denominator == "absolute" else scale)
    columns = {
        "logit_original": np.broadcast_to(before[0], logit.shape),
        "logit_patched": after[0],
        "effect": change,
        "logprob_change": logprob,
        "probability_change": probability,
        "centred_change": centred,
    }
    return _node_table(PATH_SCAN, state.names, nodes, columns)


def attribution_rows(scan: Paths, state: PathState, nodes: dict[int, list[Node]]) -> pa.Table:
    """First-order and direct shares of the nodes, on every kept pair."""
    engine = state.engine
    assert isinstance(engine, PathEngine | EndPatching)
    estimated = first_order(engine, scan.freeze)
    direct, _ = direct_shares(state.anatomy, state.original, engine.gold_P)
    places = [node for members in nodes.values() for node in members]
    columns = {
        name: np.stack(
            [
                (shares.heads_LHP[node] if isinstance(node, Head) else shares.mlps_LP[node.layer]).cpu().numpy()
                for node in places
            ]
        )
        for name, shares in (("first_order", estimated), ("direct", direct))
    }
    return _node_table(ATTRIBUTION_SCAN, state.names, places, columns)


def _node_table(schema: pa.Schema, names: pa.Array, nodes: Sequence[Node], columns: dict[str, np.ndarray]) -> pa.Table:
    """Rows of ``schema``, node by node: N * P of them, from columns of N P."""
    pairs = len(names)
    heads = [node.head if isinstance(node, Head) else None for node in nodes]
    filled: dict[str, Any] = {name: values.ravel().astype(np.float32) for name, values in columns.items()}
    filled["node"] = np.repeat(["mlp" if head is None else "head" for head in heads], pairs)
    filled["layer"] = np.repeat([node.layer for node in nodes], pairs)
    filled["head"] = [head for head in heads for _ in range(pairs)]
    filled["prompt_id"] = names.take(pa.array(np.tile(np.arange(pairs), len(nodes))))
    return cast_table(schema, filled)


def _pairs_table(
    names: pa.Array, correct_P: np.ndarray, kept_P: np.ndarray, original: Measures, counterfactual: Measures
) -> pa.Table:
    own, other = original.numpy(), counterfactual.numpy()
    columns = [names, correct_P, kept_P, own[0], other[0], own[1], other[1], original.predicted.cpu().numpy()]
    schema = PATH_PAIRS
    return pa.Table.from_arrays([pa.array(c).cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
