"""Comparative Neuron Analysis of a layer sweep: the original against the model with each layer's LoRA.

Paper A section 5, method.md sections 5 and 6. change = tuned - original, both under the original's scales; a LoRA in
attention leaves the value vectors alone, so neurons mean the same in all. Per prompt the neurons of largest change are
kept, all layers ranked together. One shard an adapter; the original's side is computed once a replica.

Shape legend: P prompt, K neuron, L layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch

from mathinterp.engine.lens.neurons import EndActivations, FrozenScales, NeuronLens, end_activations
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.neurons import TARGETS
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.tuning.attached import attached
from mathinterp.tuning.lora_sweep import adapter_folder
from mathinterp.tuning.sweep_neurons.tables import SWEEP_NEURONS, TABLES

TOP = 50


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


@dataclass(frozen=True)
class SweepNeurons(Experiment):
    """Coefficients of the most enhanced neurons under each adapter of a sweep.

    sweep: its run id. trials: (layer, learning rate) of the adapters, which are in ``folder``.
    top: neurons a prompt. target: the token w, "predicted" by the original model or "gold".
    """

    sweep: str
    trials: tuple[tuple[int, float], ...]
    folder: str
    top: int = TOP
    target: str = "predicted"

    name: ClassVar[str] = "sweep_neurons"
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UserError(f"--target '{self.target}' is not known; take one of {', '.join(TARGETS)}")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; the sweep's run id stands for the adapters."""
        return {
            "sweep": self.sweep,
            "trials": [list(trial) for trial in self.trials],
            "top": self.top,
            "target": self.target,
            "change": "tuned - original",
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """One an adapter."""
        return [
            Shard("sweep_neurons", index, {"layer": layer, "learning_rate": rate})
            for index, (layer, rate) in enumerate(self.trials)
        ]

    def prepare(self, subject: Subject) -> SweepNeuronState:
        """The original's passes."""
        lens = NeuronLens(subject.anatomy)
        sequences = [prompt.input_ids[: prompt.end + 1] for prompt in subject.prompts]
        original = end_activations(subject.anatomy, sequences)
        if self.target == "gold":
            gold = [prompt.scored[0].token_id for prompt in subject.prompts]
            target_P = torch.tensor(gold, device=subject.anatomy.device)
        else:
            target_P = lens.logits(original).argmax(dim=-1)
        return SweepNeuronState(subject, lens, sequences, original, lens.frozen_scales(original), target_P)

    def run(self, state: SweepNeuronState, shard: Shard) -> pa.Table:
        """Rows of one adapter."""
        layer, rate = shard.work["layer"], shard.work["learning_rate"]
        with attached(state.subject.anatomy, adapter_folder(self.folder, layer, rate)):
            tuned = end_activations(state.subject.anatomy, state.sequences)
        found = self._most_enhanced(state, tuned)
        prompts = [prompt.prompt.prompt_id for prompt in state.subject.prompts]
        count = len(found["rank"]) // len(prompts)
        columns = {
            **found,
            "tuned_layer": [layer] * len(found["rank"]),
            "learning_rate": [rate] * len(found["rank"]),
            "prompt_id": [name for name in prompts for _ in range(count)],
        }
        arrays = [pa.array(columns[column.name]).cast(column.type) for column in SWEEP_NEURONS]
        return pa.Table.from_arrays(arrays, schema=SWEEP_NEURONS)

    def _most_enhanced(self, state: SweepNeuronState, tuned: EndActivations) -> dict[str, Any]:
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
            order_PT = torch.sort(joined["change"], dim=1, descending=True, stable=True).indices[:, : self.top]
            best = {name: values.gather(1, order_PT) for name, values in joined.items()}
        ranks_PT = torch.arange(1, best["change"].shape[1] + 1).expand(best["change"].shape[0], -1)
        return {name: values.flatten().numpy() for name, values in {**best, "rank": ranks_PT}.items()}


def missing_adapters(folder: str, trials: Sequence[tuple[int, float]]) -> list[Path]:
    """Adapters of finished trials that are not where they should be."""
    places = [adapter_folder(folder, layer, rate) for layer, rate in trials]
    return [place for place in places if not (place / "adapter_config.json").is_file()]
