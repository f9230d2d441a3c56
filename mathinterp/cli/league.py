"""``mathinterp league``: every attribution method beside exact patching, on one model and prompt set."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.experiment import print_summary
from mathinterp.cli.options import (
    Whole,
    cluster_options,
    json_option,
    model_options,
    out_folder,
    prompt_options,
    store_option,
)
from mathinterp.cli.output import print_json
from mathinterp.cli.running import print_run, resumable
from mathinterp.cli.verbosity import say_on_stderr
from mathinterp.experiments.league.tables import COMPARED

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary


@click.command(context_settings={"default_map": {"prompt_name": "operand_pairs", "limit": 160}})
@model_options()
@prompt_options()
@click.option(
    "--methods", default=",".join(COMPARED), show_default=True, help="Those to compare, with commas between them."
)
@click.option("--steps", type=Whole(1), default=5, show_default=True, help="Of the eap-ig methods.")
@store_option()
@cluster_options()
@click.option("--out", default=None, metavar="FOLDER", callback=out_folder, help="Also draw it: PNG and SVG.")
@json_option()
def league(
    methods: str, steps: int, model: str, adapter: str | None, dtype: str, load_in: str | None,
    trust_remote_code: bool, prompt_name: str, limit: int | None, seed: int, store: str,
    out: str | None, as_json: bool, **workers: Any,
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
    from mathinterp.models.catalog import ModelSpec
    from mathinterp.prompts import prompts_of
    from mathinterp.workflows.league import league as run_league
    from mathinterp.workflows.pipeline import StageUnfinished, Workers

    prompts = prompts_of(prompt_name, seed=seed, limit=limit)
    try:
        with resumable():
            found = run_league(
                ModelSpec(model, adapter, dtype, trust_remote_code, load_in), prompts,
                methods=[name.strip() for name in methods.split(",") if name.strip()], steps=steps, store=store,
                workers=Workers(**workers), told=_tell,
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


def _tell(title: str, run: "RunSummary") -> None:
    work = f"{run.seconds:.1f} s" if run.done else "was there already"
    say_on_stderr(f"{title}: run {run.run_id}, {work}", run_id=run.run_id)
