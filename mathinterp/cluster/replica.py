"""One replica: a model on its device, the tokenized prompts, and a scan's prepared state, computing shards.

Knows how to load, compute, check and write one shard; knows nothing about retries or other replicas. It is a plain
class: ray_workers.py makes an actor of it. A shard is done when its file is in the store, not when the receipt arrives.
"""

import fcntl
import logging
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mathinterp.startup import searched_rarely

with searched_rarely():
    import pyarrow as pa
    import torch

    from mathinterp import logs
    from mathinterp.cluster.agreement import PROBE, probe_note
    from mathinterp.cluster.compile_ahead import compile_ahead
    from mathinterp.cluster.events import CardLost, Receipt, first_line
    from mathinterp.cluster.job import AT_ONCE as AT_ONCE
    from mathinterp.cluster.job import Computed, ReplicaJob, made_here, taken_over, written
    from mathinterp.cluster.job import check_rows as check_rows
    from mathinterp.cluster.temporary import private
    from mathinterp.cluster.vital import Vital
    from mathinterp.engine import batching
    from mathinterp.engine.alone import alone_deviation
    from mathinterp.errors import UserError
    from mathinterp.experiments import registry
    from mathinterp.experiments.base import Shard, Subject
    from mathinterp.models.card_memory import check_fits
    from mathinterp.models.catalog import LoadedModel, ResolvedModel
    from mathinterp.models.split import devices_of, split_note
    from mathinterp.store import Store, prompts_fingerprint

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SPLIT = "split"  # in the notes: which card each layer was on
LOADS_AT_ONCE = 2  # replicas of one node that read weights at the same time: 8 x 13 GB at once would fill its memory


class Replica:
    """The holder of one model; ``load`` once, then ``run`` shard after shard.

    On a GPU two threads may call ``run`` at once (AT_ONCE): one shard's file is written while the next one computes.
    All computing happens in one thread of its own, in the order of the calls.
    """

    def __init__(self, job: ReplicaJob):
        if job.log_json:
            logs.to_stderr()
        registry.add(type(job.scan))  # one from outside the package is new to this process
        self._job = job
        self._store = None if job.store_url is None else Store(job.store_url)
        self._state: Any = None
        self._versions: dict[str, str] = {}
        self._vital = Vital()
        self._computing: tuple[int, float] | None = None  # evaluations of the shard, and the counter when it began
        self._turns = ThreadPoolExecutor(1, "computing") if job.device == "cuda" else None

    def _in_turn(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """``work`` in the thread that computes; on a CPU that is the caller's, since writing would take its core."""
        return work(*arguments) if self._turns is None else self._turns.submit(work, *arguments).result()

    def load(self) -> dict[str, Any]:
        """Load the model and prepare the scan; returns the scan's notes (plain JSON).

        Raises:
            UserError: the node has another model or no device, or the model does not fit.
        """
        with searched_rarely():
            return self._in_turn(self._load)

    def _load(self) -> dict[str, Any]:
        job = self._job
        torch.set_num_threads(job.threads)
        if job.device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"{_where()} gave this replica a GPU but torch sees none there; install a CUDA build of torch"
            )
        require_same("prompts", prompts_fingerprint(job.prompts), job.prompts_fingerprint)
        with loading_turn(LOADS_AT_ONCE):
            resolved = self._find_model()
        ahead = {}  # layers on several cards are compiled for each, when they are there
        if job.cards == 1:
            ahead = compile_ahead(job.scan, resolved, job.prompts, job.device)
        with loading_turn(LOADS_AT_ONCE):
            loaded = self._load_model(resolved)
        loaded_at = time.time()
        self._versions = made_here(job.scan, resolved, job.device)
        subject = Subject(anatomy=loaded.anatomy, prompts=job.prompts, tokenizer=loaded.tokenizer)
        alone = {}
        if job.scan.reads_together and job.prompts:
            sentences = [prompt.input_ids[: prompt.end + 1] for prompt in job.prompts]
            alone = {"alone_deviation": alone_deviation(loaded.anatomy, sentences)}
        self._state = job.scan.prepare(subject)
        prepared = {"model_loaded_at": loaded_at, "prepare_seconds": time.time() - loaded_at}
        started = time.time()
        probe = probe_note(job.scan.cells(self._state, subject), job.device, socket.gethostname())
        checked = {PROBE: probe, "probe_seconds": time.time() - started}
        split = {} if job.cards == 1 else {SPLIT: split_note(loaded.anatomy.shape.n_layers, job.cards)}
        return {**job.scan.notes(self._state), **alone, **ahead, **split, **prepared, **checked}

    def _find_model(self) -> ResolvedModel:
        resolved = self._job.source.resolve(self._job.device)
        require_same(f"model '{resolved.spec.name}'", resolved.fingerprint, self._job.model_fingerprint)
        if self._job.device == "cuda":
            check_fits(resolved, self._job.cards, smallest_card(self._job.cards))
        return resolved

    def _load_model(self, resolved: ResolvedModel) -> LoadedModel:
        try:
            home, *further = devices_of(self._job.device, self._job.cards)
            return self._job.source.load(resolved, home, further)
        except torch.cuda.OutOfMemoryError as error:
            total = smallest_card(self._job.cards)
            raise UserError(
                f"model '{resolved.spec.name}' does not fit on the GPU of {_where()} ({total / 1e9:.0f} GB, shared by"
                " all replicas on it); use fewer replicas per GPU, more `gpus_per_replica`, a narrower `dtype` or a"
                " smaller model"
            ) from error

    def run(self, shard: Shard) -> Receipt:
        """Compute a shard, check its rows and write its file.

        Raises:
            ArithmeticError: a result is NaN or infinite; names the row.
            TypeError: the scan returned other columns than it declares.
            CardLost: a GPU gives this process nothing but errors.
            StoreFailed: the store gave out, or was away for longer than AWAY_SECONDS.
        """
        assert self._store is not None
        with logs.about(run_id=self._job.run_id, shard=shard.key):
            receipt = written(self._store, self._job, shard, self.rows(shard), aside=self._turns is not None)
            logger.info(f"{receipt.rows} rows in {receipt.seconds:.1f} s")
        return receipt

    def rows(self, shard: Shard) -> Computed:
        """A shard's rows, not yet checked or written; raises CardLost where this process can compute none any more."""
        try:
            return self._in_turn(self._compute, shard)
        except RuntimeError:
            if self._job.device == "cuda":
                check_cards(self._job.cards)
            raise

    def pulse(self) -> tuple[float, float]:
        """The part of the shard being computed that is done, and for how many seconds it has not moved. Of any thread.

        The first is 0 where the engine does not count.
        """
        computing, still = self._computing, self._vital.still()
        if computing is None:
            return 0.0, still
        evaluations, before = computing
        return (min((batching.evaluated - before) / evaluations, 1.0) if evaluations else 0.0), still

    def close(self) -> None:
        """Let go of the model and of the thread that computes."""
        self._state = None
        if self._turns is not None:
            self._turns.shutdown()

    def _compute(self, shard: Shard) -> Computed:
        started, halved = time.perf_counter(), batching.halved
        if self._job.device == "cuda":
            for card in range(self._job.cards):
                torch.cuda.reset_peak_memory_stats(card)
        self._computing = (self._job.scan.evaluations(shard, self._job.prompts), batching.evaluated)
        try:
            table, versions = self._rows(shard)
        finally:
            self._computing = None
        memory = _peak_memory(self._job.device, self._job.cards)
        return Computed(table, time.perf_counter() - started, memory, batching.halved - halved, versions)

    def _rows(self, shard: Shard) -> tuple[pa.Table, dict[str, str]]:
        """The shard's rows, computed or taken over, and what made them."""
        scan = self._job.scan
        if "stored" in shard.work:
            assert self._store is not None
            return taken_over(scan, self._store, shard)
        self._vital.begin()  # not while the store is read: it ends waiting itself, after its own retries
        try:
            return scan.run(self._state, shard), self._versions
        finally:
            self._vital.end()


