"""The course of a fine-tuning, from ``tuning_runs``."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import Figure, Tip, titled
from mathinterp.experiments.results import Results

PANELS = {"loss": "loss (nats per answer token)", "lr": "learning rate", "samples_per_second": "samples per second"}
MANY = 80  # points


def draw(results: Results) -> Figure | None:
    """Loss, learning rate and samples per second against the step; None: the run trained nothing."""
    rows = results.frame(
        """SELECT step, loss, lr, samples_per_second, tokens_per_second, memory / 1e9 AS memory, trained_parameters
           FROM tuning_runs WHERE run_id = $run ORDER BY step"""
    )
    if rows.empty:
        return None
    step = Tip("step", "step", "whole")
    tips = [
        step, Tip("loss", "loss", "nats"), Tip("lr", "learning rate"), Tip("samples_per_second", "samples per second"),
        Tip("tokens_per_second", "tokens per second"), Tip("memory", "memory", "GB"),
        Tip("trained_parameters", "trained parameters", "whole"),
    ]  # fmt: skip
    parts = [
        curves(rows, step, Tip(name, title), None, tips, panel=None, points=len(rows) <= MANY)
        for name, title in PANELS.items()
    ]
    last = rows.iloc[-1]
    return titled(
        alt.concat(*parts, columns=3), results, "The course of the fine-tuning",
        f"Curves of the loss, the learning rate and the samples per second against the optimizer step; after"
        f" {int(last['step'])} steps the loss is {last['loss']:.3g} nats per answer token.",
    )  # fmt: skip
