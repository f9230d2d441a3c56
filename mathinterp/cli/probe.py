"""``mathinterp scan probe``: layer by layer, are the MLPs closer to the operands or to the answer?"""

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


@click.command(context_settings={"default_map": {"prompt_name": "pairs"}})
@model_options()
@prompt_options()
@click.option(
    "--vectors",
    default="residual",
    show_default=True,
    help="residual: the stream before and after the MLP; written: the MLP's normed input and what it writes.",
)
@click.option("--fold-norm", is_flag=True, help="Fold the final norm's weight into the unembedding.")
@click.option("--keep-all", is_flag=True, help="Keep prompts that the model answers wrongly, too.")
@click.option("--layers", default=None, help="Layers, for example 0-3,17; default all.")
@store_option()
@cluster_options()
@json_option()
def probe(
    vectors: str, fold_norm: bool, keep_all: bool, layers: str | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Cosine of each MLP's input and output at END with the unembedding of operands and answer (paper B, section 4.2).

    \b
    a, b, c: first digit tokens of operand A, operand B and the answer; difference: output - input.
    Prompts that the model answers wrongly (first token) are left out.

    \b
    Examples:
      mathinterp scan probe
      mathinterp scan probe --vectors written --fold-norm --prompts two_digit
    """
    from mathinterp.experiments.kept import kept_line
    from mathinterp.experiments.mlp_probe import MlpProbe
    from mathinterp.experiments.mlp_probe.summary import summarize_probe
    from mathinterp.store import Store

    run = run_chosen(MlpProbe(vectors, fold_norm, parse_layers(layers), keep_all), **options)
    summary = summarize_probe(Store(run.store), run.run_id) if run.rows or run.reused else None
    if as_json:
        found = {"curve": summary.curve, "overtakes": summary.overtakes, "verdict": summary.verdict} if summary else {}
        print_json({**run_json(run), **found})
    else:
        if summary is not None:
            print_table(summary.curve, title="Mean cosine with operand A, operand B and answer C, all operations")
            console.print(kept_line(Store(run.store), run.run_id), highlight=False)
            console.print(summary.verdict, highlight=False)
            print_sql_hint(run.store, summary.queries)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)
