"""Run a scan: from a model and prompts to finished files in a store, as one function of named steps.

The driver resolves and tokenizes, then hands out shards; where they go to Ray, it loads no weights and needs no CUDA.
Running the same scan again resumes it: shards whose file is in the store are kept, only the missing ones run.
"""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mathinterp import logs
from mathinterp.cluster import again
from mathinterp.cluster.agreement import PROBE, Agreement
from mathinterp.cluster.can_run import check_model as check_model
from mathinterp.cluster.dispatch import Dispatcher, Outcome
from mathinterp.cluster.events import Observers
from mathinterp.cluster.found import found_in
from mathinterp.cluster.growth import Growth
from mathinterp.cluster.job import ReplicaJob, made_here
from mathinterp.cluster.places import Place, Placement, place_of
from mathinterp.cluster.progress import QuietProgress, ScanProgress
from mathinterp.cluster.summary import RunSummary as RunSummary
from mathinterp.errors import UserError
from mathinterp.experiments.base import Context, Experiment, Shard
from mathinterp.experiments.costs import parameters
from mathinterp.experiments.growing import Growing
from mathinterp.models.handle import Model, NamedSource, model_of
from mathinterp.models.resolved import DTYPE_BYTES, ResolvedModel
from mathinterp.models.spec import ModelSpec
from mathinterp.prompts.given import Columns, Prompts
from mathinterp.prompts.mib import fitting
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt
from mathinterp.store import Run, Store, prompts_fingerprint
from mathinterp.text import counted
from mathinterp.versions import code_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A scan of one resolved model and tokenized prompts, and the shards it is cut into."""

    scan: Experiment
    model: ResolvedModel
    prompts: tuple[TokenizedPrompt, ...]
    prompts_fingerprint: str
    prompts_label: str
    shards: tuple[Shard, ...]
    parameters: dict[str, Any]  # that the run id counts
    columns: Columns = field(default_factory=dict)  # further facts about prompts, kept beside them
    growing: Growing | None = None  # where further shards follow from rows

    @property
    def listed(self) -> list[str]:
        """Keys of what the run's record begins with."""
        return [shard.key for shard in self.shards] + ([self.growing.closing.key] if self.growing else [])


def run_scan(
    scan: Experiment,
    model: Model | ModelSpec,
    prompts: Sequence[Prompt],
    store_url: str,
    *,
    replicas: int | None = None,
    gpus_per_replica: float | None = None,
    address: str | None = None,
    progress: bool = True,
    prompts_label: str | None = None,
    max_attempts: int = 3,
    place: Place | None = None,
) -> RunSummary:
    """Run ``scan`` to its end, or resume it; every finished shard is a file in the store.

    With none of replicas, gpus_per_replica and address it runs in this process, without Ray; the rows are the same.

    Args:
        scan: what to measure.
        model: the model; every node must find the same one under its name, or gets the weights of a wrapped one.
        prompts: what to measure it on; none for an experiment that needs none.
        store_url: folder or object-store URL; on several machines one that all of them share.
        replicas: number of model replicas; None: one per GPU, or one per CPU core while memory allows.
        gpus_per_replica: 0 for CPU, 1, a fraction, or 2 and more: the model's layers lie on so many GPUs of one node;
            None: 1 if the cluster has GPUs.
        address: a running Ray cluster; "local": a local Ray for this call.
        progress: show a bar (or lines) on stderr.
        prompts_label: the prompts' name in tables; None: their own.
        max_attempts: exceptions after which a shard is given up and reported.
        place: where to compute, for example a service, in place of what those three say.
    Returns:
        what was done; ``failed`` names the shards that were given up.
    Raises:
        UserError: a mistake in the arguments, found here or by a replica; no retry is made.
        NoReplicaLeft: replicas died or failed to load until none was left.
    """
    started = time.monotonic()
    if scan.one_replica and (replicas or 1) != 1:
        raise UserError(f"{scan.name} runs on one replica, as each shard needs those before it; leave out `replicas`")
    store = Store(store_url)
    spec, model = model, model_of(model)
    with ExitStack() as stack:
        place = place or place_of(model, stack, replicas, gpus_per_replica, address)
        with again.remembered(scan, spec, prompts, gpus_per_replica, address) as found:
            check_model(scan, place.described(), place)
            work = bound_work(scan, place.described(), prompts, store, prompts_label)
            found.update(opening(work, place.device()) if prompts_label is None else {})
        run = open_run(store, work, place.device())
        stack.enter_context(logs.about(run_id=run.run_id))
        growth, missing = to_compute(store, work, run)
        there = len(run.shards) - len(missing) - (growth is not None)  # whose closing shard is written again
        logger.info(
            f"run {run.run_id}: {scan.name} of {work.model.label} ({work.model.dtype}, {work.model.fingerprint}),"
            f" {len(work.prompts)} prompts, {len(missing)} of {len(run.shards)} shards to compute in {store.url}"
        )
        outcome, placement = Outcome(), None
        if missing:
            weights = DTYPE_BYTES[work.model.dtype] * parameters(work.model.shape) * scan.models_held
            placement = place.placement(1 if work.scan.one_replica else len(missing), weights)
            logger.info(f"{counted(placement.replicas, 'replica')} on {placement.device}")
            outcome = dispatch(work, run, store, missing, place, placement, max_attempts, progress, growth)
        else:
            if growth is not None:
                growth.close(metadata(work))
            run.finish()
    return summarize(work, run, store, growth, there, outcome, placement, time.monotonic() - started)


