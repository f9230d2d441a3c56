"""What must not happen to a service and those who ask it: questions forgotten under way, leaks, mixed versions."""

import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import urllib3

import mathinterp as mi
from mathinterp.cluster import vital
from mathinterp.cluster.events import Lost, Ready
from mathinterp.cluster.replica import loading_turn
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard
from mathinterp.experiments.heads import Heads
from mathinterp.service import front
from mathinterp.service.place import ServiceWorkers
from mathinterp.service.requests import ReplicaGone, Requests
from tests.service_case import served
from tests.toy_scan import ToyScan

TINY = "random:llama-tiny"
PROMPTS = mi.prompts([(f"{a} plus 5 is", str(a + 5)) for a in (3, 14, 62, 71)])


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def hosted() -> Iterator[tuple[str, Any]]:
    with served(1) as (url, router, workers):
        router.until_ready()
        yield url, workers.hosts[0]


@pytest.mark.slow
def test_a_question_that_is_being_answered_is_not_idle(hosted, tmp_path, monkeypatch):
    """A shard may take longer than it takes to forget a question that nobody asks about."""
    monkeypatch.setattr(front, "IDLE_SECONDS", 0.5)
    url, _ = hosted
    ended = threading.Event()

    def look() -> None:  # which is when questions are forgotten
        service = mi.connect(url)
        while not ended.wait(0.02):
            service.status()

    looking = threading.Thread(target=look)
    looking.start()
    run = mi.connect(url).run(ToyScan(1, seconds=1.5), TINY, PROMPTS, store=str(tmp_path), progress=False)
    ended.set()
    looking.join()
    assert run.complete
    assert run.ended.replicas_lost == 0


def test_a_question_that_cannot_be_prepared_leaves_nothing_behind(hosted, tmp_path, monkeypatch):
    url, host = hosted
    monkeypatch.setattr("mathinterp.service.place.encode_prompts", lambda prompts: [])
    with pytest.raises(UserError, match="is not the driver's"):
        mi.connect(url).run(Heads(), TINY, PROMPTS, store=str(tmp_path), progress=False)
    until(lambda: not host._sessions)


@pytest.mark.slow
def test_a_process_says_that_nothing_moves_also_while_it_prepares_a_question(hosted, tmp_path, monkeypatch):
    monkeypatch.setattr(vital, "LOOK_SECONDS", 0.2)
    url, host = hosted
    ended = threading.Event()
    prepare = Heads.prepare

    def hang(*given: Any) -> Any:
        assert ended.wait(20)
        return prepare(*given)

    monkeypatch.setattr(Heads, "prepare", hang)
    ask = threading.Thread(
        target=mi.connect(url).run, args=(Heads(), TINY, PROMPTS), kwargs={"store": str(tmp_path), "progress": False}
    )
    ask.start()
    try:
        until(lambda: host.pulse()[1] > 1)
    finally:
        ended.set()
        ask.join()
    assert host.pulse() == (0.0, 0.0)


@pytest.mark.slow
def test_who_waits_for_his_turn_to_load_does_not_stand_still(tmp_path, monkeypatch):
    monkeypatch.setattr(vital, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = vital.Vital()

    def wait() -> None:
        seen.begin()
        with loading_turn(1):
            seen.end()

    waiting = threading.Thread(target=wait)
    with loading_turn(1):
        waiting.start()
        found = []
        for _ in range(6):
            time.sleep(0.35)
            found.append(seen.still())
    waiting.join()
    assert found == [0.0] * 6


def test_what_a_process_has_is_known_after_a_question_that_failed(hosted, tmp_path, monkeypatch):
    def fail(*_: Any) -> Any:
        raise UserError("a fault")

    monkeypatch.setattr(Heads, "prepare", fail)
    url, host = hosted
    with pytest.raises(UserError, match="a fault"):
        mi.connect(url).run(Heads(), TINY, PROMPTS, store=str(tmp_path), progress=False)
    assert [row["model"] for row in mi.connect(url).status()["models"]] == [TINY]
    again = pickle.loads(pickle.dumps(failed(host)))
    assert [row["label"] for row in again.there.held] == [TINY]


def failed(host: Any) -> BaseException:
    """What a call raises that knows nobody's question."""
    try:
        host.run(Shard("call", 0, {"kind": "rows", "session": "nobody's", "shard": {}}))
    except RuntimeError as error:
        return error
    raise AssertionError("it did not fail")


def test_a_question_whose_client_is_gone_while_it_is_prepared_leaves_nothing_behind(tmp_path):
    with served(1) as (url, router, workers):
        router.until_ready()
        its_client_goes(url, router, workers.hosts[0], tmp_path)


def its_client_goes(url: str, router: Any, host: Any, tmp_path: Any) -> None:
    held, prepare = threading.Event(), host._prepare

    def slowly(**asked: Any) -> Any:
        assert held.wait(20)
        return prepare(**asked)

    host._prepare = slowly
    service = mi.connect(url)
    ask = ServiceWorkers(service.requests, job(tmp_path), {"name": TINY, "dtype": "float32"}, 1)._ask
    session = service.requests.json("POST", "/v1/sessions", ask)["session"]
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        head = f"POST /v1/sessions/{session}/replicas HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        until(lambda: router._slots[0].current)
    until(lambda: router._slots[0].current.future.cancelled())
    held.set()
    service.ablate(TINY, PROMPTS, heads=["0.1"])  # behind what was begun
    until(lambda: not host._sessions)


def test_a_question_that_nobody_asks_about_any_more_is_forgotten_whatever_is_asked_next(hosted, tmp_path, monkeypatch):
    monkeypatch.setattr(front, "IDLE_SECONDS", 0.2)
    url, host = hosted
    service = mi.connect(url)
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "forget", lambda *_: None)  # as of a client that was killed
        service.run(ToyScan(1), TINY, PROMPTS, store=str(tmp_path), progress=False)
    assert len(host._sessions) == 1
    time.sleep(0.3)
    service.ablate(TINY, PROMPTS, heads=["0.1"])
    until(lambda: not host._sessions, 5)


