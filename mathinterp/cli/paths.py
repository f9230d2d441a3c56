"""``mathinterp scan paths``: path patching, and which heads it calls key heads."""

import logging
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

logger = logging.getLogger("mathinterp.paths")


@click.command(context_settings={"default_map": {"prompt_name": "pairs"}})
@model_options()
@prompt_options()
@click.option(
    "--freeze",
    default="heads",
    show_default=True,
    help="What keeps its X_r output: heads (MLPs run), all, or none (plain activation patching).",
)
@click.option(
    "--effect", default="logit", show_default=True, help="What ranks: logit, centred, probability or logprob."
)
@click.option(
    "--denominator",
    default="absolute",
    show_default=True,
    help="Relative effects are divided by |original|, or (paper) by the original value.",
)
@click.option(
    "--positions",
    default="end",
    show_default=True,
    help="Patch at end, or at all tokens (slow; with --freeze none, else both are the same).",
)
@click.option("--keep-all", is_flag=True, help="Keep pairs that the model answers wrongly, too.")
@click.option("--layers", default=None, help="Layers of the patched nodes, for example 0-3,17; default all.")
@click.option("--receiver", default=None, help="Pass the change on through one node alone: 17.22.q (.k, .v) or 17.mlp.")
@click.option("--top", default=10, show_default=True, type=click.IntRange(min=1), help="Nodes shown an operation.")
@store_option()
@cluster_options()
@json_option()
def paths(
    freeze: str, effect: str, denominator: str, positions: str, keep_all: bool, layers: str | None,
    receiver: str | None, top: int, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Patch each head and MLP with its output on a counterfactual sentence (paper B, Algorithm 1).

    \b
    Examples:
      mathinterp scan paths
      mathinterp scan paths --freeze all --effect logprob --limit 400
      mathinterp scan paths --receiver 5.2.q
    """
    from mathinterp.experiments.paths import Paths
    from mathinterp.experiments.paths.summary import summarize_paths
    from mathinterp.store import Store

    chosen = Paths(
        freeze=freeze, effect=effect, denominator=denominator, positions=positions, keep_all=keep_all,
        layers=parse_layers(layers), receiver=receiver,
    )  # fmt: skip
    run = run_chosen(chosen, **options)
    summary = summarize_paths(Store(run.store), run.run_id, top) if run.rows or run.reused else None
    if summary is not None:
        for warning in summary.warnings:
            logger.warning(warning)
    if as_json:
        print_json({**run_json(run), **(summary.as_json() if summary else {})})
    else:
        if summary is not None:
            print_table(summary.pairs, title="Pairs")
            print_table(summary.top, title=f"Most negative effects of one node ({chosen.measure})")
            console.print(summary.verdict, highlight=False)
            print_table(summary.agreement, title="Do measures rank the nodes alike? (rank correlations)")
            print_sql_hint(run.store, summary.queries)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)
