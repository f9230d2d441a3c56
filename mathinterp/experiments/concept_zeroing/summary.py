"""What zeroing the neurons of a concept scan says, from the stored rows alone (paper A, Table 8)."""

from collections.abc import Sequence

from mathinterp.experiments.results import Results, Row, Shown, Summary
from mathinterp.text import counted

DECREASES = dict.fromkeys(("decrease", "low", "high", "random", "random least", "random most"), "")


def summarize(results: Results) -> Summary:
    """The relative decrease with each level's neurons at zero, and with random ones; levels without random sets."""
    decreases = results.rows(
        """SELECT level AS "hits more than", operation, neurons, n, decrease, low, high, random,
               random_least AS "random least", random_most AS "random most"
            FROM paper_a_table8 WHERE run_id = $run
            ORDER BY level, operation = 'all' DESC, operation"""
    )
    missing, verdict = missing_controls(results), _verdict(decreases)
    return Summary(
        parts=[
            Shown("All of them at zero: relative decrease of accuracy (%), 95 % interval", decreases, DECREASES),
            verdict, *missing,
        ],
        data={"decreases": decreases, "verdict": verdict, "missing_controls": missing},
        queries=[results.query("SELECT * FROM concept_zeroing_effects WHERE run_id = $run")],
    )  # fmt: skip


def _verdict(decreases: Sequence[Row]) -> str:
    """The level that costs most over all operations, beside random sets, and the operation that it costs most."""
    overall = [row for row in decreases if row["operation"] == "all"]
    known = [row for row in overall if row["decrease"] is not None]
    if not known:  # of an unfinished run the sets themselves may be missing, and random ones be there
        nothing = overall and all(row["random"] is None for row in overall)
        return f"Nothing was right originally (n = {overall[0]['n']:,}): there is nothing to lose." if nothing else ""
    worst = max(known, key=lambda row: row["decrease"])
    said = (
        f"The largest relative decrease of accuracy over all operations is {_percent(worst)}, with"
        f" the {counted(worst['neurons'], 'neuron')} of more than {counted(worst['hits more than'], 'hit')} at zero"
    )
    if worst["random"] is not None:
        least, most = (f"{100 * worst[name]:.3g}" for name in ("random least", "random most"))
        said += f"; of as many random ones in each layer it is {100 * worst['random']:.3g} % ({least} to {most})"
    single = [row for row in decreases if row["operation"] != "all" and row["decrease"] is not None]
    if len({row["operation"] for row in single}) > 1:
        most_of = max(single, key=lambda row: row["decrease"])
        said += f". Of one operation: {_percent(most_of)} in {most_of['operation']}, hits > {most_of['hits more than']}"
    return f"{said}."


def _percent(row: Row) -> str:
    """The decrease with its interval and n."""
    ends = [row["low"], row["high"]]
    interval = "" if None in ends else "95 % interval {:.3g} to {:.3g}, ".format(*(100 * end for end in ends))
    return f"{100 * row['decrease']:.3g} % ({interval}n = {row['n']:,})"


def missing_controls(results: Results) -> list[str]:
    """A line for each level that has no random sets though some were asked for: which layer is full.

    A random set has as many neurons in each layer as the level's own, and none of them: that takes half a layer.
    """
    rows = results.rows(
        """SELECT level, layer, count(*) FILTER (hits > level) AS zeroed, count(*) AS neurons
            FROM concept_neurons AS found
            JOIN (
                SELECT DISTINCT level, parameters ->> 'source' AS source FROM paper_a_table8 JOIN runs USING (run_id)
                WHERE run_id = $run AND random_sets = 0 AND (parameters ->> 'seeds')::INTEGER > 0
            ) AS alone ON found.run_id = alone.source
            GROUP BY level, layer
            QUALIFY row_number() OVER (PARTITION BY level ORDER BY zeroed / neurons DESC, layer) = 1
            ORDER BY level"""
    )
    return [
        f"No random sets for hits > {row['level']}: {row['zeroed']} of the {row['neurons']} neurons of layer"
        f" {row['layer']} are zeroed, so there are not as many others to draw there; take higher levels."
        for row in rows
    ]
