"""``mathinterp submit``: run a command or a script on a Ray cluster and follow its log."""

import sys

import click

from mathinterp.cli.verbosity import say_on_stderr, verbosity
from mathinterp.errors import UserError, did_you_mean
from mathinterp.gates import shortened


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--address", required=True, help="The cluster's job service, for example http://127.0.0.1:8265.")
@click.option(
    "--working-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder to upload and run in: own experiments, files. Default: the checkout, if there is one.",
)
@click.option("--name", help="The job's id in the cluster. Default: JOB, the time and a few letters.")
@click.option("--no-send", is_flag=True, help="Send no files that the job's options name: they are paths of the nodes.")
@click.pass_context
def submit(
    context: click.Context,
    job: str,
    arguments: tuple[str, ...],
    address: str,
    working_dir: str | None,
    name: str | None,
    no_send: bool,
) -> None:
    """Run JOB with ARGUMENTS on a cluster; exits as the job does.

    JOB is a short name (head_scan, path_scan, neuron_scan, concept_scan, pipeline, precise_sft, lora_sweep,
    evaluate), a command in quotes, or a script (.py) in the uploaded folder. Files that the job's options name
    (--prompts, --data, --circuit, --adapter and the like) travel with it, and so does the module of a module:Class
    in the current folder; not so folders and models by their full path, which are the nodes' own, and never what is
    hidden or named like a secret. Measures the upload first and names the largest files if it is over Ray's limit.
    Options before -- are this command's, those after it the job's; -q, -v and --log-format go on to a job that is a
    command. Ctrl-C ends this command, not the job, and tells how to stop that.

    \b
    Examples:
      mathinterp submit head_scan --address http://127.0.0.1:8265 -- --prompts words.jsonl --store s3://bucket/results
      mathinterp submit "scan residual_norms:ResidualNorms" --name norms --address http://127.0.0.1:8265
    """
    from mathinterp.cli import interrupt
    from mathinterp.cluster.submit import submit as submit_job

    _check(job, context.find_root())
    interrupt.say("interrupted; what was submitted goes on on the cluster")
    code = submit_job(
        job, arguments, address, output=sys.stdout, announce=say_on_stderr, working_dir=working_dir, name=name,
        no_send=no_send, options=verbosity(),
    )  # fmt: skip
    sys.exit(code)


def _check(job: str, root: click.Context) -> None:
    """Raise UserError unless ``job`` is a script, or a command that runs on a cluster."""
    from mathinterp.cluster.submit import JOBS, is_script

    words = job.split()
    if not job.endswith(".py") and any(word.startswith("-") for word in words[1:]):
        raise UserError(f"JOB '{shortened(job)}': the job's own options stand after --, not in the quotes")
    if is_script(job) or ":" in job:  # the job's folder holds the script, or the experiment's class
        return
    command: click.Command | None = root.command
    for word in JOBS.get(job, job).split():
        command = command.get_command(root, word) if isinstance(command, click.Group) else None
    if command is None or not any(parameter.name == "address" for parameter in command.params):
        raise UserError(
            f"there is no job '{job}'.{did_you_mean(job, JOBS)} Give {', '.join(JOBS)}, a script (.py), or in quotes a"
            ' command that takes --address, for example "scan mlps"'
        )
