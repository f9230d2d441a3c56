"""``mathinterp maskkeep``: zero each prompt's first neurons, or all others (paper A, Tables 5, 15 and 19)."""

import sys
from typing import Any

import click

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    parse_layers,
    prompt_options,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.errors import UserError


@click.command()
@click.option(
    "--neurons-from", "source", required=True, metavar="RUN_ID", help="The finished 'scan neurons' run that ranks them."
)
@model_options()
@prompt_options()
@click.option("--ks", default="99,50,30,20,10", show_default=True, help="Numbers of neurons a prompt.")
@click.option("--control-seeds", type=int, default=3, show_default=True, help="Draws of random neurons.")
@click.option(
    "--deep-layers",
    default=None,
    help="Whose other neurons keep zeroes, for example 17-31; default the layers from 17/32 of the depth on (in 'chain'"
    " deep means from the zeroed head's layer on).",
)
@click.option("--cases", default="correct", show_default=True, help="Prompts shown: correct, flipped or all.")
@click.option("--scoring", default="token", show_default=True, help="What is shown: token, first_token or exact_match.")
@store_option()
@cluster_options()
@json_option()
def maskkeep(
    source: str, ks: str, control_seeds: int, deep_layers: str | None, cases: str, scoring: str, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Zero each prompt's first k neurons (mask), or all other neurons of the deep layers (keep).

    \b
    Table 5, 15 and 19 of paper A, with random neurons of the same layers beside them. Which neurons: those that rank
    first for the prompt, all layers together, in a run of 'scan neurons' (its --layers limits them). --model and
    --prompts are to be that run's; a smaller --limit is fine. Rows of all prompts and tokens are stored whatever
    --cases and --scoring show. Neurons are ranked for the first answer token: --scoring first_token counts it alone.

    \b
    Examples:
      mathinterp scan neurons --against head:0.6 --limit 160
      mathinterp maskkeep --neurons-from RUN_ID --limit 160
      mathinterp maskkeep --neurons-from RUN_ID --limit 160 --ks 99,10 --cases flipped --scoring first_token
    """
    from mathinterp.experiments.mask_keep import MaskKeep
    from mathinterp.experiments.mask_keep.summary import CASES, SCORINGS, neurons_from, summarize_maskkeep
    from mathinterp.experiments.neurons.stored import check_model, neuron_run
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store

    for name, value, known in (("cases", cases, CASES), ("scoring", scoring, SCORINGS)):
        if value not in known:
            raise UserError(f"--{name} '{value}' is not known; take one of {', '.join(known)}")
    numbers, deep = _parse_ks(ks), parse_layers(deep_layers, "--deep-layers")
    store = Store(options["store"])
    ranked = neuron_run(store, source)
    names = ("model", "adapter", "dtype", "trust_remote_code")
    resolved = resolve(ModelSpec(*(options[name] for name in names)))
    check_model(ranked, resolved.fingerprint, resolved.label)
    prompts = load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"])
    neurons = neurons_from(store, ranked, prompts, max(numbers))
    run = run_chosen(MaskKeep(neurons, numbers, control_seeds, deep), **options)
    found = summarize_maskkeep(Store(run.store), run.run_id, cases, scoring) if run.complete else None
    if as_json:
        told = {"table": found.table, "operations": found.operations, "verdict": found.verdict} if found else {}
        print_json({**run_json(run), "neurons_from": source, "cases": cases, "scoring": scoring, **told})
    else:
        if found is not None:
            print_table(found.table, title=f"Relative accuracy decrease (%), over all operations ({cases}, {scoring})")
            print_table(found.operations, title="The same by operation; coef: how much smaller the coefficients (%)")
            console.print(found.verdict, highlight=False)
            print_sql_hint(run.store, found.queries)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)


def _parse_ks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--ks '{text}' cannot be read; write numbers of neurons, like 99,50,10")
    return tuple(int(part) for part in parts)
