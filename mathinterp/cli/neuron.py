"""``mathinterp neuron``: the card of one FFN neuron, from a stored neuron scan and the model."""

from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import json_option, model_options, parse_neurons, store_option
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.experiments.neurons.card import NeuronCard
    from mathinterp.models.catalog import LoadedModel, ModelSpec


@click.command()
@click.argument("neuron")
@click.option(
    "--neurons-from",
    "source",
    default=None,
    metavar="RUN_ID",
    help="The finished 'scan neurons' run; default: the model's only one.",
)
@model_options()
@click.option("--tokens", type=click.IntRange(min=1), default=10, show_default=True, help="Tokens of each list.")
@store_option()
@json_option()
def neuron(neuron: str, source: str | None, tokens: int, store: str, as_json: bool, **options: Any) -> None:
    """Show what NEURON (layer.neuron) does: coefficient and importance by operation, and the tokens it writes.

    \b
    v is the neuron's value vector and c its coefficient at END. Tokens are those that v, -v and c v (c: the mean over
    prompts) raise most through the final norm and the unembedding. The model is loaded here, without Ray.

    \b
    Examples:
      mathinterp scan neurons --against head:0.6 --limit 160
      mathinterp neuron 4.312
      mathinterp neuron 28.3696 --model MODEL --neurons-from RUN_ID --json
    """
    from mathinterp.experiments.neurons.card import neuron_card, only_run
    from mathinterp.experiments.neurons.stored import check_model, neuron_run
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.store import Store

    chosen, results = _parse(neuron), Store(store)
    spec = ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code")))
    resolved = resolve(spec)
    if source is None:
        run = only_run(results, resolved.fingerprint, resolved.label)
    else:
        run = neuron_run(results, source)
        check_model(run, resolved.fingerprint, resolved.label)
    loaded = load_here(spec)
    card = neuron_card(results, run, chosen, loaded.anatomy, loaded.tokenizer, tokens)
    if as_json:
        print_json({"run_id": run["run_id"], "model": resolved.label, **_json(card)})
        return
    against = f" against {card.against}" if card.against else ""
    print_table(card.operations, title=f"Neuron {card.neuron} of {resolved.label}, run {run['run_id']}{against}")
    print_table(card.prompts, title="Prompts that rank it highest")
    print_table(_token_rows(card), title="Tokens it raises (with the logit, but for the final norm's scale)")
    console.print(card.verdict, highlight=False)
    print_sql_hint(results.url, card.queries)


def load_here(spec: "ModelSpec") -> "LoadedModel":
    """The model, on the GPU of this machine if there is one."""
    import torch

    from mathinterp.models.catalog import load

    return load(spec, "cuda" if torch.cuda.is_available() else "cpu")


def _parse(text: str) -> tuple[int, int]:
    neurons = parse_neurons(text, "neuron")
    if len(neurons) > 1:
        raise UserError(f"neuron '{text}' names {len(neurons)}; a card is of one")
    return neurons[0]


def _json(card: "NeuronCard") -> dict[str, Any]:
    tokens = {name: [{"token": text, "value": value} for text, value in tokens] for name, tokens in card.tokens.items()}
    return {
        "neuron": card.neuron, "against": card.against, "operations": card.operations, "prompts": card.prompts,
        "tokens": tokens, "verdict": card.verdict,
    }  # fmt: skip


def _token_rows(card: "NeuronCard") -> list[dict[str, Any]]:
    """One row a place; a column each for v, -v and every operation's c v."""
    places = len(card.tokens["v"])
    return [
        {"place": place + 1, **{name: _cell(tokens[place]) for name, tokens in card.tokens.items()}}
        for place in range(places)
    ]


def _cell(token: tuple[str, float]) -> str:
    return f"{token[0]!r} {token[1]:+.3g}"
