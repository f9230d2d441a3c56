"""``mathinterp scan neurons``: Comparative Neuron Analysis (paper A, section 4)."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    parse_heads,
    parse_layers,
    prompt_options,
    store_option,
)
from mathinterp.cli.output import print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.experiments.neurons import Neurons
    from mathinterp.models.catalog import ModelSpec, ResolvedModel

BYTES_A_NEURON = 8  # of a stored neuron, prompt and condition: two float32 that hardly compress
SHOWN = 5  # neurons an operation
SHOWN_TOKENS = 10  # a neuron, as in paper A


@click.command()
@model_options()
@prompt_options()
@click.option(
    "--against",
    default=None,
    metavar="WHAT",
    help="head:17.22[,14.19] zeroed; adapter:PATH; model:NAME; or input, the counterfactual. Default: nothing.",
)
@click.option("--target", default="predicted", show_default=True, help="The token explained: predicted or gold.")
@click.option("--rank", default="difference", show_default=True, help="A prompt's first: difference, abs or ratio.")
@click.option("--keep", default="topk:100", show_default=True, help="Rows of a prompt: topk:K over all layers, or all.")
@click.option("--layers", default=None, help="Layers, for example 0-3,17; default all.")
@click.option("--tokens", is_flag=True, help="Also show what the first neurons write; loads the model here.")
@store_option()
@cluster_options()
@json_option()
def neurons(against: str | None, target: str, rank: str, keep: str, layers: str | None, tokens: bool, as_json: bool,
            **options: Any) -> None:  # fmt: skip
    """Importance and coefficient of every FFN neuron at END: original against intervened (paper A, section 4).

    \b
    change = original - intervened, or tuned - original with adapter: and model:. Whatever --keep says, mean and
    spread of every neuron are stored for each operation.

    \b
    Examples:
      mathinterp scan neurons --against head:0.6 --tokens
      mathinterp scan neurons --model smollm2 --against adapter:smollm2-arithmetic --limit 8
      mathinterp scan neurons --prompts pairs --against input --keep topk:500
    """
    from mathinterp.experiments.neurons import Neurons

    top, keep_all = _parse_keep(keep)
    spec = _spec(options)
    chosen = Neurons(
        **_parse_against(against, spec), target=target, rank=rank, top=top, keep_all=keep_all,
        layers=parse_layers(layers),
    )  # fmt: skip
    if keep_all:
        _require_room(chosen, spec, options)
    run = run_chosen(chosen, **options)
    change = "change" if chosen.against else "importance"
    found = _top_neurons(run.store, run.run_id, change) if run.complete else []
    written = _written(found, spec) if tokens and found else []
    if as_json:
        print_json({**run_json(run), "top": found, **({"tokens": written} if tokens else {})})
    else:
        ranked = f"largest mean {change}" + (f" ({chosen.parameters()['change']})" if chosen.against else "")
        print_table(found, title=f"Neurons of {ranked}, nats; in_top: % of prompts with it among the first {top}")
        if written:
            print_table(written, title="Tokens that the neurons' mean c v raises most, and lowers most")
        where = f"WHERE run_id = '{run.run_id}'"
        print_sql_hint(
            run.store,
            [
                f"SELECT * FROM neuron_summary {where} AND operation = 'all' ORDER BY {change} DESC LIMIT 20",
                f"SELECT * FROM neuron_changes {where} AND rank <= 5 ORDER BY prompt_id, rank LIMIT 20",
                f"SELECT layer, head, condition, avg(importance) AS importance FROM head_importance {where}"
                " GROUP BY ALL ORDER BY importance DESC LIMIT 10",
                f"SELECT * FROM layer_importance {where} ORDER BY operation, condition, layer",
            ],
        )
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)


def _spec(options: dict[str, Any]) -> "ModelSpec":
    from mathinterp.models.catalog import ModelSpec

    return ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code")))


def _parse_keep(text: str) -> tuple[int, bool]:
    """ "topk:50" -> (50, False), "all" -> (100, True); raises UserError for anything else."""
    if text == "all":
        return 100, True
    kind, _, number = text.partition(":")
    if kind != "topk" or not number.isdecimal() or int(number) < 1:
        raise UserError(f"--keep '{text}' cannot be read; write topk:100 or all")
    return int(number), False


def _parse_against(text: str | None, spec: "ModelSpec") -> dict[str, Any]:
    """The fields of Neurons that --against sets; another model is found here, before anything starts."""
    if text is None or text == "input":
        return {"against": text}
    kind, _, value = text.partition(":")
    if kind not in ("head", "adapter", "model") or not value:
        raise UserError(f"--against '{text}' cannot be read; write head:17.22,14.19, adapter:PATH, model:NAME or input")
    if kind == "head":
        try:
            return {"against": kind, "heads": parse_heads(value)}
        except UserError:
            raise UserError(f"--against '{text}' cannot be read; write heads as head:17.22,14.19") from None
    return {"against": kind, "other": _other_model(kind, value, spec)}


def _other_model(kind: str, value: str, spec: "ModelSpec") -> Any:
    from dataclasses import replace

    from mathinterp.experiments.neurons import OtherModel
    from mathinterp.models.catalog import resolve

    original = resolve(spec)
    wanted = replace(spec, adapter=value) if kind == "adapter" else replace(spec, name=value, adapter=None)
    other = resolve(wanted)
    _require_comparable(original, other)
    return OtherModel(wanted, other.fingerprint, other.label)


def _require_comparable(original: "ResolvedModel", other: "ResolvedModel") -> None:
    """Raise UserError unless a neuron and a token are the same thing in both models, and the models are not one."""
    for what in ("model_type", "n_layers", "n_heads", "d_model", "n_neurons", "vocabulary", "positions"):
        here, there = getattr(original.shape, what), getattr(other.shape, what)
        if here != there:
            raise UserError(f"--against: {other.label} has {what} {there}, {original.label} has {here}")
    if original.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise UserError(f"--against: the tokens of {other.label} are not those of {original.label}")
    if original.fingerprint == other.fingerprint:
        raise UserError(f"--against: {other.label} is {original.label} itself; nothing would change")


def _require_room(chosen: "Neurons", spec: "ModelSpec", options: dict[str, Any]) -> None:
    """Raise UserError if --keep all writes more than the store's disk has free; object stores are not asked."""
    from mathinterp.models.catalog import resolve
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store

    store = Store(options["store"])
    if not store.files.local:
        return
    shape = resolve(spec).shape
    neurons = len(chosen.chosen(shape)) * shape.n_neurons
    prompts = len(load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"]))
    conditions = 1 if chosen.against is None else 2
    wanted = BYTES_A_NEURON * neurons * prompts * conditions
    folder = next(place for place in (Path(store.url), *Path(store.url).parents) if place.exists())
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise UserError(
            f"--keep all would write about {wanted / 1e9:,.1f} GB ({neurons:,} neurons x {prompts:,} prompts x"
            f" {conditions} condition(s)), but {folder} has {free / 1e9:,.1f} GB free; keep topk:K (the means of every"
            " neuron are stored all the same), or take fewer --layers or a smaller --limit"
        )


def _top_neurons(store: str, run_id: str, change: str) -> list[dict[str, Any]]:
    """Each operation's neurons of largest mean ``change`` (a column of neuron_summary)."""
    from mathinterp.store import Store

    intervened = (
        ", intervened_importance, coefficient, intervened_coefficient" if change == "change" else ", coefficient"
    )
    first = "change, change_std, importance" if change == "change" else "importance, importance_std"
    return Store(store).rows(
        f"""SELECT operation, layer || '.' || neuron AS neuron, {first}{intervened}, 100 * in_top AS in_top, n
            FROM neuron_summary WHERE run_id = '{run_id}'
            QUALIFY row_number() OVER (PARTITION BY operation ORDER BY {change} DESC, layer, neuron) <= {SHOWN}
            ORDER BY operation = 'all' DESC, operation, {change} DESC, layer, neuron"""
    )


def _written(found: list[dict[str, Any]], spec: "ModelSpec") -> list[dict[str, Any]]:
    """The tokens of each shown neuron, under its mean coefficient in the original model."""
    from mathinterp.cli.neuron import load_here
    from mathinterp.experiments.neurons.card import written_tokens

    loaded = load_here(spec)
    return written_tokens(found, loaded.anatomy, loaded.tokenizer, SHOWN_TOKENS)
