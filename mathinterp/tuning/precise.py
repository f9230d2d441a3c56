"""Precise fine-tuning: chosen heads (and neurons) train, as LoRA whose one factor is a frozen 0/1 selection.

Knows anatomy and PEFT; knows nothing about data, loops or Ray. (Paper B section 4.3; method.md section 6.)

The update of some output rows of W (out x in) is dW = S D: S (out x r) has one 1 a column, D (r x in) trains. So
lora_B = S is frozen and lora_A = D starts at 0. The update of some input columns is dW = D S^T: lora_A = S^T is frozen
and lora_B = D starts at 0. Rank = alpha = r in each module, so the scale is 1. Gradients of D are exactly the gradients
of the chosen rows (columns), and the result is a plain PEFT LoRA adapter. Weights train, biases do not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, ModelShape, Projection
from mathinterp.models.catalog import LoadedModel
from mathinterp.models.fingerprint import in_order
from mathinterp.models.units import Head, Neuron

ADAPTER = "default"  # PEFT's name for the one adapter


@dataclass(frozen=True)
class Selection:
    """What trains. ``with_groups`` matters for grouped-query models only: the k, v rows of the heads' groups too."""

    heads: tuple[Head, ...] = ()
    neurons: tuple[Neuron, ...] = ()
    mlp_layers: tuple[int, ...] = ()  # all neurons of these layers
    with_groups: bool = False

    def check(self, shape: ModelShape) -> None:
        """Raise UserError for a head, neuron or layer that does not exist or is given twice, or for none at all."""
        if not (self.heads or self.neurons or self.mlp_layers):
            raise UserError("no head is chosen: give `heads` (17.22,14.19), `heads_from` or `heads_sql`")
        for layer, head in self.heads:
            shape.check_head(layer, head)
        if self.neurons or self.mlp_layers:
            shape.check_neurons()
        for layer, neuron in self.neurons:
            shape.check_neuron(layer, neuron)
        for layer in self.mlp_layers:
            shape.check_layer(layer)
        for chosen, what in ((self.heads, "head"), (self.neurons, "neuron")):
            twice = [f"{layer}.{index}" for layer, index in chosen if chosen.count((layer, index)) > 1]
            if twice:
                raise UserError(f"{what} {twice[0]} is given twice")


@dataclass(frozen=True)
class Part:
    """The rows (output features) or columns (input features) of one linear module that train."""

    module: str  # its name in the model
    side: Literal["rows", "columns"]
    features: tuple[int, ...]


def parts_of(anatomy: Anatomy, selection: Selection) -> list[Part]:
    """The selection as rows and columns of the model's linear modules, in the order of the layers.

    A head's rows of q and columns of o; in multi-head models its rows of k and v too. A neuron's rows of gate and up
    and its column of down. Raises UserError as ``Selection.check`` does.
    """
    selection.check(anatomy.shape)
    names = {module: name for name, module in anatomy.model.named_modules()}
    found: dict[tuple[str, Literal["rows", "columns"]], list[int]] = {}

    def add(module: nn.Module, side: Literal["rows", "columns"], features: Sequence[int]) -> None:
        found.setdefault((names[module], side), []).extend(features)

    d_head = anatomy.shape.d_head
    for layer in sorted({layer for layer, _ in selection.heads}):
        heads = sorted(head for at, head in selection.heads if at == layer)
        for projection, units in _projections(anatomy, layer, heads, selection.with_groups):
            add(projection.module, "rows", _features(projection, units, d_head))
        columns = [head * d_head + i for head in heads for i in range(d_head)]
        add(anatomy.output_projection(layer), "columns", columns)
    for layer, neurons in _neurons_by_layer(selection, anatomy.shape).items():
        gate = anatomy.gate(layer)
        for projection in ([gate] if gate is not None else []) + [anatomy.up(layer)]:
            add(projection.module, "rows", _features(projection, neurons, 1))
        add(anatomy.down_projection(layer), "columns", neurons)
    return [Part(module, side, tuple(features)) for (module, side), features in found.items()]


