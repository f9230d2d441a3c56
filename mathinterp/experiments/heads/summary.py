"""What a finished head scan says (paper A, Table 1)."""

from mathinterp.experiments.ablation_summary import summarize_ablation
from mathinterp.experiments.reach import prompts_of
from mathinterp.experiments.results import Results, Summary


def summarize(results: Results) -> Summary:
    """The heads that cost most, per operation, and how few they are."""
    (known,) = results.rows(
        """SELECT count(digits) > 0 AS paper_a_table2, count(t.carry_class) FILTER (s.operation IN ('add', 'sub')) > 0
               AS paper_a_table3 FROM scored_baseline AS s JOIN runs AS r USING (run_id)
           LEFT JOIN answer_tokens AS t ON t.prompts_fingerprint = r.prompts_fingerprint AND t.prompt_id = s.prompt_id
           WHERE run_id = $run"""
    )  # what the paper splits by, where the prompts tell it
    named = {row["operation"] for row in prompts_of(results)}
    tables = {"paper_a_table1": " AND rank <= 5"} if named & {"add", "sub", "mul", "div"} else {}
    tables |= {view: "" for view, has_rows in known.items() if has_rows}
    queries = [results.query(f"SELECT * FROM {view} WHERE run_id = $run{rows}") for view, rows in tables.items()]
    return summarize_ablation(results, "head_effects", "layer || '.' || head", "head", queries)
