"""Prediction-enhancing graphs of a neuron scan's first neurons, and their causal check (paper A, 4.3 and Table 6).

A graph's nodes are the neurons that rank first for one prompt, or for one operation (and "all") in the mean over its
prompts. Its edges (engine/lens/graph.py) are means over its prompts; the strongest are stored. The root is the lowest
node. The check zeroes, for several k, the lowest of a graph's first k neurons at every position (and, as a control,
random other neurons of the same layer) and takes the coefficients of the other first k neurons again, prompt by prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.engine.lens import MEASURES
from mathinterp.errors import UserError
from mathinterp.experiments.base import Context, Experiment, Shard, Subject
from mathinterp.experiments.neuron_graph.tables import AT_ONCE, TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_counts
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS, real, shortened, whole

if TYPE_CHECKING:
    from mathinterp.experiments.neuron_graph.nodes import NeuronNodes
    from mathinterp.experiments.neuron_graph.rows import GraphState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import Prompt, TokenizedPrompt

BY = ("prompt", "operation")
DEFAULT_KS = (99, 50, 30, 20, 10)  # paper A's Table 6
SHOWN_NAMES = 5


@dataclass(frozen=True)
class KeptEdges:
    """Edges stored of a graph: at most the ``strongest`` (None: no limit) of those whose strength is ``above`` this.

    Written "top:60", "above:0.5" or "all".
    """

    strongest: int | None = 60
    above: float = 0.0

    def __post_init__(self) -> None:
        if (self.strongest is not None and self.strongest < 1) or self.above < 0:
            raise UserError("`edges`: keep 1 edge or more (top:60), or those above 0 or more (above:0.5)")

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``text`` names; raises UserError."""
        kind, _, number = text.partition(":")
        if text == "all":
            return cls(None)
        try:
            if kind == "top":
                return cls(whole(number))
            if kind == "above":
                return cls(None, real(number))
        except ValueError:
            pass
        raise UserError(f"`edges` '{shortened(text)}' cannot be read; write top:60, above:0.5 or all")

    def __str__(self) -> str:
        if self.strongest is not None:
            return f"top:{self.strongest}"
        return f"above:{self.above:g}" if self.above else "all"


@dataclass(frozen=True)
class GraphShown:
    """Options of the summary and the figure."""

    graph: str | None = option(
        None, "Prompt id or operation to show and draw.", flag="show", shown="all, else the first", metavar="GRAPH"
    )


