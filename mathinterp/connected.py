"""``mi.connect``: a running service in place of this process, with the same functions."""

from collections.abc import Generator
from dataclasses import dataclass, field
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mathinterp.errors import Unfinished
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.experiments.question import Answered
from mathinterp.face import Run, run
from mathinterp.frame import Frame
from mathinterp.models.handle import Model, model_of
from mathinterp.prompts.given import Prompts, prompts_of
from mathinterp.service.attached import Workers
from mathinterp.service.codec import bytes_table, encode
from mathinterp.service.place import OnService, Told, spec_for
from mathinterp.service.requests import ReplicaGone, Requests
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.workflows.league import League


def connect(url: str, *, token: str | None = None, user: str | None = None) -> "Service":
    """A service that ``mathinterp serve start`` started.

    Args:
        url: for example "http://127.0.0.1:8390".
        token: where it wants one; None: that of the environment, MATHINTERP_SERVICE_TOKEN, or in the file (mode 0600)
            that MATHINTERP_SERVICE_TOKEN_FILE names.
        user: a name; users of a service take turns. None: the name of this process's user.
    Raises:
        UserError: no service answers there, it wants another token, or it is of another version.
    """
    return Service(Requests(url, token=token, user=user))


@dataclass(frozen=True)
class Cell:
    """A finished shard of a run: its key, ``table/number``, and its rows, which are in the store by now."""

    shard: str
    table: pa.Table = field(repr=False)


@dataclass(frozen=True, repr=False)
class Service:
    """What ``mathinterp.run`` and ``ablate`` do, computed by the service; what is stored is stored by this process."""

    requests: Requests

    def run(
        self,
        experiment: Experiment,
        model: Model | str = "bundled",
        prompts: Any = None,
        *,
        store: str = "results",
        replicas: int | None = None,
        progress: bool = True,
        max_attempts: int = 3,
    ) -> Run:
        """Run an experiment, or resume it; as ``mathinterp.run``, whose rows and run id it has.

        Args:
            model: a name that this process and the service's machines find, or what ``load`` returned.
            store: of this process: a folder or URL.
            replicas: most of the service's that the run takes; None: as many as there are.
        Raises:
            UserError: as ``mathinterp.run``; or the service does not know the experiment or finds another model.
            Unfinished: the service ended meanwhile; the same call goes on.
        """
        return self._run(experiment, model, prompts, store, replicas, progress, max_attempts, None)

    def stream(
        self,
        experiment: Experiment,
        model: Model | str = "bundled",
        prompts: Any = None,
        *,
        store: str = "results",
        replicas: int | None = None,
        max_attempts: int = 3,
    ) -> Generator[Cell, None, Run]:
        """The same, and each shard's rows as soon as they are there; shards that the store has are left out.

        The generator returns the run. Closed before its end, it cancels what waits; the same call goes on from there.
        """
        cells: Queue[Cell | None] = Queue()
        ended, made, raised = Event(), list[Run](), list[BaseException]()

        def told(shard: Shard, table: pa.Table) -> None:
            if ended.is_set():
                raise Unfinished("the stream was closed; the same call goes on from here")
            cells.put(Cell(shard.key, table))

        def work() -> None:
            try:
                made.append(self._run(experiment, model, prompts, store, replicas, False, max_attempts, told))
            except BaseException as error:
                raised.append(error)
            cells.put(None)

        thread = Thread(target=work, name="stream", daemon=True)
        thread.start()
        try:
            while (cell := cells.get()) is not None:
                yield cell
        finally:
            ended.set()
            thread.join()
        if raised:
            raise raised[0]
        return made[0]

    def league(
        self, model: Model | str = "bundled", prompts: Any = None, *, replicas: int | None = None, **asked: Any
    ) -> "League":
        """Attribution methods beside exact patching; as ``mathinterp.league``, with its arguments, rows and run ids.

        Args:
            replicas: most of the service's that each stage takes; None: as many as there are.
            asked: methods, steps, store and told.
        Raises:
            UserError, StageUnfinished: as ``mathinterp.league``.
            Unfinished: the service ended meanwhile; the same call goes on.
        """
        from mathinterp.workflows.league import league

        return league(model, prompts, workers=Workers(replicas, service=self.requests), **asked)

    def ablate(self, model: Model | str, prompts: Any, **asked: Any) -> Answered:
        """Named heads, MLPs and neurons replaced together; as ``mathinterp.ablate``, with its arguments.

        Raises UserError as that does, and for a ``value`` that is an object of this process.
        """
        given = prompts if isinstance(prompts, Prompts) else prompts_of(prompts)
        model = model_of(model)
        self.requests.check()
        place = OnService(self.requests, model)
        described = place.described()
        ask = {
            "spec": spec_for(model, described),
            "model_fingerprint": described.fingerprint,
            "prompts": encode(given, "`prompts`"),
            "arguments": encode({name: _plain(value) for name, value in asked.items()}, "`value`"),
        }
        try:
            facts, (rows, effects) = self.requests.tables("/v1/ablate", ask)
        except ReplicaGone as gone:
            raise Unfinished(f"the service could not answer: {gone}; ask it again") from gone
        return Answered(facts["what"], *(Frame(bytes_table(each).to_pandas()) for each in (rows, effects)))

    def _run(
        self, experiment: Experiment, model: Model | str, prompts: Any, store: str, replicas: int | None,
        progress: bool, max_attempts: int, told: Told | None,
    ) -> Run:  # fmt: skip
        placed = OnService(self.requests, model_of(model), replicas, told, experiment)
        return run(
            experiment, model, prompts, store=store, place=placed, progress=progress, max_attempts=max_attempts
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Models with their level and bytes, processes, queue, users."""
        return self.requests.json("GET", "/v1/status", seconds=10.0)

    def __repr__(self) -> str:
        about = self.requests.about
        cards = about.get("gpus_per_replica", 0)
        each = f", {cards:g} GPUs each" if cards > 1 else ""
        return f"<service at {self.requests.url}, {counted(about['replicas'], 'replica')} on {about['device']}{each}>"


def _plain(value: Any) -> Any:
    """Tensors as arrays, and what is iterated over once as a list."""
    if hasattr(value, "detach"):
        wide = value.detach().cpu()
        return (wide.float() if str(wide.dtype) == "torch.bfloat16" else wide).numpy()  # which NumPy has not
    return list(value) if isinstance(value, Generator | range) else value
