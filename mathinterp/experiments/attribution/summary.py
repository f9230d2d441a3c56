"""What a finished attribution run says: the nodes of largest estimated effect."""

from mathinterp.experiments.results import Results, Shown, Summary, per_operation

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
    passes = f"{run['method']}: {run['forwards']} forward and {run['backwards']} backward passes over each prompt"
    return Summary(
        parts=[
            Shown("Largest estimated changes of the logit difference, node as on X_c (95 % interval)",
                  per_operation(ranked)),
            f"{passes}, for all nodes. What they estimate is measured by `scan heads` and `scan mlps` with `ablation`"
            " resample, `positions` all; `mathinterp league` compares.",
        ],
        data={"top": ranked, **run},
        queries=[
            results.query("SELECT * FROM node_attribution_effects WHERE run_id = $run AND operation = 'all'"
                          " ORDER BY abs(effect) DESC LIMIT 10"),
        ],
    )  # fmt: skip
