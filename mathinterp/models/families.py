"""Where each model family keeps its parts: one short entry per ``config.model_type``.

To support a new family of decoders whose layers are one attention and one MLP, add an entry and run ``mathinterp
selftest --model YOUR_MODEL``: the self-test proves that what the entry says is true. Paths are attribute names,
relative to the module named beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mathinterp.errors import UserError
from mathinterp.models.unsupported import unsupported_kind


@dataclass(frozen=True)
class Family:
    """Attribute names of one family's modules; the defaults are Llama's."""

    decoder: str = "model"  # in the causal-LM module: holds layers, embedding and final norm
    embedding: str = "embed_tokens"  # in the decoder
    layers: str = "layers"  # in the decoder
    final_norm: str = "norm"  # in the decoder
    attention: str = "self_attn"  # in a layer
    attention_norm: str = "input_layernorm"  # in a layer: the norm that attention reads through
    query: str | None = "q_proj"  # in attention; None where q, k and v are fused
    key: str | None = "k_proj"
    value: str | None = "v_proj"
    fused_qkv: str | None = None  # in attention
    fused_qkv_layout: str | None = (
        None  # "blocks": all q, all k, all v; "per_head": q, k, v of head 0, then of head 1, ...
    )
    output_projection: str = "o_proj"  # in attention; its input is the heads side by side
    mlp: str = "mlp"  # in a layer
    mlp_norm: str = "post_attention_layernorm"  # in a layer: the norm that the MLP reads through
    gate: str | None = "gate_proj"  # in the MLP; None for a plain two-matrix MLP
    up: str | None = "up_proj"  # in the MLP: W_up of a gated MLP, fc1 of a plain one
    fused_gate_up: str | None = None  # in the MLP: gate rows, then up rows
    activation: str = "act_fn"  # in the MLP
    down_projection: str = "down_proj"  # in the MLP; its input is the neurons' coefficients
    attention_post_norm: str | None = None  # in a layer: a norm between attention's output and the residual stream
    mlp_post_norm: str | None = None  # in a layer: the same after the MLP
    norm_offset: float = 0.0  # a norm multiplies by its weight plus this
    parallel: bool | str = False  # attention and MLP read the same input; a string names the config flag that says so
    attention_backend: str = "sdpa"  # "eager" where the family has no SDPA or needs its soft-cap
    position_table: bool = False  # positions come from a table of max_position_embeddings rows, and there are no others
    tree_mask: bool = True  # accepts a 4-D additive mask and explicit position ids (proved by the self-test)


FAMILIES: dict[str, Family] = {
    "llama": Family(),  # Llama 1, 2, 3, SmolLM, and the bundled model
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma2": Family(
        mlp_norm="pre_feedforward_layernorm", attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm", norm_offset=1.0, attention_backend="eager",
    ),
    "phi3": Family(
        query=None, key=None, value=None, fused_qkv="qkv_proj", fused_qkv_layout="blocks",
        gate=None, up=None, fused_gate_up="gate_up_proj", activation="activation_fn",
    ),
    "gpt2": Family(
        decoder="transformer", embedding="wte", layers="h", final_norm="ln_f",
        attention="attn", attention_norm="ln_1", query=None, key=None, value=None,
        fused_qkv="c_attn", fused_qkv_layout="blocks", output_projection="c_proj", mlp_norm="ln_2",
        gate=None, up="c_fc", activation="act", down_projection="c_proj", position_table=True,
    ),
    "gptj": Family(
        decoder="transformer", embedding="wte", layers="h", final_norm="ln_f",
        attention="attn", attention_norm="ln_1", output_projection="out_proj",
        mlp_norm="ln_1", gate=None, up="fc_in", activation="act", down_projection="fc_out", parallel=True,
        position_table=True,
    ),
    "gpt_neox": Family(
        decoder="gpt_neox", embedding="embed_in", final_norm="final_layer_norm",
        attention="attention", query=None, key=None, value=None, fused_qkv="query_key_value",
        fused_qkv_layout="per_head", output_projection="dense",
        gate=None, up="dense_h_to_4h", activation="act", down_projection="dense_4h_to_h",
        parallel="use_parallel_residual",
    ),
}  # fmt: skip


def family_of(model_type: str, fields: Mapping[str, Any] | None = None) -> Family:
    """The entry for ``config.model_type``.

    Raises UserError for an unknown one, naming the entry to write or, where none can describe it, what the model is;
    ``fields`` of its config tell that better than the defaults of its type.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    unknown = f"model family '{model_type}' is not known (known: {', '.join(sorted(FAMILIES))}); "
    if kind := unsupported_kind(model_type, fields):
        raise UserError(
            f"{unknown}it is {kind}: only decoders whose layers are one attention and one MLP are supported"
        )
    raise UserError(
        f"{unknown}add an entry FAMILIES['{model_type}'] in mathinterp/models/families.py "
        "and prove it with 'mathinterp selftest'"
    )
