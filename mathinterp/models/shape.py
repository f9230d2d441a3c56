"""Sizes of a decoder and the reach of its positions, as plain facts; imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import dataclass

from mathinterp.errors import UserError


@dataclass(frozen=True)
class Positions:
    """What a model's config says about positions."""

    limit: int | None = None  # of a text, in tokens: rows of its table, or the length that rotary ones are made for
    alike_up_to: int | None = None  # up to this length frequencies are the same; None: whatever the length
    each_length: bool = False  # beyond it each length has its own frequencies, else all have one other set

    def kind(self, length: int) -> int:
        """Sentences of one kind may share a forward pass; 0 for all, where the frequencies never change."""
        if self.alike_up_to is None or length <= self.alike_up_to:
            return 0
        return length if self.each_length else 1

    def widest(self, width: int, longest: int) -> int:
        """``width``, or as much of it as a batch whose longest sentence has ``longest`` tokens may be padded to."""
        if self.kind(longest) and self.each_length:
            return longest
        ends = [self.limit, None if self.kind(longest) else self.alike_up_to]
        return max(longest, min([width, *(end for end in ends if end is not None)]))


ANY_LENGTH = Positions()


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, from its config alone (no weights needed)."""

    model_type: str
    n_layers: int
    n_heads: int  # query heads
    n_groups: int  # key/value groups; a "head" never means one of these
    d_head: int
    d_model: int
    n_neurons: int  # FFN neurons per layer; of a mixture of experts, those of one expert
    vocabulary: int
    gated_mlp: bool
    parallel: bool
    logit_softcap: float | None
    attention_windows: tuple[int | None, ...]  # per layer; None = full attention
    tied_unembedding: bool
    positions: Positions = ANY_LENGTH
    n_experts: int = 0  # MLPs that each MLP is a mixture of; 0: it is none
    experts_per_token: int = 0  # of these, those that a token goes through
    residual_multiplier: float = 1.0  # what a block gives is added to the residual stream times this
    logits_divisor: float = 1.0

    def check_neurons(self) -> None:
        """Raise UserError where MLPs are mixtures of experts: a neuron has no one coefficient for every token there."""
        if self.n_experts:
            raise UserError(
                f"model family '{self.model_type}' has mixtures of experts for MLPs: heads and whole MLPs can be"
                " studied and heads trained, but single neurons are not supported"
            )

    def check_layer(self, layer: int) -> None:
        """Raise UserError unless ``layer`` exists."""
        if not 0 <= layer < self.n_layers:
            raise UserError(f"layer {layer} does not exist: the model has layers 0 to {self.n_layers - 1}")

    def check_head(self, layer: int, head: int) -> None:
        """Raise UserError unless head ``layer.head`` exists."""
        self.check_layer(layer)
        if not 0 <= head < self.n_heads:
            raise UserError(f"head {layer}.{head} does not exist: each layer has heads 0 to {self.n_heads - 1}")

    def check_neuron(self, layer: int, neuron: int) -> None:
        """Raise UserError unless neuron ``layer.neuron`` exists."""
        self.check_layer(layer)
        if not 0 <= neuron < self.n_neurons:
            raise UserError(f"neuron {layer}.{neuron} does not exist: each layer has neurons 0 to {self.n_neurons - 1}")

    def chosen_layers(self, asked: Iterable[int] | None) -> list[int]:
        """The layers asked for, ascending; None: all. Raises UserError for one that does not exist."""
        layers = list(range(self.n_layers)) if asked is None else sorted(set(asked))
        for layer in layers:
            self.check_layer(layer)
        return layers
