"""What a neuron scan compares the model with, and what it keeps of a prompt: as people write it, and what that means.

Knows models by their files; loads no weights.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mathinterp.errors import UserError
from mathinterp.experiments.options import read_heads
from mathinterp.gates import shortened, whole
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.models.catalog import ModelSpec, ResolvedModel
    from mathinterp.store import Store

MODELS = ("adapter", "model")
BYTES_PER_NEURON = 8  # stored, of a prompt and condition: two float32 that hardly compress
SAME = ("model_type", "n_layers", "n_heads", "d_model", "n_neurons", "vocabulary", "positions")


@dataclass(frozen=True)
class Against:
    """The intervention; written "head:17.22,14.19", "adapter:PATH", "model:NAME" or "input".

    kind: head (zeroed at every position), adapter, model, or input (the counterfactual prompt).
    name: of the adapter or model.
    """

    kind: str
    name: str = ""
    heads: tuple[Head, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """The intervention that ``text`` names; raises UserError."""
        kind, _, value = text.partition(":")
        if text == "input" or (kind in MODELS and value):
            return cls(kind, value)
        if kind != "head" or not value:
            how = "head:17.22,14.19, adapter:PATH, model:NAME or input"
            raise UserError(f"`against` '{shortened(text)}' cannot be read; write {how}")
        try:
            return cls(kind, heads=tuple(sorted(set(read_heads(value) or ()))))
        except UserError:
            raise UserError(f"`against` '{shortened(text)}' cannot be read; write heads as head:17.22,14.19") from None

    def __str__(self) -> str:
        detail = ",".join(map(str, self.heads)) or self.name
        return f"{self.kind}:{detail}" if detail else self.kind


@dataclass(frozen=True)
class Keep:
    """What is stored of a prompt: its first ``top`` neurons over all layers ("topk:100"), or every one ("all").

    top: neurons that count as a prompt's first, whatever is stored.
    """

    top: int = 100
    everything: bool = False

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``text`` names; raises UserError."""
        if text == "all":
            return cls(everything=True)
        kind, _, number = text.partition(":")
        try:
            if kind == "topk":
                return cls(whole(number, 1))
        except ValueError:
            pass
        raise UserError(f"`keep` '{shortened(text)}' cannot be read; write topk:100 or all")

    def __str__(self) -> str:
        return "all" if self.everything else f"topk:{self.top}"


@dataclass(frozen=True)
class OtherModel:
    """The model that the original is compared with; ``fingerprint`` is the driver's, ``label`` for people."""

    spec: ModelSpec
    fingerprint: str
    label: str


def other_model(against: Against, original: ResolvedModel) -> OtherModel:
    """The model that ``against`` names: the original with another adapter, or any of its shape and vocabulary.

    Raises UserError unless a neuron and a token are the same thing in both models, and the models are not one.
    """
    from mathinterp.models.catalog import resolve

    if against.kind == "adapter":
        spec = replace(original.spec, adapter=against.name)
    else:
        spec = replace(original.spec, name=against.name, adapter=None)
    other = resolve(spec)
    for what in SAME:
        here, there = getattr(original.shape, what), getattr(other.shape, what)
        if here != there:
            raise UserError(f"`against`: {other.label} has {what} {there}, {original.label} has {here}")
    if original.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise UserError(f"`against`: the tokens of {other.label} are not those of {original.label}")
    if original.fingerprint == other.fingerprint:
        raise UserError(f"`against`: {other.label} is {original.label} itself; nothing would change")
    return OtherModel(spec, other.fingerprint, other.label)


def require_room(store: Store, neurons: int, prompts: int, conditions: int) -> None:
    """Raise UserError if every neuron of every prompt is more than the store's disk has free."""
    require_free(
        store,
        BYTES_PER_NEURON * neurons * prompts * conditions,
        f"`keep` all would write about {{size}} ({neurons:,} neurons x {prompts:,} prompts x {conditions}"
        " condition(s))",
        "keep topk:K (the means of every neuron are stored all the same), or take fewer `layers` or prompts (`limit`)",
    )


def require_free(store: Store, wanted: float, what: str, advice: str) -> None:
    """Raise UserError if ``wanted`` bytes are more than the store's disk has free; object stores are not asked.

    Args:
        what: would be written, with {size} in it.
    """
    if not store.files.local:
        return
    folder = next(place for place in (Path(store.url), *Path(store.url).parents) if place.exists())
    free = shutil.disk_usage(folder).free
    if wanted > free:
        size = f"{wanted / 1e9:,.1f} GB"
        raise UserError(f"{what.format(size=size)}, but {folder} has {free / 1e9:,.1f} GB free; {advice}")
