"""A model's config, found sound before anything loads: what cannot be built, or fails in the first pass, is refused.

Knows configs and transformers' own classes; loads no weights.
"""

from typing import Any

from transformers import PretrainedConfig

from mathinterp.errors import UserError
from mathinterp.gates import MOST, MOST_LAYERS, shortened
from mathinterp.models.random_shapes import stand_in_config, without_weights

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
UNSIZED = ("max_position_embeddings", "model_max_length")  # which may say that there is no limit
OPTIONAL_SIZES = (
    "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "moe_intermediate_size", "num_local_experts",
    "num_key_value_heads", "num_kv_heads", "head_dim", "sliding_window",
)  # fmt: skip


def check_sizes(name: str, fields: dict[str, Any]) -> None:
    """Raise UserError for a size in config.json that is no size; those of layers become lists as soon as it is read."""
    for field, value in fields.items():
        if isinstance(value, int) and abs(value) > MOST and field not in UNSIZED:
            raise UserError(f"model '{name}': {field} in config.json is {shortened(value)}, which is no size")
        if field in LAYERS and isinstance(value, int) and value > MOST_LAYERS:
            raise UserError(f"model '{name}': {field} in config.json is {value:,}, more layers than any model has")


def check_buildable(config: PretrainedConfig, name: str) -> None:
    """Raise UserError, in one line, for sizes that do not fit each other and for settings that transformers refuses."""
    for field in (*SIZES, *OPTIONAL_SIZES):
        value = getattr(config, field, None)
        if value is None and field in OPTIONAL_SIZES:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"model '{name}': {field} in config.json is {value!r}; it must be a whole number from 1 on")
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
        raise UserError(
            f"model '{name}': hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads} in"
            " config.json"
        )
    if groups is not None and heads % groups:
        raise UserError(
            f"model '{name}': num_attention_heads {heads} is not a multiple of num_key_value_heads {groups} in"
            " config.json"
        )
    try:
        without_weights(stand_in_config(config))
    except Exception as error:  # whatever a config makes transformers raise, it is the config that is wrong
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"model '{name}': no model can be built from config.json: {type(error).__name__} {said}"
        ) from error
