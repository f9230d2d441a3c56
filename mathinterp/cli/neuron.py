"""``mathinterp neuron``: the card of one FFN neuron, from a stored neuron scan and the model."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import Whole, json_option, model_options, run_option, spec_of, store_option
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table

if TYPE_CHECKING:
    from mathinterp.experiments.neurons.card import NeuronCard


@click.command()
@click.argument("neuron")
@run_option("--neurons-from", "neurons_from", "The finished 'scan neurons' run; default: the model's only one.")
@model_options()
@click.option("--tokens", type=Whole(1), default=10, show_default=True, help="Tokens of each list.")
@store_option()
@json_option()
def neuron(neuron: str, neurons_from: str | None, tokens: int, store: str, as_json: bool, **options: Any) -> None:
    """Show what NEURON (layer.neuron) does: coefficient and importance by operation, and the tokens it writes.

    \b
    v is the neuron's value vector and c its coefficient at END. Tokens are those that v, -v and c v (c: the mean over
    prompts) raise most through the final norm and the unembedding. The model is loaded here, without Ray.

    \b
    Examples:
      mathinterp scan neurons --against head:0.6 --limit 160
      mathinterp neuron 4.312
      mathinterp neuron 28.3696 --model MODEL --from RUN_ID --json
    """
    from mathinterp.experiments.neurons.card import neuron_card
    from mathinterp.experiments.results import Shown
    from mathinterp.store import Store

    results = Store(store)
    card = neuron_card(neuron, spec_of(options), results, neurons_from, tokens)
    if as_json:
        print_json({name: value for name, value in asdict(card).items() if name != "queries"})
        return
    against = f" against {card.against}" if card.against else ""
    shown = Shown(f"Neuron {card.neuron} of {card.model}, run {card.run_id}{against}", card.operations, {"in_top": "%"})
    print_table(shown.printed, title=shown.title)
    print_table(card.prompts, title="Prompts that rank it highest")
    print_table(_token_rows(card), title="Tokens it raises (with the logit, but for the final norm's scale)")
    console.print(card.verdict)
    print_sql_hint(results.url, card.queries)


def _token_rows(card: "NeuronCard") -> list[dict[str, Any]]:
    """One row a place; a column each for v, -v and every operation's c v."""
    return [
        {
            "place": place + 1,
            **{
                name: f"{tokens[place]['token']!r} {tokens[place]['value']:+.3g}"
                for name, tokens in card.tokens.items()
            },
        }
        for place in range(len(card.tokens["v"]))
    ]
