"""The map of head pairs: how far two heads together cost more, or less, than the sum of both."""

from mathinterp.experiments.charts import heat, signed_colour
from mathinterp.experiments.figures import SURE, Figure, N, Q, Tip, interval, titled
from mathinterp.experiments.head_pairs import ShownPairs
from mathinterp.experiments.reach import noise_warnings, prompts_of, rough_warnings
from mathinterp.experiments.results import Results

INTERACTION = Tip("interaction", "interaction", "points")


def draw(results: Results, shown: ShownPairs) -> Figure:
    """Heads by heads, coloured by the interaction over all operations, a dot where sure; given heads are one column."""
    rows = results.frame(
        """SELECT first, second, pair, interaction, interaction_low AS low, interaction_high AS high, drop_both,
                  drop_first, drop_second, q_value AS q, sure, n FROM head_pairs
           WHERE run_id = $run AND operation = 'all' ORDER BY layer, head, other_layer, other_head"""
    )
    tips = [
        Tip("pair", "pair", "text"), INTERACTION, interval("low", "high", "points"), Q, SURE,
        Tip("drop_both", "both out", "points"), Tip("drop_first", "first out", "points"),
        Tip("drop_second", "second out", "points"), N,
    ]  # fmt: skip
    figure = heat(
        rows, Tip("second", "and"), Tip("first", "head"),
        signed_colour("interaction", rows["interaction"], INTERACTION.title, "points"), tips,
        across=list(dict.fromkeys(rows["second"])), up=list(dict.fromkeys(rows["first"]))[::-1], angle=-90, dot="sure",
    )  # fmt: skip
    return titled(
        figure, results, "What two heads cost together, beyond the sum of both (dot: sure)",
        "Map of heads by heads, coloured by the interaction over all operations: above 0 one head stands in for the"
        " other, below 0 one works through the other.",
        [*rough_warnings(prompts_of(results)), *noise_warnings(results)],
    )  # fmt: skip