@contextmanager
def loading_turn(limit: int) -> Iterator[None]:
    """Hold one of ``limit`` turns of this machine; the kernel gives the turn back even after kill -9."""
    folder = Path(tempfile.gettempdir()) / f"mathinterp-loading-{os.getuid()}"
    if not private(folder):
        raise UserError(f"'{folder}' belongs to others too, so it cannot hold locks; remove it, or set another TMPDIR")
    while True:
        for turn in range(limit):
            with open(folder / str(turn), "w", opener=_no_link) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.write(" ")  # who waits for others moves (vital.py): a holder that hangs is replaced itself
                    continue
                yield
                return
        time.sleep(0.2)


def _no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)


def require_same(what: str, here: str, driver: str) -> None:
    """Raise UserError unless this process finds what the driver found."""
    if here != driver:
        raise UserError(
            f"{what} on {_where()} is not the driver's (fingerprint {here}, driver {driver});"
            " all nodes need the same files and the same version of mathinterp"
        )


def _where() -> str:
    return f"node {socket.gethostname()}"


def smallest_card(cards: int) -> int:
    """Bytes of the smallest of a replica's GPUs."""
    return min(torch.cuda.get_device_properties(card).total_memory for card in range(cards))


def check_cards(cards: int) -> None:
    """Raise CardLost where a GPU's context is broken: after some errors every call fails until the process ends."""
    for card in range(cards):
        try:
            torch.cuda.synchronize(card)
        except RuntimeError as error:
            raise CardLost(f"its GPU gives nothing but errors: {first_line(error)}") from error


def _peak_memory(device: str, cards: int) -> int:
    """Of a replica on several cards that of the fullest."""
    if device == "cuda":
        return max(torch.cuda.max_memory_allocated(card) for card in range(cards))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