@dataclass(frozen=True)
class NeuronGraph(Experiment):
    """Which of the first neurons drive which later ones, and what zeroing the lowest of them does (paper A, 4.3).

    Give the model and prompts of the neuron scan; the neurons rank as they do there. No number of first neurons in the
    check may be above what that scan keeps of a prompt (topk:K).
    """

    neurons_from: str = option(
        dataclasses.MISSING,
        "A finished run of 'scan neurons'.",
        flag="from",
        former=("neurons-from",),
        metavar="RUN_ID",
    )
    by: str = option("prompt", "A graph for each prompt, or for each operation and all.", choices=BY)
    top: int = option(30, "Nodes: the first so many neurons of the neuron scan.", least=2)
    measure: str = option(
        "sum",
        "What ranks edges: sum (inner products, by size), signed, or first_order (positive ones).",
        choices=MEASURES,
    )
    edges: KeptEdges = option(
        KeptEdges(), "Kept of a graph: top:N, above:X, or all.", parse=KeptEdges.read, shown="top:60"
    )
    ks: tuple[int, ...] | None = option(
        None,
        "First neurons in the causal check; or none.",
        parse=partial(read_counts, least=0),
        shown="those of 99,50,30,20,10 that the scan keeps",
    )
    control_seeds: int = option(3, "Random neurons zeroed as controls.", least=0, most=MOST_DRAWS)
    nodes: NeuronNodes | None = None  # of every graph, from the neuron scan; found by ``bind``

    name: ClassVar[str] = "graph"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    show_options: ClassVar[type] = GraphShown
    command_examples: ClassVar[Sequence[str]] = (
        "scan neurons --against head:0.6 --limit 160",
        "scan graph --from RUN_ID --limit 160 --out figures",
        "scan graph --from RUN_ID --limit 160 --by operation --measure first_order --show add",
    )

    def __post_init__(self) -> None:
        if isinstance(self.edges, str):
            normalized(self, edges=KeptEdges.read(self.edges))
        normalized(self, ks=read_counts(self.ks))
        check_options(self)
        if any(k < 2 for k in self.ks or ()):
            raise UserError("`ks`: with fewer than 2 first neurons there are no others whose coefficients could fall")

    def bind(self, context: Context) -> Self:
        """With the nodes; raises UserError for a run of another model or of other prompts, or that keeps too few."""
        from mathinterp.experiments.neuron_graph.nodes import nodes_from
        from mathinterp.experiments.neurons.stored import check_model, neuron_run

        model, run = context.model, neuron_run(context.store, self.neurons_from)
        check_model(run, model.fingerprint, model.label)
        nodes = nodes_from(context.store, run, self.by, self.top, self.ks, model.fingerprint, context.prompts)
        return dataclasses.replace(self, nodes=nodes)

    @property
    def ranked(self) -> NeuronNodes:
        """The nodes that ``bind`` found."""
        assert self.nodes is not None, "the nodes are found by bind"
        return self.nodes

    def checked_ks(self) -> list[int]:
        """The ks that the largest graph has neurons for, largest first."""
        most = max(len(nodes.neurons) for nodes in self.ranked.graphs)
        return [k for k in self._ks() if k <= most]

    def _ks(self) -> list[int]:
        return sorted(set(DEFAULT_KS if self.ks is None else self.ks), reverse=True)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "neurons_from": self.neurons_from,
            "nodes": self.ranked.fingerprint,
            "by": self.by,
            "top": self.top,
            "measure": self.measure,
            "strongest": self.edges.strongest,
            "above": self.edges.above,
            "ks": self._ks(),
            "seeds": self.control_seeds,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Each table by blocks of prompts, or an operation a file; raises UserError for neurons that do not exist."""
        graphs = self.ranked.graphs
        known = {prompt.prompt.prompt_id for prompt in prompts} | {"all", *(p.prompt.operation for p in prompts)}
        for nodes in graphs:
            assert nodes.graph in known, f"no prompt of graph '{nodes.graph}'"
            for layer, neuron in nodes.neurons:
                shape.check_layer(layer)
                if neuron >= shape.n_neurons:
                    raise UserError(f"neuron {layer}.{neuron} does not exist: a layer has {shape.n_neurons}")
        size = AT_ONCE if self.by == "prompt" else 1
        blocks = [list(range(start, min(start + size, len(graphs)))) for start in range(0, len(graphs), size)]
        checks = len(self.checked_ks()) * (1 + self.control_seeds)
        return [
            Shard(table, index, {"graphs": block}, 1.0 + (checks if table == "neuron_graph_check" else 0))
            for table in TABLES
            if table != "neuron_graph_check" or checks
            for index, block in enumerate(blocks)
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """A clean pass of each prompt, and for the check one more for every k and zeroed neuron."""
        if self.by == "prompt":
            return len(shard.work["graphs"]) * int(shard.cost)
        graphs = [self.ranked.graphs[i] for i in shard.work["graphs"]]
        return sum(len(nodes.prompts(self.by, prompts)) for nodes in graphs) * int(shard.cost)

    def prepare(self, subject: Subject) -> GraphState:
        """Handles to weights; activations are taken shard by shard."""
        from mathinterp.experiments.neuron_graph.rows import prepare

        return prepare(subject)

    def run(self, state: GraphState, shard: Shard) -> pa.Table:
        """Rows of the shard's graphs."""
        from mathinterp.experiments.neuron_graph.rows import check_rows, edge_rows, node_rows

        make = dict(zip(TABLES, (node_rows, edge_rows, check_rows), strict=True))[shard.table]
        rows = make(self, state, [self.ranked.graphs[i] for i in shard.work["graphs"]])
        return pa.Table.from_pylist(rows, TABLES[shard.table].schema)

    def check_shown(self, shown: GraphShown, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for a graph that these prompts do not give."""
        if self.by == "prompt":
            names = [prompt.prompt_id for prompt in prompts]
        else:
            names = ["all", *sorted({prompt.operation for prompt in prompts if prompt.operation is not None})]
        if shown.graph is not None and shown.graph not in names:
            found = ", ".join(names[:SHOWN_NAMES])
            raise UserError(f"`graph` '{shown.graph}': there is no such graph; there are {found} ...")
