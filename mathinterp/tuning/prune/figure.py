"""Accuracy under each condition of a pruning (the form of paper A, Table 11)."""

import altair as alt

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """Points with intervals, a panel for each operation; the original model as a dashed line."""
    rows = results.frame(
        """SELECT replace(condition, '_', ' + ')
                      || CASE WHEN condition LIKE 'random%' THEN ', seed ' || seed ELSE '' END AS name,
                  operation, n, baseline_accuracy AS original, accuracy, low, high, gain, gain_low, gain_high
           FROM tuned_accuracy WHERE run_id = $run AND layer IS NULL
           ORDER BY condition = 'lora' DESC, condition LIKE 'pruned%' DESC, condition, seed"""
    )
    accuracy = Tip("accuracy", "accuracy", "%")
    tips = [
        Tip("name", "condition", "text"), OPERATION, accuracy, interval("low", "high", "%"),
        Tip("original", "original model", "%"), Tip("gain", "gain", "points"),
        interval("gain_low", "gain_high", "points", "its interval"), N,
    ]  # fmt: skip
    names = list(dict.fromkeys(rows["name"]))
    return titled(
        intervals(
            rows, Tip("name", ""), accuracy, ("low", "high"), tips, order=names, panel="operation", rule="original",
            x_scale=alt.Scale(domain=[0, 1]),
        ),
        results, "Accuracy with deep layers pruned (dashed: original model)",
        "Points of accuracy with 95 % intervals under each condition: chosen and random neurons kept, with and"
        " without a LoRA trained after it; a panel for each operation.",
    )  # fmt: skip
