"""A folder's config.json against the config class of transformers: what it says is computed, or it is refused by name.

A config class keeps fields that its model never reads: a soft-cap that the family does not have, a rotary scaling of an
unknown type, a name with a letter missing. Knows config.json and the classes; knows nothing about weights.
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mathinterp.errors import UserError
from mathinterp.models.random_shapes import stand_in_config, without_weights

# Fields that change what some decoder computes; one that the class at hand does not have is not computed with. Those
# that bring weights of their own, such as biases, are missed in the weights.
_COMPUTING = {
    "alibi", "altup_num_inputs", "attention_chunk_size", "attention_multiplier", "attn_config",
    "attn_logit_softcap", "attn_logit_softcapping", "attn_scale", "attn_temperature_tuning", "clip_qkv",
    "embedding_multiplier", "embedding_scale", "emb_scale", "final_logit_softcap", "final_logit_softcapping",
    "kv_lora_rank", "layer_norm_eps", "layer_norm_epsilon", "layer_types", "layernorm_epsilon",
    "lm_head_multiplier", "logit_scale", "logit_softcap", "logit_softcapping", "logits_scaling", "logits_soft_cap",
    "n_experts", "n_routed_experts", "no_rope_layers", "norm_eps", "norm_epsilon", "num_experts",
    "num_local_experts", "num_key_value_heads", "parallel_attn", "q_lora_rank", "qk_layernorm", "qk_norm",
    "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_local_base_freq", "rope_parameters",
    "rope_pct", "rope_ratio", "rope_scaling", "rotary_dim", "scale_depth", "scale_emb", "scale_embedding",
    "sliding_window", "sliding_window_pattern", "use_alibi", "use_logit_cap", "use_parallel_residual",
    "use_qk_norm", "use_sliding_window", "yarn",
}  # fmt: skip
# Fields of other classes that repeat, under another name, what a class here has a field for.
_SAME = {
    "hidden_act": ("hidden_activation", "activation_function"),
    "hidden_activation": ("hidden_act", "activation_function"),
    "activation_function": ("hidden_act", "hidden_activation"),
    "sliding_window_size": ("sliding_window",), "num_key_value_heads": ("num_attention_heads",),
}  # fmt: skip
_ROPE_FIELDS = {
    "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
}  # fmt: skip
# What each kind of rotary scaling reads; "type" is the old name of rope_type.
_ROPE_ALWAYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned",
}  # fmt: skip
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(), "linear": {"factor"}, "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip
_ALIKE = 0.85  # from which a field's name is taken for another with a letter missing or too many
# Fields that decide nothing that is computed here: one that resembles them may say what it likes.
_IDLE = re.compile(r"^_|dropout|pdrop|token_id$|^initializer_|^summary_|^pretraining_tp$|^use_cache$")


def check_config(folder: Path, fields: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise UserError where ``fields``, read from config.json, says what a model of ``config`` would not compute.

    Not for models with code of their own, whose config classes may read anything.
    """
    where = f"model folder '{folder}': config.json"
    known = _known(config)
    for name, value in fields.items():
        if name in known or name in _ROPE_FIELDS or _is_neutral(value):
            continue
        computed = [getattr(config, other) for other in _SAME.get(name, ()) if other in known]
        if computed and value in computed:
            continue
        if name in _COMPUTING or computed:
            raise _no_place(where, name, value, config)
        meant = difflib.get_close_matches(name, sorted(_deciding(config) - set(fields)), n=1, cutoff=_ALIKE)
        if meant:
            raise UserError(
                f"{where} sets {name}, which transformers' {config.model_type} does not know: if it means {meant[0]}, "
                "name it so, else take it out"
            )
    _check_rope(where, fields, config)


