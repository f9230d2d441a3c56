"""Rows of the neuron scan: of one prompt, or mean and spread over the prompts of an operation.

Shape legend: P prompt, K neuron, U unit (neuron, head, or 1 for a whole block).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.lens.neurons import LayerImportance
from mathinterp.experiments.neurons.tables import NEURON_SCAN
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Sides:
    """One layer's numbers, original first and intervened (if any) second; P K each, float32 as they are stored."""

    layers: list[LayerImportance]
    importance: list[torch.Tensor]
    coefficient: list[torch.Tensor]

    def columns(self) -> dict[str, torch.Tensor]:
        """Stored column -> its numbers."""
        found: dict[str, torch.Tensor] = {}
        for prefix, importance, coefficient in zip(
            ("", "intervened_"), self.importance, self.coefficient, strict=False
        ):
            found |= {f"{prefix}importance": importance, f"{prefix}coefficient": coefficient}
        return found


def change_of(pair: Sequence[torch.Tensor], tuned: bool) -> torch.Tensor:
    """original - intervened, or tuned - original."""
    return pair[1] - pair[0] if tuned else pair[0] - pair[1]


def block_rows(prompts: Sequence[TokenizedPrompt], layer: int, sides: Sides) -> list[pa.Table]:
    """Per prompt: every head, attention and the MLP as wholes, and the sum over the layer's neurons."""
    blocks = {
        "head": [side.heads_PH for side in sides.layers],
        "attention": [side.attention_P[:, None] for side in sides.layers],
        "ffn": [side.ffn_P[:, None] for side in sides.layers],
        "neurons": [side.neurons_PK.sum(dim=1, keepdim=True) for side in sides.layers],
    }
    parts = []
    for node, pair in blocks.items():
        count, units = pair[0].shape
        values = {
            name: values_PU.float().cpu().flatten().numpy()
            for name, values_PU in zip(("importance", "intervened_importance"), pair, strict=False)
        }
        unit_n, prompt_n = np.tile(np.arange(units), count), np.repeat(np.arange(count), units)
        parts.append(prompt_rows(node, layer, unit_n, prompts, prompt_n, values))
    return parts


def prompt_rows(
    node: str,
    layer: int,
    unit_n: np.ndarray,
    prompts: Sequence[TokenizedPrompt],
    prompt_n: np.ndarray,
    values: dict[str, np.ndarray],
) -> pa.Table:
    """Rows of one prompt each."""
    names = pa.array([prompt.prompt.prompt_id for prompt in prompts], pa.string())
    operations = pa.array([prompt.prompt.operation for prompt in prompts], pa.string())
    columns = {"prompt_id": names.take(pa.array(prompt_n)), "operation": operations.take(pa.array(prompt_n)), **values}
    return _table(len(unit_n), {"node": node, "layer": layer, "n": 1}, {"unit": unit_n, **columns})


def summaries(prompts: Sequence[TokenizedPrompt], layer: int, sides: Sides, tuned: bool) -> list[pa.Table]:
    """Mean and spread of every neuron over the prompts of each operation, summed in float64."""
    columns = sides.columns()
    if len(sides.importance) == 2:
        columns["change"] = change_of(sides.importance, tuned)
        columns["coefficient_change"] = change_of(sides.coefficient, tuned)
    operations = [prompt.prompt.operation for prompt in prompts]
    parts = []
    for operation in dict.fromkeys(operations):
        rows = torch.tensor([i for i, other in enumerate(operations) if other == operation])
        values = {}
        for name, values_PK in columns.items():
            part_nK = values_PK[rows.to(values_PK.device)].double()
            values[name] = part_nK.mean(dim=0).cpu().numpy()
            values[f"{name}_std"] = part_nK.std(dim=0, correction=0).cpu().numpy()
        same = {"node": "neuron", "layer": layer, "n": len(rows), "operation": operation}
        neurons = len(values["importance"])
        parts.append(_table(neurons, same, {"unit": np.arange(neurons), **values}))
    return parts


def _table(length: int, same: dict[str, Any], columns: dict[str, Any]) -> pa.Table:
    """Rows of NEURON_SCAN from columns of one value and of many; columns not given are null."""
    arrays = []
    for column in NEURON_SCAN:
        if column.name in columns:
            arrays.append(pa.array(columns[column.name]).cast(column.type))
        elif same.get(column.name) is not None:
            arrays.append(pa.repeat(pa.scalar(same[column.name], column.type), length))
        else:
            arrays.append(pa.nulls(length, column.type))
    return pa.Table.from_arrays(arrays, schema=NEURON_SCAN)
