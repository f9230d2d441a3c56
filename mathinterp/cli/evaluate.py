"""``mathinterp evaluate``: accuracy on benchmarks and prompt sets, item by item, base and tuned models side by side."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.options import (
    Whole,
    cluster_options,
    json_option,
    model_options,
    place_to_read,
    spec_of,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_json
from mathinterp.gates import MOST_SEED

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.evaluation.evaluate.summary import EvaluationSummary

ALL_TASKS = "gsm8k,svamp,addsub,singleeq,multiarith,mmlu,commonsense_qa"


@click.command()
@click.option(
    "--tasks",
    default=ALL_TASKS,
    show_default=True,
    help="Benchmarks (csqa is short for commonsense_qa), prompt sets such as two_digit, or prompt files.",
)
@click.option(
    "--data-dir",
    default=None,
    callback=place_to_read,
    metavar="FOLDER",
    help="Local copies of the public files (svamp/SVAMP.json, ...): nothing is downloaded. Default: the hub.",
)
@click.option("--limit", type=Whole(1), default=None, help="Items per task at most, spread evenly.")
@click.option(
    "--fewshot",
    type=Whole(),
    default=None,
    help="Worked examples before an item; default: GSM8K 8, word problems 8, MMLU 5, CommonsenseQA 7.",
)
@click.option(
    "--examples",
    default=None,
    help="own (written here) or train (published training file); default own, for GSM8K train; MMLU has its dev.",
)
@click.option(
    "--seed",
    type=Whole(most=MOST_SEED),
    default=0,
    show_default=True,
    help="Of the draw of 'train' examples, and of a prompt set's operands.",
)
@model_options()
@store_option()
@cluster_options()
@json_option()
def evaluate(
    tasks: str, data_dir: str | None, limit: int | None, fewshot: int | None, examples: str | None, seed: int,
    store: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Evaluate a model on benchmarks and prompt sets; every item's answer is kept.

    Word problems are answered by greedy decoding (the number after "####", else after "answer is", else the last),
    MMLU and CommonsenseQA by the likeliest letter, both through lm-evaluation-harness; prompt sets by greedy
    decoding of the answer alone. Evaluate a base and its tuned models into one store: the table compares them item
    by item. --data-dir holds gsm8k/test.jsonl and train.jsonl, svamp/SVAMP.json, addsub/AddSub.json,
    singleeq/questions.json, multiarith/MultiArith.json, commonsense_qa/dev_rand_split.jsonl, mmlu/test and mmlu/dev.

    \b
    Examples:
      mathinterp evaluate --tasks two_digit --limit 160
      mathinterp evaluate --model smollm2 --tasks svamp,csqa --data-dir data --limit 32
      mathinterp evaluate --model smollm2 --adapter tuned --tasks svamp,csqa --data-dir data --limit 32
    """
    from mathinterp.evaluation import jobs

    found = jobs.evaluate(
        tasks, spec_of(options), store=store, data_dir=data_dir, limit=limit, fewshot=fewshot, examples=examples,
        seed=seed, **options,
    )  # fmt: skip
    if as_json:
        runs = [{"task": job.task, **run_json(run)} for job, run in zip(found.jobs, found.runs, strict=True)]
        print_json({"runs": runs, "results": found.summary.results, "table": found.summary.table})
    else:
        _print(found.summary, found.runs)
    if not found.complete:
        sys.exit(1)


def _print(summary: "EvaluationSummary", runs: "Sequence[RunSummary]") -> None:
    print_table(
        summary.shown, title="Accuracy (%) with 95 % interval; in brackets points from the base, p (paired score test)"
    )
    for line in summary.remarks:
        console.print(line)
    print_sql_hint(runs[0].store, summary.queries)
    for run in runs:
        print_run(run)
