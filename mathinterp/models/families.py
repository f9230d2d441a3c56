"""Where each model family keeps its parts: one short entry per ``config.model_type``.

To support a new family of decoders whose layers are one attention and one MLP (or one mixture of expert MLPs), add an
entry and run ``mathinterp selftest --model YOUR_MODEL``: the self-test proves that what the entry says is true. Paths
are attribute names, relative to the module named beside them; where one depends on the config, ``variant`` says how.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mathinterp.errors import UserError
from mathinterp.models.unsupported import unsupported_kind


@dataclass(frozen=True)
class Family:
    """Attribute names of one family's modules; the defaults are Llama's."""

    decoder: str = "model"  # in the causal-LM module, perhaps dotted: holds layers, embedding and final norm
    embedding: str = "embed_tokens"  # in the decoder
    layers: str = "layers"  # in the decoder
    final_norm: str = "norm"  # in the decoder
    attention: str = "self_attn"  # in a layer
    attention_norm: str | None = "input_layernorm"  # in a layer: the norm that attention reads through; None: no norm
    query: str | None = "q_proj"  # in attention; None where q, k and v are fused
    key: str | None = "k_proj"
    value: str | None = "v_proj"
    fused_qkv: str | None = None  # in attention
    # "blocks": all q, all k, all v; "per_group": the q of group 0's heads, its k, its v, then those of group 1, ...
    fused_qkv_layout: str | None = None
    groups: str | int = "num_key_value_heads"  # config field: key/value groups, as many as heads where it is missing
    output_projection: str = "o_proj"  # in attention; its input is the heads side by side
    mlp: str = "mlp"  # in a layer
    mlp_norm: str | None = "post_attention_layernorm"  # in a layer: the norm that the MLP reads through; None: no norm
    neurons: str = (
        "intermediate_size"  # config field: neurons of a layer (of an expert); 4 * d_model where it is missing
    )
    experts: str | None = None  # config field: experts of an MLP that is a mixture of them; then no neuron is named
    gate: str | None = "gate_proj"  # in the MLP; None for a plain two-matrix MLP
    up: str | None = "up_proj"  # in the MLP: W_up of a gated MLP, fc1 of a plain one
    fused_gate_up: str | None = None  # in the MLP: gate rows, then up rows
    activation: str = "act_fn"  # in the MLP
    down_projection: str = "down_proj"  # in the MLP; its input is the neurons' coefficients
    attention_post_norm: str | None = None  # in a layer: a norm between attention's output and the residual stream
    mlp_post_norm: str | None = None  # in a layer: the same after the MLP
    norm_offset: float = 0.0  # a norm multiplies by its weight plus this
    residual_multiplier: str | None = None  # config field: what a block gives is added to the stream times this
    logits_divisor: str | None = None  # config field: what the unembedding gives is divided by this
    layer_needs: tuple[str, ...] = ()  # arguments of a layer without a default, None where its attention is known
    parallel: bool | str = False  # attention and MLP read the same input; a string names the config flag that says so
    attention_backend: str = "sdpa"  # "eager" where the family has no SDPA or needs its soft-cap
    position_table: bool = False  # positions come from a table of max_position_embeddings rows, and there are no others
    tree_mask: bool = True  # accepts a 4-D additive mask and explicit position ids (proved by the self-test)
    variant: Callable[[Any], dict[str, Any]] | None = (
        None  # config -> what differs; UserError for what is not supported
    )


def _stablelm(config: Any) -> dict[str, Any]:
    return {"mlp_norm": "input_layernorm"} if config.use_parallel_residual else {}


def _falcon(config: Any) -> dict[str, Any]:
    if config.alibi:
        raise UserError(
            "this Falcon has ALiBi, whose distances transformers takes from places in the batch and not from positions:"
            " packed prompts would be silently wrong, so only Falcons with rotary positions are supported"
        )
    new, parallel = config.new_decoder_architecture, config.parallel_attn
    norms = 2 if new and config.num_ln_in_parallel_attn is None else config.num_ln_in_parallel_attn
    if (new and not parallel) or (norms == 2 and not new):
        raise UserError(
            f"this Falcon has new_decoder_architecture={new}, parallel_attn={parallel} and num_ln_in_parallel_attn="
            f"{norms}, for which transformers makes other norms than it uses"
        )
    found: dict[str, Any] = {"parallel": parallel}
    found["groups"] = "num_kv_heads" if new else 1 if config.multi_query else "num_attention_heads"
    if parallel:
        found |= {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if norms == 2 else {"mlp_norm": "input_layernorm"}
    return found


def _gemma3(config: Any) -> dict[str, Any]:
    if config.use_bidirectional_attention:
        raise UserError("this Gemma-3 reads later tokens (use_bidirectional_attention): only decoders are supported")
    return {}


def _opt(config: Any) -> dict[str, Any]:
    unfit = {
        "do_layer_norm_before": not config.do_layer_norm_before,
        "word_embed_proj_dim": config.word_embed_proj_dim != config.hidden_size,
        "_remove_final_layer_norm": config._remove_final_layer_norm,
        "layer_norm_elementwise_affine": not config.layer_norm_elementwise_affine,
    }
    for field in (name for name, found in unfit.items() if found):
        raise UserError(
            f"this OPT has {field}={getattr(config, field)}: only OPTs are supported whose norms have weights and stand"
            " before attention, MLP and unembedding, and whose embeddings are as wide as the model (not opt-350m)"
        )
    return {}


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
        fused_qkv="c_attn", fused_qkv_layout="blocks", output_projection="c_proj", mlp_norm="ln_2", neurons="n_inner",
        gate=None, up="c_fc", activation="act", down_projection="c_proj", position_table=True,
    ),
    "gptj": Family(
        decoder="transformer", embedding="wte", layers="h", final_norm="ln_f",
        attention="attn", attention_norm="ln_1", output_projection="out_proj",
        mlp_norm="ln_1", neurons="n_inner", gate=None, up="fc_in", activation="act", down_projection="fc_out",
        parallel=True, position_table=True,
    ),
    "gpt_neox": Family(
        decoder="gpt_neox", embedding="embed_in", final_norm="final_layer_norm",
        attention="attention", query=None, key=None, value=None, fused_qkv="query_key_value",
        fused_qkv_layout="per_group", output_projection="dense",
        gate=None, up="dense_h_to_4h", activation="act", down_projection="dense_4h_to_h",
        parallel="use_parallel_residual",
    ),
    "olmo2": Family(
        attention_norm=None, mlp_norm=None, attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    "gemma3_text": Family(
        mlp_norm="pre_feedforward_layernorm", attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm", norm_offset=1.0, variant=_gemma3,
    ),
    "smollm3": Family(),
    "stablelm": Family(parallel="use_parallel_residual", variant=_stablelm),
    "falcon": Family(
        decoder="transformer", embedding="word_embeddings", layers="h", final_norm="ln_f",
        attention="self_attention", query=None, key=None, value=None, fused_qkv="query_key_value",
        fused_qkv_layout="per_group", output_projection="dense", neurons="ffn_hidden_size",
        gate=None, up="dense_h_to_4h", activation="act", down_projection="dense_4h_to_h",
        layer_needs=("alibi", "attention_mask"), variant=_falcon,
        attention_backend="eager",  # under SDPA its weights, when asked for, come from a mask taken wrong
    ),
    "opt": Family(
        decoder="model.decoder", final_norm="final_layer_norm",
        attention_norm="self_attn_layer_norm", output_projection="out_proj", mlp_norm="final_layer_norm",
        neurons="ffn_dim", gate=None, up="fc1", activation="activation_fn", down_projection="fc2",
        position_table=True, variant=_opt,
    ),
    "granite": Family(residual_multiplier="residual_multiplier", logits_divisor="logits_scaling"),
    "mixtral": Family(experts="num_local_experts"),
    "qwen3_moe": Family(experts="num_experts", neurons="moe_intermediate_size"),
}  # fmt: skip


def family_for(config: Any) -> Family:
    """The entry for a config, with what its fields decide; raises UserError for what is not supported."""
    family = family_of(config.model_type)
    return family if family.variant is None else replace(family, **family.variant(config))


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
            f"{unknown}it is {kind}: only decoders whose layers are one attention and one MLP are supported, and of "
            f"mixtures of experts {' and '.join(name for name, family in FAMILIES.items() if family.experts)}"
        )
    raise UserError(
        f"{unknown}add an entry FAMILIES['{model_type}'] in mathinterp/models/families.py "
        "and prove it with 'mathinterp selftest'"
    )
