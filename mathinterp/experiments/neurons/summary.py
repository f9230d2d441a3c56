"""What a finished neuron scan says: each operation's first neurons, and on request the tokens that they write.

Knows the store's views, and the model where its weights are asked for.
"""

from mathinterp.errors import UserError
from mathinterp.experiments.neurons import NeuronsShown
from mathinterp.experiments.results import Results, Row, Shown, Summary, per_operation
from mathinterp.experiments.stability import stability_lines

SHOWN = 5  # neurons per operation
SHOWN_TOKENS = 10  # a neuron, as in paper A


def summarize(results: Results, shown: NeuronsShown) -> Summary:
    """The neurons of largest mean change, or importance where nothing was compared; on request what they write.

    Raises UserError where tokens are asked for and the model is not at hand.
    """
    (run,) = results.rows(
        """SELECT parameters ->> 'against' AS against, parameters ->> 'change' AS change, parameters ->> 'top' AS top
           FROM runs WHERE run_id = $run"""
    )
    compared = run["against"] is not None
    measure = "change" if compared else "importance"
    found = first_neurons(results, measure) if results.finished else []
    written = _written(results, found) if shown.tokens and found else []
    ranked = f"largest mean {measure}" + (f" ({run['change']})" if compared else "")
    title = f"Neurons of {ranked}, nats; in_top: % of prompts with it among the first {run['top']}"
    stable = stability_lines(results)
    tokens = Shown("Tokens that the neurons' mean c v raises most, and lowers most", written)
    return Summary(
        parts=[Shown(title, per_operation(found), {"in_top": ""}), *stable, *([tokens] if written else [])],
        data={"top": found, "stability": stable, **({"tokens": written} if shown.tokens else {})},
        queries=[
            results.query(query)
            for query in (
                "SELECT * FROM neuron_summary WHERE run_id = $run AND operation = 'all'"
                f" ORDER BY {measure} DESC LIMIT 20",
                "SELECT * FROM neuron_changes WHERE run_id = $run AND rank <= 5 ORDER BY prompt_id, rank LIMIT 20",
                "SELECT layer, head, condition, avg(importance) AS importance FROM head_importance WHERE run_id = $run"
                " GROUP BY ALL ORDER BY importance DESC LIMIT 10",
                "SELECT * FROM layer_importance WHERE run_id = $run ORDER BY operation, condition, layer",
            )
        ],
    )


def first_neurons(results: Results, measure: str) -> list[Row]:
    """Each operation's neurons of largest mean ``measure``, change or importance."""
    columns = {
        "change": "change, change_std, importance, intervened_importance, coefficient, intervened_coefficient",
        "importance": "importance, importance_std, coefficient",
    }[measure]
    return results.rows(
        f"""SELECT operation, layer || '.' || neuron AS neuron, {columns}, in_top, n
            FROM neuron_summary WHERE run_id = $run
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY {measure} DESC, layer, neuron) <= {SHOWN}
            ORDER BY operation = 'all' DESC, operation, {measure} DESC, layer, neuron"""
    )


def _written(results: Results, found: list[Row]) -> list[Row]:
    """The tokens of each shown neuron, under its mean coefficient in the original model."""
    from mathinterp.experiments.neurons.card import written_tokens

    if results.load_model is None:
        raise UserError("`tokens` need the model's weights, and stored rows alone are here; give the model")
    loaded = results.load_model()
    return written_tokens(found, loaded.anatomy, loaded.tokenizer, SHOWN_TOKENS)
