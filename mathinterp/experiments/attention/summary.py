"""What a finished attention scan says: which heads look at what, operation by operation (paper B, Figure 5)."""

from mathinterp.experiments.kept import kept_line
from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation

ARITHMETIC = ("operand_a", "operand_b", "operator", "equals")  # types that rank heads


def summarize(results: Results, top: int = 8) -> Summary:
    """The heads with most of their weight on operands, operator and equals, and what most heads look at.

    The same ``top`` heads, chosen over all operations, are shown for each: rows of paper_b_figure5 (weights per
    token, %) with that weight (%).
    """
    rows = results.rows(
        """WITH weights AS (
               SELECT layer || '.' || head AS head, layer, head AS number, operation, sum(mass) AS weight
               FROM attention_by_type WHERE run_id = $run AND token_type IN (SELECT unnest($types)) GROUP BY ALL
           ), ranked AS (
               SELECT head, row_number() OVER (ORDER BY weight DESC, layer, number) AS rank
               FROM weights WHERE operation = 'all'
           )
           SELECT operation, head, weight, bos, operand_a, operator, operand_b, equals, other, looks_at, looks_at_share
           FROM paper_b_figure5 JOIN weights USING (operation, head) JOIN ranked USING (head)
           WHERE run_id = $run AND rank <= $top
           ORDER BY operation = 'all' DESC, operation, rank""",
        types=list(ARITHMETIC),
        top=top,
    )
    verdict = _verdict(results)
    title = "Heads with most weight (%) on operands, operator and equals; attention per token from END (%)"
    return Summary(
        parts=[
            Shown(title, per_operation(rows), dict.fromkeys(set(rows[0]) - {"operation", "head", "looks_at"} if rows else (), "")),
            kept_line(results),
            verdict,
        ],
        data={"top": rows, "verdict": verdict},
        queries=[
            results.query(
                """SELECT * FROM paper_b_figure5 WHERE run_id = $run AND operation = 'all'
                   ORDER BY operator DESC LIMIT 10"""
            ),
            results.query(
                """SELECT layer, head, operation, token_type, mass, low, high, argmax_share FROM attention_by_type
                   WHERE run_id = $run AND operation <> 'all' AND token_type = 'operator' ORDER BY mass DESC LIMIT 10"""
            ),
            results.query("SELECT * FROM attention_scan WHERE run_id = $run AND argmax LIMIT 10"),
        ],
    )


def _verdict(results: Results) -> str:
    """How many heads look most often at each type, over all operations; and whether BOS can be told apart."""
    counts: list[Row] = results.rows(
        """SELECT looks_at, count(*) AS heads, count(bos) AS with_bos FROM paper_b_figure5
           WHERE run_id = $run AND operation = 'all' GROUP BY looks_at ORDER BY heads DESC, looks_at"""
    )
    shares = ", ".join(f"{row['looks_at']} {row['heads']}" for row in counts)
    found = f"Of {sum(row['heads'] for row in counts)} heads, by what they look at most often outside BOS: {shares}."
    if any(row["with_bos"] for row in counts):
        return found
    return (
        f"{found} This tokenizer adds no BOS: the first token, often an operand's, may serve as the attention sink, and"
        " its weight counts under its own type; prompts that begin with another word show which."
    )
