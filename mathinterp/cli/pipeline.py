"""``mathinterp pipeline``: head scan, path patching, knock-out, attention and MLP probe on one model; the answer."""

import sys
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.experiment import Parsed
from mathinterp.cli.options import (
    Whole,
    cluster_options,
    json_option,
    model_options,
    prompt_options,
    service_option,
    spec_of,
    store_option,
    with_flags,
)
from mathinterp.cli.output import console, print_json, print_line, print_sql_hint, print_table, warn
from mathinterp.cli.running import print_run, resumable, tell_stage
from mathinterp.experiments.ablation import ABLATIONS
from mathinterp.experiments.options import read_counts
from mathinterp.experiments.paths import EFFECTS
from mathinterp.gates import MOST_DRAWS

if TYPE_CHECKING:
    from mathinterp.workflows.pipeline import PipelineResult


@click.command(context_settings={"default_map": {"prompt_name": "pairs", "limit": 400}})
@model_options()
@prompt_options()
@click.option(
    "--transfer",
    multiple=True,
    default=("rationals",),
    show_default=True,
    help="Prompts on which the heads are knocked out, too; again for more, '' for none.",
)
@click.option("--top", default=8, show_default=True, type=Whole(1), help="Heads described, at least.")
@click.option("--effect", default="logit", show_default=True, type=click.Choice(EFFECTS), help="What ranks heads.")
@click.option(
    "--ablation", default="mean", show_default=True, type=click.Choice(ABLATIONS), help="Of the knock-out."
)  # fmt: skip
@click.option(
    "--ks",
    default=None,
    type=Parsed(read_counts),
    help="Numbers of heads out; default 1,2,4,...,64 up to half of all heads.",
)
@click.option(
    "--control-seeds",
    type=Whole(most=MOST_DRAWS),
    default=5,
    show_default=True,
    help="Draws of each kind of random heads.",
)
@store_option()
@cluster_options()
@service_option()
@json_option()
def pipeline(
    transfer: tuple[str, ...], top: int, effect: str, ablation: str, ks: tuple[int, ...] | None, control_seeds: int,
    prompt_name: str, limit: int | None, seed: int, store: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Which heads do the arithmetic, for which operation, what they look at, whether they hold; which MLPs follow.

    \b
    Paper B's path in six runs, each resumable, in one store under one Ray:
      1. heads      every head zeroed by itself
      2. paths      every head and MLP patched with its output on the counterfactual
      3. knockout   the first k heads by path effect out together, against random and layer-matched ones
      4. the same on the --transfer prompts
      5. attention  what the key heads look at from END
      6. probe      are the MLPs closer to the operands or to the answer?
    Default: 400 of the 1,600 pairs, which shows drops of a few points; for the bundled model about 330 CPU seconds
    in all. --limit 1600 takes all pairs.

    \b
    Examples:
      mathinterp pipeline
      mathinterp pipeline --model smollm2 --adapter smollm2-arithmetic --limit 64 --ks 1,2,4,8
      mathinterp pipeline --transfer rationals --transfer three_digit --ablation zero
    """
    from mathinterp.prompts import prompts_of
    from mathinterp.service.attached import Workers
    from mathinterp.store import Store
    from mathinterp.workflows.pipeline import NamedPrompts, Pipeline, StageUnfinished, run_pipeline

    spec, workers = spec_of(options), Workers(**options)
    names = dict.fromkeys([prompt_name, *(name for name in transfer if name)])
    own, *others = (NamedPrompts(name, prompts_of(name, seed=seed, limit=limit)) for name in names)
    asked = Pipeline(top, effect, ablation, ks, control_seeds)
    opened = Store(store)
    try:
        with resumable():
            result = run_pipeline(asked, spec, own, others, opened, workers, tell_stage)
    except StageUnfinished as error:
        print_run(error.run)
        sys.exit(1)
    for warning in result.answer.warnings:
        warn(with_flags(warning))
    if as_json:
        print_json({"store": opened.url, "runs": result.runs.named, **result.answer.as_json()})
    else:
        _print(result, opened.url)


def _print(result: "PipelineResult", store: str) -> None:
    for number, section in enumerate(result.answer.sections, start=1):
        print_line(f"\n{number}. {section.title}", "bold")
        for line in section.lines:
            print_line(line)
        for table in section.tables:
            print_table(table.printed, title=table.title)
    console.print("\nRuns: " + ", ".join(f"{stage} {run}" for stage, run in result.runs.named.items()))
    print_sql_hint(store, result.answer.queries)
