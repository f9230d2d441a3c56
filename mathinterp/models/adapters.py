"""PEFT LoRA adapters: checked against their base before any weight is loaded, then merged into it.

Knows PEFT's files and tensor names; knows nothing about where base models come from. After merging, the model
consists of its own plain modules again, so anatomy and interventions see no difference.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mathinterp.errors import UserError


def check_adapter(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UserError unless the adapter in ``folder`` fits a base model of this config, tensor by tensor.

    Only names and shapes are compared, on the meta device. What the adapter says its base is called does not matter.
    """
    peft_config = _read_config(folder)
    _refuse_unmergeable(folder, peft_config, config)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        try:
            expected = get_peft_model_state_dict(get_peft_model(base, peft_config))
        except ValueError as error:
            raise UserError(f"adapter '{folder}' was made for another base: {_first_line(error)}") from error
    found = _tensor_shapes(folder)
    for name, shape in found.items():
        if name not in expected:
            raise UserError(f"adapter '{folder}' was made for another base: the model has no place for tensor {name}")
        if shape != tuple(expected[name].shape):
            raise UserError(
                f"adapter '{folder}' was made for another base: tensor {name} is {_by(shape)}, "
                f"model has {_by(tuple(expected[name].shape))}"
            )
    missing = sorted(set(expected) - set(found))
    if missing:
        raise UserError(f"adapter '{folder}' does not fit: its file lacks {len(missing)} tensors, first {missing[0]}")


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter's update to the weights of ``model``, in the model's dtype, and return it without PEFT modules.

    The caller passes a model in float32 (or float64) and casts afterwards: adding in bfloat16 would lose small updates.
    """
    dtype = model.dtype
    assert dtype in (torch.float32, torch.float64), f"an adapter is merged in float32 or float64, not {dtype}"
    device = model.device
    tuned = PeftModel.from_pretrained(model, str(folder), torch_device=str(device))
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    merged: Any = tuned.merge_and_unload(safe_merge=True)
    assert isinstance(merged, PreTrainedModel)
    return merged


def _read_config(folder: Path) -> LoraConfig:
    try:
        peft_config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"adapter '{folder}': adapter_config.json is not readable: {_first_line(error)}") from error
    if not isinstance(peft_config, LoraConfig):
        raise UserError(f"adapter '{folder}' is of type {peft_config.peft_type}: only LoRA adapters can be merged")
    peft_config.inference_mode = True
    # PEFT would look for a base of this name; whether the adapter fits is judged by its tensors.
    peft_config.base_model_name_or_path = None
    return peft_config


def _refuse_unmergeable(folder: Path, peft_config: LoraConfig, config: PreTrainedConfig) -> None:
    """Whole replaced modules and touched embeddings would change the vocabulary or both ends of tied weights."""
    whole = list(peft_config.modules_to_save or [])
    if peft_config.trainable_token_indices:
        whole.append("token embeddings")
    if whole:
        raise UserError(
            f"adapter '{folder}' also replaces whole modules ({', '.join(whole)}): merge it into its base with PEFT, "
            "save the result, and give that folder as the model"
        )
    targets = peft_config.target_modules
    names = [targets] if isinstance(targets, str) else list(targets or [])
    ends = [
        name for name in names if name.split(".")[-1] in ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
    ]
    if ends and config.tie_word_embeddings:
        raise UserError(
            f"adapter '{folder}' changes {', '.join(ends)}, which this model shares between embedding and unembedding"
        )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own class for a damaged header
        raise UserError(f"adapter file '{file}' cannot be read: {_first_line(error)}") from error


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
