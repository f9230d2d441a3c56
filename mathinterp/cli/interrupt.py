"""Ctrl-C and SIGTERM end a command in one line at any moment: exit code 130 or 143, no traceback.

Imports nothing heavy, so that entry.py can install it before anything else. While the command line is imported, or a
package with native code, the process ends at once. A running command is unwound by a KeyboardInterrupt, so that it
closes its run and its Ray; if it has not done so after PATIENCE seconds, because it is deep in one call, or when a
second signal comes, it is ended as it stands.
Files are written whole or not at all, so nothing is lost but time.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mathinterp import logs

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
PATIENCE = 20.0
NATIVE = ("torch", "numpy", "scipy", "pyarrow", "pandas", "duckdb", "ray", "triton")  # pybind11, Cython and the like
SAID = "interrupted; the same command goes on from here"


class Stopped(BaseException):
    """A KeyboardInterrupt past click, which would say "Aborted!" and exit with 1."""


class _State:
    came: int | None = None  # the first signal
    handled = False  # by this module: Ray has a handler of SIGTERM of its own while it starts
    unwinds = False  # a command runs, and may have something to close
    said = SAID


def install() -> None:
    """Handle both signals from now on, unless they are ignored (as under nohup)."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in CODES:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    threading.Thread(target=_watch, args=(read,), name="signals", daemon=True).start()


def _handle(number: int, frame: FrameType | None) -> None:
    first, _State.handled = not _State.handled, True
    _State.came = _State.came or number
    if first and _State.unwinds and not _imports_native_code():
        raise KeyboardInterrupt
    end()


def _imports_native_code() -> bool:
    """Whether a package is being imported in whose C++ initialisers an exception aborts the process, as in DuckDB's.

    Mostly nothing runs yet that has to be closed; what does ends as after kill -9.
    """
    native = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in NATIVE]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in native)


def _watch(read: int) -> None:
    """A thread, as the handler itself waits for the main thread to come back from whatever it calls."""
    while (number := os.read(read, 1)[0]) not in CODES:
        pass
    _State.came = _State.came or number
    select.select([read], [], [], PATIENCE)
    end()


def came() -> bool:
    """Whether one of the signals has come."""
    return _State.came is not None


def say(line: str) -> None:
    """What to tell in place of SAID."""
    _State.said = line


def end() -> None:
    """Tell it in one line and leave, without what a library does at exit: threads of theirs that run then may crash."""
    assert _State.came is not None
    line = f"\rmathinterp: {_State.said}"
    os.write(2, f"{logs.line_of(line.strip(), logging.ERROR) if logs.AS_JSON else line}\n".encode())
    os._exit(CODES[signal.Signals(_State.came)])


@contextmanager
def past_click() -> Iterator[None]:
    """Within the block an interruption by a signal is not click's to tell."""
    try:
        yield
    except KeyboardInterrupt as error:
        if came():
            raise Stopped from error
        raise


@contextmanager
def unwinding() -> Iterator[None]:
    """Within the block a signal unwinds what runs; whatever comes of that, the process then ends as interrupted."""
    _State.unwinds = True
    try:
        yield
    except BaseException:
        if not came():
            raise
    if came():
        end()
