"""Rows of a sweep's neurons: the original's passes once, then each adapter's change of every neuron.

Shape legend: P prompt, K neuron, L layer.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from mathinterp.engine.lens.neurons import EndActivations, FrozenScales, NeuronLens, end_activations
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.tuning.attached import attached
from mathinterp.tuning.sweep_neurons.tables import SWEEP_NEURONS


@dataclass
class SweepNeuronState:
    """What a replica keeps between adapters."""

    subject: Subject
    lens: NeuronLens
    sequences: list[tuple[int, ...]]
    original: EndActivations
    scales: FrozenScales
    target_P: torch.Tensor
    importance: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> P K of the original, on the CPU


def prepare(subject: Subject, target: str) -> SweepNeuronState:
    """The original's passes; ``target``: the token w, "predicted" or "gold"."""
    lens = NeuronLens(subject.anatomy)
    sequences = [prompt.input_ids[: prompt.end + 1] for prompt in subject.prompts]
    original = end_activations(subject.anatomy, sequences)
    target_P = lens.targets(subject.prompts, target, original)
    return SweepNeuronState(subject, lens, sequences, original, lens.frozen_scales(original), target_P)


def adapter_rows(state: SweepNeuronState, adapter: Path, layer: int, rate: float, top: int) -> pa.Table:
    """The ``top`` most enhanced neurons of every prompt under one adapter, that of a layer and a learning rate."""
    with attached(state.subject.anatomy, adapter):
        tuned = end_activations(state.subject.anatomy, state.sequences)
    found = _most_enhanced(state, tuned, top)
    prompts = [prompt.prompt.prompt_id for prompt in state.subject.prompts]
    count = len(found["rank"]) // len(prompts)
    columns = {
        **found,
        "tuned_layer": [layer] * len(found["rank"]),
        "learning_rate": [rate] * len(found["rank"]),
        "prompt_id": [name for name in prompts for _ in range(count)],
    }
    return cast_table(SWEEP_NEURONS, columns)


def _most_enhanced(state: SweepNeuronState, tuned: EndActivations, top: int) -> dict[str, Any]:
    """The ``top`` neurons of each prompt over all layers, prompt by prompt; ties: the lower layer, then neuron."""
    best: dict[str, torch.Tensor] = {}
    for layer in range(state.subject.anatomy.shape.n_layers):
        directions_KV = state.lens.directions(layer)
        if layer not in state.importance:
            side = state.lens.layer(layer, state.original, state.scales, state.target_P, directions_KV)
            state.importance[layer] = side.neurons_PK.float().cpu()
        side = state.lens.layer(layer, tuned, state.scales, state.target_P, directions_KV)
        importance_PK, tuned_PK = state.importance[layer], side.neurons_PK.float().cpu()
        prompts, neurons = importance_PK.shape
        here = {
            "change": tuned_PK - importance_PK,
            "layer": torch.full((prompts, neurons), layer),
            "neuron": torch.arange(neurons).expand(prompts, -1),
            "importance": importance_PK,
            "tuned_importance": tuned_PK,
            "coefficient": state.original.coefficients_PK[layer].float().cpu(),
            "tuned_coefficient": tuned.coefficients_PK[layer].float().cpu(),
        }
        joined = {name: torch.cat([best[name], here[name]], dim=1) if best else here[name] for name in here}
        order_PT = torch.sort(joined["change"], dim=1, descending=True, stable=True).indices[:, :top]
        best = {name: values.gather(1, order_PT) for name, values in joined.items()}
    ranks_PT = torch.arange(1, best["change"].shape[1] + 1).expand(best["change"].shape[0], -1)
    return {name: values.flatten().numpy() for name, values in {**best, "rank": ranks_PT}.items()}
