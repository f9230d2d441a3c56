"""The neurons that make up a graph: ranked by a stored neuron scan, with their root and what is zeroed to check it.

Knows the store's views, numbers of layers and neurons, and which prompts a graph is about; knows nothing about models.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mathinterp.errors import UserError
from mathinterp.experiments.neurons.stored import check_prompts
from mathinterp.experiments.results import Row
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.store import Store

MOST = 99  # neurons of the largest k that is checked where none is named


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
        return Neuron(layer, int(rng.choice(others)))


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


# ---- from a neuron scan ----


def nodes_from(
    store: "Store",
    run: Row,
    by: str,
    top: int,
    ks: tuple[int, ...] | None,
    fingerprint: str,
    prompts: Sequence[Prompt],
) -> NeuronNodes:
    """The first neurons of each prompt, or of each operation and all, of a finished neuron scan.

    Args:
        run: from ``neuron_run``.
        top, ks: as many neurons are needed as the largest of them; ks None: up to MOST of those that there are.
        fingerprint: of the model that the graph is made of: the scan's own, or the one it was compared with.
        prompts: those that the graph is made on. By prompt, each must be one of the scan's.
    Raises:
        UserError: a prompt that the run had not, or fewer neurons per prompt than asked for.
    """
    run_id = run["run_id"]
    importance = "importance" if fingerprint == run["model_fingerprint"] else "intervened_importance AS importance"
    needed = max(top, *(ks or (0,)))
    most = max(needed, MOST) if ks is None else needed
    if by == "operation":
        source = f"""SELECT operation AS graph, layer, neuron, {importance}, change,
                            row_number() OVER (PARTITION BY operation ORDER BY ranked_by DESC, layer, neuron) AS rank
                     FROM neuron_summary WHERE run_id = $run AND operation IS NOT NULL"""
        wanted = {"all", *(prompt.operation for prompt in prompts if prompt.operation is not None)}
    else:
        if needed > run["top"] and not run["keeps_all"]:
            raise UserError(
                f"run {run_id} keeps {run['top']} neurons per prompt, not {needed}; scan with `keep` topk:{needed}"
                " first, or give smaller `top` and `ks`"
            )
        check_prompts(store, run, prompts)
        source = f"""SELECT prompt_id AS graph, layer, neuron, {importance}, change, rank
                     FROM neuron_changes WHERE run_id = $run"""
        wanted = {prompt.prompt_id for prompt in prompts}
    rows = store.dataframe(
        f"SELECT * FROM ({source}) WHERE rank <= $most ORDER BY graph, rank", {"run": run_id, "most": most}
    )
    graphs = [_ranked(str(graph), part) for graph, part in rows.groupby("graph", sort=True) if graph in wanted]
    missing = wanted - {nodes.graph for nodes in graphs}
    if missing:
        raise UserError(f"run {run_id} has no neurons for {', '.join(sorted(missing)[:5])}; take the prompts it has")
    return NeuronNodes(run_id, tuple(graphs))


def _ranked(graph: str, rows: pd.DataFrame) -> RankedNodes:
    return RankedNodes(
        graph,
        tuple(Neuron(int(layer), int(neuron)) for layer, neuron in zip(rows["layer"], rows["neuron"], strict=True)),
        tuple(rows["importance"].astype(float).tolist()),
        tuple(None if pd.isna(value) else float(value) for value in rows["change"]),
    )
