"""The page of a store's runs, served while they are still written, with a place to ask SQL.

Knows how the parts are put together: what the page is, contents.py says, how it is asked for, front.py.
"""

import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Self

from mathinterp.report.asking import SECONDS
from mathinterp.report.front import Front, cookie_name
from mathinterp.service.listening import bound_socket, listening
from mathinterp.service.settings import url_of
from mathinterp.store import Store


@dataclass(frozen=True)
class Exploring:
    """A page that is served until ``close``, or to the end of a with block."""

    host: str
    port: int
    token: str = field(repr=False)
    _stack: ExitStack = field(repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def url(self) -> str:
        """To open in a browser. The token is in it: whoever has it can read the store."""
        return f"{url_of(self.host, self.port)}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token."""
        return cookie_name(self.port)

    def wait(self) -> None:
        """Until ``close`` is called, or an interruption."""
        self._closed.wait()

    def close(self) -> None:
        """End queries and connections; may be called again."""
        self._stack.close()
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def explore(
    store: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    run_ids: Sequence[str] = (),
    compare: tuple[str, str] | None = None,
    query_seconds: float = SECONDS,
) -> Exploring:
    """Serve a store's page from this process, to browsers that have its token.

    Args:
        store: a folder or URL; runs may be written to it meanwhile.
        host: where to listen; by default this machine alone can reach it. What goes over a network is not encrypted.
        port: 0: one that is free.
        run_ids: the runs to show, also unfinished ones; none: all that are finished.
        compare: two runs to put side by side.
        query_seconds: the most that a query from the page may take.
    Raises:
        UserError: there is no store, or no such run, or the port is taken.

    >>> from mathinterp.report.explore import explore
    >>> with explore("results") as page:
    ...     page.url.startswith(f"http://127.0.0.1:{page.port}/?token=")
    True
    """
    opened = Store(store)
    opened.require_runs()
    for run in (*run_ids, *(compare or ())):
        opened.runs.record(run)
    token = secrets.token_urlsafe(32)
    with ExitStack() as stack:
        bound = stack.enter_context(closing(bound_socket(host, port)))
        port = bound.getsockname()[1]
        front = Front(store, host, port, token, run_ids, compare, query_seconds)
        stack.callback(front.close)
        stack.enter_context(listening(front.app(), bound))
        return Exploring(host, port, token, stack.pop_all())
    raise AssertionError("never reached")
