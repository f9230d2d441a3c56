"""What a finished attention scan says, from the stored rows alone: which heads look at what, operation by operation.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from dataclasses import dataclass
from typing import Any

from mathinterp.store import Store

ARITHMETIC = ("operand_a", "operand_b", "operator", "equals")  # types that rank heads


@dataclass(frozen=True)
class AttentionSummary:
    """The answer of an attention scan.

    top: per operation, the heads with most of their weight on operands, operator and equals, as rows of
        paper_b_figure5 (weights per token, %) with that weight (%).
    verdict: how many heads look most often at each type, over all operations; and whether BOS can be told apart.
    """

    top: list[dict[str, Any]]
    verdict: str
    queries: list[str]


def summarize_attention(store: Store, run_id: str, top: int = 8) -> AttentionSummary:
    """Summarize an attention scan; the same ``top`` heads, chosen over all operations, are shown for each."""
    named = ", ".join(f"'{kind}'" for kind in ARITHMETIC)
    rows = store.rows(
        f"""WITH weights AS (
               SELECT layer || '.' || head AS head, layer, head AS number, operation, 100 * sum(mass) AS weight
               FROM attention_by_type WHERE run_id = '{run_id}' AND token_type IN ({named}) GROUP BY ALL
            ), ranked AS (
               SELECT head, row_number() OVER (ORDER BY weight DESC, layer, number) AS rank
               FROM weights WHERE operation = 'all'
            )
            SELECT operation, head, weight, bos, operand_a, operator, operand_b, equals, other, looks_at, looks_at_share
            FROM paper_b_figure5 JOIN weights USING (operation, head) JOIN ranked USING (head)
            WHERE run_id = '{run_id}' AND rank <= {top}
            ORDER BY operation = 'all' DESC, operation, rank"""
    )
    counts = store.rows(
        f"""SELECT looks_at, count(*) AS heads, count(bos) AS with_bos FROM paper_b_figure5
            WHERE run_id = '{run_id}' AND operation = 'all' GROUP BY looks_at ORDER BY heads DESC, looks_at"""
    )
    queries = [
        f"SELECT * FROM paper_b_figure5 WHERE run_id = '{run_id}' AND operation = 'all'"
        " ORDER BY operator DESC LIMIT 10",
        "SELECT layer, head, operation, token_type, mass, low, high, argmax_share FROM attention_by_type"
        f" WHERE run_id = '{run_id}' AND operation <> 'all' AND token_type = 'operator' ORDER BY mass DESC LIMIT 10",
        f"SELECT * FROM attention_scan WHERE run_id = '{run_id}' AND argmax LIMIT 10",
    ]
    return AttentionSummary(rows, _verdict(counts), queries)


def _verdict(counts: list[dict[str, Any]]) -> str:
    shares = ", ".join(f"{row['looks_at']} {row['heads']}" for row in counts)
    found = f"Of {sum(row['heads'] for row in counts)} heads, by what they look at most often outside BOS: {shares}."
    if any(row["with_bos"] for row in counts):
        return found
    return (
        f"{found} This tokenizer adds no BOS: the first token, often an operand's, may serve as the attention sink, and"
        " its weight counts under its own type; prompts that begin with another word show which."
    )
