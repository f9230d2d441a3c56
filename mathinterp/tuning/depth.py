"""Which layers of another model stand where paper A's stand in its 32.

Knows numbers of layers only. The rule: layer i of a model with L layers is at depth 32 i / L. A range of paper A's
layers is all layers whose depth is in it; its LoRA layer 9 is the last layer at depth 9 or less. On 32 layers both are
the paper's own numbers; with 30 layers the LoRA layer is 8 and the deep layers are 16 to 29, with 8 layers 2 and 5-7.
"""

PAPER_LAYERS = 32
LORA_DEPTH = 9
DEEP_FROM = 17


def lora_layer(n_layers: int) -> int:
    """The layer that stands for paper A's LoRA layer 9."""
    return LORA_DEPTH * n_layers // PAPER_LAYERS


def deep_layers(n_layers: int) -> tuple[int, ...]:
    """The layers that stand for paper A's 17 to 31."""
    return tuple(layer for layer in range(n_layers) if PAPER_LAYERS * layer >= DEEP_FROM * n_layers)
