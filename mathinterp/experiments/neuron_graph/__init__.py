"""Prediction-enhancing graphs of a neuron scan's first neurons, and their causal check (paper A, 4.3 and Table 6).

A graph's nodes are the neurons that rank first for one prompt, or for one operation (and "all") in the mean over its
prompts. Its edges (forward/neuron_graph.py) are means over its prompts; the strongest are stored. The root is the
lowest node. The check zeroes, for several k, the lowest of a graph's first k neurons at every position (and, as a
control, random other neurons of the same layer) and takes the coefficients of the other first k neurons again, prompt
by prompt.

Shape legend: M measure, N node, K neuron of a layer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import pyarrow as pa
import torch

from mathinterp.engine.lens.graph import MEASURES, GraphReader
from mathinterp.engine.lens.neurons import EndActivations, end_activations
from mathinterp.engine.lens.top_tokens import TopTokens
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.neuron_graph.nodes import BY, Neuron, NeuronNodes, RankedNodes
from mathinterp.experiments.neuron_graph.tables import TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt

AT_ONCE = 200  # prompts whose activations are held together, and single prompts' graphs in a file
COLUMNS = ("inner_product", "signed_product", "first_order")  # of MEASURES, in their order
GRAPH_TABLES = ("neuron_graph_nodes", "neuron_graph_edges", "neuron_graph_check")

Occasion = tuple[RankedNodes, TokenizedPrompt]  # a graph and one of its prompts
Place = tuple[EndActivations, int]  # activations of some prompts, and the row of one
Row = dict[str, Any]


@dataclass
class GraphState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    graph: GraphReader
    tokens: TopTokens


@dataclass(frozen=True)
class NeuronGraph(Experiment):
    """Graphs of ``nodes``.

    by: a graph a "prompt" or an "operation" (and "all").
    top: nodes of a graph.
    measure: what ranks edges: "sum" (by size: its sign says nothing alone), "signed" or "first_order" (positive ones).
    strongest: edges stored of a graph, at most; None: no limit.
    above: only edges whose strength is above this.
    ks: numbers of first neurons for the causal check; those that no graph has are left out.
    seeds: random neurons that are zeroed as controls, one after another.
    """

    nodes: NeuronNodes
    by: str = "prompt"
    top: int = 30
    measure: str = "sum"
    strongest: int | None = 60
    above: float = 0.0
    ks: tuple[int, ...] = (99, 50, 30, 20, 10)
    seeds: int = 3

    name: ClassVar[str] = "graph"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        for name, value, known in (("by", self.by, BY), ("measure", self.measure, MEASURES)):
            if value not in known:
                raise UserError(f"--{name} '{value}' is not known; take one of {', '.join(known)}")
        if self.top < 2:
            raise UserError(f"a graph of {self.top} neurons has no edges; give --top 2 or more")
        if any(k < 2 for k in self.ks):
            raise UserError("--ks: with fewer than 2 first neurons there are no others whose coefficients could fall")
        if self.seeds < 0:
            raise UserError("--control-seeds cannot be negative")
        if (self.strongest is not None and self.strongest < 1) or self.above < 0:
            raise UserError("--edges: keep 1 edge or more (top:60), or those above 0 or more (above:0.5)")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "neurons_from": self.nodes.source,
            "nodes": self.nodes.fingerprint,
            "by": self.by,
            "top": self.top,
            "measure": self.measure,
            "strongest": self.strongest,
            "above": self.above,
            "ks": sorted(set(self.ks), reverse=True),
            "seeds": self.seeds,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Each table by blocks of prompts, or an operation a file; raises UserError for neurons that do not exist."""
        graphs = self.nodes.graphs
        known = {prompt.prompt.prompt_id for prompt in prompts} | {"all", *(p.prompt.operation for p in prompts)}
        for nodes in graphs:
            assert nodes.graph in known, f"no prompt of graph '{nodes.graph}'"
            for layer, neuron in nodes.neurons:
                shape.check_layer(layer)
                if neuron >= shape.n_neurons:
                    raise UserError(f"neuron {layer}.{neuron} does not exist: a layer has {shape.n_neurons}")
        size = AT_ONCE if self.by == "prompt" else 1
        blocks = [list(range(start, min(start + size, len(graphs)))) for start in range(0, len(graphs), size)]
        checks = len(self._ks()) * (1 + self.seeds)
        costs = dict(zip(GRAPH_TABLES, (1, 1, 1 + checks), strict=True))
        return [
            Shard(table, index, {"graphs": block}, float(cost))
            for table, cost in costs.items()
            if table != "neuron_graph_check" or checks
            for index, block in enumerate(blocks)
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """A clean pass of each prompt, and for the check one more for every k and zeroed neuron."""
        if self.by == "prompt":
            return len(shard.work["graphs"]) * int(shard.cost)
        graphs = [self.nodes.graphs[i] for i in shard.work["graphs"]]
        return sum(len(nodes.prompts(self.by, prompts)) for nodes in graphs) * int(shard.cost)

    def prepare(self, subject: Subject) -> GraphState:
        """Handles to weights; activations are taken shard by shard."""
        assert subject.tokenizer is not None, "tokens are shown as text"
        anatomy = subject.anatomy
        return GraphState(anatomy, subject.prompts, GraphReader(anatomy), TopTokens(anatomy, subject.tokenizer))

    def run(self, state: GraphState, shard: Shard) -> pa.Table:
        """Rows of the shard's graphs."""
        make = dict(zip(GRAPH_TABLES, (self._node_rows, self._edge_rows, self._check_rows), strict=True))[shard.table]
        rows = make(state, [self.nodes.graphs[i] for i in shard.work["graphs"]])
        return pa.Table.from_pylist(rows, self.tables[shard.table].schema)

    def _occasions(self, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Occasion]:
        """Every graph with each of its prompts, graph after graph."""
        if self.by == "prompt":
            by_id = {prompt.prompt.prompt_id: prompt for prompt in state.prompts}
            return [(nodes, by_id[nodes.graph]) for nodes in graphs]
        return [(nodes, prompt) for nodes in graphs for prompt in nodes.prompts(self.by, state.prompts)]

    def _name(self, occasion: Occasion) -> Row:
        """The columns that name a graph; its operation is its prompt's, or itself."""
        nodes, prompt = occasion
        return {"graph": nodes.graph, "operation": prompt.prompt.operation if self.by == "prompt" else nodes.graph}

    def _by_graph(
        self, state: GraphState, graphs: Sequence[RankedNodes]
    ) -> Iterator[tuple[Row, RankedNodes, Iterator[Place]]]:
        """Each graph's name, first ``top`` nodes, and where its prompts' activations are: use them before the next."""
        by_name = {nodes.graph: nodes.first(self.top) for nodes in graphs}
        occasions = self._occasions(state, list(by_name.values()))
        for name, group in groupby(_seen(state.anatomy, occasions), key=lambda seen: self._name(seen[0])):
            yield name, by_name[name["graph"]], ((activations, row) for _, activations, row in group)

    # ---- nodes and edges ----

    def _node_rows(self, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
        rows = []
        for same, nodes, seen in self._by_graph(state, graphs):
            coefficient_PN = torch.stack([state.graph.coefficients(nodes.neurons, *place) for place in seen])
            mean_N = coefficient_PN.double().mean(dim=0)
            signs_N1 = torch.where(mean_N < 0, -1.0, 1.0)[:, None]
            values_ND = state.graph.values(nodes.neurons)
            tokens = state.tokens.of(values_ND * signs_N1.to(values_ND.dtype))
            for i, (layer, neuron) in enumerate(nodes.neurons):
                size = float(coefficient_PN[:, i].double().abs().mean())
                own = {"coefficient": float(mean_N[i]), "coefficient_size": size}
                found = {"importance": nodes.importance[i], "change": nodes.change[i]}
                place = {"layer": layer, "neuron": neuron, "rank": i + 1, "root": i == nodes.root}
                read = {"n": len(coefficient_PN), "tokens": json.dumps(tokens[i], ensure_ascii=False)}
                rows.append({**same, **place, **own, **found, **read})
        return rows

    def _edge_rows(self, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
        rows = []
        for same, nodes, seen in self._by_graph(state, graphs):
            mean_MNN, std_MNN, count = _mean_edges(state.graph, nodes, seen)
            for place, (i, j) in enumerate(self._kept(mean_MNN, nodes)):
                (layer, neuron), (to_layer, to_neuron) = nodes.neurons[i], nodes.neurons[j]
                ends = {"layer": layer, "neuron": neuron, "to_layer": to_layer, "to_neuron": to_neuron}
                values = dict(zip(COLUMNS, mean_MNN[:, i, j].tolist(), strict=True))
                spread = {f"{name}_std": float(std_MNN[m, i, j]) for m, name in enumerate(COLUMNS) if m}
                rows.append({**same, "n": count, "place": place + 1, **ends, **values, **spread})
        return rows

    def _kept(self, mean_MNN: torch.Tensor, nodes: RankedNodes) -> list[tuple[int, int]]:
        """The edges to store, strongest first; ties in the order of the nodes."""
        layer_N = torch.tensor([layer for layer, _ in nodes.neurons])
        strength_NN = mean_MNN[MEASURES.index(self.measure)]
        strength_NN = strength_NN.abs() if self.measure == "sum" else strength_NN
        strength_NN = strength_NN.masked_fill(layer_N[:, None] >= layer_N[None, :], -1.0)
        order = torch.sort(strength_NN.flatten(), descending=True, stable=True)
        count = int((order.values > self.above).sum())
        count = count if self.strongest is None else min(count, self.strongest)
        return [divmod(place, len(layer_N)) for place in order.indices[:count].tolist()]

    # ---- the causal check ----

    def _ks(self) -> list[int]:
        """The ks that the largest graph has neurons for, largest first."""
        most = max(len(nodes.neurons) for nodes in self.nodes.graphs)
        return sorted({k for k in self.ks if k <= most}, reverse=True)

    def _check_rows(self, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
        rows: list[Row] = []
        occasions = self._occasions(state, graphs)
        for start in range(0, len(occasions), AT_ONCE):
            block = occasions[start : start + AT_ONCE]
            clean = _activations(state.anatomy, block)
            for k in self._ks():
                for zeroed, seed in [("root", 0), *(("random", seed) for seed in range(self.seeds))]:
                    rows += self._zeroed_rows(state, block, clean, k, zeroed, seed)
        return rows

    def _zeroed_rows(
        self, state: GraphState, block: Sequence[Occasion], clean: EndActivations, k: int, zeroed: str, seed: int
    ) -> list[Row]:
        """One row for each other neuron of the first k, of every prompt: coefficients before and after."""
        n_neurons, rows = state.anatomy.shape.n_neurons, []
        places = [place for place, (nodes, _) in enumerate(block) if len(nodes.neurons) >= k]
        firsts = [block[place][0].first(k) for place in places]
        if zeroed == "root":
            cut = [first.neurons[first.root] for first in firsts]
        else:
            cut = [block[place][0].random_of_roots_layer(k, seed, n_neurons) for place in places]
        after = _activations(state.anatomy, [block[place] for place in places], cut)
        for row, (place, first, neuron) in enumerate(zip(places, firsts, cut, strict=True)):
            others = [other for i, other in enumerate(first.neurons) if i != first.root]
            edges = state.graph.edges([neuron, *others], clean, place, sources=1)
            found_MN = torch.stack([edges.of(measure)[0, 1:] for measure in MEASURES]).tolist()
            own, *before_N = state.graph.coefficients([neuron, *others], clean, place).tolist()
            after_N = state.graph.coefficients(others, after, row).tolist()
            same = {
                **self._name(block[place]), "prompt_id": block[place][1].prompt.prompt_id, "k": k, "zeroed": zeroed,
                "seed": seed, "zeroed_layer": neuron[0], "zeroed_neuron": neuron[1], "zeroed_coefficient": own,
            }  # fmt: skip
            for i, (layer, number) in enumerate(others):
                numbers = {
                    "layer": layer,
                    "neuron": number,
                    "coefficient": before_N[i],
                    "coefficient_zeroed": after_N[i],
                }
                reached = layer > neuron[0]  # else there is no edge
                products = {name: found_MN[m][i] if reached else None for m, name in enumerate(COLUMNS)}
                rows.append({**same, **numbers, **products})
        return rows


def _activations(
    anatomy: Anatomy, occasions: Sequence[Occasion], zeroed: Sequence[Neuron] | None = None
) -> EndActivations:
    """Activations at END; with ``zeroed``, a neuron of its own is zeroed at every position of each prompt."""
    mask: dict[int, torch.Tensor] = {}
    for row, (layer, neuron) in enumerate(zeroed or ()):
        of_layer_PK = mask.setdefault(layer, torch.zeros(len(occasions), anatomy.shape.n_neurons, dtype=torch.bool))
        of_layer_PK[row, neuron] = True
    return end_activations(anatomy, [prompt.input_ids[: prompt.end + 1] for _, prompt in occasions], zeroed_mask=mask)


def _seen(anatomy: Anatomy, occasions: Sequence[Occasion]) -> Iterator[tuple[Occasion, EndActivations, int]]:
    """Each occasion with the clean activations of its block, and its row in them."""
    for start in range(0, len(occasions), AT_ONCE):
        block = occasions[start : start + AT_ONCE]
        activations = _activations(anatomy, block)
        for row, occasion in enumerate(block):
            yield occasion, activations, row


def _mean_edges(
    graph: GraphReader, nodes: RankedNodes, seen: Iterator[Place]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and spread (divided by n) of every pair over the graph's prompts: M N N each; and how many prompts."""
    size, count = len(nodes.neurons), 0
    total_MNN = torch.zeros(len(MEASURES), size, size, dtype=torch.float64)
    square_MNN = torch.zeros_like(total_MNN)
    for activations, row in seen:
        edges = graph.edges(nodes.neurons, activations, row)
        found_MNN = torch.stack([edges.of(measure) for measure in MEASURES]).double().cpu()
        total_MNN, square_MNN, count = total_MNN + found_MNN, square_MNN + found_MNN.square(), count + 1
    mean_MNN = total_MNN / count
    return mean_MNN, (square_MNN / count - mean_MNN.square()).clamp(min=0).sqrt(), count
