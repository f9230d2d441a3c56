"""An HTTP server in this process, for a while: its socket, its thread, and who may ask.

Knows aiohttp and addresses; knows nothing about what is answered. A page of another site must not be able to ask in a
user's name: its name, led to this machine by DNS, is not ours (``is_ours``), and a token is compared in constant time.
"""

import asyncio
import hmac
import ipaddress
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from mathinterp.errors import UserError
from mathinterp.service.settings import LOOPBACK

SHUTDOWN_SECONDS = 2.0  # for requests that are being answered


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; port 0: one that is free. Raises UserError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def _cannot_listen(host: str, port: int, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot listen on {host}:{port} ({why}); choose another `port` or `host`")


def is_ours(asked: str | None, host: str) -> bool:
    """Whether ``asked``, of the header Host, is what a server that listens on ``host`` may be called.

    A loopback server has the names of loopback. Others have the name they were given, those of this machine, and any
    address that is a number: to such DNS leads nobody.
    """
    name = re.sub(r":\d*$", "", (asked or "").lower()).strip("[]")
    if name in LOOPBACK:
        return True
    return host not in LOOPBACK and (name in {host.lower(), *_own_names()} or _is_number(name))


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def same_token(given: str, token: str) -> bool:
    """Whether they are equal, in a time that does not tell how far."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


@contextmanager
def listening(app: web.Application, bound: socket.socket) -> Iterator[None]:
    """Answer requests at a bound socket, from a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    thread = threading.Thread(target=loop.run_forever, name="front", daemon=True)
    thread.start()

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, bound).start()

    try:
        try:
            asyncio.run_coroutine_threadsafe(start(), loop).result()
        except OSError as error:  # another one was bound to the same port, and listened first
            host, port = bound.getsockname()[:2]
            raise _cannot_listen(host, port, error) from error
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
