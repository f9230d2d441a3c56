"""The score of an evaluation with its interval, beside the model that the evaluated one was made from."""

import altair as alt

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results

ACCURACY = Tip("accuracy", "accuracy", "%")


def draw(results: Results) -> Figure:
    """A point with its 95 % interval over all items, and for each subset; a colour for each model."""
    rows = results.frame(
        """SELECT s.subset, r.model || CASE WHEN r.run_id = $run THEN '' ELSE ' (base)' END AS model, s.accuracy, s.low,
                  s.high, s.n, s.unread, s.truncated, r.task
           FROM evaluation_scores AS s JOIN evaluation_runs AS r USING (run_id)
           WHERE r.run_id IN (SELECT $run UNION SELECT base_run_id FROM evaluation_results WHERE run_id = $run)
           ORDER BY r.run_id = $run DESC, s.subset = 'all' DESC, s.subset"""
    )
    tips = [
        Tip("model", "model", "text"), Tip("task", "task", "text"), Tip("subset", "items", "text"), ACCURACY,
        interval("low", "high", "%"), N, Tip("unread", "no answer read", "whole"), Tip("truncated", "cut", "whole"),
    ]  # fmt: skip
    paired = results.rows(
        """SELECT difference, difference_low AS low, difference_high AS high FROM evaluation_results
           WHERE run_id = $run AND difference IS NOT NULL"""
    )
    about = [
        f"{100 * row['difference']:+.3g} points on the base, {100 * row['low']:.3g} to {100 * row['high']:.3g}, paired"
        for row in paired
    ]
    task = rows["task"].iloc[0] if len(rows) else "no finished task"
    return titled(
        intervals(
            rows, Tip("subset", ""), ACCURACY, ("low", "high"), tips, series=Tip("model", ""),
            x_scale=alt.Scale(domain=[0, 1]),
        ),
        results, f"Evaluation on {task}", "Points of accuracy with 95 % intervals, over all items and for each subset.",
        about,
    )  # fmt: skip
