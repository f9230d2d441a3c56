"""What zeroing whole sets of neurons costs, level by level, against random sets (the form of paper A, Table 8)."""

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.concept_zeroing.summary import missing_controls
from mathinterp.experiments.figures import OPERATION, Figure, N, Tip, interval, titled
from mathinterp.experiments.results import Results
from mathinterp.text import counted

SETS = {"kept": "kept by the concept scan (95 % interval)", "random": "random sets (mean, least to most)"}


def draw(results: Results) -> Figure:
    """Relative decrease of accuracy for each level, a panel for each operation."""
    rows = results.frame(
        """SELECT 'hits > ' || level AS name, level, operation, neurons, n, random_sets,
                  unnest([$kept, $random]) AS sets, unnest([decrease, random]) AS decrease,
                  unnest([low, random_least]) AS low,
                  unnest([high, random_most]) AS high
           FROM paper_a_table8 WHERE run_id = $run ORDER BY level, sets""",
        **SETS,
    )
    rows = rows[(rows["sets"] == SETS["kept"]) | (rows["random_sets"] > 0)]
    missing, decrease = missing_controls(results), Tip("decrease", "relative decrease of accuracy", "%")
    tips = [
        OPERATION, Tip("level", "hits more than", "whole"), Tip("sets", "neurons", "text"), decrease,
        interval("low", "high", "%", "range"),
        Tip("neurons", "neurons at zero", "whole"), Tip("random_sets", "random sets", "whole"), N,
    ]  # fmt: skip
    return titled(
        intervals(
            rows, Tip("name", ""), decrease, ("low", "high"), tips, series=Tip("sets", ""), panel="operation", rule=[0]
        ),
        results, "All neurons of a level at zero, against random ones",
        "Points of the relative decrease of accuracy for each level of the concept scan, a panel for each operation:"
        " with its 95 % interval of the neurons kept there, and from least to most of as many random ones per layer.",
        [f"{counted(len(missing), 'level')} without random sets: the summary says why"] if missing else [],
    )  # fmt: skip
