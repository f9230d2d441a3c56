"""The service's HTTP: who may ask, what a request must be, and answers as JSON and Arrow IPC.

    GET    /v1/service                                what this is: version, device, number of replicas, their GPUs
    GET    /v1/status                                 models, queues, users
    POST   /v1/experiments                            is this experiment (JSON) known here?
    POST   /v1/sessions                               a question (JSON: experiment, model, prompts) -> its id
    POST   /v1/sessions/ID/replicas                   prepare one replica more for it -> its number, notes
    POST   /v1/sessions/ID/replicas/NUMBER/shards     compute a shard (JSON) -> facts (JSON), its rows (Arrow)
    DELETE /v1/sessions/ID                            what waits is cancelled, what is prepared is let go
    POST   /v1/ablate                                 one question, answered at once -> facts, two tables

A connection that is closed cancels what it asked for, if that still waits. An error is one JSON object: ``error``, one
line, and ``kind``: user, token, lost (ask again) or failed (with a traceback). Knows requests; computes nothing.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from mathinterp.cluster.events import first_line
from mathinterp.errors import Unfinished, UserError
from mathinterp.service.codec import decode_experiment
from mathinterp.service.host import Answer, spec_of
from mathinterp.service.listening import is_ours, same_token
from mathinterp.service.router import ReplicaLost, Router
from mathinterp.service.settings import LOOPBACK
from mathinterp.service.turns import Call
from mathinterp.service.wire import ABOUT, SIZES, USER
from mathinterp.text import one_line, printable

MOST_BYTES = 2**29  # of one request: prompts and the scores of circuits
MOST_NAME = 64  # characters of a user's name
IDLE_SECONDS = 3600.0  # after which a question that nobody asks about any more is forgotten
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Session:
    """A question that a user asks, and the processes that answer it."""

    user: str
    ask: dict[str, Any] = field(repr=False)
    experiment: str = ""  # its name
    replicas: set[int] = field(default_factory=set)
    asked: int = 0  # requests that are being answered
    used: float = field(default_factory=time.monotonic)


class Refused(Exception):
    """Answered with a status and one line."""

    def __init__(self, status: int, kind: str, line: str):
        super().__init__(line)
        self.status, self.kind = status, kind


class Front:
    """The handlers of one service.

    Args:
        about: facts for ``/v1/service``.
        token: that every request must bring; None: the service is on loopback alone.
        computed: told what a client is answered, after the name of the experiment, or "ablate".
    """

    def __init__(
        self, router: Router, about: Mapping[str, Any], token: str | None = None,
        computed: Callable[[str, Answer], None] = lambda experiment, answer: None,
    ):  # fmt: skip
        self._router, self._token, self._computed = router, token, computed
        self._about = {**ABOUT, "started_at": time.time(), "replicas": router.slots, **about}
        self._sessions: dict[str, Session] = {}

    def app(self) -> web.Application:
        """To serve."""
        app = web.Application(middlewares=[self._guarded], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.get("/v1/service", self._service),
                web.get("/v1/status", self._status),
                web.post("/v1/experiments", self._known),
                web.post("/v1/sessions", self._open),
                web.post("/v1/sessions/{session}/replicas", self._prepare),
                web.post("/v1/sessions/{session}/replicas/{number:[0-9]{1,6}}/shards", self._shard),
                web.delete("/v1/sessions/{session}", self._close),
                web.post("/v1/ablate", self._ablate),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse strangers; turn whatever is raised into one JSON object."""
        told = ""  # the traceback of another process
        try:
            self._check(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge as error:
            most = f"the service reads at most {MOST_BYTES // 2**20} MB of a question"
            status, kind, said = error.status, "user", f"{most}; ask about fewer prompts"
        except web.HTTPException as error:
            status, kind, said = error.status, "user", f"{request.method} {request.path}: {error.reason}"
        except Refused as error:
            status, kind, said = error.status, error.kind, str(error)
        except UserError as error:
            status, kind, said = 400, "user", str(error)
        except Unfinished as error:
            status, kind, said, told = 503, "lost", str(error), getattr(error, "told", "")
        except Exception as error:
            status, kind, said, told = 500, "failed", first_line(error), getattr(error, "told", "")
        return web.json_response({"kind": kind, "error": one_line(said), "traceback": told}, status=status)

    def _check(self, request: web.Request) -> None:
        """The token; where there is none, that no page in a browser asks under another name or from another origin."""
        if self._token is not None:
            given = request.headers.get("Authorization", "")
            if not same_token(given, f"Bearer {self._token}"):
                raise Refused(401, "token", "the service wants another token")
        elif not is_ours(request.host, LOOPBACK[0]):
            raise Refused(403, "token", f"the service is asked for as {request.host[:80]}; it answers to 127.0.0.1")
        if "Origin" in request.headers:
            raise Refused(403, "token", "the service answers no pages of a browser")
        if request.method == "POST" and request.content_type != "application/json":
            raise Refused(415, "user", "the service reads application/json")

    # ---- requests ----

    async def _service(self, request: web.Request) -> web.Response:
        return web.json_response({**self._about, "card_bytes": self._card_bytes(self._router.status())})

    async def _status(self, request: web.Request) -> web.Response:
        self._forget_idle()
        found = self._router.status()
        seen = {row["user"]: row for row in found["users"]}
        for session in self._sessions.values():
            row = seen.setdefault(session.user, {"user": session.user, "running": 0, "waiting": 0})
            row["questions"] = row.get("questions", 0) + 1
        users = [{"questions": 0, **seen[user]} for user in sorted(seen)]
        about = {**self._about, "card_bytes": self._card_bytes(found)}
        return web.json_response({**about, **found, "users": users})

    def _card_bytes(self, status: dict[str, Any]) -> int | None:
        """Memory of the smallest GPU of processes that are ready; None: there is none, or none is known yet."""
        return min((row["card_bytes"] for row in status["replicas"] if row["card_bytes"] is not None), default=None)

    async def _known(self, request: web.Request) -> web.Response:
        return web.json_response({"name": decode_experiment((await _json(request)).get("experiment")).name})

    async def _open(self, request: web.Request) -> web.Response:
        ask = await _json(request)
        experiment = await asyncio.to_thread(check_ask, ask)
        self._forget_idle()
        name = secrets.token_urlsafe(18)
        self._sessions[name] = Session(_user(request), ask, experiment)
        return web.json_response({"session": name})

    async def _prepare(self, request: web.Request) -> web.Response:
        name, session = self._session(request)
        number = self._router.best(session.ask["model_fingerprint"], session.replicas)
        if number is None:
            raise Refused(503, "lost", "the service has no further replica for this question")
        session.replicas.add(number)
        try:
            answer = await self._answer(session, "prepare", {"session": name, "ask": session.ask}, number, name)
        except BaseException:
            session.replicas.discard(number)
            self._end(name, session, number)  # it may know the question by now, or soon
            raise
        return web.json_response({"replica": number, **answer.facts})

    async def _shard(self, request: web.Request) -> web.Response:
        name, session = self._session(request)
        shard, number = await _json(request), int(request.match_info["number"])
        if number not in session.replicas:
            raise Refused(503, "lost", f"replica {number} does not know this question")
        if "stored" in _fields(shard, "work"):
            raise UserError("the service reads no store: rows of another run are taken over where the run is kept")
        try:
            answer = await self._answer(session, "rows", {"session": name, "shard": shard}, number, name)
        except ReplicaLost:
            session.replicas.discard(number)
            raise
        self._computed(session.experiment, answer)
        return _tables(answer)

    async def _ablate(self, request: web.Request) -> web.Response:
        ask, session = await _json(request), Session(_user(request), {})
        self._forget_idle()
        spec = _fields(ask, "spec")
        spec_of(spec)
        work = {"spec": spec, **{name: ask.get(name) for name in ("model_fingerprint", "prompts", "arguments")}}
        session.ask["model_fingerprint"] = str(ask.get("model_fingerprint"))
        answer = await self._answer(session, "ablate", work)
        self._computed("ablate", answer)
        return _tables(answer)

    async def _close(self, request: web.Request) -> web.Response:
        name, _ = self._session(request)
        self.forget(name)
        return web.json_response({})

    # ---- sessions ----

    def _session(self, request: web.Request) -> tuple[str, Session]:
        name = request.match_info["session"]
        session = self._sessions.get(name)
        if session is None:
            raise Refused(404, "lost", "the service does not know this question any more")
        session.used = time.monotonic()
        return name, session

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        for name in [name for name, session in self._sessions.items() if not session.asked and session.used < oldest]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Cancel a question's calls and let go of what is prepared for it."""
        session = self._sessions.pop(name)
        self._router.cancel_session(name)
        for number in session.replicas:
            self._end(name, session, number)

    def _end(self, name: str, session: Session, number: int) -> None:
        call = Call(session.user, "end", session.ask["model_fingerprint"], {"session": name})
        self._router.submit(call, number)

    async def _answer(
        self, session: Session, kind: str, work: dict[str, Any], number: int | None = None, name: str | None = None
    ) -> Answer:
        """What a process answers; cancelled with the connection."""
        call = Call(session.user, kind, session.ask["model_fingerprint"], work, name)
        session.asked += 1
        self._router.submit(call, number)
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            self._router.cancel(call)
            if call.future.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise ReplicaLost("the question was cancelled") from None
            raise
        finally:
            session.asked -= 1
            session.used = time.monotonic()


def check_ask(ask: dict[str, Any]) -> str:
    """The experiment's name; raises UserError unless a question names what this service has, and reads it alike."""
    spec_of(_fields(ask, "spec"))
    scan = decode_experiment(ask.get("experiment"))
    if as_json(scan.identity()) != as_json(ask.get("parameters")):
        raise UserError(
            f"the service reads the parameters of `{scan.name}` otherwise than its client, or has other code of it;"
            " give both the same version"
        )
    for name in ("model_fingerprint", "prompts_fingerprint"):
        if not isinstance(ask.get(name), str):
            raise UserError(f"the request cannot be read: it has no {name}")
    return scan.name


def as_json(value: Any) -> str:
    """Alike for values that are the same JSON."""
    return json.dumps(value, sort_keys=True)


def _tables(answer: Answer) -> web.Response:
    parts = [json.dumps(answer.facts).encode(), *answer.tables]
    sizes = json.dumps([len(part) for part in parts])
    return web.Response(body=b"".join(parts), content_type="application/octet-stream", headers={SIZES: sizes})


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        text = (await request.read()).decode()
        found = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # half a character: an error that quotes it ends a Ray process
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        raise UserError(f"the request cannot be read: it is no JSON ({one_line(str(error))})") from error
    if not isinstance(found, dict):
        raise UserError("the request cannot be read: it is no JSON object")
    return found


def _fields(given: dict[str, Any], name: str) -> dict[str, Any]:
    found = given.get(name)
    if not isinstance(found, dict):
        raise UserError(f"the request cannot be read: it has no {name}")
    return found


def _user(request: web.Request) -> str:
    """The name that a client gives itself; no proof of anything: it only decides whose turn it is."""
    return printable(unquote(request.headers.get(USER, "")))[:MOST_NAME] or "somebody"
