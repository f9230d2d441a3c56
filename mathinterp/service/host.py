"""One process of the service: models on a shelf, and a prepared replica for each question that is being answered.

Knows how a question becomes a ``Replica`` and what that answers; knows nothing about users, queues or HTTP. It is a
plain class, of which RayWorkers makes an actor: ``run`` does one call at a time.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import torch

from mathinterp.cluster.agreement import device_name
from mathinterp.cluster.can_run import check_model
from mathinterp.cluster.job import ReplicaJob
from mathinterp.cluster.places import threads_for
from mathinterp.cluster.replica import Replica, check_cards, require_same, smallest_card
from mathinterp.cluster.vital import Vital
from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import parameters
from mathinterp.experiments.question import ablate
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel
from mathinterp.models.handle import Model
from mathinterp.models.resolved import DTYPE_BYTES
from mathinterp.service.codec import decode, decode_experiment, decode_prompts, table_bytes
from mathinterp.service.shelf import Key, Limits, Shelf, key_of
from mathinterp.text import counted

PREPARED = 8  # questions whose replica stays prepared; others are prepared again when they go on
KINDS = ("prepare", "rows", "end", "ablate")
CARD_SHARE = 0.6  # of a process's part of the cards' memory, for weights; and of what these leave, for what is prepared


@dataclass(frozen=True)
class HostSettings:
    """What a process is told when it starts.

    cores: of the largest machine, which decide the threads of a replica.
    experiments: ``module:Class`` of those from outside the package.
    cards: GPUs that the layers of each model are dealt out to; 1 on a CPU and on a part of a GPU.
    share: of each of them that is this process's own.
    """

    device: str
    limits: Limits
    cores: int
    experiments: tuple[str, ...] = ()
    cards: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class There:
    """What a process has after a call: the models on its shelf (``Shelf.report``) and the questions it is ready for."""

    held: list[dict[str, Any]] = field(default_factory=list)
    prepared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call gives: tables as Arrow IPC, facts as plain JSON, what there is now, and a shard's rows."""

    facts: dict[str, Any]
    tables: tuple[bytes, ...] = field(default=(), repr=False)
    there: There = field(default_factory=There)
    rows: int = 0


class UnknownSession(RuntimeError):
    """This process was not told, or no longer knows, what the question is."""


@dataclass
class _Session:
    job: ReplicaJob
    key: Key
    replica: Replica | None = None


@dataclass(frozen=True)
class _OnShelf:
    """The model of a replica, from the shelf; a ``ModelSource`` that goes nowhere else."""

    shelf: Shelf
    resolved: ResolvedModel

    def resolve(self, device_type: str) -> ResolvedModel:
        """As it was found."""
        return self.resolved

    def load(self, resolved: ResolvedModel, device: str, further: Sequence[str] = ()) -> LoadedModel:
        """See Shelf.take; the shelf has the same cards."""
        assert len(further) == self.shelf.cards - 1
        return self.shelf.take(resolved)


class _ShelfModel(Model):
    """A model to ask one question of."""

    def __init__(self, shelf: Shelf, spec: ModelSpec, device: str, wanted: str):
        super().__init__(spec, device)
        self._shelf = shelf
        self.described = shelf.resolve(spec, device, wanted)

    @contextmanager
    def lent(self) -> Iterator[LoadedModel]:
        """From the shelf."""
        yield self._shelf.take(self.described)


