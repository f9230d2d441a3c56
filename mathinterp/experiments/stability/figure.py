"""How alike the first nodes of a ranking are under other draws of its prompts or templates."""

import altair as alt

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import OPERATION, Figure, Tip, interval, titled
from mathinterp.experiments.reach import ROUGH
from mathinterp.experiments.results import Results
from mathinterp.experiments.stability.result import BAR, FEW_TEMPLATES

JACCARD = Tip("jaccard", "Jaccard index")


def draw(results: Results) -> Figure | None:
    """Jaccard indices of the first k, a panel for each operation; dashed: the bar. None where no draws are stored.

    Of each draw with the run's own ranking, with the range of 95 % of them, and of any two draws, which the bar is for.
    """
    rows = results.frame(
        """SELECT CASE WHEN count(DISTINCT node) OVER () > 1 THEN operation || ', ' || node ELSE operation END AS panel,
                  operation, node, over, 'first ' || k AS first, k, nodes, units,
                  over || unnest([': any two draws', ': with the run''s own']) AS compared,
                  unnest([pairwise, jaccard]) AS jaccard, unnest([NULL, jaccard_low]) AS low,
                  unnest([NULL, jaccard_high]) AS high
           FROM stability_overlap WHERE run_id = $run
           ORDER BY operation = 'all' DESC, operation, node, k, over, compared"""
    )
    if rows.empty:
        return None
    tips = [
        Tip("first", "nodes", "text"), Tip("node", "kind", "text"), OPERATION, Tip("compared", "draws of", "text"),
        JACCARD,
        interval("low", "high", "", "95 % of draws"), Tip("units", "drawn", "whole"),
        Tip("nodes", "nodes ranked", "whole"),
    ]  # fmt: skip
    of_prompts, of_templates = rows[rows["over"] == "prompts"]["units"], rows[rows["over"] == "templates"]["units"]
    doubts = []
    if len(of_prompts) and of_prompts.min() < ROUGH:
        doubts.append(f"with {of_prompts.min()} prompts of an operation the draws say little: give at least {ROUGH}")
    if len(of_templates) and of_templates.min() < FEW_TEMPLATES:
        doubts.append(f"{of_templates.min()} templates per operation are too few to mean much")
    return titled(
        intervals(
            rows, Tip("first", ""), JACCARD, ("low", "high"), tips, series=Tip("compared", "draws of"),
            panel="panel", rule=[BAR], x_scale=alt.Scale(domain=[0, 1]),
        ),
        results, f"Would other prompts give the same first nodes? (dashed: {BAR})",
        "Points of the mean Jaccard index of the first nodes of each operation: of draws with the run's own ranking,"
        f" with the range of 95 % of them, and of any two draws; in a stable list any two have {BAR} or more.",
        doubts,
    )  # fmt: skip
