"""The curves of a knock-out: accuracy against the number of heads that are out."""

import altair as alt

from mathinterp.experiments.charts import curves
from mathinterp.experiments.figures import OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.knockout.summary import doubts
from mathinterp.experiments.results import Results

WORDS = {"effect": "ranked heads", "random": "random heads", "random_layer": "random heads, same layers"}


def draw(results: Results) -> Figure | None:
    """Accuracy against k: ranked heads with their interval, random ones as the range over seeds."""
    rows = results.frame(
        """SELECT ranking, k, operation, accuracy, low, high, n, '95 % interval' AS band
           FROM knockout_curve WHERE run_id = $run AND ranking = 'effect'
           UNION ALL
           SELECT ranking, k, operation, accuracy, lowest, highest, NULL, 'range over draws'
           FROM knockout_bands WHERE run_id = $run AND ranking <> 'effect' ORDER BY k"""
    )
    rows["heads_out"] = rows["ranking"].map(lambda ranking: WORDS.get(ranking, ranking))
    k, accuracy = Tip("k", "heads out", "whole"), Tip("accuracy", "accuracy", "%")
    tips = [
        Tip("heads_out", "heads", "text"),
        OPERATION,
        k,
        accuracy,
        interval("low", "high", "%", "band"),
        Tip("band", "band is", "text"),
        N,
    ]
    figure = curves(
        rows.drop(columns="ranking"), k, accuracy, ("low", "high"), tips, series=Tip("heads_out", ""),
        x_scale=alt.Scale(type="symlog"), y_scale=alt.Scale(domain=[0, 1]), ticks=sorted(map(int, rows["k"].unique())),
        order=[word for ranking, word in WORDS.items() if (rows["ranking"] == ranking).any()],
    )  # fmt: skip
    return titled(
        figure, results, "Accuracy with heads knocked out",
        "Curves of accuracy against the number of heads that are out, a panel for each operation: ranked heads with"
        " their 95 % interval, random heads with the range over draws.",
        doubts(results),
    )  # fmt: skip
