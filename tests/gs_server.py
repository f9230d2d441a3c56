"""Google's storage service on this machine (gcp-storage-emulator), which refuses a share of all requests, and counts.

    python -m tests.gs_server PORT

The emulator answers what it is asked; before it stands a server that refuses, in the same process (tests/refusing.py).
Knows the JSON API's words for a refusal; knows nothing about stores.
"""

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from tests.job_service import free_ports
from tests.refusing import BUCKET, Refusing, Server, serving

HOST = "127.0.0.1"


@contextmanager
def gs_server() -> Iterator[Server]:
    """A server with one bucket (BUCKET); its clients find it by ``environment``. Skips where a package is absent."""
    for package in ("gcp_storage_emulator", "gcsfs"):
        if find_spec(package) is None:
            pytest.skip("pip install 'mathinterp[gcs-test]' (gcp-storage-emulator, gcsfs)")
    (port,) = free_ports(1)
    running = Server("gs", f"http://{HOST}:{port}", {"STORAGE_EMULATOR_HOST": f"http://{HOST}:{port}"})
    with serving("tests.gs_server", port, running, running.counts), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDSDK_CONFIG", str(Path(__file__).with_name("no-such-folder")))  # nobody's credentials
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"):
            patch.delenv(name, raising=False)
        yield running


class _Forwarding:
    """An application that passes each request on to a server, path and query as they came."""

    def __init__(self, port: int):
        self._port = port

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
        headers |= {"Content-Type": environ.get("CONTENT_TYPE") or "text/plain", "Connection": "close"}
        connection = http.client.HTTPConnection(HOST, self._port, timeout=60)
        try:
            connection.request(environ["REQUEST_METHOD"], environ["asked"], content, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in ("server", "date")]
        start_response(f"{answer.status} {answer.reason}", kept)
        return [text]


class _Handler(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        """The path as it came, too: %2F in an object's name is no slash of the address."""
        return {**super().get_environ(), "asked": self.path}


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True


def answer(status: str) -> tuple[dict[str, str], str]:
    """What the JSON API says with a status."""
    refusal = {"error": {"code": int(status[:3]), "message": status[4:]}}
    return {"Content-Type": "application/json"}, json.dumps(refusal)


def main(port: int) -> None:
    """Serve until killed."""
    from gcp_storage_emulator.server import create_server

    (behind,) = free_ports(1)
    create_server(HOST, behind, in_memory=True, default_bucket=BUCKET).start()
    make_server(HOST, port, Refusing(_Forwarding(behind), answer), _Threads, _Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
