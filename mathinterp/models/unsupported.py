"""Kinds of models that no entry of families.py can describe, told from what a config says.

Knows transformers' lists of model types and the fields of their configs; knows nothing about modules or weights.
"""

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

_RECURRENT_NAME = re.compile(r"mamba|rwkv|xlstm|retnet|hyena|griffin|recurrent")
_RECURRENT_FIELD = re.compile(
    r"(n_)?mamba_|ssm_|lru_|rwkv_|time_step_|linear_(conv|num|key|value|head|attn)_|state_size$|conv_L_cache$|conv1d_"
)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Types of which neither a list of transformers nor a field of the config tells it.
_OTHERWISE = {
    "blt": "a model of byte patches, with layers inside and around it that read other lengths",
    "hrm_text": "a recurrent model, which runs its layers several times",
    "moshi": "a model of sound beside text",
    "speech_to_text_2": "the decoder of an encoder-decoder",
    "trocr": "the decoder of an encoder-decoder",
    "xlnet": "a permutation model, which reads texts in other orders than from left to right",
}
_EXPERTS_NAME = re.compile(r"moe(_|$)|mixtral|dbrx")
_EXPERTS_FIELD = re.compile(r"\w*experts$")


def unsupported_kind(model_type: str, fields: Mapping[str, Any] | None = None) -> str | None:
    """What a model is, in words, if it is no decoder whose layers are one attention and one MLP; None if it may be.

    Args:
        fields: of its config, before the defaults of its model type in transformers.
    """
    if fields is not None and model_type not in CONFIG_MAPPING and "auto_map" not in fields:
        return f"a model that transformers {transformers.__version__} does not know either"
    fields = {**_default_fields(model_type), **(fields or {})}
    if fields.get("is_encoder_decoder") or model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder"
    if model_type in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES or any(
        fields.get(name) for name in ("vision_config", "audio_config", "text_config")
    ):
        return "a model of images or sound beside text"
    if model_type in _OTHERWISE:
        return _OTHERWISE[model_type]
    if fields.get("altup_num_inputs"):
        return "a model of several residual streams (AltUp)"
    if _RECURRENT_NAME.search(model_type) or any(_RECURRENT_FIELD.match(name) for name in fields):
        return "a recurrent model (a state space, linear attention or convolutions in some or all layers)"
    if others := _layer_kinds(fields) - _ATTENTION_LAYERS:
        return f"a model with layers of other kinds ({', '.join(sorted(others))})"
    if _EXPERTS_NAME.search(model_type) or _has_experts(fields):
        return "a mixture of experts"
    if fields.get("kv_lora_rank"):
        return "a model of latent attention, whose heads have no keys and values of their own"
    if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not fields.get("is_decoder"):
        return "an encoder, which predicts no next token"
    if model_type in CONFIG_MAPPING and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "no causal language model"
    return None


def _default_fields(model_type: str) -> dict[str, Any]:
    if model_type not in CONFIG_MAPPING:
        return {}
    try:
        fields: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # some configs cannot be made without arguments
        return {}
    return fields


def _layer_kinds(fields: Mapping[str, Any]) -> set[str]:
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("block_types") or []
    return {str(kind) for kind in kinds}


def _has_experts(fields: Mapping[str, Any]) -> bool:
    if fields.get("is_moe") is False or fields.get("enable_moe_block") is False:
        return False
    counts = [value for name, value in fields.items() if _EXPERTS_FIELD.match(name)]
    return any(isinstance(count, int) and count > 1 for count in counts)
