"""Tiny random decoders of every supported family, and a tokenizer for them.

Knows configs small enough for exact float64 identities on a CPU; knows nothing about what the tests do with them.
Weights are drawn so that every part matters: norms, biases, soft-caps and windows are never at their neutral values.
"""

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mathinterp.models.families import family_of

VOCABULARY = 160
WINDOW = 4  # shorter than any arithmetic prompt, so that a forgotten window shows
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
_LLAMA_LIKE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **_SPECIAL,
)  # fmt: skip
_GPT_LIKE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_inner=40, n_positions=512,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_SPECIAL,
)  # fmt: skip
_NEOX: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=512, rotary_pct=0.5, attention_bias=True, **_SPECIAL,
)  # fmt: skip
_FALCON: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, ffn_hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=512, bias=True, **_SPECIAL,
)  # fmt: skip
_OPT: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, ffn_dim=40, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=512, tie_word_embeddings=False, dropout=0.0, **_SPECIAL,
)  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model type and fields
    "llama": ("llama", _LLAMA_LIKE),
    "llama3-rope-scaled": ("llama", {**_LLAMA_LIKE, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": None}),
    "mistral-window": ("mistral", {**_LLAMA_LIKE, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 16}),  # 4 heads of 16 beside d_model 32
    "gemma2": (
        "gemma2",
        {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {**_LLAMA_LIKE, "sliding_window": None}),
    "gpt2": ("gpt2", _GPT_LIKE),
    "gptj": ("gptj", {**_GPT_LIKE, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {**_NEOX, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {**_NEOX, "use_parallel_residual": False}),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "gemma3": (
        "gemma3_text",
        {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}},
    ),
    "smollm3": ("smollm3", {**_LLAMA_LIKE, "no_rope_layers": [1, 0, 1] * 2}),
    "stablelm": ("stablelm", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "stablelm",
        {**_LLAMA_LIKE, "partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "falcon": ("falcon", _FALCON),
    "falcon-new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": ("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False}),
    "opt": ("opt", _OPT),
    "opt-plain": ("opt", {**_OPT, "enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": True}),
    "granite": (
        "granite",
        {**_LLAMA_LIKE, "embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.6,
         "logits_scaling": 2.5},
    ),
    "mixtral": (
        "mixtral", {**_LLAMA_LIKE, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_LLAMA_LIKE, "head_dim": 16, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip

# Families that this transformers does not have are in no test.
MISSING: list[str] = [name for name, (model_type, _) in _CONFIGS.items() if model_type not in CONFIG_MAPPING]
TINY_FAMILIES: list[str] = [name for name in _CONFIGS if name not in MISSING]
FIRST_FAMILIES = ("llama", "gpt2", "gemma2")  # `make check` tries these alone
MIXTURES: set[str] = {"mixtral", "qwen3_moe"}
WITH_NEURONS: list[str] = [name for name in TINY_FAMILIES if name not in MIXTURES]
of_neurons = pytest.mark.parametrize("anatomy", WITH_NEURONS, indirect=True)  # tests about single neurons


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of tiny family ``name`` (one of TINY_FAMILIES)."""
    model_type, fields = _CONFIGS[name]
    return AutoConfig.for_model(model_type, **copy.deepcopy(fields))  # some configs write into what they are given


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random 3-layer, 4-head model in eval mode, without gradients; same seed, same weights in every dtype."""
    return copy.deepcopy(_drawn(name, seed, dtype))  # the caller's own: tests change weights and add hooks


@functools.lru_cache(maxsize=64)
def _drawn(name: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    config = tiny_config(name)
    backend = family_of(config.model_type).attention_backend
    return randomized(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=backend), seed)


def randomized(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with all its parameters drawn anew, in eval mode, without gradients."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm_weight = parameter.dim() == 1 and parameter_name.endswith("weight")
            # Norm weights vary around their initial value (0 in Gemma-2, 1 elsewhere); biases around 0.
            parameter.copy_(parameter + 0.3 * drawn if is_norm_weight else 0.3 * drawn)
    return model.eval().requires_grad_(False)


_WORDS = (
    "The sum of and is difference between product ratio Q What plus minus times divides A equal to equals divided by "
    "multiplied added subtracted from result Question Answer nothing less than more many how much has have left total "
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand "
    "0 1 2 3 4 5 6 7 8 9 + - * / = ? : . , < > ( ) ' | ; ! & @ # % ^ ~"
)


def tiny_tokenizer(extra_words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of VOCABULARY entries: digits and signs are one token each, spaces none, BOS is added.

    Words outside the vocabulary become ``<unk>``; ``extra_words`` take the places of filler entries.
    """
    entries = ["<unk>", "<s>", "</s>", "<pad>", *dict.fromkeys([*_WORDS.split(), *extra_words])]
    entries += [f"filler{i}" for i in range(VOCABULARY - len(entries))]
    assert len(entries) == VOCABULARY, f"{len(entries)} words do not fit a vocabulary of {VOCABULARY}"
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]"), behavior="isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def save_tiny(folder: Path | str, name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write ``tiny_model(name)`` and its tokenizer as a Hugging Face folder (safetensors); returns the folder."""
    folder = Path(folder)
    tiny_model(name, seed=seed, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
