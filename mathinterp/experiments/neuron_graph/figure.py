"""The drawing of a prediction-enhancing graph (paper A, section 4.3)."""

import json

import altair as alt
import pandas as pd

from mathinterp.experiments.charts import signed_colour
from mathinterp.experiments.figures import LAYER, Figure, N, Tip, data_of, titled, with_tips
from mathinterp.experiments.neuron_graph import GraphShown
from mathinterp.experiments.neuron_graph.summary import graph_name
from mathinterp.experiments.neuron_graph.tables import COLUMN_OF
from mathinterp.experiments.results import Results
from mathinterp.text import one_line

NODE_TOKENS = 3  # first tokens in a node's label
STEP_X, STEP_Y = 104, 62  # pixels between nodes, and between layers
EDGE_TIPS = [
    Tip("lower_name", "from", "text"), Tip("upper_name", "to", "text"), Tip("inner_product", "inner product"),
    Tip("signed_product", "signed product"), Tip("first_order", "first-order effect"),
    Tip("share", "share of the upper coefficient", "%"), N,
]  # fmt: skip
NODE_TIPS = [
    Tip("name", "neuron", "text"), LAYER, Tip("rank", "rank", "whole"), Tip("importance", "importance", "nats"),
    Tip("change", "change", "nats"), Tip("coefficient", "mean coefficient"), Tip("tokens", "tokens", "text"),
    Tip("root", "lowest", "text"), N,
]  # fmt: skip


def draw(results: Results, shown: GraphShown) -> Figure:
    """One graph (None: the first), layer above layer: nodes as layer.neuron with their tokens, edges going up.

    Node size: importance (or change, where something was compared). Edge width and colour: strength under the run's
    measure. The root has a thick rim. The figure's label is the graph.
    """
    name = graph_name(results, shown.graph)
    where = "WHERE run_id = $run AND graph = $graph"
    nodes = results.frame(f"SELECT * FROM neuron_graph_nodes {where} ORDER BY layer, rank", graph=name)
    edges = results.frame(f"SELECT * FROM neuron_graph_edges {where} ORDER BY place", graph=name)
    (run,) = results.rows("SELECT parameters ->> 'measure' AS measure FROM runs WHERE run_id = $run")
    text = results.rows(
        "SELECT text FROM prompts JOIN runs USING (prompts_fingerprint) WHERE run_id = $run AND prompt_id = $graph",
        graph=name,
    )
    nodes = _placed(nodes)
    layers = sorted(nodes["layer"].unique(), reverse=True)
    widest = int(nodes.groupby("layer").size().max())
    across = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.25, widest - 0.1], nice=False))
    up = alt.Y("layer:O", title="layer", scale=alt.Scale(domain=layers), axis=alt.Axis(grid=False))
    parts = [
        *([_edges(edges, nodes, COLUMN_OF[run["measure"]], across, up)] if len(edges) else []),
        *_nodes(nodes, across, up),
    ]
    figure = alt.layer(*parts).resolve_scale(size="independent")
    title = text[0]["text"] if text else f"Graph {name}"
    return titled(
        figure.properties(width=max(230, STEP_X * widest), height=max(90, STEP_Y * len(layers))), results, title,
        f"Prediction-enhancing graph of {len(nodes)} neurons in {len(layers)} layers and {len(edges)} edges between"
        f" them, which go from lower layers to higher ones; edges by {run['measure']}, lowest neuron with a thick rim.",
        label=name,
    )  # fmt: skip


def _placed(nodes: pd.DataFrame) -> pd.DataFrame:
    """With x: a layer's neurons by rank, centred; tokens in words; and what a node's size shows."""
    counts = nodes.groupby("layer")["rank"].transform("size")
    x = nodes.groupby("layer").cumcount() + (counts.max() - counts) / 2
    words = nodes["tokens"].map(lambda tokens: [_shown(token) for token in json.loads(tokens)])
    size = nodes["change"].fillna(nodes["importance"]).abs()
    label = words.map(lambda tokens: " ".join(tokens[:NODE_TOKENS]))
    return nodes.assign(x=x, label=label, tokens=words.map(" ".join), size=size).drop(columns=["run_id", "operation"])


def _edges(edges: pd.DataFrame, nodes: pd.DataFrame, column: str, across: alt.X, up: alt.Y) -> alt.Chart:
    places = nodes.set_index("name")["x"]
    rows = edges.assign(
        x=edges["lower_name"].map(places), to_x=edges["upper_name"].map(places), strength=edges[column].abs()
    )
    kept = ["layer", "to_layer", "x", "to_x", "strength", *(tip.field for tip in EDGE_TIPS)]
    lines = alt.Chart(data_of(rows[kept])).mark_rule(opacity=0.8).encode(
        x=across, x2="to_x:Q", y=up, y2="to_layer:O",
        color=signed_colour(column, rows[column], f"edge: {column.replace('_', ' ')}"),
        strokeWidth=alt.StrokeWidth("strength:Q", scale=alt.Scale(range=[0.7, 4]), legend=None),
    )  # fmt: skip
    return with_tips(lines, EDGE_TIPS)


def _nodes(nodes: pd.DataFrame, across: alt.X, up: alt.Y) -> list[alt.Chart]:
    chart = alt.Chart(data_of(nodes)).encode(x=across, y=up)
    rim = alt.condition("datum.root === 'yes'", alt.value(3.5), alt.value(1))
    size = alt.Size("size:Q", scale=alt.Scale(range=[50, 260], domainMin=0), legend=None)
    discs = chart.mark_point(filled=True, fill="white", stroke="black", opacity=1).encode(size=size, strokeWidth=rim)
    return [
        with_tips(discs, NODE_TIPS),
        *(
            chart.mark_text(dx=12, dy=dy, align="left", fontSize=9, limit=STEP_X - 26, tooltip=None).encode(text=text)
            for text, dy in (("name:N", -5), ("label:N", 7))
        ),
    ]


def _shown(token: str) -> str:
    """A token's text with its white space visible."""
    return one_line(token.replace(" ", "·").replace("\n", "⏎")) or "∅"
