"""What every scan command does: run or resume a scan with the options given, and say how it went."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mathinterp.cli.options import with_flags
from mathinterp.cli.output import console, say_where_at_last
from mathinterp.cli.verbosity import Failure, say_notes, say_on_stderr
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.base import Experiment
    from mathinterp.models.spec import ModelSpec
    from mathinterp.prompts.prompt import Prompt


def run_chosen(
    chosen: "Experiment", *, spec: "ModelSpec", store: str, shown: Any = None, prompt_name: str | None = None,
    limit: int | None = None, seed: int = 0, sentence: "Prompt | None" = None, service: str | None = None,
    **workers: Any,
) -> "RunSummary":  # fmt: skip
    """Run, or resume, a scan with the options of prompt_options, store_option and cluster_options (``workers``).

    Args:
        prompt_name: None for an experiment that needs no prompts.
        shown: the experiment's show_options, looked at before anything runs; None: nothing of it is shown.
        sentence: read it alone, instead of a set of prompts.
        service: the URL of a service that computes it; ``workers`` then only say how many of its replicas at most.
    """
    limit = limit if chosen.prompts_needed is None else chosen.prompts_needed
    from mathinterp.cluster.again import finished_again
    from mathinterp.prompts.given import Prompts, prompts_of
    from mathinterp.service.attached import Workers, run_at

    if sentence is not None:
        prompts = Prompts((sentence,), sentence.text)
    else:
        prompts = Prompts(()) if prompt_name is None else prompts_of(prompt_name, seed=seed, limit=limit)
    if shown is not None:
        chosen.check_shown(shown, prompts)
    at = Workers(**workers, service=service)
    asked = {name: value for name, value in workers.items() if name != "replicas"}
    if service is None and (found := finished_again(chosen, spec, prompts, store, **asked)):
        return found
    with resumable():
        return run_at(at, chosen, spec, prompts, store)


@contextmanager
def resumable() -> Iterator[None]:
    """Within the block replicas may all be lost: a line says so, and that the same command goes on; exit code 1."""
    from mathinterp.cluster.events import NoReplicaLeft

    try:
        yield
    except NoReplicaLeft as error:
        say_notes(error)
        raise Failure(f"{with_flags(str(error))}; the same command goes on from here") from error


def tell_stage(title: str, run: "RunSummary") -> None:
    """A stage of a workflow has run, or was there."""
    work = f"{run.seconds:.1f} s" if run.done else "was there already"
    say_on_stderr(f"{title}: run {run.run_id}, {work}", run_id=run.run_id)


def run_json(run: "RunSummary") -> dict[str, Any]:
    """What a command prints of a run under --json."""
    return {
        "run_id": run.run_id,
        "store": run.store,
        "shards": run.shards,
        "shards_reused": run.reused,
        "shards_done": run.done,
        "rows": run.rows,
        "seconds": round(run.seconds, 3),
        "failed": [{"shard": failure.key, "error": failure.error} for failure in run.failed],
    }


def print_run(run: "RunSummary") -> None:
    """The closing lines of a command: rows, pace, what was reused, what failed."""
    if run.done:
        paced = run.evaluations and run.seconds
        pace = f", {run.evaluations / run.seconds:,.0f} forward evaluations/s" if paced else ""
        work = f"{run.rows:,} rows in {run.seconds:.1f} s on {run.replicas} {run.device} replica(s){pace}"
    else:
        work = "nothing left to compute"
    there = f"{counted(run.shards, 'shard')} {'was' if run.shards == 1 else 'were'}"
    console.print(f"Run {run.run_id}: {work}; {run.reused} of {there} there already.")
    for failure in run.failed:
        error = with_flags(failure.error)
        where = " (traceback in the run's record)" if failure.traceback else ""
        line = f"shard {failure.key} was given up: {error}{where}"
        say_on_stderr(line, logging.ERROR, run_id=run.run_id, shard=failure.key)
    if run.failed or not run.complete:
        line = "the run is incomplete: the same command runs what is missing"
        say_on_stderr(line, logging.ERROR, run_id=run.run_id)
    say_where_at_last(run.store)
