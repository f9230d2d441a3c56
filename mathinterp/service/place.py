"""A service as the place where a run's shards are computed; the run stays in this process.

Knows the dispatcher's ``Workers`` interface and the service's requests. Rows come back as Arrow, and their files are
written here: the store is the asker's, the service never sees it.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import pyarrow as pa

from mathinterp.cluster.can_run import check_model
from mathinterp.cluster.events import Event, Failed, Finished, Lost, Observer, Ready
from mathinterp.cluster.job import Computed, ReplicaJob, taken_over, written
from mathinterp.cluster.places import Placement
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.models.handle import Model
from mathinterp.models.resolved import ResolvedModel
from mathinterp.models.sources import NAMES
from mathinterp.service.codec import bytes_table, encode, encode_prompts
from mathinterp.service.requests import ReplicaGone, Requests
from mathinterp.store import Store

QUIET_SECONDS = 30.0  # without an answer after which it is asked whether the service is there at all
THERE_SECONDS = 60.0  # for it to say so
EACH = 2  # shards for which one replica more is worth preparing
Told = Callable[[Shard, pa.Table], None]


def check_named(model: Model) -> None:
    """Raise UserError for a model that is in this process's memory alone, or that runs code of its folder."""
    if model.in_memory_alone:
        raise UserError(
            f"model '{model.label}' is an object in this process's memory, which does not go to a service; save it to a"
            " folder that the service can read, or run it here"
        )
    if model.spec.trust_remote_code:
        raise UserError("a service runs no code of a model's folder; leave out `trust_remote_code`, or run it here")


def spec_for(model: Model, described: ResolvedModel) -> dict[str, str | None]:
    """The model as the service is asked for it: files by their full path, the dtype made plain."""
    spec = model.spec
    adapter = None if spec.adapter is None else _full(spec.adapter)
    return {"name": _full(spec.name), "adapter": adapter, "dtype": described.dtype, "load_in": spec.load_in}


def _full(name: str) -> str:
    if name in NAMES:  # whatever folder may be called so
        return name
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


