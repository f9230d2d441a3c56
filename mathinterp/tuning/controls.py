"""What precise fine-tuning is held against: full, whole-layer and LoRA training, and other heads in the same form.

Knows PEFT, anatomy and lists of heads; knows nothing about data, loops or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.experiments.controls import layer_matched_heads, random_heads
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.models.catalog import LoadedModel
from mathinterp.models.units import Head
from mathinterp.tuning.precise import save_adapter
from mathinterp.tuning.settings import CONTROLS

TARGETS = ("attention", "mlp", "all")


def control_heads(
    kind: str,
    key: Sequence[Head],
    ranking: Sequence[Head],
    shape: ModelShape,
    seed: int,
    never: Sequence[Head] = (),
) -> list[Head]:
    """As many other heads as ``key`` has.

    Args:
        kind: "random": drawn from all others; "random_layer": as many in each layer as ``key`` has there; "bottom": the
            last of ``ranking``.
        key: the chosen heads.
        ranking: all heads, most important first; only "bottom" needs it.
        seed: of the draw.
        never: heads that no control may hold besides: the other key heads of the run that ranked them.
    Raises:
        UserError: an unknown kind, no ranking of all heads where one is needed, or too few other heads (for
            "random_layer": in a layer).
    """
    if kind not in CONTROLS:
        raise UserError(f"`control` '{kind}' is not known; take one of {', '.join(CONTROLS)}")
    for head in (*key, *never):
        shape.check_head(*head)
    excluded, heads = {*key, *never}, shape.n_layers * shape.n_heads
    if len(key) > heads - len(excluded):
        raise UserError(
            f"{len(excluded)} of {heads} heads are chosen or key heads, which leaves {heads - len(excluded)} for a"
            f" control of {len(key)}: choose fewer"
        )
    if kind == "bottom":
        if len(set(ranking)) < heads:  # the last of some heads may well matter
            raise UserError(
                f"`control` bottom needs a ranking of all {heads} heads, and this one has "
                f"{len(set(ranking))}: give `heads_from`, a scan of all heads, with `top`"
            )
        return [head for head in ranking if head not in excluded][-len(key) :]
    every = [Head(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)]
    if kind == "random":
        return random_heads(every, key, seed, never)
    for layer in sorted({layer for layer, _ in key}):
        wanted, out = (sum(at == layer for at, _ in some) for some in (key, excluded))
        if wanted > shape.n_heads - out:
            raise UserError(
                f"layer {layer}: {out} of {shape.n_heads} heads are chosen or key heads, which leaves"
                f" {shape.n_heads - out} for a control of {wanted} there: choose fewer, or `control` random"
            )
    return layer_matched_heads(every, key, seed, never)


@dataclass(frozen=True)
class FullJob:
    """Training of all weights (embeddings too; a tied one stays one tensor), or of whole layers and nothing else."""

    layers: tuple[int, ...] | None = None
    name: str = field(default="full", init=False)

    @property
    def method(self) -> str:
        """ "full", or the layers that train whole."""
        return self.name if self.layers is None else "layers " + ", ".join(map(str, self.layers))

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON."""
        return {"layers": None if self.layers is None else list(self.layers)}

    def check(self, shape: ModelShape) -> None:
        """Raise UserError if the model has no such layer."""
        for layer in self.layers or ():
            shape.check_layer(layer)

    def build(self, loaded: LoadedModel) -> nn.Module:
        """The model, the chosen parameters requiring a gradient."""
        self.check(loaded.anatomy.shape)
        chosen: list[nn.Module] = [loaded.model]
        if self.layers is not None:
            chosen = [loaded.anatomy.layers[layer] for layer in self.layers]
        for module in chosen:
            module.requires_grad_(True)
        return loaded.model

    def export(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, base: str) -> None:
        """Write a model folder in the trained dtype."""
        assert isinstance(model, PreTrainedModel)
        save_model(model, tokenizer, folder)


@dataclass(frozen=True)
class LoraJob:
    """An ordinary LoRA adapter on the linear modules of attention, MLP or both; of all layers or of some."""

    rank: int = 16
    alpha: int = 32
    targets: str = "all"  # one of TARGETS
    layers: tuple[int, ...] | None = None
    name: str = field(default="lora", init=False)

    @property
    def method(self) -> str:
        """ "lora"."""
        return self.name

    def parameters(self) -> dict[str, Any]:
        """What decides the weights, as plain JSON."""
        layers = None if self.layers is None else list(self.layers)
        return {"rank": self.rank, "alpha": self.alpha, "targets": self.targets, "layers": layers}

    def check(self, shape: ModelShape) -> None:
        """Raise UserError for a layer that does not exist, unknown targets, an impossible rank or alpha."""
        for layer in self.layers or ():
            shape.check_layer(layer)
        if self.targets not in TARGETS:
            raise UserError(f"`targets` '{self.targets}' is not known; take one of {', '.join(TARGETS)}")
        if not 1 <= self.rank <= max(shape.d_model, shape.n_neurons):
            raise UserError(
                f"`rank` {self.rank}: give 1 to {max(shape.d_model, shape.n_neurons)}, as no matrix has more"
            )
        if self.alpha < 1:
            raise UserError(f"`alpha` {self.alpha}: at least 1 is needed; at 0 the adapter would change nothing")

    def build(self, loaded: LoadedModel) -> nn.Module:
        """The model with the adapter; a module's lora_A is drawn from torch's generator, lora_B is 0."""
        self.check(loaded.anatomy.shape)
        modules = lora_modules(loaded.anatomy, self.targets, self.layers)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(modules),
            fan_in_fan_out={type(module).__name__ == "Conv1D" for module in modules.values()} == {True},
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(loaded.model, config)
        assert isinstance(adapted, PeftModel)
        return adapted

    def export(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, base: str) -> None:
        """Write the adapter."""
        assert isinstance(model, PeftModel)
        save_adapter(model, folder, base)


def lora_modules(anatomy: Anatomy, targets: str, layers: Sequence[int] | None) -> dict[str, nn.Module]:
    """Name -> linear module (nn.Linear or Conv1D) of the layers' attention, MLP or both."""
    wanted = range(anatomy.shape.n_layers) if layers is None else layers
    names = {module: name for name, module in anatomy.model.named_modules()}
    roots = {
        "attention": [anatomy.attention(layer) for layer in wanted],
        "mlp": [anatomy.mlp(layer) for layer in wanted],
        "all": [anatomy.layers[layer] for layer in wanted],
    }[targets]
    return {
        names[module]: module
        for root in roots
        for module in root.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer."""
    model.config.use_cache = True  # the catalog turns it off for its own passes
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
