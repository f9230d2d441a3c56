"""The parts of a model that can be changed: where they are, and how people write them. Needs no torch."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from mathinterp.gates import whole


class Head(NamedTuple):
    """One query head; written ``layer.head``, both counted from 0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"

    @classmethod
    def read(cls, text: str) -> Self:
        """ "17.22" -> Head(17, 22); raises ValueError for anything else."""
        return cls(*_pair(text))


class Neuron(NamedTuple):
    """One FFN neuron; written ``layer.neuron``, both counted from 0 (paper A writes ``layer_neuron``)."""

    layer: int
    neuron: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.neuron}"

    @classmethod
    def read(cls, text: str) -> Self:
        """ "28.3696" or "28_3696" -> Neuron(28, 3696); raises ValueError for anything else."""
        return cls(*_pair(text.replace("_", ".")))


@dataclass(frozen=True, order=True)
class Mlp:
    """The MLP of one layer."""

    layer: int

    def __str__(self) -> str:
        return f"mlp {self.layer}"


@dataclass(frozen=True, order=True)
class AttentionOutput:
    """What the attention of one layer gives, all heads together."""

    layer: int


@dataclass(frozen=True, order=True)
class ResidualStream:
    """The residual stream that one layer reads; that of layer 0 is the embedding."""

    layer: int


Unit = Head | Neuron | Mlp | AttentionOutput | ResidualStream


def _pair(text: str) -> tuple[int, int]:
    layer, _, number = text.strip().partition(".")
    return whole(layer), whole(number)
