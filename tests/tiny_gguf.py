"""Tiny models as GGUF files, written as llama.cpp's converter writes them, unquantised.

Knows llama.cpp's names and what its converter does to weights (q and k rows interleaved, Gemma's norms plus one,
GPT-2's matrices transposed); knows nothing about how mathinterp or transformers read them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mathinterp.models.families import family_of
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer


def drawn_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose attention is far from uniform, so that a window, a cap or a rotation shows."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=family_of(config.model_type).attention_backend
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.ndim == 1 and "norm" in name else 0.3 * drawn)
    return model.eval().requires_grad_(False)


def changed_config(name: str, **fields: Any) -> PreTrainedConfig:
    """The config of tiny family ``name`` with other values for some of its fields."""
    config = tiny_config(name)
    return type(config)(**{**config.to_dict(), **fields})


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings that every file of this architecture has, without the prefix."""
    heads = config.num_attention_heads
    settings = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": heads,
    }  # fmt: skip
    if config.model_type == "gpt2":
        settings |= {"feed_forward_length": config.n_inner, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
        return settings
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    settings |= {
        "feed_forward_length": config.intermediate_size, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.dimension_count": head,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "attention.key_length": head,
        "attention.value_length": head,
    }  # fmt: skip
    if config.model_type == "gemma2":
        settings |= {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    return settings


def word_vocabulary(size: int) -> dict[str, Any]:
    """A byte-level vocabulary in which no kind of pre-tokenizer makes a difference: it has one merge."""
    tokens = list(tiny_tokenizer().convert_ids_to_tokens(list(range(size))))
    tokens[-3:] = ["a", "n", "an"]
    return {
        "model": "gpt2", "tokens": tokens, "token_type": [1] * size, "merges": ["a n"], "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    changed: Mapping[str, Any] | None = None,
    other: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Write ``model``; returns ``file``.

    Args:
        changed: settings of the architecture, without its prefix, to add or replace; None as a value leaves one out.
        other: whole settings to add, such as ``general.type``.
        tokenizer: settings under ``tokenizer.ggml.``; by default ``word_vocabulary``.
        extra_tensors: more tensors than the model has.
        without: names in the file of tensors to leave out.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    settings = {**settings_of(config), **(changed or {})}
    whole = {f"{config.model_type}.{key}": value for key, value in settings.items()}
    vocabulary = word_vocabulary(config.vocab_size) if tokenizer is None else tokenizer
    whole |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | dict(other or {})
    for key, value in whole.items():
        _add(writer, key, value)
    for name, tensor in {**_tensors(model), **(extra_tensors or {})}.items():
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.data
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", getattr(config, "num_key_value_heads", 1)),
        ):
            if config.model_type == "llama" and part in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if config.model_type == "gemma2" and "norm" in name:
            tensor = tensor + 1
        if config.model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T
        base, suffix = name.rsplit(".", 1)
        tensors[f"{names.get_name(base)}.{suffix}"] = tensor.numpy()
    return tensors


def save_tiny_gguf(file: Path) -> Path:
    """The tiny Llama as llama.cpp's converter would write it, unquantised (q and k rows interleaved for its rotary)."""
    model, tokenizer = tiny_model("llama", dtype=torch.float32), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    tokens[-3:] = ["a", "n", "an"]  # the merge below needs them
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        base, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
