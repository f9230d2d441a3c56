"""Requests to a service: JSON out, JSON or Arrow back, and what goes wrong as one line.

Knows HTTP and the service's errors; knows nothing about experiments or runs.
"""

import getpass
import json
import socket
from contextlib import suppress
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import urllib3

from mathinterp.cluster.events import first_line
from mathinterp.errors import Unfinished, UserError
from mathinterp.gates import shortened
from mathinterp.models.recalled import Resolving
from mathinterp.service.state import TOKEN_VARIABLE, token_of
from mathinterp.service.wire import ABOUT, SIZES, USER
from mathinterp.text import one_line, visible

CONNECT_SECONDS = 10.0
ABOUT_SECONDS = 10.0  # for what the service answers at once
KEPT = 32  # connections
ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]  # a machine that is gone is noticed within some minutes
if hasattr(socket, "TCP_KEEPIDLE"):
    ALIVE += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30), (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    ]  # fmt: skip


class ReplicaGone(Exception):
    """What was to answer is gone; another one may. ``told``: the traceback of what was raised in it, if any."""

    def __init__(self, line: str, status: int, told: str = ""):
        super().__init__(line)
        self.status, self.told = status, told


class ServiceFault(RuntimeError):
    """An exception of the service's, told in its first line; ``told`` has its traceback."""

    def __init__(self, line: str, told: str):
        super().__init__(line)
        self.told = told


def fault(line: str, told: str) -> ServiceFault:
    """As which the exception is told here: under its own name, "ArithmeticError" for example."""
    name, colon, message = line.partition(": ")
    if not colon or not name.isidentifier():
        return ServiceFault(line, told)
    return type(name, (ServiceFault,), {})(message, told)  # type: ignore[no-any-return]


class Requests:
    """One service and one user of it; may be used from several threads.

    Args:
        url: for example http://127.0.0.1:8390.
        token: None: that of the environment, MATHINTERP_SERVICE_TOKEN.
        user: whose turn it is; None: the name of this process's user.
    Raises:
        UserError: no service answers there, it wants another token, or it is of another version.
    """

    def __init__(self, url: str, *, token: str | None = None, user: str | None = None):
        parts = _service_parts(url)
        if parts is None:
            raise UserError(f"`service` '{shortened(visible(str(url)))}': give a URL like http://127.0.0.1:8390")
        self.url = f"{parts.scheme}://{parts.netloc.rstrip(':')}"
        token = token_of(None) if token is None else token.strip()  # as of a file, with the end of its line
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UserError("`token` has letters that no token has; openssl rand -hex 32 makes one")
        self._headers = {USER: quote((user or _own_name())[:64])}
        self._headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(
            maxsize=KEPT,
            retries=False,
            socket_options=[*urllib3.connection.HTTPConnection.default_socket_options, *ALIVE],
        )
        self.resolve = Resolving()
        self.about: dict[str, Any]  # what the service says of itself
        self.check()

    def check(self, seconds: float = ABOUT_SECONDS) -> None:
        """Raise UserError unless a service of this version answers; another one may have been started meanwhile."""
        self.about = self.json("GET", "/v1/service", seconds=seconds)
        if any(self.about.get(name) != here for name, here in ABOUT.items()):
            raise UserError(
                f"{self.url} is no service of this version of mathinterp (it says"
                f" {self.about.get('mathinterp', 'nothing')}); give both the same version"
            )

    def json(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> dict[str, Any]:
        """What a request is answered with; raises UserError, ReplicaGone, ServiceFault or Unfinished."""
        return self._json(self._request(method, path, body, seconds))

    def tables(self, path: str, body: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Facts and tables (Arrow IPC) that a POST is answered with; raises as ``json`` does."""
        answer = self._request("POST", path, body, None)
        content, parts = answer.data, list[bytes]()
        for size in json.loads(answer.headers[SIZES]):
            parts.append(content[:size])
            content = content[size:]
        return json.loads(parts[0]), parts[1:]

    def forget(self, path: str) -> None:
        """DELETE, whether or not somebody is there to hear it."""
        with suppress(UserError, Unfinished, ReplicaGone, ServiceFault):
            self.json("DELETE", path, seconds=ABOUT_SECONDS)

    def _request(self, method: str, path: str, body: Any, seconds: float | None) -> urllib3.BaseHTTPResponse:
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        try:
            answer = self._pool.request(
                method, self.url + path, body=None if body is None else json.dumps(body).encode(), headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds), redirect=False,
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status != 200:
            self._refused(answer)
        return answer

    def _unreachable(self, error: Exception) -> Exception:
        """A mistake in the URL, or, of a service that was there, work that stopped."""
        if hasattr(self, "about"):
            return Unfinished(f"the service at {self.url} does not answer any more ({_reason(error)})")
        return UserError(f"no service answers at {self.url} ({_reason(error)}); 'mathinterp serve start' starts one")

    def _refused(self, answer: urllib3.BaseHTTPResponse) -> None:
        said = self._json(answer)
        line, kind = str(said.get("error")), said.get("kind")
        if kind == "token" and answer.status == 401:
            raise UserError(
                f"the service at {self.url} wants another token; set {TOKEN_VARIABLE} to the one it was started with"
            )
        if kind == "lost":
            raise ReplicaGone(line, answer.status, str(said.get("traceback", "")))
        if kind == "failed":
            raise fault(line, str(said.get("traceback", "")))
        raise UserError(line)

    def _json(self, answer: urllib3.BaseHTTPResponse) -> dict[str, Any]:
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url} is no service of mathinterp: it answers {answer.status} and no JSON object")
        return found


def _service_parts(url: object) -> SplitResult | None:
    """The parts of a URL that says where a service is, and no more; else None."""
    text = url if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:  # also of brackets that hold no address
        return None
    further = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    plain = text.isprintable() and " " not in text
    return parts if plain and parts.scheme in ("http", "https") and parts.hostname and not further else None


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    if "WRONG_VERSION_NUMBER" in str(inner):
        return "it speaks plain HTTP, not TLS: http://"
    cause = inner.args[-1] if isinstance(inner, urllib3.exceptions.ProtocolError) else None
    if isinstance(cause, (RemoteDisconnected, IncompleteRead)):
        return "it closed the connection"
    if isinstance(cause, HTTPException):
        return "what listens there speaks no HTTP"
    inner = cause if isinstance(cause, OSError) else inner
    said = one_line(str(inner)).rpartition(": ")[2] or first_line(error)
    return said


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user in a container
        return "somebody"
