"""How a neuron scan's rows are computed: of one prompt, or mean and spread over the prompts of an operation.

Shape legend: P prompt, K neuron, U unit (neuron, head, or 1 for a block), k neurons kept of a layer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.intervention import zeroed
from mathinterp.engine.lens.neurons import (
    EndActivations,
    FrozenScales,
    LayerImportance,
    NeuronLens,
    end_activations,
    layer_importances,
    lenses_of,
)
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.experiments.neurons.against import Against, OtherModel
from mathinterp.experiments.neurons.tables import NEURON_SCAN, NEURON_TARGETS
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import DTYPES, load
from mathinterp.models.units import Head
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass
class NeuronState:
    """What a replica keeps between shards; lenses: one for each card, home first."""

    prompts: Sequence[TokenizedPrompt]
    lenses: list[NeuronLens]
    original: EndActivations
    scales: FrozenScales
    target_P: torch.Tensor
    intervened: EndActivations | None
    intervened_lenses: list[NeuronLens]  # the original's, unless another model is compared

    @property
    def tuned(self) -> bool:
        """Whether another model is compared: then change = tuned - original, else original - intervened."""
        return self.intervened_lenses is not self.lenses

    def of_prompts(self, first: int, stop: int) -> "NeuronState":
        """The state of some of the prompts."""
        rows = slice(first, stop)
        return replace(
            self,
            prompts=self.prompts[rows],
            original=self.original.rows(rows),
            scales=self.scales.rows(rows),
            target_P=self.target_P[rows],
            intervened=None if self.intervened is None else self.intervened.rows(rows),
        )


def prepare(subject: Subject, target: str, against: Against | None, other: OtherModel | None) -> NeuronState:
    """The passes over all prompts, original and intervened, and the frozen scales of the norms."""
    anatomy, prompts = subject.anatomy, subject.prompts
    lenses = lenses_of(anatomy)
    sequences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
    original = end_activations(anatomy, sequences)
    target_P = lenses[0].targets(prompts, target, original)
    intervened, other_lenses = None, lenses
    if other is not None:
        other_lenses = lenses_of(_loaded(other, anatomy))
        intervened = end_activations(other_lenses[0].anatomy, sequences)
    elif against is not None and against.heads:
        intervened = end_activations(anatomy, sequences, zeroed(anatomy, [Head(*head) for head in against.heads]))
    elif against is not None:
        intervened = end_activations(anatomy, [_counterfactual(prompt) for prompt in prompts])
    scales = lenses[0].frozen_scales(original)
    return NeuronState(prompts, lenses, original, scales, target_P, intervened, other_lenses)


def _loaded(other: OtherModel, anatomy: Anatomy) -> Anatomy:
    """The other model, in the original's dtype and on its devices."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == anatomy.dtype)
    loaded = load(replace(other.spec, dtype=dtype), anatomy.device, anatomy.cards[1:])
    if loaded.fingerprint != other.fingerprint:
        raise UserError(
            f"model '{other.label}' is not the driver's here (fingerprint {loaded.fingerprint}, driver"
            f" {other.fingerprint}); all nodes need the same files"
        )
    return loaded.anatomy


def _counterfactual(prompt: TokenizedPrompt) -> tuple[int, ...]:
    assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
    return prompt.counterfactual_ids[: prompt.end + 1]


# ---- one layer under both conditions ----


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


def sides_of(state: NeuronState, layer: int) -> Sides:
    """The layer under both conditions."""
    runs = [state.original] if state.intervened is None else [state.original, state.intervened]
    if state.tuned:  # one model after the other
        layers = [
            layer_importances(lenses, layer, [run], state.scales, state.target_P)[0]
            for lenses, run in zip((state.lenses, state.intervened_lenses), runs, strict=True)
        ]
    else:
        layers = layer_importances(state.lenses, layer, runs, state.scales, state.target_P)
    coefficients = [run.coefficients_PK[layer].float() for run in runs]
    return Sides(layers, [side.neurons_PK.float() for side in layers], coefficients)


# ---- rows ----


def layer_rows(state: NeuronState, layer: int, rank: str, top: int | None) -> pa.Table:
    """One layer: the prompts' first ``top`` neurons (None: all), heads and blocks, and every neuron's summaries."""
    sides = sides_of(state, layer)
    parts = [neuron_rows(state, layer, sides, rank, top), *block_rows(state.prompts, layer, sides)]
    return pa.concat_tables([*parts, *summaries(state.prompts, layer, sides, state.tuned)])


def neuron_rows(state: NeuronState, layer: int, sides: Sides, rank: str, top: int | None) -> pa.Table:
    """Per prompt the layer's first neurons (ties: the lower number first), or all in order."""
    prompts, neurons = sides.importance[0].shape
    if top is None:
        chosen_Pk = torch.arange(neurons, device=sides.importance[0].device).expand(prompts, -1)
    else:
        order = torch.sort(_rank_key(sides, rank, state.tuned), dim=1, descending=True, stable=True).indices
        chosen_Pk = order[:, :top]
    values = {
        name: values_PK.gather(1, chosen_Pk).cpu().flatten().numpy() for name, values_PK in sides.columns().items()
    }
    prompt_n = np.repeat(np.arange(prompts), chosen_Pk.shape[1])
    return prompt_rows("neuron", layer, chosen_Pk.cpu().flatten().numpy(), state.prompts, prompt_n, values)


def _rank_key(sides: Sides, rank: str, tuned: bool) -> torch.Tensor:
    """What a prompt's neurons are ranked by, in float32 as stored: the view does the same over all layers."""
    importance_PK = sides.importance[0]
    change_PK = importance_PK if len(sides.importance) == 1 else change_of(sides.importance, tuned)
    if rank == "abs":
        return change_PK.abs()
    if rank == "ratio":
        return torch.where(importance_PK == 0, 0.0, change_PK / importance_PK.abs())
    return change_PK


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


def target_rows(state: NeuronState) -> pa.Table:
    """The token w of each prompt, and what the two sides say at END."""
    parts = []
    for condition, lens, activations in (
        ("original", state.lenses[0], state.original),
        ("intervened", state.intervened_lenses[0], state.intervened),
    ):
        if activations is None:
            continue
        logits_PV = lens.logits(activations)
        predicted = logits_PV.argmax(dim=-1).cpu().numpy()
        logprob = logits_PV.log_softmax(dim=-1).gather(1, state.target_P[:, None])[:, 0]
        gold = np.array([prompt.scored[0].token_id for prompt in state.prompts])
        columns = {
            "prompt_id": [prompt.prompt.prompt_id for prompt in state.prompts],
            "condition": [condition] * len(state.prompts),
            "target_id": state.target_P.cpu().numpy(),
            "logprob": logprob.float().cpu().numpy(),
            "predicted_id": predicted,
            "correct": predicted == gold,
        }
        parts.append(cast_table(NEURON_TARGETS, columns))
    return pa.concat_tables(parts)
