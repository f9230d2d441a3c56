"""An object in memory, borrowed: which can be, and how everything about it is put back.

Knows torch modules and transformers' configs; knows nothing about what is done with the model meanwhile.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from mathinterp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_wrappable(model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise UserError for an object whose weights, config and tokenizer do not say what it computes."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model '{name}' is no plain transformers model; merge adapters first (peft's merge_and_unload)"
        )
    if model.get_output_embeddings() is None:
        raise UserError(f"model '{name}' is no causal language model: it has no unembedding")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"model '{name}' is quantised; wrap the unquantised model")
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise UserError(f"model '{name}' has no fast tokenizer, which is needed to know which token is what")
    kinds = {(str(each.device), each.dtype) for each in model.parameters()}
    if len(kinds) != 1:
        raise UserError(f"model '{name}' has weights of several dtypes or devices; bring them to one first")
    for place, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if any(not _of_transformers(hook) for hook in hooks):
            raise UserError(f"model '{name}' has forward hooks ({place or 'the model itself'}); remove them first")
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's moves inputs between devices
            raise UserError(f"model '{name}' has a forward of its own ({place or 'the model itself'}); remove it first")


def _of_transformers(hook: Any) -> bool:
    """Hooks that transformers leaves behind to record outputs; they change none."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


@contextmanager
def restored(model: "PreTrainedModel") -> Iterator[None]:
    """Whatever the block does to modules and configs of ``model`` is undone at its end, also after an exception.

    That is: classes, hooks, attributes, children, modes, buffers, where tensors lie, gradient flags, attention
    implementation.
    The numbers in the weights are not copied: the block must not write into them.
    """
    modules = [(module, type(module), _kept(vars(module))) for module in model.modules()]
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    settings = [(config, copy.deepcopy(vars(config))) for config in configs.values() if hasattr(config, "__dict__")]
    tensors = [(each, each.data, each.requires_grad) for each in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for module, kind, kept in modules:
            module.__class__ = kind
            _put_back(vars(module), kept)
        for config, kept in settings:
            vars(config).clear()
            vars(config).update(kept)
        for tensor, data, gradients in tensors:
            _put_back_tensor(tensor, data, gradients)


def _put_back_tensor(tensor: torch.Tensor, data: torch.Tensor, gradients: bool) -> None:
    if tensor.data_ptr() != data.data_ptr():
        tensor.data = data
    tensor.requires_grad_(gradients)


def _kept(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> the value, and a shallow copy of one that could be changed in place."""
    changeable = {name: copy.copy(value) for name, value in attributes.items() if isinstance(value, dict | list | set)}
    return {name: (value, changeable.get(name)) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], kept: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - kept.keys():
        del attributes[name]
    for name, (value, content) in kept.items():
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, dict | set):
            value.clear()
            value.update(content)
        attributes[name] = value
