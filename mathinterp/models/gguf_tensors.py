"""A GGUF file's tensors against the model that will hold them: each has a place in it, or the file is refused.

transformers passes over tensors that it has no name for. Knows the names of the gguf package, and rotary factors, which
llama.cpp keeps as a tensor and transformers in the config; knows nothing about how tensors are stored.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mathinterp.errors import UserError
from mathinterp.models.gguf_metadata import GgufMetadata
from mathinterp.models.random_shapes import without_weights

ROPE_FACTORS = "rope_freqs.weight"
_TOLERANCE = 1e-4  # relative, of float32 factors worked out by two programs
# (low, high frequency factor, positions before) of the models whose converter writes rotary factors: Llama 3.1 to 3.3.
_LLAMA3 = (1.0, 4.0, 8192)


def apply_tensors(metadata: GgufMetadata, config: PreTrainedConfig) -> None:
    """Raise UserError unless tensors of ``metadata`` and parameters of a model of this config are the same set.

    Rotary factors are given to ``config`` first, where they are those of Llama 3.
    """
    if ROPE_FACTORS in metadata.tensors:
        _give_rope_factors(metadata, config)
    import gguf

    architectures = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[metadata.architecture], config.num_hidden_layers)
    # A tied unembedding is not among the parameters, nor in the file.
    places = {_in_file(names, name): tensor for name, tensor in without_weights(config).named_parameters()}
    left_over = sorted(set(metadata.tensors) - set(places) - {ROPE_FACTORS})
    missing = sorted(str(name) for name in set(places) - set(metadata.tensors))
    for found, what in ((left_over, "holds tensors that the model has no place for"), (missing, "lacks tensors")):
        if found:
            raise UserError(f"GGUF file '{metadata.file}' {what}: {len(found)} in all, first {found[0]}")
    embedding, expected = metadata.tensors["token_embd.weight"].shape, (config.vocab_size, config.hidden_size)
    if embedding != expected:
        raise UserError(
            f"GGUF file '{metadata.file}' has a token_embd.weight of {embedding[0]} x {embedding[1]}, its settings say "
            f"{expected[0]} x {expected[1]}"
        )
    for name, parameter in places.items():
        held, wanted = metadata.tensors[name].shape, tuple(parameter.shape)
        if sorted(held) != sorted(wanted):  # some are kept transposed
            raise UserError(
                f"GGUF file '{metadata.file}' has a {name} of {_sizes(held)}, its settings say {_sizes(wanted)}"
            )


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _in_file(names: "object", parameter: str) -> str:
    base, _, suffix = parameter.rpartition(".")
    name = names.get_name(base)  # type: ignore[attr-defined]
    return f"{name or base}.{suffix}"


def _give_rope_factors(metadata: GgufMetadata, config: PreTrainedConfig) -> None:
    """Each rotary frequency is divided by its factor; the config can say so where they follow Llama 3's rule."""
    factors = metadata.float32(ROPE_FACTORS)
    rope = getattr(config, "rope_parameters", None) or {}
    if factors is not None and rope.get("rope_type") == "default":
        wanted = torch.tensor(factors.copy())
        if torch.equal(wanted, torch.ones_like(wanted)):
            return
        low, high, before = _LLAMA3
        scaled = {
            **rope, "rope_type": "llama3", "factor": round(float(wanted.max()), 6), "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": before,
        }  # fmt: skip
        plain, config.rope_parameters = _frequencies(config), scaled
        found = plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_TOLERANCE):
            return
    raise UserError(
        f"GGUF file '{metadata.file}' scales rotary positions by the tensor {ROPE_FACTORS}, and not by the rule of "
        "Llama 3, which transformers could be told: give the model as a Hugging Face folder"
    )


def _frequencies(config: PreTrainedConfig) -> torch.Tensor:
    """Rotary frequencies without scaling, in float32 as models compute them."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies: torch.Tensor = 1.0 / config.rope_parameters["rope_theta"] ** powers
    return frequencies
