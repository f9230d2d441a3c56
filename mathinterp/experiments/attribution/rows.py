"""The rows of attribution: estimates of the engine, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mathinterp.engine.attribution.estimate import estimate
from mathinterp.engine.attribution.methods import passes_of
from mathinterp.engine.attribution.pairs import places_of
from mathinterp.experiments.attribution.tables import NODE_ATTRIBUTIONS
from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.experiments.attribution import Attribution
    from mathinterp.experiments.base import Subject


def rows_of(scan: Attribution, subject: Subject, prompts: Sequence[TokenizedPrompt]) -> pa.Table:
    """A row for each node and prompt."""
    anatomy = subject.anatomy
    places = places_of(anatomy, scan.neurons)
    values, passes = estimate(
        anatomy, prompts, places, method=scan.method, steps=scan.steps, positions=scan.positions,
        max_tokens=subject.max_tokens,
    )  # fmt: skip
    made = (passes.forwards, passes.backwards)
    expected = tuple(n * len(prompts) for n in passes_of(scan.method, anatomy.shape.n_layers, scan.steps))
    assert made == expected, f"{scan.method} made {made} passes, not {expected}"
    names = [item.prompt.prompt_id for item in prompts]
    return pa.concat_tables([_rows(scan.method, place, values[place].numpy(), names) for place in places])


def _rows(method: str, place: tuple[str, int], values_PU: np.ndarray, names: list[str]) -> pa.Table:
    """U * P rows, unit by unit."""
    (site, layer), (pairs, units) = place, values_PU.shape
    rows = pairs * units
    unit = np.repeat(np.arange(units), pairs)
    columns: dict[str, Any] = {
        "method": pa.repeat(method, rows),
        "node": pa.repeat(site, rows),
        "layer": np.full(rows, layer),
        "head": unit if site == "head" else pa.nulls(rows, pa.int16()),
        "neuron": unit if site == "neuron" else pa.nulls(rows, pa.int32()),
        "prompt_id": pa.array(names).take(pa.array(np.tile(np.arange(pairs), units))),
        "effect": values_PU.T.ravel().astype(np.float32),
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in NODE_ATTRIBUTIONS]
    return pa.Table.from_arrays(arrays, schema=NODE_ATTRIBUTIONS)
