"""Prediction-enhancing graphs: their nodes from a stored neuron scan, what a graph run says, and a drawing of a graph.

Knows the store's views; knows nothing about models or how rows were computed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.errors import UserError
from mathinterp.experiments.neuron_graph.nodes import BY, NeuronNodes, RankedNodes
from mathinterp.experiments.neurons.stored import check_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store

MOST = 99  # neurons of the largest k that is checked where none is named
NODE_TOKENS = 3  # first tokens in a node's label
MOST_ROWS = 12  # edges shown in a table
MEASURE_COLUMN = {"sum": "inner_product", "signed": "signed_product", "first_order": "first_order"}


# ---- nodes from a neuron scan ----


def nodes_from(
    store: Store,
    run: dict[str, Any],
    by: str,
    top: int,
    ks: tuple[int, ...] | None,
    fingerprint: str,
    prompts: Sequence[Prompt],
) -> NeuronNodes:
    """The first neurons of each prompt, or of each operation and all, of a finished neuron scan.

    Args:
        run: from ``neuron_runs.neuron_run``.
        top, ks: as many neurons are needed as the largest of them; ks None: up to MOST of those that there are.
        fingerprint: of the model that the graph is made of: the scan's own, or the one it was compared with.
        prompts: those that the graph is made on. By prompt, each must be one of the scan's.
    Raises:
        UserError: a prompt that the run had not, or fewer neurons a prompt than asked for.
    """
    if by not in BY:
        raise UserError(f"--by '{by}' is not known; take one of {', '.join(BY)}")
    run_id = run["run_id"]
    importance = "importance" if fingerprint == run["model_fingerprint"] else "intervened_importance AS importance"
    needed = max(top, *(ks or (0,)))
    most = max(needed, MOST) if ks is None else needed
    if by == "operation":
        source = f"""SELECT operation AS graph, layer, neuron, {importance}, change,
                            row_number() OVER (PARTITION BY operation ORDER BY ranked_by DESC, layer, neuron) AS rank
                     FROM neuron_summary WHERE run_id = '{run_id}' AND operation IS NOT NULL"""
        wanted = {"all", *(prompt.operation for prompt in prompts if prompt.operation is not None)}
    else:
        if needed > run["top"] and not run["keeps_all"]:
            raise UserError(
                f"run {run_id} keeps {run['top']} neurons a prompt, not {needed}; scan with --keep topk:{needed}"
                " first, or give smaller --top and --ks"
            )
        check_prompts(store, run, prompts)
        source = f"""SELECT prompt_id AS graph, layer, neuron, {importance}, change, rank
                     FROM neuron_changes WHERE run_id = '{run_id}'"""
        wanted = {prompt.prompt_id for prompt in prompts}
    rows = store.dataframe(f"SELECT * FROM ({source}) WHERE rank <= {most} ORDER BY graph, rank")
    graphs = [_ranked(str(graph), part) for graph, part in rows.groupby("graph", sort=True) if graph in wanted]
    missing = wanted - {nodes.graph for nodes in graphs}
    if missing:
        raise UserError(f"run {run_id} has no neurons for {', '.join(sorted(missing)[:5])}; take the prompts it has")
    return NeuronNodes(run_id, tuple(graphs))


def _ranked(graph: str, rows: pd.DataFrame) -> RankedNodes:
    return RankedNodes(
        graph,
        tuple(zip(rows["layer"].astype(int).tolist(), rows["neuron"].astype(int).tolist(), strict=True)),
        tuple(rows["importance"].astype(float).tolist()),
        tuple(None if pd.isna(value) else float(value) for value in rows["change"]),
    )


# ---- what a run says ----


@dataclass(frozen=True)
class GraphSummary:
    """The answer of a graph run.

    graph: the graph whose edges are shown; edges: its strongest; check: Table 6, per cent; agreement: whether edges
        from the root tell which coefficients fall.
    """

    graph: str
    root: str
    edges: list[dict[str, Any]]
    check: list[dict[str, Any]]
    agreement: list[dict[str, Any]]
    queries: list[str]


def summarize_graph(store: Store, run_id: str, graph: str | None = None) -> GraphSummary:
    """Summarize a graph run; ``graph`` None: "all", else the first prompt's.

    Raises UserError for a graph that the run has not.
    """
    where = f"WHERE run_id = '{run_id}'"
    name = graph_name(store, run_id, graph)
    quoted = name.replace("'", "''")
    root = store.rows(f"SELECT name FROM neuron_graph_nodes {where} AND graph = '{quoted}' AND root")
    edges = store.rows(
        f"""SELECT lower_name AS "lower", upper_name AS "upper", inner_product, signed_product, first_order, share
            FROM neuron_graph_edges {where} AND graph = '{quoted}' ORDER BY place LIMIT {MOST_ROWS}"""
    )
    check = store.rows(
        f"""SELECT cases, k, n, root, root_low, root_high, random, random_low, random_high FROM paper_a_table6
            {where} AND operation = 'all' ORDER BY cases = 'all', k DESC"""
    )
    agreement = store.rows(
        f"""SELECT k, sum(n)::INTEGER AS n, avg(inner_product) AS inner_product, avg(signed_product) AS signed_product,
                   avg(first_order) AS first_order, avg(first_order_pearson) AS first_order_pearson
            FROM neuron_graph_agreement {where} AND operation IS NOT DISTINCT FROM coalesce(
                (SELECT max(operation) FROM neuron_graph_agreement {where} AND operation = 'all'), operation)
            GROUP BY k ORDER BY k DESC"""
    )
    queries = [
        f"SELECT * FROM neuron_graph_nodes {where} AND graph = '{quoted}' ORDER BY rank",
        f"SELECT * FROM neuron_graph_edges {where} AND graph = '{quoted}' ORDER BY place LIMIT 20",
        f"SELECT * FROM paper_a_table6 {where} ORDER BY operation, cases, k DESC",
        f"SELECT * FROM neuron_graph_agreement {where} ORDER BY operation, k DESC",
    ]
    return GraphSummary(name, root[0]["name"] if root else "-", edges, check, agreement, queries)


def graph_name(store: Store, run_id: str, graph: str | None) -> str:
    """``graph``, or the one shown first; raises UserError for a graph that the run has not."""
    names = [
        row["graph"]
        for row in store.rows(f"SELECT DISTINCT graph FROM neuron_graph_nodes WHERE run_id = '{run_id}' ORDER BY graph")
    ]
    if not names:
        raise UserError(f"run {run_id} has no graph; make one with 'mathinterp scan graph'")
    if graph is not None and graph not in names:
        raise UserError(
            f"run {run_id} has no graph '{graph}'; it has {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
        )
    return graph or ("all" if "all" in names else names[0])


# ---- the drawing ----


def graph_figure(store: Store, run_id: str, graph: str | None = None) -> Figure:
    """One graph, layer above layer: nodes as layer.neuron with their first tokens, edges from lower to higher.

    Node size: importance (or change, where something was compared). Edge width: strength under the run's measure; red
    where the edge is positive, blue where it is negative. The root has a thick rim.
    """
    name = graph_name(store, run_id, graph).replace("'", "''")
    where = f"WHERE run_id = '{run_id}' AND graph = '{name}'"
    nodes = store.dataframe(f"SELECT * FROM neuron_graph_nodes {where} ORDER BY layer, rank")
    edges = store.dataframe(f"SELECT * FROM neuron_graph_edges {where} ORDER BY place")
    run = store.rows(f"SELECT model, parameters ->> 'measure' AS measure FROM runs WHERE run_id = '{run_id}'")[0]
    text = store.rows(
        f"""SELECT text FROM prompts JOIN runs USING (prompts_fingerprint)
            WHERE run_id = '{run_id}' AND prompt_id = '{name}'"""
    )
    places = _places(nodes)
    layers = sorted(nodes["layer"].unique())
    widest = int(nodes.groupby("layer").size().max())
    figure = Figure(figsize=(max(6.0, 1.25 * widest + 1.5), max(3.5, 0.95 * len(layers) + 1.2)), layout="constrained")
    axis = figure.subplots()
    _draw_edges(axis, edges, places, MEASURE_COLUMN[run["measure"]])
    _draw_nodes(axis, nodes, places)
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set(ylabel="layer", xticks=[], ylim=(-0.7, len(layers) - 0.3), xlim=(-0.7, widest - 0.3))
    axis.set_title(f"{text[0]['text'] if text else name}  ({run['model']}, edges: {run['measure']})", fontsize=9)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    return figure


def _places(nodes: pd.DataFrame) -> dict[tuple[int, int], tuple[float, float]]:
    """(layer, neuron) -> x, y; a layer's neurons by rank, centred."""
    widest = nodes.groupby("layer").size().max()
    places = {}
    for height, (_, row) in enumerate(nodes.groupby("layer", sort=True)):
        left = (widest - len(row)) / 2
        for i, (layer, neuron) in enumerate(zip(row["layer"], row["neuron"], strict=True)):
            places[int(layer), int(neuron)] = (left + i, float(height))
    return places


