"""What a finished attribution run says: the nodes of largest estimated effect."""

from collections.abc import Sequence

from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation

NODE = """CASE node WHEN 'head' THEN layer || '.' || head WHEN 'neuron' THEN 'neuron ' || layer || '.' || neuron
                    ELSE 'mlp ' || layer END"""  # as people write it


def summarize(results: Results, top: int) -> Summary:
    """The ``top`` heads and MLPs (and neurons) of largest mean effect, either sign, per operation."""
    ranked = results.rows(
        f"""SELECT operation, {NODE} AS node, n, effect, low, high FROM node_attribution_effects
            WHERE run_id = $run
            QUALIFY row_number() OVER (
                PARTITION BY operation, node = 'neuron' ORDER BY abs(effect) DESC, layer, head, neuron) <= $top
            ORDER BY operation = 'all' DESC, operation, node LIKE 'neuron%', abs(effect) DESC""",
        top=top,
    )
    (run,) = results.rows(
        """SELECT parameters ->> 'method' AS method, (notes ->> 'forwards_per_prompt')::INTEGER AS forwards,
                  (notes ->> 'backwards_per_prompt')::INTEGER AS backwards FROM runs WHERE run_id = $run"""
    )
    verdict = _verdict(ranked)
    passes = f"{run['method']}: {run['forwards']} forward and {run['backwards']} backward passes over each prompt"
    return Summary(
        parts=[
            Shown("Largest estimated changes of the logit difference, node as on X_c (95 % interval)",
                  per_operation(ranked)),
            verdict,
            f"{passes}, for all nodes. What they estimate is measured by `scan heads` and `scan mlps` with `ablation`"
            " resample, `positions` all; `mathinterp league` compares.",
        ],
        data={"top": ranked, "verdict": verdict, **run},
        queries=[
            results.query("SELECT * FROM node_attribution_effects WHERE run_id = $run AND operation = 'all'"
                          " ORDER BY abs(effect) DESC LIMIT 10"),
        ],
    )  # fmt: skip


def _verdict(ranked: Sequence[Row]) -> str:
    """The head or MLP of largest estimated effect over all operations, that of one operation, and the neuron."""
    ranked = [row for row in ranked if row["effect"] is not None]  # NaN, where the model overflows
    nodes = [row for row in ranked if not row["node"].startswith("neuron")]
    first = [
        next((row for row in rows if row["operation"] == "all"), None)
        for rows in (nodes, [row for row in ranked if row["node"].startswith("neuron")])
    ]
    said = [f"over all operations {_effect(row)}" for row in first if row is not None]
    single = [row for row in nodes if row["operation"] != "all"]
    if len({row["operation"] for row in single}) > 1:
        largest = max(single, key=lambda row: abs(row["effect"]))
        said.insert(1, f"in {largest['operation']} {_effect(largest)}")
    return f"Largest estimated change of the logit difference: {'; '.join(said)}." if said else ""


def _effect(row: Row) -> str:
    name = f"head {row['node']}" if row["node"][0].isdigit() else row["node"]
    interval = "" if None in (row["low"], row["high"]) else f"95 % interval {row['low']:.3g} to {row['high']:.3g}, "
    return f"{row['effect']:.3g} of {name} ({interval}n = {row['n']:,})"
