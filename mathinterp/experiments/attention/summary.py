"""What a finished attention scan says: which heads look at what, operation by operation (paper B, Figure 5)."""

import json

from mathinterp.experiments.attention import ShownHeads
from mathinterp.experiments.kept import kept_line
from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation

ARITHMETIC = ("operand_a", "operand_b", "operator", "equals")  # types that rank heads
PLAIN = ("bos", "first", "other")  # types that say little


def summarize(results: Results, shown: ShownHeads) -> Summary:
    """The heads with most of their weight on the types that say something, and what most heads look at.

    Of arithmetic these are operands, operator and equals; of other prompts all but the first token and other. The same
    ``shown.top`` heads, chosen over all operations, are shown for each, with weights per token.
    """
    kinds = _kinds(results)
    named = [kind for kind in kinds if kind in ARITHMETIC] or [kind for kind in kinds if kind not in PLAIN] or kinds
    rows = _weights(results, named, kinds, shown.top)
    verdict = _verdict(results)
    title = f"Heads with most weight (%) on {', '.join(named)}; attention per token from END (%)"
    return Summary(
        parts=[
            Shown(title, per_operation(rows), dict.fromkeys(("weight", *kinds, "looks_at_share"), "")),
            kept_line(results),
            verdict,
        ],
        data={"top": rows, "verdict": verdict},
        queries=[
            results.query(
                f"""SELECT layer, head, operation, token_type, mass, low, high, argmax_share FROM attention_by_type
                   WHERE run_id = $run AND operation = 'all' AND token_type = '{named[0]}'
                   ORDER BY mass DESC LIMIT 10"""
            ),
            results.query("SELECT * FROM paper_b_figure5 WHERE run_id = $run ORDER BY operation, head LIMIT 10"),
            results.query("SELECT * FROM attention_scan WHERE run_id = $run AND argmax LIMIT 10"),
        ],
    )


def _kinds(results: Results) -> list[str]:
    """The run's token types: bos, those of arithmetic in the order of a sentence, then others by name."""
    rows = results.rows("SELECT DISTINCT token_type FROM attention_scan WHERE run_id = $run AND tokens > 0 ORDER BY 1")
    found = [row["token_type"] for row in rows]
    order = ("bos", "operand_a", "operator", "operand_b", "equals")
    last = [kind for kind in found if kind == "other"]
    return [*(kind for kind in order if kind in found), *(k for k in found if k not in (*order, "other")), *last]


def _weights(results: Results, named: list[str], kinds: list[str], top: int) -> list[Row]:
    """Per operation, the heads of most weight on ``named`` over all operations, with their weights per token."""
    found = results.rows(
        """WITH weights AS (
               SELECT layer, head, operation, sum(mass) FILTER (token_type IN (SELECT unnest($named))) AS weight,
                      map_from_entries(list((token_type, mean))) AS means
               FROM attention_by_type WHERE run_id = $run GROUP BY ALL
           ), ranked AS (
               SELECT layer, head, row_number() OVER (ORDER BY weight DESC, layer, head) AS rank
               FROM weights WHERE operation = 'all'
           )
           SELECT w.operation, w.layer || '.' || w.head AS head, weight, to_json(means) AS means, looks_at,
               looks_at_share
           FROM weights AS w JOIN ranked USING (layer, head)
           JOIN paper_b_figure5 AS f ON f.run_id = $run AND f.operation = w.operation
               AND f.head = w.layer || '.' || w.head
           WHERE rank <= $top ORDER BY w.operation = 'all' DESC, w.operation, rank""",
        named=named,
        top=top,
    )
    rows = []
    for row in found:
        means = json.loads(row.pop("means"))
        looks = {name: row.pop(name) for name in ("looks_at", "looks_at_share")}
        rows.append({**row, **{kind: means.get(kind) for kind in kinds}, **looks})
    return rows


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
