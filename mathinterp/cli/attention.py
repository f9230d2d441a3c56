"""``mathinterp scan attention``: what the heads look at from END."""

import sys
from typing import Any

import click

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    parse_heads,
    parse_layers,
    prompt_options,
    require_one,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json


@click.command(context_settings={"default_map": {"prompt_name": "pairs"}})
@model_options()
@prompt_options()
@click.option("--heads", default=None, help="Heads, for example 13.11,14.2; default all of --layers.")
@click.option("--layers", default=None, help="Layers, for example 0-3,17; default all.")
@click.option("--keep-all", is_flag=True, help="Keep prompts that the model answers wrongly, too.")
@click.option("--top", default=8, show_default=True, type=click.IntRange(min=1), help="Heads shown.")
@store_option()
@cluster_options()
@json_option()
def attention(
    heads: str | None, layers: str | None, keep_all: bool, top: int, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """What each head attends to from the last prompt token, by token type (paper B, section 4.1 and Figure 5).

    \b
    Types: bos, operand_a, operand_b, operator, equals, other. The model runs eager attention for this.
    Prompts that the model answers wrongly (first token) are left out.

    \b
    Examples:
      mathinterp scan attention
      mathinterp scan attention --heads 0.6,0.1 --prompts two_digit
    """
    from mathinterp.experiments import Results
    from mathinterp.experiments.attention import Attention
    from mathinterp.experiments.attention.summary import summarize_attention
    from mathinterp.experiments.kept import kept_line
    from mathinterp.store import Store

    require_one(heads, layers)
    run = run_chosen(Attention(parse_heads(heads), parse_layers(layers), keep_all), **options)
    summary = summarize_attention(Store(run.store), run.run_id, top) if run.rows or run.reused else None
    if as_json:
        print_json({**run_json(run), **({"top": summary.top, "verdict": summary.verdict} if summary else {})})
    else:
        if summary is not None:
            print_table(
                summary.top,
                title="Heads with most weight (%) on operands, operator and equals; attention per token from END (%)",
            )
            console.print(kept_line(Results(Store(run.store), run.run_id)), highlight=False)
            console.print(summary.verdict, highlight=False)
            print_sql_hint(run.store, summary.queries)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)
