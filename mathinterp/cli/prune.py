"""``mathinterp tune prune``: prune the deep layers to the neurons that a LoRA enhances (paper A, section 6.1)."""

import sys
from typing import Any

import click

from mathinterp.cli.experiment import print_summary
from mathinterp.cli.options import cluster_options, fields_of, json_option, model_options, spec_of, store_option
from mathinterp.cli.output import print_json, print_line
from mathinterp.cli.running import print_run, run_json
from mathinterp.cli.tuning import options_for, out_options, place_options, print_dry_run, say
from mathinterp.tuning.settings import PruneSettings


@click.command()
@options_for(PruneSettings)
@place_options()
@out_options("Folder, seen by all nodes.")
@model_options()
@store_option()
@cluster_options()
@json_option()
def prune(**options: Any) -> None:
    """Prune the deep layers to the neurons that a LoRA enhances, against random ones (paper A, section 6.1).

    \b
    A LoRA on one layer; the neurons it enhances most on each case (CNA original against tuned); all other neurons of
    the deep layers pruned; a new LoRA on the pruned model. Scored on the same prompts: original, LoRA, pruned and
    random with and without their LoRA. OUT has the pruned models as Hugging Face folders and the LoRAs as PEFT
    adapters. The same command again goes on where it stopped.

    \b
    Examples:
      mathinterp tune prune --epochs 1 --out pruned
      mathinterp tune prune --model smollm2 --target gold --case-limit 100 --out pruned
    """
    from mathinterp.experiments.base import NothingToShow
    from mathinterp.experiments.results import Results
    from mathinterp.store import Store
    from mathinterp.tuning.prune import Prune
    from mathinterp.tuning.pruning import plan_pruning, run_pruning

    plan = plan_pruning(spec_of(options), fields_of(PruneSettings, options), say)
    if options["dry_run"]:
        print_dry_run([plan.source], (), plan.config, plan.base.tokenizer, options["as_json"])
        return
    pruned = run_pruning(plan, options["out"], say)
    scored = pruned.scored
    if scored is None:
        print_run(pruned.compared)
        sys.exit(1)
    summary = Prune.summarize(Results(Store(scored.store), scored.run_id), NothingToShow())
    if options["as_json"]:
        facts = {"layer": plan.layer, "deep": list(plan.deep), "top": plan.top, "kept": len(pruned.kept)}
        rows = summary.data["accuracy"] if scored.complete else []
        neurons = run_json(pruned.compared)
        print_json({"neurons": neurons, **run_json(scored), **facts, "out": str(pruned.out), "accuracy": rows})
    else:
        print_summary(scored.store, summary if scored.complete else None)
        print_line(f"Pruned models and adapters: {pruned.out}")
        print_run(pruned.compared)
        print_run(scored)
    if not pruned.complete:
        sys.exit(1)