def _draw_edges(
    axis: Axes, edges: pd.DataFrame, places: dict[tuple[int, int], tuple[float, float]], column: str
) -> None:
    strongest = float(edges[column].abs().max()) if len(edges) else 1.0
    for edge in edges.to_dict("records"):
        value = float(edge[column])
        share = abs(value) / (strongest or 1.0)
        arrow = {
            "arrowstyle": "-|>", "color": "firebrick" if value > 0 else "steelblue", "alpha": 0.25 + 0.6 * share,
            "linewidth": 0.4 + 2.2 * share, "shrinkA": 9, "shrinkB": 9,
        }  # fmt: skip
        start, end = places[edge["layer"], edge["neuron"]], places[edge["to_layer"], edge["to_neuron"]]
        axis.annotate("", xy=end, xytext=start, arrowprops=arrow, zorder=1)


def _draw_nodes(axis: Axes, nodes: pd.DataFrame, places: dict[tuple[int, int], tuple[float, float]]) -> None:
    size = nodes["change"].fillna(nodes["importance"]).abs().to_numpy(float)
    scaled = 60 + 240 * size / (size.max() or 1.0)
    at = np.array(
        [places[int(layer), int(neuron)] for layer, neuron in zip(nodes["layer"], nodes["neuron"], strict=True)]
    )
    axis.scatter(
        at[:, 0], at[:, 1], s=scaled, c="white", edgecolors="black",
        linewidths=[2.5 if root else 0.7 for root in nodes["root"]], zorder=2,
    )  # fmt: skip
    for (x, y), name, tokens in zip(at, nodes["name"], nodes["tokens"], strict=True):
        first = " ".join(_shown(token) for token in json.loads(tokens)[:NODE_TOKENS])
        axis.annotate(f"{name}\n{first}", (x, y), xytext=(0, -9), textcoords="offset points", ha="center", va="top",
                      fontsize=6, parse_math=False, zorder=3,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5})  # fmt: skip


def _shown(token: str) -> str:
    """A token's text with its white space visible."""
    return token.replace(" ", "·").replace("\n", "⏎") or "∅"
