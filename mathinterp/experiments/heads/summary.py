"""What a finished head scan says (paper A, Table 1)."""

from mathinterp.experiments.ablation_summary import summarize_ablation
from mathinterp.experiments.results import Results, Summary


def summarize(results: Results) -> Summary:
    """The heads that cost most, per operation, and how few they are."""
    tables = {"paper_a_table1": " AND rank <= 5", "paper_a_table2": "", "paper_a_table3": ""}
    queries = [results.query(f"SELECT * FROM {view} WHERE run_id = $run{rows}") for view, rows in tables.items()]
    return summarize_ablation(results, "head_effects", "layer || '.' || head", "head", queries)
