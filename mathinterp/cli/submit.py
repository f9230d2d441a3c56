"""``mathinterp submit``: run a job script on a Ray cluster and follow its log."""

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("job")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--address", required=True, help="The cluster's job service, for example http://127.0.0.1:8265.")
def submit(job: str, arguments: tuple[str, ...], address: str) -> None:
    """Run JOB (a name in ray_jobs/, or a script) with ARGUMENTS on a cluster; exits as the job does.

    Measures the upload first and names the largest files if it is over Ray's limit. Options before -- are this
    command's, those after it the job's. Ctrl-C ends this command, not the job, and tells how to stop that.

    \b
    Example:
      mathinterp submit head_scan --address http://127.0.0.1:8265 -- --limit 200 --store s3://bucket/results
    """
    from mathinterp.cli import interrupt
    from mathinterp.cluster.submit import submit as submit_job

    interrupt.say("interrupted; what was submitted goes on on the cluster")
    script = job if job.endswith(".py") else f"ray_jobs/{job}.py"
    sys.exit(submit_job(script, arguments, address, announce=lambda line: click.echo(line, err=True)))
