"""A learned mask: which nodes stay open, and the course of its training."""

import altair as alt

from mathinterp.experiments.charts import amount_colour, curves, node_map
from mathinterp.experiments.figures import Figure, Tip, titled
from mathinterp.experiments.mask.summary import doubts
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """The probability of each node to be open; the change and the open share against the step."""
    nodes = results.frame(
        "SELECT node, layer, head, open, log_alpha FROM mask_scores WHERE run_id = $run ORDER BY layer, head"
    )
    course = results.frame("SELECT step, loss, change, open FROM mask_training WHERE run_id = $run ORDER BY step")
    step, change, share = (
        Tip("step", "step", "whole"),
        Tip("change", "relative squared change"),
        Tip("open", "mean share open", "%"),
    )
    tips = [step, change, share, Tip("loss", "loss")]
    opened = node_map(
        nodes, amount_colour("open", "probability to be open", "%"),
        [Tip("open", "probability to be open", "%"), Tip("log_alpha", "log alpha")], panel=None,
    ).properties(title="Nodes")  # fmt: skip
    many = len(course) > 60
    log, whole = alt.Scale(type="log"), alt.Scale(domain=[0, 1])
    moved = curves(course, step, change, None, tips, y_scale=log, panel=None, points=not many)
    shares = curves(course, step, share, None, tips, y_scale=whole, panel=None, points=not many)
    return titled(
        alt.concat(
            opened, moved.properties(title="Change of the logit difference"),
            shares.properties(title="Share of nodes that is open"), columns=3,
        ).resolve_scale(color="independent"),
        results, "A learned mask",
        "Map of layers by heads, MLPs in a last column, coloured by the probability that a node keeps its own output;"
        " beside it the change of the logit difference under the mask and the share of open nodes, step by step.",
        doubts(results),
    )  # fmt: skip
