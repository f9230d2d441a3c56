"""``mathinterp league``: every attribution method beside exact patching, on one model and prompt set."""

import sys
from pathlib import Path
from typing import Any

import click

from mathinterp.cli.experiment import drawing_option, print_summary
from mathinterp.cli.options import (
    Whole,
    cluster_options,
    json_option,
    model_options,
    prompt_options,
    service_option,
    spec_of,
    store_option,
)
from mathinterp.cli.output import print_json
from mathinterp.cli.running import print_run, resumable, tell_stage
from mathinterp.experiments.league.tables import COMPARED


@click.command(context_settings={"default_map": {"prompt_name": "operand_pairs", "limit": 160}})
@model_options()
@prompt_options()
@click.option(
    "--methods", default=",".join(COMPARED), show_default=True, help="Those to compare, with commas between them."
)
@click.option("--steps", type=Whole(1), default=5, show_default=True, help="Of the eap-ig methods.")
@store_option()
@cluster_options()
@service_option()
@drawing_option()
@json_option()
def league(
    methods: str, steps: int, prompt_name: str, limit: int | None, seed: int, store: str, out: str | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Compare how well each attribution method estimates the exact effects of heads and MLPs.

    \b
    Runs, each resumable, in one store:
      1. heads, mlps   every head and MLP patched with its output on the counterfactual, at every token: the truth
      2. attribution   by each method, and a learned mask
      3. circuit       of the nodes that each of these ranks first: CPR and CMD, as MIB has them
    and compares them in the view method_league. Prompts need distractors.

    \b
    Examples:
      mathinterp league
      mathinterp league --methods atp,relp --limit 32
      mathinterp league --model smollm2 --adapter smollm2-arithmetic --limit 64 --out figures
    """
    from mathinterp.experiments.figures import save
    from mathinterp.prompts import prompts_of
    from mathinterp.service.attached import Workers
    from mathinterp.workflows.league import league as run_league
    from mathinterp.workflows.pipeline import StageUnfinished

    spec, workers = spec_of(options), Workers(**options)
    prompts = prompts_of(prompt_name, seed=seed, limit=limit)
    try:
        with resumable():
            found = run_league(
                spec, prompts, methods=[name.strip() for name in methods.split(",") if name.strip()], steps=steps,
                store=store, workers=workers, told=tell_stage,
            )  # fmt: skip
    except StageUnfinished as error:
        print_run(error.run)
        sys.exit(1)
    drawn: list[Path] = []
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        drawn = save(found.figure(), Path(out) / f"league-{found.id}")
    if as_json:
        print_json(
            {"run_id": found.id, "store": found.store.url, "runs": found.runs, **found.summary.data,
             "figures": [str(path) for path in drawn]}
        )  # fmt: skip
    else:
        print_summary(found.store.url, found.summary, drawn)
