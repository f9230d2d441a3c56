"""``mathinterp chain``: from shallow neurons over heads and deep neurons to the prediction (paper A, section 4.4)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    out_folder,
    parse_layers,
    prompt_options,
    require_one,
    store_option,
)
from mathinterp.cli.output import console, file_name, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.chain import Chain


@click.command()
@click.option("--sentence", default=None, help="One sentence, like '3+5='; instead of --prompts.")
@click.option("--answer", default=None, help="Its answer; default: worked out from two numbers and an operation.")
@click.option(
    "--separator", default=None,
    help="Between sentence and answer; default: nothing after 'n+m=' without spaces, else a space.",
)  # fmt: skip
@model_options()
@prompt_options()
@click.option("--heads", default=None, help="The arithmetic heads of every prompt, the one to zero first: 17.22,14.19.")
@click.option(
    "--layers", default=None, help="Layers whose heads may be arithmetic heads, for example 1-7; default all."
)
@click.option("--n-heads", default=3, show_default=True, help="Arithmetic heads of a prompt, without --heads.")
@click.option("--top", default=10, show_default=True, help="Neurons and reads kept of a prompt's stage.")
@click.option("--target", default="predicted", show_default=True, help="The token explained: predicted or gold.")
@click.option("--operation", default="all", show_default=True, help="Which one to show, of several prompts.")
@click.option(
    "--out", default=None, metavar="FOLDER", callback=out_folder, help="Also draw the chain there, as PNG and SVG."
)
@store_option()
@cluster_options()
@json_option()
def chain(sentence: str | None, answer: str | None, separator: str | None, heads: str | None, layers: str | None,
          n_heads: int, top: int, target: str, operation: str, out: str | None, as_json: bool,
          **options: Any) -> None:  # fmt: skip
    """The four stages of an answer, of one sentence or of a set (paper A, section 4.4), as a table and a drawing.

    \b
    shallow_neuron  FFN neurons of layers before an arithmetic head's, at a token, as the head moves them to END
    attention       which heads read which tokens at END
    head            heads whose zeroing costs the answer's probability most: the arithmetic heads
    deep_neuron     neurons whose importance falls most with the first arithmetic head zeroed: in its layer or later
    prediction      the likeliest tokens, original and with that head zeroed
    Shallow and deep go by the head, here alone: the deep layers of 'maskkeep' and 'tune prune' go by the model's depth
    (17-31 of 32). In paper A they coincide, for its first arithmetic head is in layer 17 of 32.

    \b
    Examples:
      mathinterp chain --sentence "3+5="
      mathinterp chain --sentence "The sum of 38 and 47 is" --layers 1-7 --out figures
      mathinterp chain --prompts two_digit --limit 64 --operation add
    """
    from mathinterp.cli.knockout import parse_ranking
    from mathinterp.experiments.chain import Chain
    from mathinterp.experiments.chain.summary import STAGES_EXPLAINED, chain_figure, summarize_chain
    from mathinterp.experiments.figures import save
    from mathinterp.store import Store

    require_one(heads, layers)
    if sentence is None and (answer is not None or separator is not None):
        raise UserError("--answer and --separator belong to --sentence; a prompt file has fields of those names")
    chosen = Chain(None if heads is None else parse_ranking(heads), parse_layers(layers), n_heads, top, target)
    if sentence is None:
        _check_operation(operation, options)
        run = run_chosen(chosen, **options)
    else:
        _check_alone()
        run = _run_sentence(chosen, sentence, answer, separator, options)
    store = Store(run.store)
    summary = summarize_chain(store, run.run_id, operation) if run.complete else None
    drawn: list[Path] = []
    if summary is not None and out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        name = f"chain-{run.run_id}-{file_name(operation)}"
        drawn = save(chain_figure(store, run.run_id, operation), Path(out) / name)
    if as_json:
        told = {"title": summary.title, "chain": summary.table, "verdict": summary.verdict} if summary else {}
        print_json({**run_json(run), **told, "figures": [str(path) for path in drawn]})
    else:
        if summary is not None:
            print_table(summary.table, title=summary.title)
            console.print(STAGES_EXPLAINED, highlight=False)
            console.print(summary.verdict, highlight=False)
            print_sql_hint(run.store, summary.queries)
        for path in drawn:
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)


def _check_operation(operation: str, options: dict[str, Any]) -> None:
    """Raise UserError, before the work, for an operation that no prompt has."""
    from mathinterp.prompts import load_prompts

    prompts = load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"])
    known = sorted({prompt.operation for prompt in prompts if prompt.operation is not None})
    if operation not in ("all", *known):
        raise UserError(f"--operation '{operation}': the prompts have all, {', '.join(known)}")


def _check_alone() -> None:
    """Raise UserError if --sentence comes with what only a set of prompts has."""
    context = click.get_current_context()
    for name, option in (
        ("prompt_name", "--prompts"), ("limit", "--limit"), ("seed", "--seed"), ("operation", "--operation"),
        ("replicas", "--replicas"),
    ):  # fmt: skip
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UserError(f"{option} belongs to --prompts; --sentence is one sentence, on one replica")


def _run_sentence(
    chosen: "Chain", sentence: str, answer: str | None, separator: str | None, options: dict[str, Any]
) -> "RunSummary":
    """Run the scan on one sentence, on one replica."""
    from mathinterp.cluster.dispatch import NoReplicaLeft
    from mathinterp.cluster.run import run_scan
    from mathinterp.models.catalog import ModelSpec
    from mathinterp.prompts.sentence import sentence_prompt

    prompt = sentence_prompt(sentence, answer, separator)
    spec = ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code")))
    try:
        return run_scan(
            chosen,
            spec,
            [prompt],
            options["store"],
            replicas=1,
            gpus_per_replica=options["gpus_per_replica"],
            address=options["address"],
            prompts_label=prompt.text,
        )
    except NoReplicaLeft as error:
        raise click.ClickException(f"{error}; the same command goes on from here") from error
