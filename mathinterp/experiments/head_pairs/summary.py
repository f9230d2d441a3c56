"""What a run of head pairs says: which heads stand in for each other, and which work through each other."""

from mathinterp.experiments.head_pairs import ShownPairs
from mathinterp.experiments.reach import noise_warnings, prompts_of, rough_warnings
from mathinterp.experiments.results import SIGNIFICANT, Results, Shown, Summary

POINTS = dict.fromkeys(("both", "first", "second", "interaction", "low", "high"), "points")


def summarize(results: Results, shown: ShownPairs) -> Summary:
    """The pairs of largest interaction over all operations, and how many differ from adding up."""
    query = "SELECT * FROM head_pairs WHERE run_id = $run AND operation = 'all'"
    rows = results.rows(
        f"""SELECT pair, drop_both AS "both", drop_first AS "first", drop_second AS "second",
               interaction, interaction_low AS low, interaction_high AS high, q_value AS q, sure
               FROM ({query}) ORDER BY abs(interaction) DESC, pair LIMIT {shown.top}"""
    )
    (counts,) = results.rows(
        f"""SELECT count(*) AS pairs, count(*) FILTER (sure AND interaction > 0) AS backup,
               count(*) FILTER (sure AND interaction < 0) AS chained FROM ({query})"""
    )
    verdict = (
        f"Of {counts['pairs']} pairs, {counts['backup']} surely cost more together than apart (q < {SIGNIFICANT}, and"
        f" beyond noise): one head stands in for the other. {counts['chained']} surely cost less together than the sum"
        " of both: one works through the other."
    )
    return Summary(
        parts=[
            Shown("Points of accuracy over all operations, 95 % interval of the interaction", rows, POINTS),
            verdict,
        ],
        data={"top": rows, "verdict": verdict, **counts},
        queries=[results.query(f"{query} ORDER BY abs(interaction) DESC LIMIT 20")],
        warnings=[*rough_warnings(prompts_of(results)), *noise_warnings(results)],
    )
