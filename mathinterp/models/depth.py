"""Which layers of another model stand where paper A's stand in its 32; knows numbers of layers only.

Layer i of a model with L layers is at depth 32 i / L. The deep layers begin at the layer nearest to depth 17 (of two
equally near ones the later), the LoRA layer is the last one at depth 9 or less: on 32 layers the paper's own numbers.
"""

PAPER_LAYERS = 32
LORA_DEPTH = 9
DEEP_FROM = 17


def lora_layer(n_layers: int) -> int:
    """The layer that stands for paper A's LoRA layer 9: 8 of 30, 2 of 8."""
    return LORA_DEPTH * n_layers // PAPER_LAYERS


def deep_layers(n_layers: int) -> tuple[int, ...]:
    """The layers that stand for paper A's 17 to 31: 16 to 29 of 30, 4 to 7 of 8; at least the last layer."""
    first = (2 * DEEP_FROM * n_layers + PAPER_LAYERS) // (2 * PAPER_LAYERS)
    return tuple(range(min(first, n_layers - 1), n_layers))
