"""How rows of neuron graphs are computed: nodes, edges, and the causal check.

Shape legend: P prompt, M measure, N node, K neuron of a layer, D model width.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from mathinterp.engine.intervention import Change, Value
from mathinterp.engine.lens import MEASURES
from mathinterp.engine.lens.graph import GraphReader
from mathinterp.engine.lens.neurons import EndActivations, end_activations
from mathinterp.engine.lens.top_tokens import TopTokens
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neuron_graph import NeuronGraph
from mathinterp.experiments.neuron_graph.nodes import RankedNodes
from mathinterp.experiments.neuron_graph.tables import AT_ONCE, COLUMN_OF
from mathinterp.experiments.results import Row
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import TokenizedPrompt

Occasion = tuple[RankedNodes, TokenizedPrompt]  # a graph and one of its prompts
Place = tuple[EndActivations, int]  # activations of some prompts, and the row of one


@dataclass
class GraphState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    graph: GraphReader
    tokens: TopTokens


def prepare(subject: Subject) -> GraphState:
    """Handles to weights; activations are taken shard by shard."""
    assert subject.tokenizer is not None, "tokens are shown as text"
    anatomy = subject.anatomy
    return GraphState(anatomy, subject.prompts, GraphReader(anatomy), TopTokens(anatomy, subject.tokenizer))


def _occasions(scan: NeuronGraph, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Occasion]:
    """Every graph with each of its prompts, graph after graph."""
    if scan.by == "prompt":
        by_id = {prompt.prompt.prompt_id: prompt for prompt in state.prompts}
        return [(nodes, by_id[nodes.graph]) for nodes in graphs]
    return [(nodes, prompt) for nodes in graphs for prompt in nodes.prompts(scan.by, state.prompts)]


def _name(scan: NeuronGraph, occasion: Occasion) -> Row:
    """The columns that name a graph; its operation is its prompt's, or itself."""
    nodes, prompt = occasion
    return {"graph": nodes.graph, "operation": prompt.prompt.operation if scan.by == "prompt" else nodes.graph}


def _by_graph(
    scan: NeuronGraph, state: GraphState, graphs: Sequence[RankedNodes]
) -> Iterator[tuple[Row, RankedNodes, Iterator[Place]]]:
    """Each graph's name, first ``top`` nodes, and where its prompts' activations are: use them before the next."""
    by_name = {nodes.graph: nodes.first(scan.top) for nodes in graphs}
    occasions = _occasions(scan, state, list(by_name.values()))
    for name, group in groupby(_seen(state.anatomy, occasions), key=lambda seen: _name(scan, seen[0])):
        yield name, by_name[name["graph"]], ((activations, row) for _, activations, row in group)


# ---- nodes and edges ----


def node_rows(scan: NeuronGraph, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
    """One row a node: its coefficient over the graph's prompts, and the tokens that it writes."""
    rows = []
    for same, nodes, seen in _by_graph(scan, state, graphs):
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


def edge_rows(scan: NeuronGraph, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
    """One row an edge that is kept: means over the graph's prompts."""
    rows = []
    for same, nodes, seen in _by_graph(scan, state, graphs):
        mean_MNN, std_MNN, count = _mean_edges(state.graph, nodes, seen)
        for place, (i, j) in enumerate(_kept(scan, mean_MNN, nodes)):
            (layer, neuron), (to_layer, to_neuron) = nodes.neurons[i], nodes.neurons[j]
            ends = {"layer": layer, "neuron": neuron, "to_layer": to_layer, "to_neuron": to_neuron}
            values = dict(zip(COLUMN_OF.values(), mean_MNN[:, i, j].tolist(), strict=True))
            spread = {f"{name}_std": float(std_MNN[m, i, j]) for m, name in enumerate(COLUMN_OF.values()) if m}
            rows.append({**same, "n": count, "place": place + 1, **ends, **values, **spread})
    return rows


def _kept(scan: NeuronGraph, mean_MNN: torch.Tensor, nodes: RankedNodes) -> list[tuple[int, int]]:
    """The edges to store, strongest first; ties in the order of the nodes."""
    layer_N = torch.tensor([layer for layer, _ in nodes.neurons])
    strength_NN = mean_MNN[MEASURES.index(scan.measure)]
    strength_NN = strength_NN.abs() if scan.measure == "sum" else strength_NN
    strength_NN = strength_NN.masked_fill(layer_N[:, None] >= layer_N[None, :], -1.0)
    order = torch.sort(strength_NN.flatten(), descending=True, stable=True)
    count = int((order.values > scan.edges.above).sum())
    count = count if scan.edges.strongest is None else min(count, scan.edges.strongest)
    return [divmod(place, len(layer_N)) for place in order.indices[:count].tolist()]


# ---- the causal check ----


def check_rows(scan: NeuronGraph, state: GraphState, graphs: Sequence[RankedNodes]) -> list[Row]:
    """Coefficients of first neurons, before and after the lowest of them, or a random one of its layer, is zeroed."""
    rows: list[Row] = []
    occasions = _occasions(scan, state, graphs)
    for start in range(0, len(occasions), AT_ONCE):
        block = occasions[start : start + AT_ONCE]
        clean = _activations(state.anatomy, block)
        for k in scan.checked_ks():
            for zeroed, seed in [("root", 0), *(("random", seed) for seed in range(scan.control_seeds))]:
                rows += _zeroed_rows(scan, state, block, clean, k, zeroed, seed)
    return rows


def _zeroed_rows(
    scan: NeuronGraph,
    state: GraphState,
    block: Sequence[Occasion],
    clean: EndActivations,
    k: int,
    zeroed: str,
    seed: int,
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
            **_name(scan, block[place]), "prompt_id": block[place][1].prompt.prompt_id, "k": k, "zeroed": zeroed,
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
            products = {name: found_MN[m][i] if reached else None for m, name in enumerate(COLUMN_OF.values())}
            rows.append({**same, **numbers, **products})
    return rows


def _activations(
    anatomy: Anatomy, occasions: Sequence[Occasion], zeroed: Sequence[Neuron] | None = None
) -> EndActivations:
    """Activations at END; with ``zeroed``, a neuron of its own is zeroed at every position of each prompt."""
    of_layer: dict[int, torch.Tensor] = {}
    for row, (layer, neuron) in enumerate(zeroed or ()):
        chosen_PK = of_layer.setdefault(layer, torch.zeros(len(occasions), anatomy.shape.n_neurons, dtype=torch.bool))
        chosen_PK[row, neuron] = True
    changes = tuple(
        Change("neuron", layer, chosen_PK, Value.zero(anatomy, "neuron", layer))
        for layer, chosen_PK in of_layer.items()
    )
    return end_activations(anatomy, [prompt.input_ids[: prompt.end + 1] for _, prompt in occasions], changes)


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
