"""The neurons that make up a graph: ranked by an earlier scan, with their root and what is zeroed to check it.

Knows numbers of layers and neurons, and which prompts a graph is about; knows nothing about models.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mathinterp.errors import UserError
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import TokenizedPrompt

BY = ("prompt", "operation")


@dataclass(frozen=True)
class RankedNodes:
    """The first neurons of one prompt or operation, rank 1 first; ``importance`` (nats) decides between lowest ones."""

    graph: str  # prompt_id, or operation ("all": over all)
    neurons: tuple[Neuron, ...]
    importance: tuple[float, ...]
    change: tuple[float | None, ...]

    def first(self, k: int) -> "RankedNodes":
        """The first ``k`` alone."""
        return RankedNodes(self.graph, self.neurons[:k], self.importance[:k], self.change[:k])

    @property
    def root(self) -> int:
        """The place of the root: the neuron of the lowest layer; of several there, the one of largest importance."""
        return min(
            range(len(self.neurons)), key=lambda i: (self.neurons[i][0], -self.importance[i], self.neurons[i][1])
        )

    def prompts(self, by: str, prompts: Sequence[TokenizedPrompt]) -> list[TokenizedPrompt]:
        """The prompts that the graph is about."""
        if by == "prompt":
            return [prompt for prompt in prompts if prompt.prompt.prompt_id == self.graph]
        return [prompt for prompt in prompts if self.graph in ("all", prompt.prompt.operation)]

    def random_of_roots_layer(self, k: int, seed: int, n_neurons: int) -> Neuron:
        """A random neuron of the layer of the first k's root, none of the nodes; the same wherever it is drawn.

        Raises UserError if the layer has no other.
        """
        first = self.first(k)
        layer = first.neurons[first.root][0]
        others = np.setdiff1d(np.arange(n_neurons), [number for at, number in self.neurons if at == layer])
        if not len(others):
            raise UserError(f"layer {layer} has no neuron left for a control; rank fewer neurons")
        rng = np.random.default_rng([seed, k, zlib.crc32(self.graph.encode())])
        return layer, int(rng.choice(others))


@dataclass(frozen=True)
class NeuronNodes:
    """Nodes of every graph, from the neuron scan ``source``. The run's parameters hold their fingerprint."""

    source: str
    graphs: tuple[RankedNodes, ...] = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the graphs' names and neurons in order."""
        named = [[nodes.graph, nodes.neurons] for nodes in self.graphs]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
