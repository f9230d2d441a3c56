"""The rows of circuits: the engine's metric under each of them.

Shape legend: C different circuit, P pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mathinterp.engine.attribution.circuit import WHOLE, Circuit, circuit_metrics, mean_activations, places_in
from mathinterp.experiments.circuit.ranking import ORDERINGS, nothing
from mathinterp.experiments.circuit.tables import CIRCUIT_METRIC
from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.engine.attribution.pairs import Values
    from mathinterp.experiments.base import Subject
    from mathinterp.experiments.circuit import Circuit as CircuitScan

Row = tuple[str, float, int]  # ordering, fraction, nodes


@dataclass
class CircuitState:
    """What a replica keeps between shards.

    rows: those of one prompt, each with the number of its circuit in ``circuits``.
    """

    subject: Subject
    circuits: list[Circuit]
    rows: list[tuple[Row, int]]
    means: Values
    notes: dict[str, Any] = field(default_factory=dict)


def prepare(scan: CircuitScan, subject: Subject) -> CircuitState:
    """Every different circuit once."""
    circuits, rows = different_circuits(scan, nothing(subject.anatomy.shape))
    means: Values = {}
    if scan.ablation == "mean":
        means = mean_activations(subject.anatomy, subject.prompts, places_in(circuits), subject.max_tokens)
    forwards = len(circuits) + (scan.ablation != "zero")
    return CircuitState(subject, circuits, rows, means, {"forwards_per_prompt": forwards})


def different_circuits(scan: CircuitScan, empty: Circuit) -> tuple[list[Circuit], list[tuple[Row, int]]]:
    """The circuits without repeats, and each row's circuit."""
    scored = scan.ranked.scored
    circuits: list[Circuit] = [empty, WHOLE]
    rows = [(("empty", 0.0, 0), 0), (("full", 1.0, scored), 1)]
    known = {(ordering, scored): 1 for ordering in ORDERINGS}
    for ordering in ORDERINGS:
        for fraction, count in scan.counts():
            key = ("" if count == 0 else ordering, count)
            if key not in known:
                known[key] = len(circuits)
                circuits.append(scan.ranked.first(count, ordering))
            rows.append(((ordering, fraction, count), known[key]))
    return circuits, rows


def rows_of(scan: CircuitScan, state: CircuitState, prompts: Sequence[TokenizedPrompt]) -> pa.Table:
    """A row for each ordering, fraction and prompt."""
    subject, scores = state.subject, scan.ranked
    metric_CP = circuit_metrics(
        subject.anatomy, prompts, state.circuits, scan.ablation, state.means, subject.max_tokens
    )
    names = [item.prompt.prompt_id for item in prompts]
    many, rows = len(prompts), len(state.rows) * len(prompts)
    columns: dict[str, Any] = {
        "ranking_run": pa.repeat(scores.source, rows),
        "method": pa.repeat(scores.method, rows),
        "level": pa.repeat(scan.level, rows),
        "ablation": pa.repeat(scan.ablation, rows),
        "ordering": [ordering for (ordering, _, _), _ in state.rows for _ in range(many)],
        "fraction": [fraction for (_, fraction, _), _ in state.rows for _ in range(many)],
        "nodes": [count for (_, _, count), _ in state.rows for _ in range(many)],
        "prompt_id": names * len(state.rows),
        "metric": np.concatenate([metric_CP[number] for _, number in state.rows]).astype(np.float32),
    }
    return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in CIRCUIT_METRIC], schema=CIRCUIT_METRIC)
