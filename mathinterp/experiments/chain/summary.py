"""What a chain run says: one table of its stages, from the stored rows alone.

Knows the store's views; knows nothing about models or how rows were computed.
"""

import json

from mathinterp.errors import UserError
from mathinterp.experiments.chain import ChainOptions
from mathinterp.experiments.results import Results, Row, Shown, Summary
from mathinterp.text import quoted

SHOWN = 5  # rows of a stage
COLUMNS = {
    "strength": "strength", "exact_effect": "exact", "deep_effect": "on deep", "weight": "weight",
}  # fmt: skip

STAGES_EXPLAINED = (
    "shallow_neuron: of a layer before that of the head under via; deep_neuron: of that head's layer or a later one"
    " (the deep layers of maskkeep go by the model's depth instead)."
)


def summarize(results: Results, shown: ChainOptions) -> Summary:
    """The table of all stages and a verdict; the operation counts where the run has several prompts.

    Raises UserError for a run without rows of that operation.
    """
    operation = shown.operation
    rows, single = chain_rows(results, operation)
    heading, table, verdict = title(results, operation, single), _table(rows, single), _verdict(results)
    of_all = f"chain_summary WHERE run_id = $run AND operation = {quoted(operation)}"
    view = "chain WHERE run_id = $run" if single else of_all
    queries = [
        f"SELECT * FROM {view} AND stage = 'shallow_neuron' ORDER BY strength DESC LIMIT 20",
        "SELECT name, token, token_type, weight, effect, from_neurons FROM chain WHERE run_id = $run"
        " AND stage = 'attention' AND arithmetic ORDER BY prompt_id, effect DESC LIMIT 20",
        f"SELECT * FROM {view} AND stage = 'head' ORDER BY strength DESC LIMIT 20",
    ]
    return Summary(
        parts=[Shown(heading, table, {"of prompts": "%"}), STAGES_EXPLAINED, verdict],
        data={"title": heading, "chain": table, "verdict": verdict},
        queries=[results.query(query) for query in queries],
    )


def chain_rows(results: Results, operation: str) -> tuple[list[Row], bool]:
    """The first rows of every stage, and whether they are one prompt's."""
    count = results.rows("SELECT count(DISTINCT prompt_id) AS n FROM chain WHERE run_id = $run")[0]["n"]
    if not count:
        raise UserError(f"run {results.run_id} has no chain: it has no rows yet")
    if count == 1:
        rows = results.rows(
            """SELECT *, 1.0 AS share FROM chain WHERE run_id = $run
                QUALIFY row_number() OVER (PARTITION BY stage ORDER BY strength DESC, place) <= $shown OR target
                    OR (stage = 'head' AND arithmetic)
                ORDER BY stage_number, strength DESC, place""",
            shown=SHOWN,
        )
        return rows, True
    rows = results.rows(
        """SELECT *, NULL::DOUBLE AS probability_zeroed FROM chain_summary
            WHERE run_id = $run AND operation = $operation
            QUALIFY row_number() OVER (PARTITION BY stage ORDER BY strength DESC, name) <= $shown
            ORDER BY stage_number, strength DESC, name""",
        operation=operation, shown=SHOWN,
    )  # fmt: skip
    if not rows:
        raise UserError(f"run {results.run_id} has no prompts of `operation` '{operation}'")
    return rows, False


def _table(rows: list[Row], single: bool) -> list[Row]:
    found = []
    for row in rows:
        where = row["token_type"]
        if single and row["stage"] in ("shallow_neuron", "attention"):
            where = f"{row['token']} ({row['token_type']})"
        shown: Row = {"stage": row["stage"], "name": name(row), "via": row["via"], "at": where}
        shown |= {label: row[column] for column, label in COLUMNS.items()}
        if single:
            shown["head zeroed"] = row["probability_zeroed"]
        else:
            shown["of prompts"] = row["share"]
        shown["tokens"] = None if row["tokens"] is None else " ".join(json.loads(row["tokens"])[:6])
        found.append(shown)
    return found


def name(row: Row) -> str:
    """The row's name; a star for an arithmetic head of the prompt."""
    return f"{row['name']} *" if row["stage"] == "head" and row.get("arithmetic") else str(row["name"])


def _verdict(results: Results) -> str:
    """The heads that lead, and how much of what the arithmetic heads read was put there by earlier FFN neurons."""
    leading = results.rows(
        """SELECT name, count(*) AS n FROM chain WHERE run_id = $run AND stage = 'head' AND place = 1
            GROUP BY name ORDER BY n DESC, name"""
    )
    heads = ", ".join(f"{row['name']} ({row['n']})" for row in leading[:4])
    reads = results.rows(
        """SELECT sum(from_neurons) AS from_neurons, sum(effect) AS effect
            FROM chain WHERE run_id = $run AND stage = 'attention' AND arithmetic"""
    )[0]
    first = f"Head that costs the answer most, by prompts: {heads}."
    if not reads["effect"]:
        return first
    return (
        f"{first} What the arithmetic heads read is worth {reads['effect']:.4g} nats of log-odds to first order in all,"
        f" of which earlier FFN neurons put {reads['from_neurons']:.4g} there; the rest is embeddings, attention and"
        " biases."
    )


def title(results: Results, operation: str, single: bool) -> str:
    """Whose chain it is: the one prompt's, or that of an operation's prompts."""
    run = results.rows("SELECT model, prompts FROM runs WHERE run_id = $run")[0]
    if not single:
        return f"{run['prompts']}, operation {operation} ({run['model']})"
    prompt = results.rows("SELECT text, answer FROM prompts JOIN runs USING (prompts_fingerprint) WHERE run_id = $run")
    return f"{prompt[0]['text']} {prompt[0]['answer']} ({run['model']}; * arithmetic head)"
