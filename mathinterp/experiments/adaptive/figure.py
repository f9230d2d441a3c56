"""The maps of an adaptive scan: what was decided of each node, and after how many prompts."""

import altair as alt

from mathinterp.experiments.charts import amount_colour, node_map, signed_colour
from mathinterp.experiments.figures import Figure, Tip, interval, titled
from mathinterp.experiments.results import Results


def draw_decisions(results: Results, word: str, unit: str = "points") -> Figure:
    """Layers by heads (MLPs are a last column): estimates, a dot where above the threshold, and prompts used.

    Args:
        word: what a node is called.
        unit: of the estimate, a fraction; see Tip.
    """
    found = results.frame(
        """SELECT node, layer, head, decision, exact, estimate, low, high, prompts_used, prompts_run, cells AS prompts,
                  threshold, decision = 'above' AS above
           FROM decisions WHERE run_id = $run ORDER BY layer, head"""
    )
    tips = [
        Tip("decision", "decision", "text"),
        Tip("estimate", "estimate", unit),
        interval("low", "high", unit, "interval at every look"),
        *(Tip(name, name.replace("_", " "), "whole") for name in ("prompts_used", "prompts_run", "prompts")),
        Tip("exact", "certain", "text"),
        Tip("threshold", "threshold", unit),
    ]
    estimates = node_map(
        found, signed_colour("estimate", found["estimate"], "estimate", unit), tips, panel=None, dot="above"
    ).properties(title="Estimate (dot: above the threshold)")
    used = node_map(found, amount_colour("prompts_used", "prompts used", "whole"), tips, panel=None)
    figure = alt.concat(estimates, used.properties(title="Prompts used"), columns=2).resolve_scale(color="independent")
    counts = found["decision"].value_counts()
    said = ", ".join(f"{count} {decision}" for decision, count in counts.items())
    (rule,) = results.rows("SELECT (parameters ->> 'decide')::DOUBLE AS decide FROM runs WHERE run_id = $run")
    threshold = rule["decide"] / (1 if unit in ("%", "points") else 100)  # of hundredths
    return titled(
        figure, results, f"Which {word}s are above {threshold:g} {unit}",
        f"Two maps of layers by {word}s: the estimate of each, and how many prompts its decision took. {said}.",
        ["some are not decided yet"] if counts.get("open", 0) else [],
    )  # fmt: skip
