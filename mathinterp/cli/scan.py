"""``mathinterp scan ...``: run an experiment, or resume it, and say what it found."""

from mathinterp.cli.experiment import ExperimentGroup, run_experiment

scan = ExperimentGroup(
    name="scan",
    run=run_experiment,
    verb="scan",
    others={},
    help="""Run an experiment over a model; the same command again resumes or shows it.

    An experiment from outside the package is named by its class: mathinterp scan my_package.my_module:MyExperiment.

    \b
    Example:
      mathinterp scan heads --model bundled --prompts two_digit
    """,
)
