"""Configurations of model families."""

from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config

from tests.tiny import VOCABULARY

ORIGINAL = 12  # tokens up to which frequencies do not depend on the length


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


CONFIGS = {
    "dynamic": LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC),
    "dynamic-neox": GPTNeoXConfig(
        **SIZES, max_position_embeddings=ORIGINAL, rope_parameters={**DYNAMIC, "partial_rotary_factor": 0.5}
    ),
    "longrope": Phi3Config(
        **SIZES, num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONG,
    ),
}  # fmt: skip
