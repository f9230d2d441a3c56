"""What zeroing the neurons of a concept scan says, from the stored rows alone (paper A, Table 8)."""

from mathinterp.experiments.results import Results, Shown, Summary

DECREASES = dict.fromkeys(("decrease", "low", "high", "random", "random least", "random most"), "")


def summarize(results: Results) -> Summary:
    """The relative decrease with each level's neurons at zero, and with random ones; levels without random sets."""
    decreases = results.rows(
        """SELECT level AS "hits more than", operation, neurons, decrease, low, high, random,
               random_least AS "random least", random_most AS "random most"
            FROM paper_a_table8 WHERE run_id = $run
            ORDER BY level, operation = 'all' DESC, operation"""
    )
    missing = missing_controls(results)
    return Summary(
        parts=[
            Shown("All of them at zero: relative decrease of accuracy (%), 95 % interval", decreases, DECREASES),
            *missing,
        ],
        data={"decreases": decreases, "missing_controls": missing},
        queries=[results.query("SELECT * FROM concept_zeroing_effects WHERE run_id = $run")],
    )


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