def heads_that_move_along(shape: ModelShape, heads: Sequence[Head]) -> list[Head]:
    """The heads not chosen that read a key/value group of a chosen one: with ``with_groups`` they change too."""
    size = shape.n_heads // shape.n_groups
    groups = {(layer, head // size) for layer, head in heads}
    members = [Head(layer, group * size + i) for layer, group in sorted(groups) for i in range(size)]
    return [head for head in members if head not in set(heads)]


def attach(model: PreTrainedModel, parts: Sequence[Part]) -> PeftModel:
    """``model`` with an adapter that changes nothing yet; only the parts' factors require a gradient.

    The model's linear modules are wrapped in place. A frozen weight keeps its dtype; the factors are float32 beside
    16-bit weights, else of the weights' dtype.
    """
    modules = dict(model.named_modules())
    ranks = {part.module: len(part.features) for part in parts}
    assert len(ranks) == len(parts), "rows and columns of the same module"
    stored_as_input_major = {type(modules[part.module]).__name__ == "Conv1D" for part in parts}
    assert len(stored_as_input_major) == 1, "PEFT has one fan_in_fan_out for all modules"
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        target_modules=list(ranks),
        rank_pattern=dict(ranks),
        alpha_pattern=dict(ranks),
        fan_in_fan_out=stored_as_input_major.pop(),
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    wrapped: dict[str, Any] = dict(model.named_modules())
    for part in parts:
        module = wrapped[part.module]
        assert module.scaling[ADAPTER] == 1.0, f"{part.module}: scale {module.scaling[ADAPTER]}"
        _select(part, module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert trained == sum(
        rank * (module.in_features if part.side == "rows" else module.out_features)
        for part, rank in zip(parts, ranks.values(), strict=True)
        for module in [wrapped[part.module]]
    ), "something else than the parts would train"
    return adapted


@torch.no_grad()
def _select(part: Part, down_RI: nn.Parameter, up_OR: nn.Parameter) -> None:
    """Overwrite one factor with the selection and freeze it; set the other to 0.

    ``down_RI`` (lora_A) is rank x inputs, ``up_OR`` (lora_B) outputs x rank.
    """
    down_RI.zero_()
    up_OR.zero_()
    features = torch.tensor(part.features, device=down_RI.device)
    rank = torch.arange(len(part.features), device=down_RI.device)
    if part.side == "rows":
        up_OR[features, rank] = 1
        up_OR.requires_grad_(False)
    else:
        down_RI[rank, features] = 1
        down_RI.requires_grad_(False)


def save_adapter(model: PeftModel, folder: Path, base: str) -> None:
    """Write a plain PEFT adapter: ``adapter_config.json`` and ``adapter_model.safetensors``, in the trained dtype.

    ``base`` is what the config names as its base model, see models.sources.loadable_base.
    """
    model.peft_config[ADAPTER].base_model_name_or_path = base
    model.save_pretrained(str(folder), save_embedding_layers=False)
    file = folder / "adapter_config.json"
    fields = in_order(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class PreciseJob:
    """Precise fine-tuning as a job: what trains, and what it leaves behind."""

    selection: Selection
    control: str | None = None  # how the heads were drawn, for people; the heads themselves decide the weights
    name: str = field(default="precise", init=False)

    @property
    def method(self) -> str:
        """ "precise", or the control: "random heads, seed 0"."""
        return self.control or self.name

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON."""
        return {
            "heads": [list(head) for head in sorted(self.selection.heads)],
            "neurons": [list(neuron) for neuron in sorted(self.selection.neurons)],
            "mlp_layers": sorted(self.selection.mlp_layers),
            "with_groups": self.selection.with_groups,
        }

    def check(self, shape: ModelShape) -> None:
        """Raise UserError if the model has no such head, neuron or layer."""
        self.selection.check(shape)

    def build(self, loaded: LoadedModel) -> nn.Module:
        """The model with the adapter."""
        return attach(loaded.model, parts_of(loaded.anatomy, self.selection))

    def export(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, base: str) -> None:
        """Write the adapter."""
        assert isinstance(model, PeftModel)
        save_adapter(model, folder, base)


def _projections(
    anatomy: Anatomy, layer: int, heads: list[int], with_groups: bool
) -> list[tuple[Projection, list[int]]]:
    """q with the heads; k and v with the heads' groups, where each head has its own or the groups are asked for."""
    shape = anatomy.shape
    chosen = [(anatomy.query(layer), heads)]
    if shape.n_groups == shape.n_heads or with_groups:
        groups = sorted({head // (shape.n_heads // shape.n_groups) for head in heads})
        chosen += [(anatomy.key(layer), groups), (anatomy.value(layer), groups)]
    return chosen


def _features(projection: Projection, units: Sequence[int], width: int) -> list[int]:
    """Output features of the module that belong to these heads (groups, neurons) of ``width`` features each."""
    return projection.places.view(-1, width)[list(units)].flatten().tolist()


def _neurons_by_layer(selection: Selection, shape: ModelShape) -> dict[int, list[int]]:
    layers = sorted({layer for layer, _ in selection.neurons} | set(selection.mlp_layers))
    return {
        layer: list(range(shape.n_neurons))
        if layer in selection.mlp_layers
        else sorted(neuron for at, neuron in selection.neurons if at == layer)
        for layer in layers
    }
