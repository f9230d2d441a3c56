"""What makes a local Ray private: a token of its own, loopback addresses alone, and an end with its driver.

Knows Ray's authentication and what its processes leave behind; starts no Ray. Run as a program it is the watcher of
``ended_with_driver``.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

LOOPBACK = "127.0.0.1"
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOOK_SECONDS = 5.0  # between the watcher's looks at what there is to end
GRACE_SECONDS = 5.0  # most of Ray's processes end by themselves within 2 s of their driver


@contextmanager
def own_token() -> Iterator[None]:
    """Within the block Ray asks for a token that is made here and kept in the environment alone.

    What the environment says of clusters (RAY_AUTH_MODE and its tokens) is set aside, and is back afterwards. Left
    unset, ray.init() would write a token into the home folder that clusters started later silently demand.
    """
    from mathinterp.cluster.ray_private import read_authentication_again  # the watcher has no package around it

    earlier = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    read_authentication_again()
    try:
        yield
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(earlier)
        read_authentication_again()


@contextmanager
def signals_kept() -> Iterator[None]:
    """After the block SIGINT and SIGTERM are handled as before; Ray's own ways with SIGTERM abort, or exit with 15."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((n, h) for n, h in handlers.items() if h is not None):
                signal.signal(number, handler)


@contextmanager
def ended_with_driver() -> Iterator[None]:
    """Within the block, which a local Ray of this process outlasts, its processes end with this one, kill -9 included.

    Ray ends most of them itself, but its agents wait a minute for an answer of the head that is gone, and a process
    that is stopped stays.
    """
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    nowhere = subprocess.DEVNULL
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def watch(driver: int) -> None:
    """End what Ray leaves behind of the driver, as soon as its end of this process's standard input is closed."""
    process, known = psutil.Process(driver), set[psutil.Process]()
    ended = False
    while not ended:
        try:
            raylets = [child for child in process.children() if child.name() == "raylet"]
            known.update(below for raylet in raylets for below in raylet.children(recursive=True))
        except psutil.Error:  # some of them are gone meanwhile
            pass
        known = {one for one in known if one.is_running()}
        ended = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
    deadline = time.monotonic() + GRACE_SECONDS
    # psutil's own waiting raises OSError on some kernels where a process ends just then
    while (left := [one for one in known if one.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in left:
        with suppress(psutil.Error):
            one.kill()


if __name__ == "__main__":
    watch(int(sys.argv[1]))
