"""What masking a prompt's first neurons, or keeping them alone, costs, against their number."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import Figure, N, Tip, interval, titled
from mathinterp.experiments.mask_keep import MaskKeepShown
from mathinterp.experiments.results import Results

DECREASE = Tip("decrease", "relative fall of accuracy", "%")
PANELS = ("masked", "kept alone")


def draw(results: Results, shown: MaskKeepShown) -> Figure:
    """Relative decrease of accuracy over all operations, beside random neurons (mean over their draws)."""
    rows = results.frame(
        """SELECT CASE mode WHEN 'mask' THEN 'masked' ELSE 'kept alone' END AS panel,
                  CASE ranking WHEN 'top' THEN 'first neurons' ELSE 'random neurons' END AS neurons,
                  k, decrease, low, high, baseline_accuracy AS original, accuracy, logprob_change, prompts, n
           FROM maskkeep_effects
           WHERE run_id = $run AND operation = 'all' AND cases = $cases AND scoring = $scoring
             AND (ranking = 'top' OR ranking = 'random' AND seed IS NULL)
           ORDER BY panel DESC, k""",
        cases=shown.cases, scoring=shown.scoring,
    )  # fmt: skip
    k = Tip("k", "neurons of each prompt", "whole")
    tips = [
        Tip("neurons", "neurons", "text"), Tip("panel", "they are", "text"), k, DECREASE, interval("low", "high", "%"),
        Tip("original", "accuracy before", "%"), Tip("accuracy", "accuracy then", "%"),
        Tip("logprob_change", "log-probability", "nats"), Tip("prompts", "prompts", "whole"), N,
    ]  # fmt: skip
    return titled(
        curves(
            rows, k, DECREASE, ("low", "high"), tips, series=Tip("neurons", ""), panel="panel", rule=[0],
            x_scale=alt.Scale(type="symlog"), ticks=sorted(map(int, rows["k"].unique())),
        ),
        results, "What each prompt's neurons do, masked or kept alone",
        "Curves of the relative fall of accuracy with 95 % intervals against the number of neurons, one panel where"
        " they are masked and one where all others of the deep layers are, beside random neurons.",
        [f"prompts: {shown.cases}; scored by {shown.scoring}"],
    )  # fmt: skip
