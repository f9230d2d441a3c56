"""``mathinterp mib ...``: circuits in the terms of the Mechanistic Interpretability Benchmark."""

from typing import Any

import click

from mathinterp.cli.completing import run_id
from mathinterp.cli.experiment import experiment_command, run_experiment
from mathinterp.cli.group import Group
from mathinterp.cli.options import Real, json_option, model_options, out_file, spec_of, store_option
from mathinterp.cli.output import console, print_json
from mathinterp.errors import UserError

EFFECTS = ("logit_difference", "logprob")  # of attribution/ranking.py, which help need not import
LIMIT = "--limit is taken before pairs that do not fit the tokenizer are left out: fewer may remain."


class _Mib(Group):
    """The experiment's own command is here under the benchmark's word for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """With evaluate."""
        return sorted([*super().list_commands(ctx), "evaluate"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """``scan circuit`` as evaluate."""
        if name != "evaluate":
            return super().get_command(ctx, name)
        from mathinterp.experiments.circuit import Circuit

        command = experiment_command(Circuit, run_experiment)
        text = str(command.help).replace("mathinterp scan circuit", "mathinterp mib evaluate")
        return type(command)(
            name, command.context_settings, callback=command.callback, params=command.params,
            help=text.replace("\n\n\b\nExamples:", f"\n\n{LIMIT}\n\n\b\nExamples:"),
        )  # fmt: skip


@click.group(cls=_Mib)
def mib() -> None:
    """Circuits as MIB has them: evaluate a ranking or a circuit file, write a ranking as one.

    \b
    MIB: arXiv 2504.13151, its circuit localization track. Prompts of its form: mathinterp prompts --help.

    \b
    Example:
      mathinterp mib evaluate --from RUN_ID --prompts mib-bench/arithmetic_addition --limit 100
    """


@mib.command()
@click.option(
    "--from", "rank_from", required=True, metavar="RUN_ID", shell_complete=run_id,
    help="Runs whose scores rank nodes, with commas.",
)  # fmt: skip
@click.option(
    "--fraction", type=Real(0), default=0.1, show_default=True, help="Share of the nodes that are in the circuit."
)
@click.option(
    "--effect", type=click.Choice(EFFECTS), default=EFFECTS[0], show_default=True,
    help="What nodes are scored by: the change of the logit difference, answer minus distractor, as MIB has it; or of"
    " the answer's log-probability, of scans whose prompts have no distractors.",
)  # fmt: skip
@click.option("--signed", is_flag=True, help="Rank by signed scores, not by absolute ones.")
@model_options()
@store_option()
@click.option("--out", required=True, callback=out_file, metavar="FILE", help="Where the circuit is written.")
@json_option()
def export(
    rank_from: str, fraction: float, effect: str, signed: bool, store: str, out: str, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Write a ranking of heads and MLPs as a circuit in MIB's JSON, which EAP-IG reads.

    From finished scans of attribution, mask, paths, heads or mlps; with all scores, as MIB takes them as importances.

    \b
    Examples:
      mathinterp mib export --from RUN_ID --out importances.json
      mathinterp mib export --from RUN_ID --effect logprob --out importances.json
    """
    from mathinterp.experiments.circuit import read_runs
    from mathinterp.experiments.circuit.mib_json import write_circuit
    from mathinterp.experiments.circuit.ranking import scores_from
    from mathinterp.models.catalog import resolve
    from mathinterp.store import Store

    if fraction > 1:
        raise UserError(f"`fraction` {fraction:g}: a circuit has at most all nodes, 1")
    model = resolve(spec_of(options))
    opened = Store(store)
    opened.require_runs()
    scores = scores_from(opened, read_runs(rank_from) or (), "node", model, effect)
    count = int(fraction * scores.scored)
    about = {"model": model.label, "model_fingerprint": model.fingerprint, "effect": effect}
    write_circuit(out, scores, count, "signed" if signed else "absolute", model.shape, about)
    told = {"file": out, "method": scores.method, "scored": scores.scored, "nodes": count}
    if as_json:
        print_json(told)
    else:
        console.print(f"{count} of {scores.scored} nodes by {scores.method} written to {out}")
