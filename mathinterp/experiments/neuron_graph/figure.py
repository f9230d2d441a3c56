"""The drawing of a prediction-enhancing graph (paper A, section 4.3)."""

import json

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mathinterp.experiments.neuron_graph import GraphShown
from mathinterp.experiments.neuron_graph.summary import graph_name
from mathinterp.experiments.neuron_graph.tables import COLUMN_OF
from mathinterp.experiments.results import Results

NODE_TOKENS = 3  # first tokens in a node's label


def draw(results: Results, shown: GraphShown) -> Figure:
    """One graph (None: the first), layer above layer: nodes as layer.neuron with their tokens, edges going up.

    Node size: importance (or change, where something was compared). Edge width: strength under the run's measure; red
    where the edge is positive, blue where it is negative. The root has a thick rim. The figure's label is the graph.
    """
    name = graph_name(results, shown.graph)
    where = "WHERE run_id = $run AND graph = $graph"
    nodes = results.frame(f"SELECT * FROM neuron_graph_nodes {where} ORDER BY layer, rank", graph=name)
    edges = results.frame(f"SELECT * FROM neuron_graph_edges {where} ORDER BY place", graph=name)
    (run,) = results.rows("SELECT model, parameters ->> 'measure' AS measure FROM runs WHERE run_id = $run")
    text = results.rows(
        """SELECT text FROM prompts JOIN runs USING (prompts_fingerprint)
           WHERE run_id = $run AND prompt_id = $graph""",
        graph=name,
    )
    places = _places(nodes)
    layers = sorted(nodes["layer"].unique())
    widest = int(nodes.groupby("layer").size().max())
    figure = Figure(figsize=(max(6.0, 1.25 * widest + 1.5), max(3.5, 0.95 * len(layers) + 1.2)), layout="constrained")
    figure.set_label(name)
    axis = figure.subplots()
    _draw_edges(axis, edges, places, COLUMN_OF[run["measure"]])
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