def test_a_shard_is_computed_by_a_replica_of_its_question_and_from_no_store(hosted, tmp_path, monkeypatch):
    url, host = hosted
    service = mi.connect(url)
    with monkeypatch.context() as patch:
        patch.setattr(Requests, "forget", lambda *_: None)
        service.run(ToyScan(1), TINY, PROMPTS, store=str(tmp_path), progress=False)
    (session,) = host._sessions
    shard = {"table": "mlp_scan", "index": 0, "work": {"layer": 0}, "cost": 1.0}
    facts, _ = service.requests.tables(f"/v1/sessions/{session}/replicas/0/shards", shard)
    assert facts["seconds"] >= 0
    for number in (1, 9):
        with pytest.raises(ReplicaGone, match=f"replica {number} does not know this question"):
            service.requests.tables(f"/v1/sessions/{session}/replicas/{number}/shards", shard)
    shard["work"] = {"stored": [str(tmp_path), "run", "mlp_scan", 0]}
    with pytest.raises(UserError, match="the service reads no store"):
        service.requests.tables(f"/v1/sessions/{session}/replicas/0/shards", shard)


def test_a_question_larger_than_the_service_reads_says_what_to_do(hosted, monkeypatch):
    monkeypatch.setattr(front, "MOST_BYTES", 2**20)
    with served(1) as (url, _, _), pytest.raises(UserError, match=r"at most 1 MB .*; ask about fewer prompts"):
        Requests(url).json("POST", "/v1/sessions", {"prompts": "a" * 2**22})


def job(store: Any) -> Any:
    scan = Heads()
    return SimpleNamespace(
        store_url=str(store), scan=scan, model_fingerprint="0" * 16, prompts=(), prompts_fingerprint="0" * 16,
        metadata={"parameters": scan.identity()},
    )  # fmt: skip


