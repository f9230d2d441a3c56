"""``mathinterp serve``: a service of its own processes on Ray; started, asked, killed in parts, and stopped."""

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web
from click.testing import CliRunner

import mathinterp as mi
from mathinterp import logs
from mathinterp.cli.main import main
from mathinterp.cluster import dispatch, ray_cluster
from mathinterp.cluster.run import run_scan
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec
from mathinterp.service import serve as serve_module
from mathinterp.service import state
from mathinterp.service.listening import bound_socket, listening
from mathinterp.service.serve import _check_room, _processes, serving
from mathinterp.service.settings import Settings
from mathinterp.store import Store
from tests.toy_scan import ToyScan

ROOT = Path(__file__).parents[1]
TINY = "random:llama-tiny"
PROMPTS = mi.prompts([(f"{a} plus 5 is", str(a + 5)) for a in (3, 14, 62)])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Services of a test are known to it alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (state.TOKEN_VARIABLE, state.FILE_VARIABLE, "MATHINTERP_SERVICE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


NO_SERVICES = ("http://[::1", "http://[x]", "http://a b", "http://127.0.0.1:99999", "http://a\x1b[31m]", "http://\u202ea",
               "http://u:p@127.0.0.1:9", "", "http://")  # fmt: skip


def private_pipe(folder):
    """A pipe that nobody writes to, which only its owner may read."""
    os.mkfifo(folder / "pipe", 0o600)
    return folder / "pipe"


def serve(*words):
    return CliRunner().invoke(main, ["serve", *words])


# ---- without Ray ----


def test_what_cannot_be_started_is_one_line(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        token = tmp_path / "token"
        token.write_text("0123456789abcdef0123\n")
        token.chmod(0o644)
        for words, said in (
            (["start", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached by others: give a token, by --token-file"),
            (["start", "--host", "0.0.0.0", "--token-file", str(token)], f"may be read by others; chmod 600 {token}"),
            (["start", "--token-file", str(tmp_path / "nosuch")], "cannot be read (No such file or directory)"),
            (["start", "--token-file", "~nobody-of-this-name/x"], "there is no home folder of that name"),
            (["start", "--token-file", str(private_pipe(tmp_path))], "a device or a pipe; give a file"),
            (["start", "--experiment", "nosuch:X"], "there is no experiment 'nosuch:X'"),
            (["start", "--port", port, "--foreground"], f"cannot listen on 127.0.0.1:{port} (Address already in use)"),
            (["start", "--hangs-after", "3"], "'--hangs-after': 3.0 is not in the range x>=10"),  # busy is not hung
            (["status"], "no service of yours runs on this machine; 'mathinterp serve start' starts one"),
            (["stop"], "no service of yours runs on this machine"),
            (["status", "--port", "9"], "no service of yours runs on this machine at --port 9"),
            (["status", "--port", "9", "--service", "http://127.0.0.1:9"], "--service and --port both say which one"),
            (["status", "--service", "http://127.0.0.1:9"], "no service answers at http://127.0.0.1:9"),
            *((["status", "--service", url], "give a URL like") for url in NO_SERVICES),
        ):
            done = serve(*words)
            assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
            assert said in done.stderr
    monkeypatch.setenv(state.TOKEN_VARIABLE, "short")
    assert "a token has 16 or more plain characters" in serve("start").stderr
    monkeypatch.delenv(state.TOKEN_VARIABLE)
    monkeypatch.setenv(state.FILE_VARIABLE, "nosuch")
    done = serve("status", "--service", "http://127.0.0.1:9")
    assert (
        done.stderr == "mathinterp: MATHINTERP_SERVICE_TOKEN_FILE 'nosuch' cannot be read (No such file or directory)\n"
    )


@pytest.mark.parametrize("more", [[], ["--foreground"]])
def test_a_service_that_could_not_be_noted_is_not_started(tmp_path, monkeypatch, more):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = serve("start", *more)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert f"services are noted in '{tmp_path}/file/mathinterp/services', which cannot be written (Not a" in done.stderr


def test_when_replicas_of_a_service_hang_is_not_said_by_who_asks(monkeypatch):
    asked = ["--service", "http://127.0.0.1:9"]
    for words in (["--hangs-after", "60", *asked], [*asked, "--hangs-after", "60"]):
        done = CliRunner().invoke(main, ["scan", "heads", *words])
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        assert "mathinterp: --hangs-after is said when the service is started; leave it out" in done.stderr
    monkeypatch.setenv("MATHINTERP_SERVICE", "http://127.0.0.1:9")
    assert "leave it out" in CliRunner().invoke(main, ["league", "--hangs-after", "60"]).stderr
    assert dispatch.SILENCE == 300.0


def test_of_two_services_that_start_at_once_on_a_port_one_says_that_it_is_taken():
    first = bound_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bound_socket("127.0.0.1", port)  # neither listens yet
    with closing(first), closing(second), listening(web.Application(), first):
        said = rf"cannot listen on 127.0.0.1:{port} \(Address already in use\); choose"
        with pytest.raises(UserError, match=said), listening(web.Application(), second):
            pytest.fail("two listen")
        assert not [each for each in threading.enumerate() if each.name == "front"][1:]


def test_https_where_none_is_spoken_says_so():
    with socket.create_server(("127.0.0.1", 0)) as plain:
        port = plain.getsockname()[1]

        def answer() -> None:
            with plain.accept()[0] as client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer).start()
        done = serve("status", "--service", f"https://127.0.0.1:{port}")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "(it speaks plain HTTP, not TLS: http://)" in done.stderr


def test_tokens_are_read_from_a_private_file_or_the_environment(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    token.chmod(0o600)
    assert state.token_of(str(token)) == "0123456789abcdef0123"
    assert state.token_of(None) is None
    monkeypatch.setenv(state.FILE_VARIABLE, str(token))
    assert state.token_of(None) == "0123456789abcdef0123"
    monkeypatch.setenv(state.TOKEN_VARIABLE, "fedcba9876543210")
    assert state.token_of(None) == "fedcba9876543210"
    Settings(host="::1").check()
    Settings(host="0.0.0.0", token="0123456789abcdef").check()
    with pytest.raises(UserError, match="can be reached by others"):
        Settings(host="::").check()


def test_a_file_that_a_killed_service_left_is_no_service():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = psutil.Process(child.pid).create_time()
    running = state.write("127.0.0.1", 8390)
    file = state._file(8390)
    for pid, when, alive in ((os.getpid(), running.created, True), (os.getpid(), running.created - 60, False),
                             (child.pid, created, True)):  # fmt: skip
        file.write_text(json.dumps({**vars(running), "pid": pid, "created": when}))
        assert [each.pid for each in state.services()] == ([pid] if alive else [])
        assert file.exists() == alive
    file.write_text(json.dumps({**vars(running), "pid": child.pid, "created": created}))
    child.kill()
    child.wait()
    assert state.services() == []
    file.write_text("no JSON")
    assert state.on_port(8390) is None
    assert not file.exists()


def test_services_of_another_machine_with_the_same_home_are_left_alone(monkeypatch):
    running = state.write("127.0.0.1", 8390)
    other = state.folder() / f"{socket.gethostname()}-2-8390.json"
    other.write_text(json.dumps({**vars(running), "pid": 2**22 - 1}))
    assert state.services() == [running]
    assert other.exists()


@pytest.mark.slow
def test_stop_ends_a_service_and_what_it_started_where_the_kernel_refuses_to_wait(monkeypatch):
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        service = psutil.Process(process.pid)
        while not (below := service.children()):
            time.sleep(0.01)
        running = replace(state.write("127.0.0.1", 8391), pid=process.pid, created=service.create_time())

        def refused(pid: int, flags: int = 0) -> int:
            if pid == os.getpid():  # as psutil tries whether there is such a call
                return os.open(os.devnull, os.O_RDONLY)
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "pidfd_open", refused)
        assert state.alive(running)
        assert state.stop(running, seconds=5.0)
        assert not state.alive(running)
        until = time.monotonic() + 30
        while state._left(below, 0.0) and time.monotonic() < until:  # init takes killed ones away when it comes to it
            time.sleep(0.05)
        assert state._left(below, 0.0) == []


def test_of_several_services_the_port_says_which(monkeypatch):
    several = [replace(state.write("127.0.0.1", port), url=f"http://127.0.0.1:{port}") for port in (9, 10)]
    monkeypatch.setattr(state, "services", lambda: several)
    for word in ("status", "stop"):
        assert serve(word).stderr.endswith("http://127.0.0.1:9, http://127.0.0.1:10; say which one by --port\n")
    assert "no service answers at http://127.0.0.1:10" in serve("status", "--port", "10").stderr


STARTING = """#!/bin/sh
echo "$@" > "$SEEN"
echo waiting; sleep 0.6; echo 'the service starts: 1 of 3 replicas ready, 0 s so far'; sleep 0.8
echo '%s'; exit %d
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """In place of a service: a program that says a line and ends with a code; returns its words."""

    def made(line: str, code: int) -> Path:
        program = tmp_path / "program"
        program.write_text(STARTING % (line, code))
        program.chmod(0o755)
        monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
        monkeypatch.setattr("mathinterp.cli.serve.sys.executable", str(program))
        monkeypatch.setattr("mathinterp.cli.waiting.LINE_SECONDS", 0.5)
        return tmp_path / "seen"

    return made


def started(*words: str):
    return CliRunner().invoke(main, [*words, "serve", "start", "--port", "0", "--experiment", "tests.toy_scan:ToyScan"])


@pytest.mark.slow
def test_a_start_says_how_far_it_is_and_where_its_log_is(fake):
    seen = fake("mathinterp: cannot", 2)
    done = started()
    (log,) = {line.rpartition("its log is ")[2] for line in done.stderr.splitlines()[:-1]}
    told = [line.removesuffix(f"; its log is {log}") for line in done.stderr.splitlines()]
    assert told[0] == "the service starts: 0 s so far"
    assert told[-2] == "the service starts: 1 of 3 replicas ready, 1 s so far"
    assert told[-1] == "mathinterp: cannot"
    assert Path(log).parent == state.folder()
    assert not Path(log).exists()
    assert {"--quiet", "--verbose", "--log-format"}.isdisjoint(seen.read_text().split())
    assert "--experiment tests.toy_scan:ToyScan" in seen.read_text()


@pytest.mark.slow
def test_a_quiet_start_says_nothing_and_passes_it_on(fake):
    seen = fake("mathinterp: cannot", 2)
    assert started("-q").stderr == "mathinterp: cannot\n"
    assert "--quiet" in seen.read_text().split()
    assert started("-v").exit_code == 2
    assert "--verbose" in seen.read_text().split()


@pytest.mark.slow
def test_a_start_in_json_says_everything_in_json(fake):
    seen = fake(logs.line_of("mathinterp: cannot"), 2)
    done = started("--log-format", "json")
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert (said[-2]["replicas_ready"], said[-2]["replicas"]) == (1, 3)
    assert said[-2]["log"].endswith(".log")
    assert said[-1]["message"] == "mathinterp: cannot"
    assert "--log-format json" in seen.read_text()


def test_more_replicas_than_a_local_ray_has_room_for_are_refused(monkeypatch):
    monkeypatch.setattr("mathinterp.service.serve.local_gpus", lambda: 2)
    monkeypatch.setattr("mathinterp.service.serve.machine_cores", lambda: 4)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=7_900_000_000))
    for gpus, most, each in ((0, 7, "1 GB of free memory"), (1, 2, "1 GPU"), (0.5, 4, "0.5 GPUs"), (2, 1, "2 GPUs")):
        _check_room(Settings(replicas=most), gpus)
        _check_room(Settings(), gpus)
        with pytest.raises(UserError, match=f"`replicas` {most + 1}: with {each} for each .* has room for {most}$"):
            _check_room(Settings(replicas=most + 1), gpus)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    _check_room(Settings(replicas=4), 0)  # one for each core has room wherever mathinterp has


@pytest.mark.parametrize(
    ("settings", "said"), [(Settings(replicas=5), "room for 4"), (Settings(gpus_per_replica=3.0), "the most is 2")]
)
def test_what_this_machine_cannot_do_is_said_before_ray_starts_and_of_a_cluster_when_it_is_known(
    monkeypatch, settings, said
):
    for module in (ray_cluster, serve_module):
        monkeypatch.setattr(module, "local_gpus", lambda: 4 if settings.replicas else 2)

    def connect(address):
        raise UserError(f"connected to {address}")

    monkeypatch.setattr(ray_cluster, "connection", connect)
    for address in (None, "local"):
        with pytest.raises(UserError, match=said), ExitStack() as stack:
            _processes(replace(settings, address=address), stack)
    with pytest.raises(UserError, match="connected to auto"), ExitStack() as stack:
        _processes(replace(settings, address="auto"), stack)  # nodes may join


def test_a_service_says_where_it_is_as_the_log_is_said(monkeypatch):
    router = SimpleNamespace(slots=2, until_ready=lambda tell: tell(0), until_ended=lambda: None)
    here = SimpleNamespace(router=router, host="127.0.0.1", port=8399)
    monkeypatch.setattr("mathinterp.service.serve.serving", lambda settings: nullcontext(here))
    done = CliRunner().invoke(main, ["--log-format", "json", "serve", "start", "--foreground", "--port", "0"])
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert first["message"] == "the service starts: 0 of 2 replicas ready, 0 s so far"
    assert (second["message"], second["url"]) == ("serving at http://127.0.0.1:8399", "http://127.0.0.1:8399")


@pytest.mark.parametrize("fails", [False, True])
def test_a_service_that_starts_is_known_but_not_ready(monkeypatch, fails):
    known = []

    def until_ready(tell):
        known.append(state.on_port(8399))
        if fails:
            raise UserError("no replica can start")

    router = SimpleNamespace(slots=1, until_ready=until_ready, until_ended=lambda: known.append(state.on_port(8399)))
    here = SimpleNamespace(router=router, host="127.0.0.1", port=8399)
    monkeypatch.setattr("mathinterp.service.serve.serving", lambda settings: nullcontext(here))
    assert serve("start", "--foreground", "--port", "0").exit_code == (2 if fails else 0)
    assert [each.ready for each in known] == ([False] if fails else [False, True])
    assert {each.pid for each in known} == {os.getpid()}
    assert state.services() == []


# ---- on Ray ----


@pytest.mark.ray
def test_what_ray_says_in_a_service_is_logged(capsys, caplog):
    with serving(Settings(port=0, replicas=1)), caplog.at_level(logging.INFO, "mathinterp"):
        print("\x1b[33m(raylet)\x1b[0m a node died")
    assert "(raylet) a node died" in caplog.messages
    assert "a node died" not in capsys.readouterr().out


@pytest.mark.ray
def test_too_many_replicas_are_refused_in_one_line():
    done = serve("start", "--foreground", "--port", "0", "--replicas", "999")
    (line,) = done.stderr.splitlines()
    assert line.startswith("mathinterp: --replicas 999: with 1 GB of free memory for each this machine has room for ")
    assert done.exit_code == 2


@pytest.mark.ray
@pytest.mark.own_ray
@pytest.mark.timeout(200)
def test_an_interrupted_start_leaves_no_process_and_no_log(tmp_path):
    words = [sys.executable, "-m", "mathinterp", "serve", "start", "--port", "0", "--replicas", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as command:
        assert "its log is" in command.stderr.readline()
        until, me = time.monotonic() + 100, psutil.Process(command.pid)
        while not (found := list(state.folder().glob("*.log"))) or "replicas ready" not in found[0].read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        starting = json.loads(serve("status", "--json").stdout)
        assert [row["state"] for row in starting["replicas"]] in (["starting"], ["ready"])
        below = me.children(recursive=True)
        command.send_signal(signal.SIGINT)
        said = command.stderr.read().splitlines()
    left = state._left(below, 20.0)
    state._kill(left)
    assert left == []
    assert said[-1].strip() == "mathinterp: interrupted; the service was not started"
    assert command.returncode == 130
    assert len(below) > 2
    assert list(state.folder().iterdir()) == []


@pytest.mark.ray
@pytest.mark.own_ray
@pytest.mark.timeout(400)
def test_a_service_from_start_to_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    toys = ["--experiment", "tests.toy_scan:ToyScan", "--hangs-after", "12"]
    started = serve("start", "--port", "0", "--replicas", "2", *toys)
    assert started.exit_code == 0, started.output
    (running,) = state.services()
    try:
        assert running.url in started.output
        below = psutil.Process(running.pid).children(recursive=True)
        assert below
        again = serve("start", "--port", str(running.port))
        assert again.exit_code == 2
        assert f"a service runs already at {running.url}" in again.stderr
        two_users_and_a_kill(running.url, tmp_path)
        a_deadlock(running.url, tmp_path)
    finally:
        stopped = serve("stop")
    assert stopped.exit_code == 0
    assert "was stopped" in stopped.output
    assert state.services() == []
    assert not state.alive(running)
    assert psutil.wait_procs(below, timeout=20)[1] == []


def two_users_and_a_kill(url: str, tmp_path: Path) -> None:
    """Two users scan at once, a replica is killed in a call of one: both have the rows of a local run."""
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    scans = {"ada": ToyScan(16, 0.2, str(notebook)), "bob": mi.experiments.Heads()}
    for user, scan in (("ada", ToyScan(16)), ("bob", scans["bob"])):
        run_scan(scan, ModelSpec(TINY), PROMPTS, str(tmp_path / f"here-{user}"), progress=False)
    made = {}

    def ask(user: str) -> None:
        service = mi.connect(url, user=user)
        made[user] = service.run(scans[user], TINY, PROMPTS, store=str(tmp_path / user), progress=False)

    threads = [threading.Thread(target=ask, args=(user,)) for user in scans]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120
    while len(list((tmp_path / "ada").glob("mlp_scan/run_id=*/*.parquet"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    killed = next(row for row in mi.connect(url).status()["replicas"] if row["state"] == "busy")
    os.kill(killed["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(200)
    for user, table in (("ada", "mlp_scan"), ("bob", "head_scan")):
        assert made[user].complete
        here, there = (
            Store(tmp_path / place).arrow(f"SELECT * FROM {table} ORDER BY ALL") for place in (f"here-{user}", user)
        )
        assert there.equals(here)
    status = mi.connect(url).status()
    assert status["replaced"] == 1
    assert killed["pid"] not in [row["pid"] for row in status["replicas"] if row["state"] != "starting"]
    assert status["users"] == []


def a_deadlock(url: str, tmp_path: Path) -> None:
    """A replica in which nothing moves is replaced, and its shard is computed by another one; a busy one is not."""
    notebook = tmp_path / "faults"
    notebook.mkdir()
    scan, before = ToyScan(5, 0.1, str(notebook), once={1: "deadlock", 2: "busy"}), mi.connect(url).status()["replaced"]
    run = mi.connect(url).run(scan, TINY, PROMPTS, store=str(tmp_path / "hung"), progress=False)
    assert run.complete
    run_scan(ToyScan(5), ModelSpec(TINY), PROMPTS, str(tmp_path / "unhung"), progress=False)
    here, there = (Store(tmp_path / place).arrow("SELECT * FROM mlp_scan ORDER BY ALL") for place in ("unhung", "hung"))
    assert there.equals(here)
    assert mi.connect(url).status()["replaced"] == before + 1
