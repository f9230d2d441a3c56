"""Accuracy as heads are masked one after another."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import Figure, Tip, titled
from mathinterp.experiments.results import Results
from mathinterp.experiments.thin_means import thin_mean_warnings

ACCURACY, OUT = Tip("accuracy", "accuracy", "%"), Tip("heads_out", "heads out", "whole")


def draw(results: Results) -> Figure:
    """A point for each step, with the head that it masked."""
    rows = results.frame(
        """SELECT step + 1 AS heads_out, layer || '.' || head AS name, accuracy, accuracy - accuracy_before AS change,
                  logprob_change
           FROM iterative_scan WHERE run_id = $run AND masked
           UNION ALL
           SELECT DISTINCT 0, 'none', accuracy_before, NULL, NULL FROM iterative_scan WHERE run_id = $run AND step = 0
           ORDER BY heads_out"""
    )
    tips = [
        OUT, Tip("name", "masked last", "text"), ACCURACY, Tip("change", "change by it", "points"),
        Tip("logprob_change", "log-probability", "nats"),
    ]  # fmt: skip
    return titled(
        curves(rows, OUT, ACCURACY, None, tips, y_scale=alt.Scale(domain=[0, 1]), panel=None), results,
        "Heads masked one after another, each the most costly that is left",
        f"A curve of accuracy against the number of heads masked, in this order: {', '.join(rows['name'][1:21])}.",
        thin_mean_warnings(results.store, results.run_id),
    )  # fmt: skip