def to_compute(store: Store, work: Work, run: Run) -> tuple[Growth | None, list[Shard]]:
    """The shards that have no file, and where further ones come from; a finished run grows no more."""
    missing = set(run.missing_shards())
    if work.growing is None or not missing:
        return None, [shard for shard in work.shards if shard.key in missing]
    growth = Growth(work.growing, run, store, partial(evaluations_of, work))
    return growth, growth.missing()


def evaluations_of(work: Work, shards: Sequence[Shard]) -> dict[str, int]:
    """Shard key -> forward evaluations in it."""
    return {shard.key: work.scan.evaluations(shard, work.prompts) for shard in shards}


def tokens_each(work: Work) -> float:
    """Tokens that a plain forward evaluation reads, on average over the prompts; 0 without prompts."""
    return sum(len(prompt.fed) for prompt in work.prompts) / max(1, len(work.prompts))


def prepare_work(
    scan: Experiment, model: Model | ModelSpec, prompts: Sequence[Prompt], on_gpu: bool, store: Store
) -> Work:
    """``bound_work`` for a kind of device; loads no weights."""
    return bound_work(scan, model_of(model).described_on("cuda" if on_gpu else "cpu"), prompts, store)


def bound_work(
    scan: Experiment, model: ResolvedModel, prompts: Sequence[Prompt], store: Store, prompts_label: str | None = None
) -> Work:
    """Bind the experiment, tokenize the prompts and cut the work into shards."""
    given = prompts if isinstance(prompts, Prompts) else Prompts(tuple(prompts))
    label = given.label if prompts_label is None else prompts_label
    if scan.reads_neurons:
        model.shape.check_neurons()
    context = Context(model, fitting(prompts, model.tokenizer), store)
    scan = scan.bind(context)
    tokenized = context.read(scan)
    growing = scan.growing(model.shape, tokenized)
    shards = tuple(scan.shards(model.shape, tokenized) if growing is None else growing.first())
    if not shards:
        raise UserError(f"{scan.name} has nothing to do here: one of its lists, `layers` for example, may be empty")
    assert len({shard.key for shard in shards}) == len(shards), f"scan {scan.name}: shard keys must be unique"
    return Work(
        scan, model, tokenized, prompts_fingerprint(tokenized), label, shards, scan.identity(), given.columns, growing
    )


def open_run(store: Store, work: Work, device: str = "cpu") -> Run:
    """The run's record in the store, new or earlier, and its prompts; tells if other versions began it."""
    run = store.open_run(**opening(work, device))
    store.write_prompts(work.prompts_fingerprint, work.prompts, work.columns)
    return run


def opening(work: Work, device: str) -> dict[str, Any]:
    """What ``Store.open_run`` is given; plain JSON."""
    return {**metadata(work), "versions": made_here(work.scan, work.model, device), "shards": work.listed}


def dispatch(
    work: Work,
    run: Run,
    store: Store,
    shards: Sequence[Shard],
    place: Place,
    placement: Placement,
    max_attempts: int,
    progress: bool,
    growth: Growth | None = None,
) -> Outcome:
    """Run the missing shards, and bring the run's record up to date however that ends."""
    progress = progress and logger.isEnabledFor(logging.WARNING)  # nothing where the log is silenced
    outcome = Outcome()
    try:
        with place.workers(replica_job(work, run, store, placement), placement) as workers:
            evaluations = growth.evaluations if growth else evaluations_of(work, shards)
            inside = getattr(workers, "pulse", None)  # of a replica in this process
            counted = ScanProgress(shards, evaluations, placement.replicas, inside=inside, awaited=place.awaited)
            tags = {"run_id": run.run_id, "experiment": work.scan.name, "model": work.model.label}
            further = place.observers(evaluations, tags, tokens_each(work))
            observers = Observers(counted if progress else QuietProgress(), *further)
            dispatcher = Dispatcher(
                workers, shards, replicas=placement.replicas, max_attempts=max_attempts, observer=observers,
                check=Agreement(run).joined, found=found_in(store, run), source=growth,
            )  # fmt: skip
            outcome = dispatcher.outcome
            with observers:
                dispatcher.run()
        if growth is not None:
            growth.close(metadata(work))
        return outcome
    finally:
        close_run(run, outcome)


