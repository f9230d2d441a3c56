"""A GGUF file's settings against the config that transformers makes of them: each is used, or the file is refused.

transformers reads the settings that it knows and passes over the others, and takes from the class of the config what a
file does not say. Here each setting of the file is given to the config where its class has a place for it, and the
config is then held against the file, under llama.cpp's rules for what a file leaves out. Knows both vocabularies;
knows nothing about tokenizers or weights.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from mathinterp.errors import UserError
from mathinterp.models.anatomy import model_shape
from mathinterp.models.gguf_metadata import GgufMetadata

Config = PreTrainedConfig

# Settings whose value transformers takes from the config class instead of the file, and where they belong in a config.
_GIVEN: dict[str, dict[str, str]] = {
    "gemma2": {
        "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "llama": {"attention.key_length": "head_dim"},
    "mistral": {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen2": {"attention.head_count_kv": "num_key_value_heads"},
    "qwen3": {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"},
}  # fmt: skip
_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
# Without a key/value group of its own, or a sliding window, 0 says "none".
_READ: dict[str, Callable[[Config], Any]] = {
    "block_count": lambda config: config.num_hidden_layers,
    "context_length": lambda config: config.max_position_embeddings,
    "embedding_length": lambda config: config.hidden_size,
    "feed_forward_length": lambda config: model_shape(config).n_neurons,
    "vocab_size": lambda config: config.vocab_size,
    "attention.head_count": lambda config: config.num_attention_heads,
    "attention.head_count_kv": lambda config: model_shape(config).n_groups,
    "attention.key_length": lambda config: model_shape(config).d_head,
    "attention.value_length": lambda config: model_shape(config).d_head,
    "attention.layer_norm_rms_epsilon": lambda config: getattr(config, "rms_norm_eps", None),
    "attention.layer_norm_epsilon": lambda config: getattr(config, "layer_norm_epsilon", None),
    "attention.sliding_window": lambda config: _window(config),
    "attn_logit_softcapping": lambda config: getattr(config, "attn_logit_softcapping", None) or 0.0,
    "final_logit_softcapping": lambda config: getattr(config, "final_logit_softcapping", None) or 0.0,
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "rope.dimension_count": lambda config: _rotary_width(config),
}
# Values at which a setting that no config here has a place for changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.scale": (0,), "embedding_scale": (0, 1), "expert_count": (0,), "expert_used_count": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "rope.scaling.attn_factor": (1,),
}  # fmt: skip
_INERT = {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
_ROPE_SCALING = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}  # read together


def apply_settings(metadata: GgufMetadata, config: Config) -> None:
    """Give ``config`` the file's settings; raises UserError naming one that has no place in it.

    Raises UserError too for a part of a file, for what is not a model, and for settings that are missing.
    """
    _check_kind(metadata)
    found = metadata.of_architecture()
    norm = "attention.layer_norm_epsilon" if config.model_type == "gpt2" else "attention.layer_norm_rms_epsilon"
    # Without the last one transformers leaves Llama's q and k rows in llama.cpp's order, which is another model.
    groups = ["attention.head_count_kv"] if metadata.architecture == "llama" else []
    lacking = [key for key in (*_NEEDED, norm, *groups) if key not in found]
    if lacking:
        raise UserError(f"GGUF file '{metadata.file}' lacks the setting {metadata.architecture}.{lacking[0]}")
    meant = {**_left_out(found, config), **found}
    for key, attribute in _GIVEN.get(config.model_type, {}).items():
        if key in meant:
            setattr(config, attribute, meant[key] or None)  # a window or soft-cap of 0 is none
    for name, setting in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(config, f"{name}_token_id", metadata.settings.get(f"tokenizer.ggml.{setting}_token_id"))
    _give_attention_scale(metadata, config)
    _give_rope_scaling(metadata, config, found)
    for key, value in meant.items():
        if key not in _INERT | _ROPE_SCALING:
            _check(metadata, config, key, value)


def _check_kind(metadata: GgufMetadata) -> None:
    kind, parts = metadata.settings.get("general.type", "model"), metadata.settings.get("split.count", 1)
    if kind != "model":
        raise UserError(f"GGUF file '{metadata.file}' holds no model but {kind!r} (general.type)")
    if parts > 1:
        raise UserError(
            f"GGUF file '{metadata.file}' is one of {parts} parts (split.count): put them together with "
            "'llama-gguf-split --merge'"
        )


def _left_out(found: dict[str, Any], config: Config) -> dict[str, Any]:
    """What llama.cpp takes for settings that decide results and that a file does not have."""
    if config.model_type == "gpt2":
        return {}
    width = found["embedding_length"] // found["attention.head_count"]
    gemma = config.model_type == "gemma2"
    return {
        "attention.head_count_kv": found["attention.head_count"],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": 4096 if gemma else 0,
        "attn_logit_softcapping": 50.0 if gemma else 0.0,
        "final_logit_softcapping": 30.0 if gemma else 0.0,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": found.get("attention.key_length", width),
    }


def _check(metadata: GgufMetadata, config: Config, key: str, value: Any) -> None:
    if key in _NEUTRAL:
        used = value in _NEUTRAL[key]
    elif key in _READ:
        held = _READ[key](config)
        # A window that no prompt can leave is none; numbers were stored in float32.
        unseen = key == "attention.sliding_window" and (value == 0 or value >= config.max_position_embeddings)
        used = (unseen and held == 0) or _equal(held, value)
    else:
        used = False
    if used:
        return
    name = f"{metadata.architecture}.{key}"
    says = f"sets {name} to {value}" if key in metadata.of_architecture() else f"leaves out {name}, which means {value}"
    holds = f"computes with {_READ[key](config)}" if key in _READ else "has no place for it"
    raise UserError(
        f"GGUF file '{metadata.file}' {says}, but transformers' {config.model_type} {holds}: give the model as a "
        "Hugging Face folder"
    )


def _equal(held: Any, value: Any) -> bool:
    numbers = isinstance(held, int | float) and isinstance(value, int | float)
    return bool(abs(held - value) <= 1e-6 * abs(value) if numbers else held == value)


def _give_attention_scale(metadata: GgufMetadata, config: Config) -> None:
    """Gemma-2's is in no setting: llama.cpp knows it by the model's size; the config class has that of two sizes."""
    if config.model_type != "gemma2":
        return
    head = model_shape(config).d_head
    if (config.num_hidden_layers, head) == (46, 128):  # 27B
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    elif head != config.query_pre_attn_scalar:
        raise UserError(
            f"GGUF file '{metadata.file}' does not say by what Gemma-2's attention is scaled (query_pre_attn_scalar), "
            f"and heads of {head} are of no size that is known: give the model as a Hugging Face folder"
        )


def _give_rope_scaling(metadata: GgufMetadata, config: Config, found: dict[str, Any]) -> None:
    kind = found.get("rope.scaling.type", "linear")
    factor = found.get("rope.scaling.factor") or found.get("rope.scale_linear") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return
    if kind == "linear" and _rope(config).get("rope_type") == "default" and config.model_type != "phi3":
        config.rope_parameters = {**_rope(config), "rope_type": "linear", "factor": float(factor)}
        return
    raise UserError(
        f"GGUF file '{metadata.file}' scales rotary positions ({metadata.architecture}.rope.scaling.type {kind}, "
        f"factor {factor}), which transformers does not read from it: give the model as a Hugging Face folder"
    )


def _rope(config: Config) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rotary_width(config: Config) -> int | None:
    if not _rope(config):
        return None
    return int(model_shape(config).d_head * _rope(config).get("partial_rotary_factor", 1.0))


def _window(config: Config) -> int:
    """The window of the layers that have one; 0 where none has."""
    if config.model_type == "llama":  # its layers never look at one
        return 0
    return next((window for window in model_shape(config).attention_windows if window is not None), 0)
