"""What a neuron edit says: gender bias and perplexity before and after it, against random neurons (paper A, 6.2)."""

from mathinterp.experiments.results import Results, Shown, Summary

QUERIES = {
    "bias": "SELECT * EXCLUDE (run_id) FROM paper_a_table12 WHERE run_id = $run"
    " ORDER BY stereotype = 'all' DESC, stereotype",
    "perplexity": "SELECT * EXCLUDE (run_id) FROM edit_perplexity"
    " WHERE run_id = $run ORDER BY edit = 'original' DESC, edit, seed",
    "professions": "SELECT * FROM paper_a_table22 WHERE run_id = $run ORDER BY original DESC",
}


def summarize(results: Results) -> Summary:
    """Bias per stereotype, and nats per token on ordinary text; of each profession in the data alone."""
    rows = {name: results.rows(query) for name, query in QUERIES.items()}
    return Summary(
        parts=[
            Shown("Gender bias (nats), neurons zeroed against random neurons of the same layers", rows["bias"]),
            Shown("Ordinary text, nats per token", rows["perplexity"]),
        ],
        data=rows,
        queries=[results.query(query) for query in QUERIES.values()],
    )