class OnService:
    """See ``cluster.places.Place``.

    Args:
        requests: to the service.
        model: to ask for there.
        replicas: most that the run takes; None: as many as there are.
        told: called with each shard's rows as they come, from another thread.
        scan: what is to be run, which the service must know.
    """

    awaited: ClassVar[str] = "the service, which may have a model to load or others to serve"

    def __init__(
        self, requests: Requests, model: Model, replicas: int | None = None, told: Told | None = None,
        scan: Experiment | None = None,
    ):  # fmt: skip
        self._requests, self._model, self._replicas, self._told = requests, model, replicas, told
        self._scan = scan
        self._described: ResolvedModel | None = None

    def device(self) -> str:
        """The service's."""
        return str(self._requests.about["device"])

    def cards(self) -> int:
        """GPUs of each of the service's replicas; 1 on CPU."""
        return max(1, int(self._requests.about.get("gpus_per_replica", 1)))

    def card_bytes(self) -> int | None:
        """Memory of the smallest of the service's GPUs, as soon as one of its replicas is ready."""
        found: int | None = self._requests.about.get("card_bytes")
        return found

    def described(self) -> ResolvedModel:
        """As its machines find it; raises UserError for what cannot be asked, before anything is written."""
        if self._described is None:
            check_named(self._model)
            if self._scan is not None:
                self._requests.json("POST", "/v1/experiments", {"experiment": encode(self._scan, self._scan.name)})
            described = self._requests.resolve(self._model.spec, self.device())
            self._check_cards(described)
            self._described = described
        return self._described

    def _check_cards(self, described: ResolvedModel) -> None:
        """Raise UserError for what the service's cards cannot hold or do; tells who decides on them."""
        try:
            check_model(self._scan, described, self)
        except UserError as error:
            whose = f"its cards are those of the service at {self._requests.url}, as 'mathinterp serve start' was told"
            raise UserError(f"{error} ({whose})") from error

    def placement(self, shards: int, model_bytes: int) -> Placement:
        """Each replica prepares the question for itself, which few shards are not worth."""
        most = int(self._requests.about["replicas"])
        count = min(most if self._replicas is None else self._replicas, most, -(-shards // EACH))
        gpus = float(self.cards()) if self.device() == "cuda" else 0.0
        return Placement(max(1, count), gpus=gpus, cpus=1, threads=1)

    def observers(self, evaluations: Mapping[str, int], tags: Mapping[str, str], tokens: float) -> list[Observer]:
        """None beside the progress: this process may know no Ray, and the service tells what it computes."""
        return []

    @contextmanager
    def workers(self, job: ReplicaJob, placement: Placement) -> Iterator["ServiceWorkers"]:
        """The question's replicas; what waits is cancelled when the block ends."""
        spec = spec_for(self._model, self.described())
        with closing(ServiceWorkers(self._requests, job, spec, placement.replicas, self._told)) as workers:
            yield workers


class ServiceWorkers:
    """The dispatcher's ``Workers``: a slot is a replica that the service has prepared for this question."""

    def __init__(
        self, requests: Requests, job: ReplicaJob, spec: dict[str, str | None], slots: int, told: Told | None = None
    ):
        self._requests, self._job, self._told = requests, job, told
        assert job.store_url is not None
        self._store = Store(job.store_url)
        self._ask = {
            "experiment": encode(job.scan, job.scan.name),
            "parameters": job.metadata["parameters"],
            "spec": spec,
            "model_fingerprint": job.model_fingerprint,
            "prompts": encode_prompts(job.prompts),
            "prompts_fingerprint": job.prompts_fingerprint,
        }
        self._session: str | None = None
        self._closed = False
        self._opening = threading.Lock()
        self._replicas: dict[int, int] = {}  # slot -> its number at the service
        self._lives = dict.fromkeys(range(slots), 0)  # slot -> how often it was started
        self._events: SimpleQueue[tuple[int, int, Event]] = SimpleQueue()
        self._heard = time.monotonic()

    def start(self, slot: int) -> None:
        """Ask for a replica."""
        self._lives[slot] += 1
        self._ask_aside(slot, None, self._prepare)

    def submit(self, slot: int, shard: Shard) -> None:
        """Ask for a shard."""
        self._ask_aside(slot, shard, self._compute)

    def abandon(self, slot: int) -> None:
        """Never asked for: the service itself ends what hangs."""
        raise AssertionError(slot)

    def _ask_aside(self, slot: int, shard: Shard | None, work: Callable[[int, Any], Event]) -> None:
        """In a thread that nobody waits for at the end: a service that has stopped may never answer."""
        asked = (slot, self._lives[slot], shard, work)
        threading.Thread(target=self._work, args=asked, name="asking", daemon=True).start()

    def wait(self, timeout: float) -> list[Event]:
        """What has been answered; of a replica that was lost, nothing that comes after.

        Raises Unfinished where the service as a whole says nothing any more.
        """
        events = self._answered(timeout)
        if events:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > QUIET_SECONDS:
            self._requests.json("GET", "/v1/service", seconds=THERE_SECONDS)
            self._heard = time.monotonic()
        return events

    def _answered(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                slot, life, event = self._events.get(timeout=0 if events else timeout)
            except Empty:
                return events
            if life == self._lives[slot]:
                events.append(event)
                if isinstance(event, Lost):
                    self._lives[slot] += 1
                    self._replicas.pop(slot, None)

    def _work(self, slot: int, life: int, shard: Shard | None, work: Callable[[int, Any], Event]) -> None:
        try:
            event = work(slot, shard)
        except ReplicaGone as gone:
            event = Lost(slot, str(gone), gone.told)
        except Exception as error:
            event = Failed(slot, shard, error, getattr(error, "told", "") or traceback.format_exc())
        self._events.put((slot, life, event))

    def _prepare(self, slot: int, shard: None) -> Event:
        session = self._opened()
        try:
            found = self._requests.json("POST", f"/v1/sessions/{session}/replicas", {})
        except ReplicaGone as gone:
            with self._opening:
                if gone.status == 404 and self._session == session:  # the service was started anew
                    self._session = None
            raise
        self._replicas[slot] = found["replica"]
        return Ready(slot, found["notes"])

    def _opened(self) -> str:
        """The question's id at the service, which is asked once; if the run has ended meanwhile, it is taken back."""
        with self._opening:
            session = self._session
            if session is None and not self._closed:
                self._requests.check(THERE_SECONDS)
                session = self._session = self._requests.json("POST", "/v1/sessions", self._ask)["session"]
            if self._closed or session is None:
                self._forget()
                raise ReplicaGone("the run has ended", 503)
            return session

    def _compute(self, slot: int, shard: Shard) -> Event:
        if "stored" in shard.work:
            rows, versions = taken_over(self._job.scan, self._store, shard)
            computed = Computed(rows, 0.0, 0, 0, versions)
        else:
            number = self._replicas.get(slot)
            if number is None or self._session is None:
                raise ReplicaGone("the replica was lost", 503)
            ask = {"table": shard.table, "index": shard.index, "work": shard.work, "cost": shard.cost}
            facts, (content,) = self._requests.tables(f"/v1/sessions/{self._session}/replicas/{number}/shards", ask)
            computed = Computed(table=bytes_table(content), **facts)
        receipt = written(self._store, self._job, shard, computed)
        if self._told is not None:
            self._told(shard, computed.table)
        return Finished(slot, shard, receipt)

    def close(self) -> None:
        """Cancel what was asked."""
        self._closed = True
        self._forget()

    def _forget(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._requests.forget(f"/v1/sessions/{session}")