def test_an_answer_may_name_any_number_of_units(hosted):
    """More than a header of HTTP has room for."""
    url, _ = hosted
    neurons = [f"{layer}.{neuron}" for layer in range(2) for neuron in range(64)]
    service = mi.connect(url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("http.client._MAXLINE", 1000)
        answered = service.ablate(TINY, PROMPTS, neurons=neurons)
    assert len(answered.what) > 1000
    assert answered.what == mi.ablate(TINY, PROMPTS, neurons=neurons).what


def test_tensors_of_bfloat16_are_sent(hosted):
    url, _ = hosted
    vector = torch.linspace(-1, 1, 16, dtype=torch.bfloat16)
    there = mi.connect(url).ablate(TINY, PROMPTS, heads=["0.1"], value=vector)
    here = mi.ablate(TINY, PROMPTS, heads=["0.1"], value=vector)
    assert np.array_equal(there.rows.to_numpy(), here.rows.to_numpy())


@pytest.mark.parametrize(("name", "other"), [("mathinterp", "0.0.1"), ("protocol", 0), ("result_format", -1)])
def test_a_service_whose_rows_may_mean_something_else_is_refused(hosted, monkeypatch, name, other):
    url, _ = hosted
    asked = Requests.json
    monkeypatch.setattr(Requests, "json", lambda *given, **more: {**asked(*given, **more), name: other})
    with pytest.raises(UserError, match="is no service of this version of mathinterp"):
        mi.connect(url)


def test_a_service_that_was_started_anew_in_another_version_is_not_asked_for_the_rest(hosted, tmp_path, monkeypatch):
    service = mi.connect(hosted[0])
    cells = service.stream(ToyScan(30, seconds=0.05), TINY, PROMPTS, store=str(tmp_path))
    next(cells)
    monkeypatch.setattr(front, "ABOUT", {**front.ABOUT, "result_format": -1})
    with served(1) as (newer, router, workers):
        router.until_ready()
        service.requests.url = newer
        with pytest.raises(UserError, match="is no service of this version of mathinterp"):
            for _ in cells:
                pass
        with pytest.raises(UserError, match="is no service of this version of mathinterp"):
            service.ablate(TINY, PROMPTS, heads=["0.1"])
        assert not workers.given


@pytest.mark.parametrize("spec", [{}, {"name": 5}, {"name": ""}, {"name": TINY, "adapter": ["a"]}])
def test_a_model_that_is_not_named_is_one_line(hosted, spec):
    url, _ = hosted
    body = {"spec": spec, "model_fingerprint": "", "prompts": [], "arguments": {}}
    for path in ("/v1/sessions", "/v1/ablate"):
        answer = urllib3.request("POST", url + path, json=body, retries=False)
        assert answer.status == 400
        assert answer.json()["error"] == "the request cannot be read: its spec names no model"


class Scripted:
    """A service that answers as it is told."""

    def __init__(self) -> None:
        self.prepared: list[threading.Event] = []
        self.sessions = 0
        self.gone = threading.Event()

    def json(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> dict[str, Any]:
        if path == "/v1/sessions":
            self.sessions += 1
            return {"session": f"s{self.sessions}"}
        if path.startswith("/v1/sessions/s1/"):
            gate = threading.Event()
            self.prepared.append(gate)
            assert gate.wait(20)
            raise ReplicaGone("the service does not know this question any more", 404)
        return {"replica": 0, "notes": {}}

    def check(self, seconds: float) -> None:
        pass

    def tables(self, path: str, body: Any) -> Any:
        raise AssertionError(path)

    def forget(self, path: str) -> None:
        pass


def test_a_service_that_was_started_anew_is_asked_once(tmp_path):
    """Two replicas hear at different times that their question is forgotten; it is opened once more, not twice."""
    service: Any = Scripted()
    workers = ServiceWorkers(service, job(tmp_path), {}, 2)
    workers.start(0)
    workers.start(1)
    until(lambda: len(service.prepared) == 2)
    for gate in service.prepared:
        gate.set()
        until(lambda: any(isinstance(event, Lost) for event in workers.wait(1.0)))
        workers.start(0)
        until(lambda: any(isinstance(event, Ready) for event in workers.wait(1.0)))
    workers.close()
    assert service.sessions == 2


class OpensSlowly(Scripted):
    """It takes its time to open a question."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.asked, self.forgotten = threading.Event(), list[str](), list[str]()

    def json(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> dict[str, Any]:
        self.asked.append(path)
        assert self.open.wait(20)
        self.sessions = 1
        return super().json(method, path, body, seconds)

    def forget(self, path: str) -> None:
        self.forgotten.append(path)


def test_a_run_that_ends_while_its_question_is_opened_leaves_none_behind(tmp_path):
    """Ctrl-C right at the beginning: nothing is prepared for nobody."""
    service: Any = OpensSlowly()
    workers = ServiceWorkers(service, job(tmp_path), {}, 2)
    workers.start(0)
    workers.start(1)
    until(lambda: service.asked)
    workers.close()
    service.open.set()
    until(lambda: service.forgotten)
    assert not [event for event in workers.wait(0.3) if isinstance(event, Ready)]
    assert (service.asked, service.forgotten) == (["/v1/sessions"], ["/v1/sessions/s2"])


def test_what_was_asked_of_a_lost_replica_says_nothing_about_the_next_one(tmp_path, monkeypatch):
    """A request that had not begun when its replica was lost."""
    service: Any = Scripted()
    service.sessions = 1
    workers = ServiceWorkers(service, job(tmp_path), {}, 1)
    late: list[threading.Thread] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: late.append(thread))
        workers.submit(0, Shard("head_scan", 0, {}))
    workers.start(0)
    late[0].start()
    late[0].join()
    seen: list[Any] = []
    until(lambda: seen.extend(workers.wait(0.1)) or seen)
    workers.close()
    assert [type(event) for event in (*seen, *workers.wait(0.1))] == [Ready]


STOPPED = """
import os, signal, sys, time
import mathinterp as mi
from mathinterp.service import place
from tests.toy_scan import ToyScan

place.QUIET_SECONDS = place.THERE_SECONDS = 0.5
prompts = mi.prompts([("3 plus 5 is", "8")])
cells = mi.connect(sys.argv[1]).stream(ToyScan(50, seconds=0.1), "random:llama-tiny", prompts, store=sys.argv[2])
next(cells)
os.kill(int(sys.argv[3]), signal.SIGSTOP)
try:
    for _ in cells:
        pass
except mi.errors.Unfinished as error:
    print(error)
"""
SERVING = """
import threading
from tests.service_case import served
import tests.toy_scan
from mathinterp.experiments import registry

registry.add(tests.toy_scan.ToyScan)
with served(1) as (url, router, _):
    router.until_ready()
    print(url, flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_a_service_that_stands_still_ends_the_run_and_the_process(tmp_path):
    """It is there, its system acknowledges what it is sent, and nothing is ever answered."""
    with subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            url = service.stdout.readline().strip()
            words = [sys.executable, "-c", STOPPED, url, str(tmp_path), str(service.pid)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=100)
        finally:
            service.kill()
    assert "does not answer any more" in done.stdout, done.stderr
    assert done.returncode == 0