class Host:
    """Answers calls; each is a ``Shard`` whose ``work`` says what is asked (KINDS)."""

    def __init__(self, settings: HostSettings):
        self._settings = settings
        self._shelf = self._shelf_of(settings.limits)  # of cards: see ``load``
        self._card_bytes: int | None = None
        self._sessions: dict[str, _Session] = {}  # used longest ago first
        self._computing: Replica | None = None
        self._vital = Vital()  # of what no replica computes

    def load(self) -> dict[str, Any]:
        """What this process is; raises UserError where it cannot compute."""
        if self._settings.device == "cuda":
            self._find_cards()
        for name in self._settings.experiments:
            registry.find(name)
        device = device_name(self._settings.device)
        return {"node": socket.gethostname(), "pid": os.getpid(), "device": device, "card_bytes": self._card_bytes}

    def _find_cards(self) -> None:
        """How much memory they have, and so how many bytes of weights they get where that was not said."""
        cards, seen = self._settings.cards, torch.cuda.device_count() if torch.cuda.is_available() else 0
        if seen < cards:
            raise UserError(
                f"Ray gave this process of {socket.gethostname()} {counted(cards, 'GPU')} but torch sees"
                f" {seen or 'none'} there"
            )
        self._card_bytes = smallest_card(cards)
        if not self._settings.limits.card:
            card = int(CARD_SHARE * self._settings.share * sum(_memory(card) for card in range(cards)))
            self._shelf = self._shelf_of(replace(self._settings.limits, card=card))

    def _shelf_of(self, limits: Limits) -> Shelf:
        return Shelf(self._settings.device, limits, self._model_leaves, cards=self._settings.cards)

    def cards(self) -> int:
        """GPUs that the layers of each model are dealt out to."""
        return self._settings.cards

    def card_bytes(self) -> int | None:
        """Memory of the smallest of them; None on a CPU."""
        return self._card_bytes

    def run(self, call: Shard) -> Answer:
        """Answer one call; raises what it raises, with what there is now as its ``there``, or CardLost."""
        work = dict(call.work)
        kind = work.pop("kind")
        assert kind in KINDS
        self._vital.begin()  # loading and preparing may hang, too
        try:
            answer: Answer = getattr(self, f"_{kind}")(**work)
        except Exception as error:
            if self._settings.device == "cuda" and isinstance(error, RuntimeError):
                check_cards(self._settings.cards)
            error.__dict__["there"] = self._there()
            raise
        finally:
            self._vital.end()
        return replace(answer, there=self._there())

    def _there(self) -> There:
        prepared = (name for name, session in self._sessions.items() if session.replica is not None)
        return There(self._shelf.report(), tuple(prepared))

    def pulse(self) -> tuple[float, float]:
        """See Replica.pulse; of the question that is being answered."""
        replica = self._computing
        return (0.0, self._vital.still()) if replica is None else replica.pulse()

    def _prepare(self, session: str, ask: dict[str, Any]) -> Answer:
        """Know a question, and be ready for its shards."""
        self._end(session)
        resolved = self._shelf.resolve(spec_of(ask["spec"]), self._settings.device, ask["model_fingerprint"])
        job = self._job(ask, resolved)
        check_model(job.scan, resolved, self)
        self._sessions[session] = _Session(job, key_of(resolved))
        _, notes = self._ready(session)
        return Answer({"notes": notes, "node": socket.gethostname(), "pid": os.getpid()})

    def _rows(self, session: str, shard: dict[str, Any]) -> Answer:
        """Compute a shard of a question that was prepared."""
        if session not in self._sessions:
            raise UnknownSession(f"process {os.getpid()} on {socket.gethostname()} does not know this question")
        replica, _ = self._ready(session)
        self._computing = replica
        try:
            computed = replica.rows(Shard(**shard))
        finally:
            self._computing = None
        names = ("seconds", "peak_memory", "halved", "versions", "node", "pid")
        facts = {name: getattr(computed, name) for name in names}
        return Answer(facts, (table_bytes(computed.table),), rows=computed.table.num_rows)

    def _end(self, session: str) -> Answer:
        self._forget(session)
        self._sessions.pop(session, None)
        return Answer({})

    def _ablate(self, spec: dict[str, Any], model_fingerprint: str, prompts: Any, arguments: Any) -> Answer:
        """One question, answered at once."""
        model = _ShelfModel(self._shelf, spec_of(spec), self._settings.device, model_fingerprint)
        require_same(f"model '{model.spec.name}'", model.fingerprint, model_fingerprint)
        check_model(None, model.described, self)
        started = time.perf_counter()
        torch.set_num_threads(self._threads(model.described))
        with self._room():
            answered = ablate(model, decode(prompts), **decode(arguments))
        frames = (pa.Table.from_pandas(frame, preserve_index=False) for frame in (answered.rows, answered.effects))
        return Answer(
            {"what": answered.what, "seconds": time.perf_counter() - started}, tuple(map(table_bytes, frames))
        )

    def _job(self, ask: dict[str, Any], resolved: ResolvedModel) -> ReplicaJob:
        scan = decode_experiment(ask["experiment"])
        return ReplicaJob(
            scan=scan,
            source=_OnShelf(self._shelf, resolved),
            prompts=decode_prompts(ask["prompts"]),
            model_fingerprint=ask["model_fingerprint"],
            prompts_fingerprint=ask["prompts_fingerprint"],
            store_url=None,
            run_id="",
            device=self._settings.device,
            threads=self._threads(resolved, scan.models_held),
            cards=self._settings.cards,
        )

    def _threads(self, resolved: ResolvedModel, models: int = 1) -> int:
        """As many as a run without the service has: they decide last bits."""
        weights = DTYPE_BYTES[resolved.dtype] * parameters(resolved.shape) * models
        return 1 if self._settings.device == "cuda" else threads_for(weights, self._settings.cores)

    def _ready(self, name: str) -> tuple[Replica, dict[str, Any]]:
        """The replica of a session, prepared; and its notes, if it was prepared now."""
        session = self._sessions[name] = self._sessions.pop(name)
        if session.replica is not None:
            torch.set_num_threads(session.job.threads)
            self._shelf.take(session.job.source.resolve(session.job.device))
            return session.replica, {}
        with self._room():
            replica = Replica(session.job)
            try:
                notes = replica.load()
            except BaseException:
                replica.close()
                raise
        session.replica = replica
        return replica, notes

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Within the block something is prepared: replicas used longest ago make room for it."""
        prepared = [name for name, session in self._sessions.items() if session.replica is not None]
        while prepared and (len(prepared) >= PREPARED or self._card_is_full()):
            self._forget(prepared.pop(0))
        yield

    def _card_is_full(self) -> bool:
        if self._settings.device != "cuda":
            return False
        cards, share = range(self._settings.cards), self._settings.share
        weights = self._shelf.ready_bytes() / len(cards)  # on each; layers are dealt out
        return any(
            torch.cuda.memory_allocated(card) - weights > CARD_SHARE * (share * _memory(card) - weights)
            for card in cards
        )  # fmt: skip

    def _model_leaves(self, key: Key) -> None:
        for name, session in self._sessions.items():
            if session.key == key:
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Let go of what is prepared; the question stays known."""
        session = self._sessions.get(name)
        if session is not None and session.replica is not None:
            session.replica.close()
            session.replica = None


def _memory(card: int) -> int:
    """Bytes of a GPU."""
    return int(torch.cuda.get_device_properties(card).total_memory)


def spec_of(given: dict[str, Any]) -> ModelSpec:
    """A model that a client names; raises UserError for one whose folder's code would run here."""
    texts = [given.get("name"), given.get("adapter", ""), given.get("dtype", "auto"), given.get("load_in")]
    if not all(isinstance(text, str) for text in texts if text is not None) or not texts[0]:
        raise UserError("the request cannot be read: its spec names no model")
    spec = ModelSpec(
        str(given["name"]), given.get("adapter"), str(given.get("dtype", "auto")), load_in=given.get("load_in")
    )
    if given.get("trust_remote_code"):
        raise UserError("a service runs no code of a model's folder; leave out `trust_remote_code`, or run it here")
    return spec
