"""Which services of this machine run, and the token of one: small files of the user's own.

Knows files and processes; knows nothing about Ray or HTTP.
"""

import contextlib
import errno
import json
import os
import re
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mathinterp.errors import UserError
from mathinterp.gates import check_place
from mathinterp.models.cache import cache_folder, write_atomic
from mathinterp.prompts.json_lines import read_text
from mathinterp.service.settings import url_of

TOKEN_VARIABLE = "MATHINTERP_SERVICE_TOKEN"
FILE_VARIABLE = "MATHINTERP_SERVICE_TOKEN_FILE"
SHORTEST_TOKEN = 16  # characters
GRACE_SECONDS = 30.0  # for a service to end after it was asked to


@dataclass(frozen=True)
class Running:
    """A service of this machine, as its file says.

    created: when its process began, as the system tells: another process may have its number by now.
    ready: whether one of its replicas was ready; before that it says how far it is and may be stopped.
    """

    url: str
    host: str
    port: int
    pid: int
    created: float
    started_at: float
    log: str = ""
    ready: bool = True


def folder() -> Path:
    """Where the files are."""
    return cache_folder() / "services"


def made_folder() -> Path:
    """The folder, which is there now and can be written; raises UserError if it cannot be."""
    where, why = folder(), None
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        why = error.strerror
    if why is None and not os.access(where, os.W_OK | os.X_OK):
        why = os.strerror(errno.EACCES)
    if why is not None:
        raise UserError(f"services are noted in '{where}', which cannot be written ({why}); set XDG_CACHE_HOME")
    return where


def _file(port: int) -> Path:
    return folder() / f"{socket.gethostname()}-{port}.json"


def write(host: str, port: int, log: str = "", ready: bool = True) -> Running:
    """Say that this process is a service, or is about to be one."""
    created = psutil.Process().create_time()
    running = Running(url_of(host, port), host, port, os.getpid(), created, time.time(), log, ready)
    write_atomic(made_folder() / _file(port).name, json.dumps(asdict(running)))
    return running


def remove(running: Running) -> None:
    """Take the file of a service away, if it is still that one's."""
    if _read(_file(running.port)) == running:
        _file(running.port).unlink(missing_ok=True)


def services() -> list[Running]:
    """Those that run here; files of others that ended without taking theirs away are removed."""
    found, ours = [], re.compile(rf"{re.escape(socket.gethostname())}-\d+\.json")  # home may be other machines' too
    for file in sorted(file for file in folder().glob("*.json") if ours.fullmatch(file.name)):
        running = _read(file)
        if running is not None and alive(running):
            found.append(running)
        else:
            file.unlink(missing_ok=True)
    return found


def on_port(port: int) -> Running | None:
    """The service of that port, if it runs."""
    return next((running for running in services() if running.port == port), None)


def _read(file: Path) -> Running | None:
    try:
        return Running(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def alive(running: Running) -> bool:
    """Whether the process is there, and is the one that wrote the file."""
    try:
        process = psutil.Process(running.pid)
        return abs(process.create_time() - running.created) < 1.0 and _runs(process)
    except psutil.Error:
        return False


def stop(running: Running, seconds: float = GRACE_SECONDS) -> bool:
    """End a service and all of its processes; returns whether it went by itself."""
    clean = end(running.pid, seconds)
    remove(running)
    return clean


def end(pid: int, seconds: float) -> bool:
    """End a process and all below it, killed if they take longer; returns whether it went by itself."""
    try:
        process = psutil.Process(pid)
        below = process.children(recursive=True)
        process.terminate()
    except psutil.Error:
        return True
    left = _left([process], seconds)
    _kill(left)
    _kill(_left(below, min(seconds, 10.0)))
    return not left


def _left(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended after so long; asked for again and again, since psutil's own waiting raises OSError on
    some kernels where a process ends just then.
    """
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process.kill()


def token_of(file: str | None) -> str | None:
    """The token of a file that only its owner may read, else of the environment, which may name a file, too.

    None: there is none.

    Raises UserError for a file that cannot be read or that others may read, and for a short token.
    """
    token, where = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    said = "`token_file`" if file is not None else FILE_VARIABLE
    file = os.environ.get(FILE_VARIABLE) if file is None and token is None else file
    if file is not None:
        check_place(file, said)
        where = f"{said} '{file}'"
        try:
            mode = os.stat(Path(file).expanduser()).st_mode
        except OSError as error:
            raise UserError(f"{where} cannot be read ({error.strerror})") from error
        if stat.S_IMODE(mode) & 0o077:
            raise UserError(f"{where} may be read by others; chmod 600 {file}")
        token = read_text(Path(file).expanduser(), said).strip()
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(
            f"{where}: a token has {SHORTEST_TOKEN} or more plain characters; openssl rand -hex 32 makes one"
        )
    return token
