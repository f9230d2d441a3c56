"""``mathinterp pipeline``: head scan, path patching, knock-out, attention and MLP probe on one model; the answer."""

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.knockout import parse_ks
from mathinterp.cli.options import cluster_options, json_option, model_options, prompt_options, store_option
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.experiments.base import Experiment
    from mathinterp.experiments.knockout import Knockout
    from mathinterp.experiments.paths import Paths
    from mathinterp.report.pipeline import PipelineAnswer, PipelineRuns

logger = logging.getLogger("mathinterp.pipeline")


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
@click.option("--top", default=8, show_default=True, type=click.IntRange(min=1), help="Heads described, at least.")
@click.option("--effect", default="logit", show_default=True, help="What ranks: logit, centred, probability, logprob.")
@click.option("--ablation", default="mean", show_default=True, help="Of the knock-out: mean, zero or resample.")
@click.option("--ks", default=None, help="Numbers of heads out; default 1,2,4,...,64 up to half of all heads.")
@click.option("--control-seeds", type=int, default=5, show_default=True, help="Draws of each kind of random heads.")
@store_option()
@cluster_options()
@json_option()
def pipeline(
    transfer: tuple[str, ...], top: int, effect: str, ablation: str, ks: str | None, control_seeds: int,
    as_json: bool, **options: Any,
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
    from mathinterp.cluster.ray_cluster import connection
    from mathinterp.experiments.knockout import Knockout
    from mathinterp.experiments.paths import Paths
    from mathinterp.report.pipeline import answer_pipeline
    from mathinterp.store import Store

    store = Store(options["store"])
    paths = Paths(effect=effect)
    knockout = Knockout(ablation=ablation, ranking=((0, 0),), seeds=control_seeds)
    others = tuple(dict.fromkeys(name for name in transfer if name and name != options["prompt_name"]))
    knockout = _checked(paths, knockout, parse_ks(ks), others, options)
    if top > len(knockout.ranking):
        raise UserError(f"--top {top}: the model has only {len(knockout.ranking)} heads")
    with connection(options["address"]):
        runs = _run_stages(paths, knockout, others, top, options)
    answer = answer_pipeline(store, runs)
    for warning in answer.warnings:
        logger.warning(warning)
    if as_json:
        print_json({"store": store.url, "runs": runs.named, **answer.as_json()})
    else:
        _print(answer, store.url, runs)


def _checked(
    paths: "Paths", knockout: "Knockout", ks: tuple[int, ...] | None, others: tuple[str, ...],
    options: dict[str, Any],
) -> "Knockout":  # fmt: skip
    """The knock-out with ``ks``; raises UserError for what a later stage would refuse after minutes of work."""
    from mathinterp.experiments.attention import Attention
    from mathinterp.experiments.chosen_heads import chosen_heads
    from mathinterp.experiments.mlp_probe import MlpProbe
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts
    from mathinterp.prompts.pairs import with_counterfactuals

    model = resolve(ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code"))))
    knockout = replace(knockout, ranking=tuple(chosen_heads(model.shape, None, None)), ks=ks)
    for name in (options["prompt_name"], *others):
        prompts = load_prompts(name, seed=options["seed"], limit=options["limit"])
        if name == options["prompt_name"] or knockout.needs_counterfactuals:
            prompts = with_counterfactuals(prompts, model.tokenizer)
        tokenized = read_prompts(prompts, model)
        knockout.shards(model.shape, tokenized)
        if name == options["prompt_name"]:
            for scan in (paths, Attention(), MlpProbe()):
                scan.shards(model.shape, tokenized)
    return knockout


def _run_stages(
    paths: "Paths", knockout: "Knockout", others: tuple[str, ...], top: int, options: dict[str, Any]
) -> "PipelineRuns":
    """Run, or resume, every stage; the ranking of one is what the next ones take out and look at."""
    from mathinterp.experiments.attention import Attention
    from mathinterp.experiments.heads import Heads
    from mathinterp.experiments.knockout.summary import key_heads_from, ranking_from
    from mathinterp.experiments.mlp_probe import MlpProbe
    from mathinterp.report.pipeline import PipelineRuns, described_heads
    from mathinterp.store import Store

    own = options["prompt_name"]
    heads_run = _run(f"head scan, {own}", Heads(), options)
    paths_run = _run(f"path patching, {own}", paths, options)
    store = Store(options["store"])
    knockout = replace(knockout, ranking=ranking_from(store, paths_run), key=key_heads_from(store, paths_run))
    knockouts = {
        name: _run(f"knock-out, {name}", knockout, {**options, "prompt_name": name}) for name in (own, *others)
    }
    described = described_heads(store, paths_run, top)
    attention_run = _run(f"attention, {own}", Attention(heads=described), options)
    probe_run = _run(f"MLP probe, {own}", MlpProbe(), options)
    return PipelineRuns(heads_run, paths_run, knockouts, attention_run, probe_run, described)


def _run(title: str, scan: "Experiment", options: dict[str, Any]) -> str:
    """Run, or resume, one stage; its run id. Ends the command, exit code 1, if a shard was given up."""
    run = run_chosen(scan, **options)
    work = f"{run.seconds:.1f} s" if run.done else "was there already"
    click.echo(f"{title}: run {run.run_id}, {work}", err=True)
    if run.failed or not run.complete:
        print_run(run)
        sys.exit(1)
    return run.run_id


def _print(answer: "PipelineAnswer", store: str, runs: "PipelineRuns") -> None:
    for number, section in enumerate(answer.sections, start=1):
        console.print(f"\n{number}. {section.title}", style="bold", highlight=False, soft_wrap=True)
        for line in section.lines:
            console.print(line, highlight=False, soft_wrap=True)
        for title, rows in section.tables.items():
            print_table(rows, title=title)
    console.print("\nRuns: " + ", ".join(f"{stage} {run}" for stage, run in runs.named.items()), highlight=False)
    print_sql_hint(store, answer.queries)
