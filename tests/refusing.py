"""A server that refuses a share of all requests and counts them: what those of the object stores have in common.

GET /-/counts tells the requests by method since the last call of it; PUT /-/refuse?share=0.1 makes it refuse that share
of them from then on, half of them after the request was carried out, as when only the answer is lost; with &status=403
all refusals are of that status, and nothing of them is carried out. Knows WSGI; knows no store's protocol.
"""

import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from threading import Lock
from typing import Any

import pytest

BUCKET = "bucket"
STATUSES = ("503 Slow Down", "503 Service Unavailable", "429 Too Many Requests")


class Refusing:
    """A server's application behind a counter and a die."""

    def __init__(self, application: Any, answer: Callable[[str], tuple[dict[str, str], str]]):
        """answer: of a status, the headers and the text with which the store's service refuses."""
        self._application, self._answer = application, answer
        self._share, self._random, self._lock = 0.0, random.Random(0), Lock()
        self._only: str | None = None
        self._counts: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/-/"):
            return self._control(path, environ["QUERY_STRING"], start_response)
        with self._lock:
            refused, late, status = (
                self._random.random() < self._share, self._random.random() < 0.5, self._random.choice(STATUSES)
            )  # fmt: skip
            self._counts["refused" if refused else method] += 1
            status, late = self._only or status, late and not self._only
        if not refused:
            return self._application(environ, start_response)
        if late:
            list(self._application(environ, lambda *_: None))
        else:  # a client that still sends does not hear
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers, text = self._answer(status)
        start_response(status, [*headers.items()])
        return [text.encode()]

    def _control(self, path: str, words: str, start_response: Any) -> list[bytes]:
        with self._lock:
            if path == "/-/refuse":
                given = urllib.parse.parse_qs(words)
                self._share, code = float(given["share"][0]), given.get("status", [""])[0]
                self._only = f"{code} {HTTPStatus(int(code)).phrase}" if code else None
            answer = json.dumps(self._counts).encode()
            if path == "/-/counts":
                self._counts.clear()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [answer]


class Server:
    """A running server, as seen from outside."""

    headers: dict[str, str] = {}  # noqa: RUF012  # what a request needs

    def __init__(self, scheme: str, address: str, environment: dict[str, str]):
        """scheme: s3 or gs; environment: by which clients find the server."""
        self.scheme, self.address, self.environment = scheme, address, environment

    def url(self, prefix: str, bucket: str = BUCKET) -> str:
        """The place of a store."""
        return f"{self.scheme}://{bucket}/{prefix}"

    def refuse(self, share: float, status: int | str = "") -> None:
        """Refuse that share of all requests from now on; with that status, if one is given."""
        self.ask("PUT", f"/-/refuse?share={share}&status={status}")

    def counts(self) -> Counter[str]:
        """Requests by method, and those refused, since the last call."""
        return Counter(json.loads(self.ask("GET", "/-/counts")))

    def ask(self, method: str, path: str) -> bytes:
        """The answer to a request."""
        request = urllib.request.Request(self.address + path, method=method, headers=self.headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            content: bytes = answer.read()
        return content


@contextmanager
def serving(module: str, port: int, running: Server, ready: Callable[[], object]) -> Iterator[None]:
    """``python -m module port`` until the end of the block, from when ``ready`` is answered; its clients find it."""
    server = subprocess.Popen(
        [sys.executable, "-m", module, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, "the server ended"
            try:
                ready()
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        running.counts()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in running.environment.items():
                patch.setenv(name, value)
            yield
    finally:
        server.kill()
        server.wait()
