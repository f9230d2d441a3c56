"""What iterative masking says: the heads it masked one after another, and what each of them costs."""

from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.experiments.thin_means import thin_mean_warnings


def summarize(results: Results) -> Summary:
    """One row per step, and how to take the heads out together."""
    steps = results.rows(
        """SELECT step, layer || '.' || head AS head, accuracy,
               accuracy - accuracy_before AS accuracy_change, logprob_change
           FROM iterative_scan WHERE run_id = $run AND masked ORDER BY step"""
    )
    (asked,) = results.rows(
        """SELECT parameters ->> 'ablation' AS ablation, parameters ->> 'rank_by' AS rank_by, status
           FROM runs WHERE run_id = $run"""
    )
    warnings = thin_mean_warnings(results.store, results.run_id)
    title = f"Heads masked one after another ({asked['ablation']} ablation, by {asked['rank_by']})"
    together = f"To knock them out together: mathinterp knockout `rank_from` {results.run_id}"
    return Summary(
        parts=[
            Shown(title, steps, {"accuracy": "%", "accuracy_change": "points"}),
            together if asked["status"] == "finished" else "",
        ],
        data={"ranking": [row["head"] for row in steps], "warnings": warnings, "steps": steps},
        queries=[results.query("SELECT * FROM iterative_scan WHERE run_id = $run ORDER BY step, accuracy")],
        warnings=warnings,
    )