def replica_job(work: Work, run: Run, store: Store, placement: Placement) -> ReplicaJob:
    """What every replica is told; it gets the model under its name."""
    return ReplicaJob(
        scan=work.scan,
        source=NamedSource(work.model.spec),
        prompts=work.prompts,
        model_fingerprint=work.model.fingerprint,
        prompts_fingerprint=work.prompts_fingerprint,
        store_url=store.url,
        run_id=run.run_id,
        device=placement.device,
        threads=placement.threads,
        cards=placement.cards,
        metadata=metadata(work),
        log_json=logs.AS_JSON,
    )


def metadata(work: Work) -> dict[str, Any]:
    """What the footer of each file says about its rows."""
    return {
        "scan": work.scan.name,
        "parameters": work.parameters,
        "model": work.model.label,
        "model_fingerprint": work.model.fingerprint,
        "prompts": work.prompts_label,
        "prompts_fingerprint": work.prompts_fingerprint,
        "dtype": work.model.dtype,
        "code_version": code_version(),
    }


def close_run(run: Run, outcome: Outcome) -> None:
    """Write notes, errors with their tracebacks, numbers of tries and machines into the run's record.

    Raises:
        UserError: files that replicas say they wrote are not in the store as seen from here.
    """
    if "model_loaded_at" in outcome.notes:
        facts = {name: fact for name, fact in outcome.notes.items() if name != PROBE}  # kept when the replica joined
        seconds = run.record["notes"].get("seconds_from_loaded_model", 0.0)  # of earlier sessions
        run.note({**facts, "seconds_from_loaded_model": seconds + time.time() - outcome.notes["model_loaded_at"]})
    for versions in {json.dumps(receipt.versions): receipt.versions for receipt in outcome.receipts}.values():
        run.made_by(versions)
    if halved := sorted({receipt.node for receipt in outcome.receipts if receipt.halved}):
        run.note({"memory_ran_out": sorted({*run.record["notes"].get("memory_ran_out", []), *halved})})
        logger.warning(
            "memory ran out on %s, and batches were halved: there, last bits of rows differ from those of whole batches"
            " (nodes kept in the run's notes as memory_ran_out)",
            ", ".join(halved),
        )
    missing = run.finish(
        errors={failure.key: f"{failure.error}\n{failure.traceback}".strip() for failure in outcome.failures},
        attempts=outcome.tries,
        hosts={receipt.node for receipt in outcome.receipts if receipt.node},
        written={
            receipt.key: {"rows": receipt.rows, "bytes": receipt.bytes, "sha256": receipt.sha256}
            for receipt in outcome.receipts
            if receipt.sha256
        },
    )
    if unseen := [receipt for receipt in outcome.receipts if receipt.key in set(missing)]:
        raise UserError(
            f"{counted(len(unseen), 'shard')} written on {unseen[0].node} but not in the store as this machine sees it;"
            " give `store` a folder that all nodes share, or an s3:// or gs:// URL, and leave it there until the end"
        )


def summarize(
    work: Work,
    run: Run,
    store: Store,
    growth: Growth | None,
    there: int,
    outcome: Outcome,
    placement: Placement | None,
    seconds: float,
) -> RunSummary:
    """The outcome in the numbers a user asks for; ``there``: shards that had their file before."""
    done, known = {receipt.key for receipt in outcome.receipts}, work.shards if growth is None else growth.known
    return RunSummary(
        run_id=run.run_id,
        store=store.url,
        shards=len(run.shards),
        reused=there,
        done=len(done) + (growth is not None and growth.closed),
        rows=sum(receipt.rows for receipt in outcome.receipts),
        evaluations=sum(evaluations_of(work, [shard for shard in known if shard.key in done]).values()),
        seconds=seconds,
        device=placement.device if placement else None,
        replicas=placement.replicas if placement else 0,
        replicas_lost=outcome.replicas_lost,
        busy=outcome.busy,
        peak_memory=max((receipt.peak_memory for receipt in outcome.receipts), default=0),
        failed=outcome.failures,
    )
