"""``mathinterp chain``: ``mathinterp scan chain``, of one sentence as well (paper A, section 4.4)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from mathinterp.cli.experiment import experiment_command, run_experiment
from mathinterp.cli.options import given_here
from mathinterp.errors import UserError
from mathinterp.experiments import Experiment
from mathinterp.experiments.chain import Chain

OF_SETS = ("prompt_name", "limit", "seed", "operation", "replicas")  # what one sentence on one replica has none of
SENTENCE = [
    click.Option(["--sentence"], help="One sentence, like '3+5='; instead of --prompts."),
    click.Option(["--answer"], help="Its answer. Default: worked out from two numbers and an operation."),
    click.Option(
        ["--separator"],
        help="Between sentence and answer. Default: nothing after 'n+m=' without spaces, else a space.",
    ),
]
EXAMPLES = """
  mathinterp chain --sentence "3+5="
  mathinterp chain --sentence "The sum of 38 and 47 is" --layers 1-7 --out figures"""


def of_sentence(
    run: Callable[..., None], experiment: type[Experiment], *, sentence: str | None, answer: str | None,
    separator: str | None, **options: Any,
) -> None:  # fmt: skip
    """``run`` the experiment with its options on one sentence, or on a set of prompts."""
    if sentence is None:
        if answer is not None or separator is not None:
            raise UserError("--answer and --separator belong to --sentence; a prompt file has fields of those names")
        run(experiment, **options)
        return
    from mathinterp.prompts.sentence import sentence_prompt

    for option in given_here():
        if option.name in OF_SETS:
            raise UserError(f"{option.opts[0]} belongs to --prompts; --sentence is one sentence, on one replica")
    run(experiment, **{**options, "replicas": 1}, sentence=sentence_prompt(sentence, answer, separator))


def sentence_command(run: Callable[..., None], verb: str = "scan") -> click.Command:
    """The command of the chain, which takes one sentence too; see ``experiment_command``."""
    command = experiment_command(Chain, partial(of_sentence, run), verb)
    command.params = [*SENTENCE, *command.params]
    return command


chain = sentence_command(run_experiment)
chain.help = f"{chain.help}{EXAMPLES}"