def check_rotation(folder: Path, fields: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise UserError unless the base and the rotated part of a head are those of the file, wherever it says them.

    For a config that passed ``check_config`` and of which a model can be built.
    """
    if not _has_rope(config):
        return
    where, given = f"model folder '{folder}': config.json", _given_rope(fields)
    first = next(_each_rope(config.rope_parameters))
    for name, parameter in (("rope_theta", "rope_theta"), ("rotary_emb_base", "rope_theta")):
        if name in given and given[name] != first.get(parameter):
            raise UserError(
                f"{where} sets {name} to {given[name]}, but transformers' {config.model_type} computes with "
                f"{first.get(parameter)}"
            )
    part = given.get("partial_rotary_factor", given.get("rotary_pct", first.get("partial_rotary_factor", 1.0)))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    buffers = without_weights(stand_in_config(config)).named_buffers()
    rotated = [2 * buffer.numel() for name, buffer in buffers if name.endswith("inv_freq")]
    wanted = 2 * ((int(width * part) + 1) // 2)
    if any(found != wanted for found in rotated):
        raise UserError(
            f"{where} rotates {part} of each head ({wanted} of {width} numbers), but transformers' {config.model_type} "
            f"rotates {rotated[0]}"
        )


def _known(config: PreTrainedConfig) -> set[str]:
    """The fields of the config's class, under all their names."""
    cls = type(config)
    return set(cls().to_dict()) | set(cls.attribute_map) | set(cls.attribute_map.values()) | set(dir(cls))


def _deciding(config: PreTrainedConfig) -> set[str]:
    """The names of fields that a misspelt one may mean: neither what every kind of model has nor an idle one."""
    cls = type(config)
    own = (set(cls().to_dict()) - set(PreTrainedConfig().to_dict())) | set(cls.attribute_map)
    return {name for name in own | _ROPE_FIELDS if not _IDLE.search(name)}


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _check_rope(where: str, fields: dict[str, Any], config: PreTrainedConfig) -> None:
    given = _given_rope(fields)
    if not _has_rope(config):
        if config.model_type == "gptj" and given.get("rope_theta") == 10000:
            given.pop("rope_theta")
        for name, value in given.items():
            raise _no_place(where, name, value, config)
        return
    both = [given.get("rope_scaling"), given.get("rope_parameters")]
    if None not in both and both[0] != both[1]:
        raise UserError(f"{where} sets rope_scaling and rope_parameters to different values: keep the right one")
    for parameters in _each_rope(config.rope_parameters):
        _check_rope_parameters(where, parameters)


def _no_place(where: str, name: str, value: Any, config: PreTrainedConfig) -> UserError:
    return UserError(
        f"{where} sets {name} to {json.dumps(value)[:60]}, which transformers' {config.model_type} has no place for: "
        "take it out if the model was trained without it"
    )


def _given_rope(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in sorted(_ROPE_FIELDS & set(fields)) if not _is_neutral(fields[name])}


def _has_rope(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "rope_parameters", None)) and "rope_parameters" in type(config)().to_dict()


def _each_rope(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One dictionary, or one per type of layer."""
    nested = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]


def _check_rope_parameters(where: str, parameters: dict[str, Any]) -> None:
    kind = str(parameters.get("rope_type", "default"))
    if kind not in _ROPE_KEYS or (kind != "default" and kind not in ROPE_INIT_FUNCTIONS):
        raise UserError(
            f"{where} scales rotary positions by the type '{kind}', which is not known here (known: "
            f"{', '.join(_ROPE_KEYS)})"
        )
    unread = sorted(set(parameters) - _ROPE_ALWAYS - _ROPE_KEYS[kind])
    unread = [name for name in unread if parameters[name] is not None]
    if unread:
        raise UserError(
            f"{where} sets {unread[0]} for rotary positions of type '{kind}', which does not read it (it reads: "
            f"{', '.join(sorted(_ROPE_KEYS[kind])) or 'rope_theta'}): correct the type or the name"
        )
    for name in ("factor", "rope_theta", "original_max_position_embeddings"):
        value = parameters.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            why = "not above 0" if number else "no number"
            raise UserError(f"{where} sets the {name} of rotary positions to {json.dumps(value)}, which is {why}")
