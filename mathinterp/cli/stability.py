"""``mathinterp stability``: how far a finished run's ranking hangs on its prompts."""

import click

from mathinterp.cli.completing import run_id
from mathinterp.cli.options import Whole, json_option, store_option
from mathinterp.cli.output import print_json, warn
from mathinterp.experiments.stability import DRAWS, LEAST_DRAWS
from mathinterp.gates import MOST_DRAWS, MOST_SEED


@click.command()
@click.option(
    "--run", default="latest", show_default=True, metavar="RUN_ID", shell_complete=run_id,
    help="A finished run that ranks nodes.",
)  # fmt: skip
@click.option("--operation", default="all", show_default=True, help="The operation shown; all are stored.")
@click.option(
    "--draws",
    type=Whole(LEAST_DRAWS, MOST_DRAWS),
    default=DRAWS,
    show_default=True,
    help="Draws of prompts, and of templates.",
)
@click.option("--seed", type=Whole(most=MOST_SEED), default=0, show_default=True, help="Seed of the draws.")
@click.option("--top", type=Whole(1), default=10, show_default=True, help="Nodes shown.")
@store_option()
@json_option()
def stability(run: str, operation: str, draws: int, seed: int, top: int, store: str, as_json: bool) -> None:
    """Say how stable a ranking is: which of the first nodes stay first when prompts are drawn again.

    \b
    Prompts, and templates with all their prompts, are drawn with replacement within each operation, and the nodes
    ranked again, from stored rows, without a model. Views: stability (rank intervals, shares of draws in which a node
    is among the first 5, 10, 32), stability_overlap (Jaccard index of the first k, beside the bar of 0.8 for any two
    draws).

    \b
    Examples:
      mathinterp stability
      mathinterp stability --run RUN_ID --operation mul --draws 1000
    """
    from mathinterp.cli.experiment import print_summary
    from mathinterp.experiments.stability import stability_of
    from mathinterp.face import open_store

    opened = open_store(store)
    summary = stability_of(opened, run, draws=draws, seed=seed).summary(operation, top)
    for line in summary.warnings:
        warn(line)
    if as_json:
        print_json(summary.data)
    else:
        print_summary(opened.url, summary)
