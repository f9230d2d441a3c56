"""Tensors of a checkpoint that transformers passes over without a word: only those that the model computes anyway.

Old checkpoints hold causal masks and rotary frequencies beside their weights, and a model's class names patterns of
such tensors to leave out. Knows safetensors; knows nothing about configs.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from mathinterp.errors import UserError
from mathinterp.models.sources import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FREQUENCIES = r"rotary_emb\.inv_freq"
_RELATIVE = 0.01  # of frequencies that were rounded to 16 bits


def refuse_dropped(folder: Path, model: "PreTrainedModel") -> None:
    """Raise UserError for a tensor in ``folder`` that is left out though it says something that is not computed."""
    patterns = [_FREQUENCIES, *(model._keys_to_ignore_on_load_unexpected or ())]
    placed = set(model.state_dict())
    # A checkpoint of the decoder alone has names without the decoder's.
    placed |= {name.removeprefix(f"{model.base_model_prefix}.") for name in placed}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no dictionary)
                dropped = name not in placed and any(re.search(pattern, name) for pattern in patterns)
                if dropped and not _is_computed(name, tensors.get_tensor(name), model):
                    raise UserError(
                        f"model '{folder}' holds the tensor {name}, which transformers leaves out and which is not "
                        "what the model computes in its place"
                    )


def is_mask(name: str) -> bool:
    """Whether a tensor is called as the causal masks of old checkpoints are."""
    return re.search(r"(^|\.)(attn|attention)\.bias$", name) is not None


def _is_computed(name: str, tensor: torch.Tensor, model: "PreTrainedModel") -> bool:
    """Whether a tensor is the causal mask, what fills it, or the model's own rotary frequencies."""
    if name.endswith("masked_bias"):
        return tensor.numel() == 1
    if name.endswith(".inv_freq"):
        own = [buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")]
        return any(
            buffer.shape == tensor.shape and torch.allclose(tensor.float(), buffer.float().cpu(), rtol=_RELATIVE)
            for buffer in own
        )
    if not is_mask(name) or tensor.ndim < 2:
        return False
    mask = tensor.bool().reshape(-1, *tensor.shape[-2:])
    return bool((mask == torch.ones(mask.shape, dtype=torch.bool).tril()).all())
