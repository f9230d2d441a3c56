"""An S3 server of this machine (moto), in a process of its own, that refuses a share of all requests and counts them.

    python -m tests.s3_server PORT

Knows S3's protocol; knows nothing about stores. How it refuses: tests/refusing.py.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.job_service import free_ports
from tests.refusing import BUCKET, Refusing, Server, serving

CODES = {
    "503 Slow Down": "SlowDown",
    "503 Service Unavailable": "ServiceUnavailable",
    "429 Too Many Requests": "TooManyRequestsException",
    "403 Forbidden": "AccessDenied",
}


class S3(Server):
    """A running server, as seen from outside."""

    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}  # noqa: RUF012

    def make(self, bucket: str) -> None:
        """Make a bucket."""
        self.ask("PUT", f"/{bucket}")


@contextmanager
def s3_server() -> Iterator[S3]:
    """A server with one bucket (BUCKET); its clients find it by ``environment``. Skips where moto or s3fs is absent."""
    for package in ("moto.server", "flask_cors", "s3fs"):
        pytest.importorskip(package, reason="pip install 'mathinterp[s3-test]' (moto, s3fs)")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    running = S3(
        "s3",
        address,
        {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
         "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"},
    )  # fmt: skip
    with serving("tests.s3_server", port, running, lambda: running.make(BUCKET)), pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_PROFILE", raising=False)
        yield running


def answer(status: str) -> tuple[dict[str, str], str]:
    """What S3 says with a status."""
    headers = {"Content-Type": "application/xml", "Connection": "close"}
    return headers, f"<Error><Code>{CODES[status]}</Code><Message>try again</Message></Error>"


def main(port: int) -> None:
    """Serve until killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = Refusing(DomainDispatcherApplication(create_backend_app), answer)
    run_simple("127.0.0.1", port, application, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
