"""What a finished run says: the mean over prompts, layer by layer."""

from mathinterp.experiments import Results, Shown, Summary


def summarize(results: Results) -> Summary:
    """The means, and how far they grow."""
    query = "SELECT layer, n, mean FROM residual_norm_means WHERE run_id = $run ORDER BY layer"
    rows = results.rows(query)
    return Summary(
        parts=[Shown("Mean norm at END", rows), f"It grows {rows[-1]['mean'] / rows[0]['mean']:.3g} times."],
        data={"means": rows},
        queries=[results.query(query)],
    )
