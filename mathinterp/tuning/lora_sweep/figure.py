"""The curve of a layer sweep: accuracy against the layer that has the LoRA (paper A, section 5)."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import LAYER, OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results

ACCURACY = Tip("accuracy", "accuracy", "%")


def draw(results: Results) -> Figure:
    """Accuracy with its 95 % interval; the original model as a dashed line."""
    rows = results.frame(
        """SELECT layer, operation, baseline_accuracy AS original, accuracy, low, high, gain, gain_low, gain_high,
                  learning_rate, n
           FROM lora_sweep_curve WHERE run_id = $run ORDER BY layer"""
    )
    tips = [
        LAYER, OPERATION, ACCURACY, interval("low", "high", "%"), Tip("original", "original model", "%"),
        Tip("gain", "gain", "points"), interval("gain_low", "gain_high", "points", "its interval"),
        Tip("learning_rate", "learning rate"), N,
    ]  # fmt: skip
    scale = alt.Scale(domain=[0, 1])
    return titled(
        curves(rows, LAYER, ACCURACY, ("low", "high"), tips, y_scale=scale, rule="original"), results,
        "Accuracy with a LoRA in one layer (dashed: original model)",
        "Curves of accuracy against the layer that has the LoRA, with 95 % intervals, a panel for each operation.",
    )  # fmt: skip
