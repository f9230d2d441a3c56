"""An S3 server of this machine (moto), in a process of its own, that refuses a share of all requests and counts them.

    python -m tests.s3_server PORT

GET /-/counts tells the requests by method since the last call of it; PUT /-/refuse?share=0.1 makes it refuse that share
of them from then on: 503 Slow Down, 503 Service Unavailable or 429, half of them after the request was carried out, as
when only the answer is lost. Knows S3's protocol; knows nothing about stores.
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
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import pytest

from tests.job_service import free_ports

REFUSALS = (
    ("503 Slow Down", "SlowDown"),
    ("503 Service Unavailable", "ServiceUnavailable"),
    ("429 Too Many Requests", "TooManyRequestsException"),
)
BUCKET = "bucket"


class Refusing:
    """The server's application behind a counter and a die."""

    def __init__(self, application: Any):
        self._application = application
        self._share, self._random, self._lock = 0.0, random.Random(0), Lock()
        self._counts: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/-/"):
            return self._control(path, environ["QUERY_STRING"], start_response)
        with self._lock:
            refused, late, (status, code) = (
                self._random.random() < self._share, self._random.random() < 0.5, self._random.choice(REFUSALS)
            )  # fmt: skip
            self._counts["refused" if refused else method] += 1
        if not refused:
            return self._application(environ, start_response)
        if late:
            list(self._application(environ, lambda *_: None))
        start_response(status, [("Content-Type", "application/xml"), ("Connection", "close")])
        return [f"<Error><Code>{code}</Code><Message>try again</Message></Error>".encode()]

    def _control(self, path: str, words: str, start_response: Any) -> list[bytes]:
        with self._lock:
            if path == "/-/refuse":
                self._share = float(urllib.parse.parse_qs(words)["share"][0])
            answer = json.dumps(self._counts).encode()
            if path == "/-/counts":
                self._counts.clear()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [answer]


class S3:
    """A running server, as seen from outside."""

    def __init__(self, address: str):
        self.address = address
        self.environment = {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def refuse(self, share: float) -> None:
        """Refuse that share of all requests from now on."""
        self._ask("PUT", f"/-/refuse?share={share}")

    def counts(self) -> Counter[str]:
        """Requests by method, and those refused, since the last call."""
        return Counter(json.loads(self._ask("GET", "/-/counts")))

    def make(self, bucket: str) -> None:
        """Make a bucket."""
        self._ask("PUT", f"/{bucket}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(
            self.address + path,
            method=method,
            headers={"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            content: bytes = answer.read()
        return content


@contextmanager
def s3_server() -> Iterator[S3]:
    """A server with one bucket (BUCKET); its clients find it by ``environment``. Skips where moto or s3fs is absent."""
    for package in ("moto.server", "flask_cors", "s3fs"):
        pytest.importorskip(package, reason="pip install 'mathinterp[s3-test]' (moto, s3fs)")
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_server", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    running = S3(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, "the server ended"
            try:
                running.make(BUCKET)
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        running.counts()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in running.environment.items():
                patch.setenv(name, value)
            patch.delenv("AWS_PROFILE", raising=False)
            yield running
    finally:
        server.kill()
        server.wait()


def main(port: int) -> None:
    """Serve until killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = Refusing(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, application, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
