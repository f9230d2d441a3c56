"""``mathinterp scan ...``: run a scan, or resume it, and say what it found."""

import logging
import sys
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.attention import attention
from mathinterp.cli.concepts import concepts
from mathinterp.cli.graph import graph
from mathinterp.cli.neurons import neurons
from mathinterp.cli.options import (
    ablation_options,
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
from mathinterp.cli.paths import paths
from mathinterp.cli.probe import probe
from mathinterp.cli.running import print_run, run_chosen, run_json

if TYPE_CHECKING:
    from mathinterp.experiments.base import Experiment

logger = logging.getLogger(__name__)


@click.group()
def scan() -> None:
    """Run an experiment over a model; the same command again resumes or shows it.

    \b
    Example:
      mathinterp scan heads --model bundled --prompts two_digit
    """


@scan.command()
@model_options()
@prompt_options()
@ablation_options()
@click.option("--heads", default=None, help="Heads, for example 17.22,14.19; default all of --layers.")
@store_option()
@cluster_options()
@json_option()
def heads(heads: str | None, layers: str | None, ablation: str, positions: str | None, scoring: str | None,
          engine: str, **options: Any) -> None:  # fmt: skip
    """Ablate each attention head in turn and score every answer token (paper A, section 3).

    \b
    Examples:
      mathinterp scan heads
      mathinterp scan heads --model smollm2 --adapter smollm2-arithmetic --limit 160
      mathinterp scan heads --prompts pairs --ablation mean
    """
    from mathinterp.experiments.heads import Heads

    require_one(heads, layers)
    chosen = Heads(ablation, positions, scoring, engine, heads=parse_heads(heads), layers=parse_layers(layers))
    _run_ablation(chosen, "head", **options)


@scan.command()
@model_options()
@prompt_options()
@ablation_options()
@store_option()
@cluster_options()
@json_option()
def mlps(layers: str | None, ablation: str, positions: str | None, scoring: str | None, engine: str,
         **options: Any) -> None:  # fmt: skip
    """Ablate each whole MLP block in turn and score every answer token.

    \b
    Example:
      mathinterp scan mlps --limit 200
    """
    from mathinterp.experiments.mlps import Mlps

    _run_ablation(Mlps(ablation, positions, scoring, engine, layers=parse_layers(layers)), "mlp", **options)


def _run_ablation(chosen: "Experiment", node: str, as_json: bool, **options: Any) -> None:
    from mathinterp.experiments.ablation_summary import summarize_ablation
    from mathinterp.experiments.thin_means import thin_mean_warnings
    from mathinterp.store import Store

    run = run_chosen(chosen, **options)
    summary = summarize_ablation(Store(run.store), run.run_id, node) if run.rows or run.reused else None
    for warning in thin_mean_warnings(Store(run.store), run.run_id):
        logger.warning(warning)
    if as_json:
        found = {"baseline": summary.baseline, "verdict": summary.verdict, "top": summary.top} if summary else {}
        print_json({**run_json(run), **found})
    else:
        if summary is not None:
            print_table(summary.table, title=f"Accuracy (%), one {node} ablated")
            print_table(summary.top, title="Largest drops (points, 95 % interval, relative %, BH q)")
            console.print(summary.verdict, highlight=False)
            print_sql_hint(run.store, summary.queries)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)


scan.add_command(neurons)
scan.add_command(paths)
scan.add_command(attention)
scan.add_command(probe)
scan.add_command(concepts)
scan.add_command(graph)
