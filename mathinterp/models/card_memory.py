"""Whether a model's weights fit its cards, from the config and the sizes of the cards; loads nothing.

Imports nothing heavy before a model is built to count its weights.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.models.resolved import DTYPE_BYTES, ResolvedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROOM = 0.92  # of a card's memory that weights may take: the rest is for the context, activations and kernels
AT_ONCE = 4  # layers: one runs, the next is there, and buffers of both
QUANTISED_BYTES = {"8bit": 1.0, "4bit": 0.57}  # of a weight in a matrix of a layer, scales included


@dataclass(frozen=True)
class Weights:
    """What a model's weights take, in bytes; weights that are tied count once, and lie at home."""

    layers: tuple[int, ...]
    rest: int  # embeddings, norms, unembedding

    def on_cards(self, cards: int) -> list[int]:
        """Bytes on each card."""
        from mathinterp.models.split import dealt

        found = [self.rest] + [0] * (cards - 1)
        for size, card in zip(self.layers, dealt(len(self.layers), cards), strict=True):
            found[card] += size
        return found

    def on_worker(self, workers: int) -> float:
        """Bytes on each of so many workers: its share of the layers (sharded.py), and those gathered at one time."""
        gathered = 0 if workers == 1 else AT_ONCE * max(self.layers)
        return self.rest + sum(self.layers) / workers + gathered

    def cards_needed(self, card_bytes: int) -> int | None:
        """The fewest cards of that memory that hold the weights; None: no number of them does."""
        fitting = (n for n in range(1, len(self.layers) + 1) if max(self.on_cards(n)) <= ROOM * card_bytes)
        return next(fitting, None)


def weights_of(config: "PreTrainedConfig", bytes_each: int, load_in: str | None = None) -> Weights:
    """From the config alone: the model is built without weights and its parameters are counted."""
    from mathinterp.models.random_shapes import without_weights
    from mathinterp.models.split import layers_name

    prefix = f"{layers_name(config)}."
    layers, rest = [0.0] * config.num_hidden_layers, 0
    for name, parameter in without_weights(config).named_parameters():
        if not name.startswith(prefix):
            rest += parameter.numel() * bytes_each
            continue
        each = QUANTISED_BYTES[load_in] if load_in and parameter.ndim > 1 else bytes_each
        layers[int(name.removeprefix(prefix).partition(".")[0])] += parameter.numel() * each
    return Weights(tuple(map(int, layers)), rest)


def runs_own_code(model: ResolvedModel) -> bool:
    """Whether its class is none of transformers', so that the config alone does not say what there is."""
    from transformers import AutoModelForCausalLM

    named = "AutoModelForCausalLM" in (getattr(model.config, "auto_map", None) or {})
    return (model.spec.trust_remote_code and named) or type(model.config) not in AutoModelForCausalLM._model_mapping


def check_fits(model: ResolvedModel, cards: int, card_bytes: int) -> None:
    """Raise UserError, naming the number of cards that would do, for weights that ``cards`` cards cannot hold.

    Says nothing of a model that runs its own code, which alone knows its weights: loading it tells.
    """
    if runs_own_code(model):
        return
    bytes_each = DTYPE_BYTES[model.dtype]
    if model.adapter is not None:
        bytes_each = max(bytes_each, 4)  # adapters are merged in float32
    weights = weights_of(model.config, bytes_each, model.spec.load_in)
    most = max(weights.on_cards(cards))
    if most <= ROOM * card_bytes:
        return
    needed = weights.cards_needed(card_bytes)
    helps = (
        "no number of such cards holds it" if needed is None else
        f"give `gpus_per_replica` {needed}, or a narrower `dtype`, or `load_in`"
    )  # fmt: skip
    share = "" if cards == 1 else f", {most / 1e9:.3g} GB of them on one of {cards} cards"
    raise UserError(
        f"model '{model.label}' has {sum((*weights.layers, weights.rest)) / 1e9:.3g} GB of weights{share}, and a card"
        f" here has {card_bytes / 1e9:.3g} GB, of which {ROOM:.0%} may be weights: {helps}"
    )


def check_trainable(model: ResolvedModel, workers: int, card_bytes: int) -> None:
    """Raise UserError for weights that do not fit the card of each of ``workers`` that share the layers; 1: it has all.

    Gradients and the optimizer's state are not counted.
    """
    if runs_own_code(model):
        return
    weights = weights_of(model.config, DTYPE_BYTES[model.dtype])
    if (here := weights.on_worker(workers)) <= ROOM * card_bytes:
        return
    fitting = (n for n in range(2, 1 + len(weights.layers)) if weights.on_worker(n) <= ROOM * card_bytes)
    needed = next(fitting, None)
    helps = "no number of them holds it" if needed is None else f"give `shard_model` with `workers` {needed}"
    raise UserError(
        f"model '{model.label}' has {here / 1e9:.3g} GB of weights on each card, and a card here has"
        f" {card_bytes / 1e9:.3g} GB, of which {ROOM:.0%} may be weights: {helps}"
    )
