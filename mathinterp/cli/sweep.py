"""``mathinterp tune sweep``: a LoRA in each layer by itself (paper A, section 5)."""

import sys
from typing import Any

import click

from mathinterp.cli.experiment import print_summary
from mathinterp.cli.options import cluster_options, fields_of, json_option, model_options, spec_of, store_option
from mathinterp.cli.output import print_json
from mathinterp.cli.running import print_run, run_json
from mathinterp.cli.tuning import options_for, out_options, print_dry_run, say
from mathinterp.tuning.settings import SweepSettings


@click.command()
@options_for(SweepSettings)
@out_options("Folder, seen by all nodes.")
@model_options()
@store_option()
@cluster_options()
@json_option()
def sweep(**options: Any) -> None:
    """Train a LoRA in each layer's attention by itself: accuracy by layer, and whose coefficients grow (paper A, 5).

    \b
    Trials, one (layer, learning rate), run in parallel, one on each replica; on GPUs --gpus-per-replica 0.25 puts four
    on each. The same command again keeps finished trials. Their adapters are in OUT. The paper's layer bands (1-9,
    10-16, 17-30 of 32) are taken by share of the depth. On a model that cannot do the cases yet, --target gold asks
    about the right answer instead of the predicted one.

    \b
    Examples:
      mathinterp tune sweep --epochs 1 --out sweep
      mathinterp tune sweep --model smollm2 --target gold --gpus-per-replica 0.25 --out sweep
    """
    from mathinterp.experiments.base import NothingToShow
    from mathinterp.experiments.results import Results
    from mathinterp.store import Store
    from mathinterp.tuning.lora_sweep import LoraSweep
    from mathinterp.tuning.sweep import plan_sweep, run_sweep
    from mathinterp.tuning.sweep_neurons import SweepNeurons

    plan = plan_sweep(spec_of(options), fields_of(SweepSettings, options), say)
    if options["dry_run"]:
        print_dry_run([plan.source], (), plan.scan.config, plan.base.tokenizer, options["as_json"])
        return
    swept = run_sweep(plan, options["out"])
    compared = swept.compared
    if compared is None:
        print_run(swept.trials)
        sys.exit(1)
    store = Store(swept.trials.store)
    summaries = [
        experiment.summarize(Results(store, run.run_id), NothingToShow())
        for experiment, run in ((LoraSweep, swept.trials), (SweepNeurons, compared))
    ]
    if options["as_json"]:
        found = {name: rows for summary in summaries for name, rows in summary.data.items() if compared.complete}
        print_json({"sweep": run_json(swept.trials), "neurons": run_json(compared), "out": str(swept.out), **found})
    else:
        for summary in summaries:
            print_summary(store.url, summary)
        print_run(swept.trials)
        print_run(compared)
    if not swept.complete:
        sys.exit(1)
