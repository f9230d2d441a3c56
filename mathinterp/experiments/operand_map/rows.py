"""The rows of an operand map: of one layer's units, of the pairs, and of the kept neurons.

Shape legend: P pair, U unit, H head, K neuron, L layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.choose import Engine, build_engine, packing_deviation
from mathinterp.engine.intervention import Tokens
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.scores import Scores
from mathinterp.experiments.ablated import AblationState, score_rows
from mathinterp.experiments.columns import BASELINE, cast_table
from mathinterp.experiments.operand_map.activations import LayerMaps
from mathinterp.experiments.operand_map.grid import Grid, grid_of
from mathinterp.experiments.operand_map.keeping import Keeping, effects, kept_neurons
from mathinterp.experiments.operand_map.measures import Measured, Measures
from mathinterp.experiments.operand_map.tables import (
    FAMILIES,
    MAP_BITS,
    OPERAND_KEEP_SCAN,
    OPERAND_PAIRS,
    OPERAND_UNIT_MAPS,
)
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.experiments.base import Subject
    from mathinterp.experiments.operand_map import OperandMap

KEPT_AT_ONCE = 4  # interventions of one batch


@dataclass
class MapState:
    """What a replica keeps between shards."""

    scan: OperandMap
    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]  # in the grid's order, the first answer token alone scored
    grid: Grid
    engine: Engine
    maps: LayerMaps
    measures: Measures
    effect_LK: torch.Tensor
    size_LK: torch.Tensor
    notes: dict[str, Any]

    @cached_property
    def keeping(self) -> Keeping:
        """The means of the deep layers; asked for by the shard of kept neurons alone."""
        deep = self.scan.deep(self.anatomy.shape)
        return Keeping(self.anatomy, self.engine, self.maps.ends, deep, self.scan.ablation)


def prepare(scan: OperandMap, subject: Subject) -> MapState:
    """One clean pass on trees of shared prefixes; one forward and backward pass over the sample of pairs."""
    anatomy, grid = subject.anatomy, grid_of(subject.prompts)
    ordered = [subject.prompts[index] for index in grid.order_P]
    prompts = [replace(item, scored=item.scored[:1], distractor=None) for item in ordered]
    ends = Tokens.ends(prompts)
    engine = build_engine(
        anatomy, prompts, private_from=ends.token_n.tolist(), edits_per_batch=KEPT_AT_ONCE,
        max_tokens=subject.max_tokens, compiled=False,
    )  # fmt: skip
    token_P = torch.tensor([prompt.scored[0].token_id for prompt in prompts])
    sample = np.sort(np.random.default_rng(scan.map_seed).permutation(len(prompts))[: scan.sample])
    effect_LK, size_LK = effects(anatomy, [prompts[index] for index in sample], scan.ablation, subject.max_tokens)
    notes: dict[str, Any] = {
        "engine": engine.name,
        "packing_deviation": packing_deviation(engine, anatomy, prompts),
        "complete": grid.complete,
        "tokens": sum(len(prompt.fed) for prompt in prompts),
    }
    if isinstance(engine, PackedEngine):
        notes["nodes"] = engine.forest.n_nodes
    measures = Measures(grid, anatomy.device, anatomy.dtype, scan.shuffles, scan.map_seed)
    maps = LayerMaps(anatomy, engine, ends, token_P)
    return MapState(scan, anatomy, prompts, grid, engine, maps, measures, effect_LK, size_LK, notes)


# ---- units ----


def layer_rows(state: MapState, layer: int) -> pa.Table:
    """A row for each measure of each head, and for each neuron."""
    parts = []
    for measure, values_HP in state.maps.heads(layer).items():
        same = {"node": "head", "measure": measure, "layer": layer}
        parts.append(_unit_rows(state, same, values_HP, np.arange(len(values_HP)), {}))
    values_KP, direct_K = state.maps.neurons(layer)
    more = {
        "direct": direct_K.cpu().numpy(),
        "effect": state.effect_LK[layer].cpu().numpy(),
        "effect_size": state.size_LK[layer].cpu().numpy(),
    }
    same = {"node": "neuron", "measure": "coefficient", "layer": layer}
    kept = None if state.scan.every_map else state.scan.maps
    parts.append(_unit_rows(state, same, values_KP, kept, more))
    return pa.concat_tables(parts)


def _unit_rows(
    state: MapState,
    same: dict[str, Any],
    values_UP: torch.Tensor,
    kept: np.ndarray | int | None,
    more: dict[str, np.ndarray],
) -> pa.Table:
    """Rows of one node and measure.

    Args:
        kept: units whose maps are kept; a number: see ``_best``; None: all.
    """
    _check_finite(state, same, values_UP)
    measured = state.measures.of(values_UP, state.anatomy.shape.d_head if same["node"] == "head" else 1)
    units = len(values_UP)
    columns = measured.columns | more | _named(state, measured)
    if not isinstance(kept, np.ndarray):
        kept = np.arange(units) if kept is None else _best(state, measured, kept)
    columns["map"] = _lists(values_UP, np.sort(kept))
    columns[same["node"]] = np.arange(units)
    arrays = []
    for field in OPERAND_UNIT_MAPS:
        if field.name in same:
            arrays.append(pa.repeat(pa.scalar(same[field.name], field.type), units))
        elif field.name not in columns:
            arrays.append(pa.nulls(units, field.type))
        else:
            column = columns[field.name]
            if isinstance(column, np.ndarray) and pa.types.is_floating(field.type):
                column = pa.array(column.astype(np.float32), mask=np.isnan(column))
            arrays.append(pa.array(column).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=OPERAND_UNIT_MAPS)


def _best(state: MapState, measured: Measured, count: int) -> np.ndarray:
    """The units that a heuristic explains best, families in turn: the first of each, then the second, and so on.

    Constant units come last.
    """
    gain_U = np.nan_to_num(measured.columns["auroc"] - measured.columns["shuffled"], nan=-1.0)
    family_U = np.where(measured.best_U < 0, -1, state.measures.heuristics.family_C[measured.best_U])
    order = np.argsort(-gain_U, kind="stable")
    turn = {int(unit): int((family_U[order[:place]] == family_U[unit]).sum()) for place, unit in enumerate(order)}
    return np.array(
        sorted(turn, key=lambda unit: (family_U[unit] < 0, turn[unit], -gain_U[unit], unit))[:count], np.int64
    )


def _named(state: MapState, measured: Measured) -> dict[str, Any]:
    """The best heuristic of each unit in words; null where there is none."""
    heuristics, none_U = state.measures.heuristics, measured.best_U < 0
    families = [FAMILIES[number] for number in heuristics.family_C[measured.best_U]]
    return {
        "heuristic": pa.array([heuristics.labels[best] for best in measured.best_U], mask=none_U),
        "family": pa.array(families, mask=none_U),
        "high": pa.array(measured.columns.pop("high"), mask=none_U),
    }


def _lists(values_UP: torch.Tensor, kept: np.ndarray) -> pa.Array:
    """The kept maps as lists in float32, rounded to MAP_BITS significant bits; null elsewhere."""
    pairs = values_UP.shape[1]
    chosen = values_UP[torch.from_numpy(kept).to(values_UP.device)]
    flat = rounded(chosen.float().cpu().numpy()).ravel()
    lengths = np.zeros(len(values_UP), np.int64)
    lengths[kept] = pairs
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(flat), mask=pa.array(lengths == 0))


def rounded(values: np.ndarray, bits: int = MAP_BITS) -> np.ndarray:
    """float32 at the nearest number of ``bits`` significant bits: off by at most 2^-bits of itself."""
    mantissa, exponent = np.frexp(values)
    nearest: np.ndarray = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
    return nearest.astype(np.float32)


def _check_finite(state: MapState, same: dict[str, Any], values_UP: torch.Tensor) -> None:
    bad = (~values_UP.isfinite()).nonzero()
    if len(bad):
        unit, pair = (int(index) for index in bad[0])
        raise ArithmeticError(
            f"{same['node']} {same['layer']}.{unit}: {same['measure']} is {float(values_UP[unit, pair])} on prompt"
            f" {state.prompts[pair].prompt.prompt_id}"
        )


# ---- pairs, and the first answer token ----


def pair_rows(state: MapState) -> pa.Table:
    """The grid, place by place."""
    grid = state.grid
    names = [prompt.prompt.prompt_id for prompt in state.prompts]
    columns = {
        "place": np.arange(len(grid)), "prompt_id": names, "a": grid.a_P, "b": grid.b_P, "result": grid.result_P,
        "tokens": [prompt.end + 1 for prompt in state.prompts],
    }  # fmt: skip
    return cast_table(OPERAND_PAIRS, columns)


def baseline_rows(state: MapState) -> pa.Table:
    """The first answer token under the unchanged model."""
    return _scores(state, state.engine.baseline(), BASELINE, {})


def keep_rows(state: MapState) -> pa.Table:
    """None, the first k and k random neurons kept, for each k."""
    scan, shape = state.scan, state.anatomy.shape
    choices = [("top", 0), *((ranking, k) for ranking in ("top", "random") for k in scan.chosen_ks(shape))]
    kept = [
        {layer: kept_neurons(state.size_LK[layer], ranking, k, scan.map_seed, layer) for layer in scan.deep(shape)}
        for ranking, k in choices
    ]
    scores = state.keeping.run(kept)
    rankings, ks = zip(*choices, strict=True)
    return _scores(state, scores, OPERAND_KEEP_SCAN, {"ranking": list(rankings), "k": list(ks)})


def _scores(state: MapState, scores: Scores, schema: pa.Schema, ids: dict[str, list[Any]]) -> pa.Table:
    return score_rows(AblationState(state.anatomy, state.prompts, state.engine, None, {}), scores, schema, ids)
