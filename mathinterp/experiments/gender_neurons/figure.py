"""The neurons that add most to the stereotypes, and to which (paper A, section 6.2)."""

from mathinterp.experiments.charts import intervals
from mathinterp.experiments.figures import LAYER, Figure, Tip, titled
from mathinterp.experiments.gender_neurons import SHOWN
from mathinterp.experiments.results import Results


def draw(results: Results) -> Figure:
    """A line for each of the first neurons: what it adds to the professions of all, of women's and of men's."""
    rows = results.frame(
        """SELECT layer || '.' || neuron AS name, rank, layer, professions,
                  unnest(['all', 'woman', 'man']) AS stereotype,
                  unnest([change, change_woman, change_man]) AS change
           FROM gender_neurons WHERE run_id = $run AND rank <= $shown ORDER BY rank, stereotype""",
        shown=SHOWN,
    )
    value = Tip("change", "what it adds to the stereotype", "nats")
    tips = [
        Tip("name", "neuron", "text"), Tip("rank", "rank", "whole"), LAYER, Tip("stereotype", "professions of", "text"),
        value, Tip("professions", "professions in all", "whole"),
    ]  # fmt: skip
    return titled(
        intervals(rows, Tip("name", ""), value, None, tips, series=Tip("stereotype", "professions of"), rule=[0]),
        results,
        f"The first {rows['name'].nunique()} neurons that add to stereotypes",
        "Points: how much more a neuron adds to professions after the gender they are stereotyped as than after the"
        " other, summed over all professions, over those of women and over those of men.",
    )  # fmt: skip
