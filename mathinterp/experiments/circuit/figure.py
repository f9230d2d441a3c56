"""Faithfulness against the share of nodes that compute."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.circuit.summary import doubts
from mathinterp.experiments.figures import Figure, Tip, interval, titled
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A line and its interval for each ordering; 1 is the whole model, 0 nothing."""
    rows = results.frame(
        """SELECT ordering || ' scores' AS ordering, method, fraction, nodes, faithfulness, low, high, n
           FROM circuit_curves WHERE run_id = $run ORDER BY ordering DESC, fraction"""
    )
    faithfulness, nodes = Tip("faithfulness", "faithfulness"), Tip("nodes", "nodes", "whole")
    share = Tip("fraction", "share of nodes in the circuit", "%")
    tips = [
        Tip("ordering", "nodes by", "text"),
        share,
        nodes,
        faithfulness,
        interval("low", "high", ""),
        Tip("n", "prompts", "whole"),
    ]
    return titled(
        curves(
            rows, share, faithfulness, ("low", "high"), tips, series=Tip("ordering", "nodes by"),
            x_scale=alt.Scale(type="log"), rule=[0, 1], panel=None,
        ),
        results, f"Circuits by {rows['method'].iloc[0]}" if len(rows) else "Circuits",
        "Curves of faithfulness, 0 for nothing and 1 for the whole model, against the share of nodes that compute.",
        doubts(results),
    )  # fmt: skip
