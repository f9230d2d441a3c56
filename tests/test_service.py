"""A service asked over HTTP, in one process without Ray: rows, errors, turns, and who may ask."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
import urllib3
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cluster.progress import ScanProgress
from mathinterp.cluster.run import run_scan
from mathinterp.connected import Service
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.models.catalog import ModelSpec
from mathinterp.service import listening
from mathinterp.service.shelf import Limits
from mathinterp.store import Store
from tests.service_case import served
from tests.tiny import tiny_model, tiny_tokenizer
from tests.toy_scan import ToyScan

TINY = "random:llama-tiny"
PROMPTS = mi.prompts([(f"{a} plus 5 is", str(a + 5)) for a in (3, 14, 62, 71)])
TOKEN = "a token of the tests"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with served(2) as (url, _, _):
        yield mi.connect(url, user="ada")


NESTED = (
    b'{"experiment": {"~": "mathinterp.experiments.heads:Heads", "fields": {"layers": '
    + b"[" * 600
    + b"]" * 600
    + b"}}}"
)


def rows(store: Path, table: str) -> Any:
    return Store(store).arrow(f"SELECT * FROM {table} ORDER BY ALL")


@pytest.mark.slow
def test_rows_run_id_and_record_are_those_of_a_local_run(service, tmp_path):
    scan = Heads(layers="0-2")
    here = mi.run(scan, TINY, PROMPTS, store=str(tmp_path / "here"), progress=False)
    there = service.run(scan, TINY, PROMPTS, store=str(tmp_path / "there"), progress=False)
    assert there.complete
    assert there.id == here.id
    for table in ("head_scan", "baseline", "prompts", "answer_tokens"):
        assert rows(tmp_path / "there", table).equals(rows(tmp_path / "here", table))
        assert rows(tmp_path / "there", table).num_rows > 0
    records = [Store(tmp_path / place).record(here.id) for place in ("here", "there")]
    for told in records:
        assert {"noise_floor", "engine", "alone_deviation"} <= told["notes"].keys()
    assert records[0]["notes"]["noise_floor"] == records[1]["notes"]["noise_floor"]
    assert records[0]["versions"] == records[1]["versions"]
    assert there.sql("SELECT count(*) AS n FROM head_effects WHERE run_id = $run").n.item() > 0


@pytest.mark.slow
def test_a_run_is_resumed_and_nothing_is_computed_twice(service, tmp_path):
    scan, store = Mlps(), str(tmp_path)
    first = service.run(scan, TINY, PROMPTS, store=store, progress=False)
    (file,) = list(tmp_path.glob("mlp_scan/run_id=*/shard-00000.parquet"))
    content = rows(tmp_path, "mlp_scan")
    file.unlink()
    again = service.run(scan, TINY, PROMPTS, store=store, progress=False)
    assert (again.id, again.ended.done, again.ended.reused) == (first.id, 1, first.ended.done - 1)
    assert rows(tmp_path, "mlp_scan").equals(content)
    assert service.run(scan, TINY, PROMPTS, store=store, progress=False).ended.done == 0


@pytest.mark.slow
def test_a_run_says_that_it_waits_for_the_service(service, tmp_path, monkeypatch):
    said = []

    class Told(ScanProgress):
        def __enter__(self) -> Self:
            said.append(self.describe(0))
            return super().__enter__()

    monkeypatch.setattr("mathinterp.cluster.run.ScanProgress", Told)
    for where, asked in (("there", service), ("here", mi)):
        asked.run(Mlps(), TINY, PROMPTS, store=str(tmp_path / where))
    assert said == [
        "waiting for the service, which may have a model to load or others to serve, 0 s so far, 0 of 1 replicas ready",
        "waiting for replicas to load, 0 s so far, 0 of 1 replicas ready",
    ]


def test_cells_come_as_they_are_done_and_are_in_the_store_by_then(service, tmp_path):
    stream = service.stream(Heads(), TINY, PROMPTS, store=str(tmp_path))
    seen = {}
    while True:
        try:
            cell = next(stream)
        except StopIteration as end:
            run = end.value
            break
        table, _, index = cell.shard.partition("/")
        assert list(tmp_path.glob(f"{table}/run_id=*/shard-{index}.parquet"))
        seen[cell.shard] = cell.table
    assert set(seen) == set(Store(tmp_path).record(run.id)["shards"])
    streamed = sum(table.num_rows for key, table in seen.items() if key.startswith("head_scan/"))
    assert streamed == rows(tmp_path, "head_scan").num_rows


@pytest.mark.slow
def test_a_stream_that_is_closed_goes_on_from_there(service, tmp_path):
    scan = ToyScan(8, seconds=0.05)
    stream = service.stream(scan, TINY, PROMPTS, store=str(tmp_path))
    first = next(stream)
    stream.close()
    done = len(list(tmp_path.glob("mlp_scan/run_id=*/*.parquet")))
    assert 1 <= done < 8
    rest = [cell.shard for cell in service.stream(scan, TINY, PROMPTS, store=str(tmp_path))]
    assert first.shard not in rest
    assert len(rest) == 8 - done


@pytest.mark.parametrize(
    "asked",
    [
        {"heads": ["0.1", (1, 2)]},
        {"heads": "0.1", "value": "dataset_mean"},
        {"mlps": [1], "neurons": ["2.3"], "value": 0.5, "tokens": ["first"]},
        {"heads": ["0.1"], "value": np.linspace(-1, 1, 16)},
        {"heads": ["0.1"], "value": mi.prompts([(f"{a} minus 5 is", "9") for a in (3, 14, 62, 71)])},
    ],
    ids=["zero", "mean", "part", "vector", "prompts"],
)
def test_ablate_answers_as_it_does_here(service, asked):
    here, there = mi.ablate(TINY, PROMPTS, **asked), service.ablate(TINY, PROMPTS, **asked)
    assert there.what == here.what
    pd.testing.assert_frame_equal(there.rows, here.rows, check_exact=True)
    pd.testing.assert_frame_equal(there.effects, here.effects, check_exact=True)
    assert there.drop == here.drop


@pytest.mark.slow
def test_adaptive_scans_and_those_that_take_over_rows(service, tmp_path):
    """Shards that follow from rows are asked for by the client, rows of another run are taken over there."""
    prompts = mi.prompts("two_digit", limit=64)
    for place, run in (("here", mi.run), ("there", service.run)):
        store = str(tmp_path / place)
        decided = run(Heads(layers="0", decide=5), TINY, prompts, store=store, progress=False)
        full = run(Heads(layers="0", reuse=decided.id), TINY, prompts, store=store, progress=False)
        assert full.complete
    for table in ("head_scan", "baseline"):
        assert rows(tmp_path / "there", table).equals(rows(tmp_path / "here", table))


@pytest.mark.slow
def test_two_users_at_once_and_a_question_that_overtakes_a_long_scan(tmp_path):
    with served(1) as (url, _, _):
        ada, bob = mi.connect(url, user="ada"), mi.connect(url, user="bob")
        ended: list[tuple[str, float]] = []

        def scan() -> None:
            ada.run(ToyScan(40, seconds=0.1), TINY, PROMPTS, store=str(tmp_path / "ada"), progress=False)
            ended.append(("ada", time.monotonic()))

        thread = threading.Thread(target=scan)
        thread.start()
        while len(list(tmp_path.glob("ada/mlp_scan/run_id=*/*.parquet"))) < 2:
            time.sleep(0.01)
        users = {row["user"]: row for row in ada.status()["users"]}
        bob.run(Heads(heads="0.1"), TINY, PROMPTS, store=str(tmp_path / "bob"), progress=False)
        ended.append(("bob", time.monotonic()))
        thread.join()
        assert [name for name, _ in ended] == ["bob", "ada"]
        assert users["ada"]["questions"] == 1
        assert users["ada"]["running"] + users["ada"]["waiting"] >= 1
        assert rows(tmp_path / "ada", "mlp_scan").num_rows == 40 * rows(tmp_path / "bob", "baseline").num_rows


@pytest.mark.slow
def test_a_replica_that_dies_under_a_shard_costs_no_row(tmp_path):
    scan = ToyScan(12, seconds=0.05)
    run_scan(ToyScan(12), ModelSpec(TINY), PROMPTS, str(tmp_path / "whole"), progress=False)
    with served(2) as (url, _, workers):
        stream = mi.connect(url).stream(scan, TINY, PROMPTS, store=str(tmp_path / "store"))
        next(stream)
        workers.die(0)
        for _ in stream:
            pass
        assert mi.connect(url).status()["replaced"] == 1
    assert rows(tmp_path / "store", "mlp_scan").equals(rows(tmp_path / "whole", "mlp_scan"))


def test_an_exception_in_a_shard_is_told_as_here(service, tmp_path):
    scan = ToyScan(3, always={1: "nan", 2: "raise"})
    run = service.run(scan, TINY, PROMPTS, store=str(tmp_path), progress=False)
    told = {failure.key: failure.error for failure in run.ended.failed}
    assert told["mlp_scan/00002"] == "RuntimeError: layer 2 is broken"
    assert told["mlp_scan/00001"].startswith("ArithmeticError: shard mlp_scan/00001: logprob is nan")
    assert "in run" in Store(tmp_path).record(run.id)["errors"]["mlp_scan/00002"]  # the service's traceback
    assert rows(tmp_path, "mlp_scan").num_rows > 0


def test_where_a_shard_breaks_every_card_is_told_as_here(service, tmp_path):
    run = service.run(ToyScan(3, always={2: "card lost"}), TINY, PROMPTS, store=str(tmp_path), progress=False)
    (failed,) = run.ended.failed
    assert (failed.key, failed.attempts, failed.losses, run.ended.done) == ("mlp_scan/00002", 0, 5, 2)
    assert failed.error == "its replica died 5 times: a replica died: its GPU gives nothing but errors"
    assert "in run" in Store(tmp_path).record(run.id)["errors"]["mlp_scan/00002"]  # the service's traceback
    while {row["state"] for row in service.status()["replicas"]} != {"ready"}:  # the last one prepares in vain
        time.sleep(0.01)


def test_what_cannot_be_asked_is_one_line_before_anything_is_written(service, tmp_path):
    wrapped = mi.wrap(tiny_model("llama"), tiny_tokenizer(), name="mine")
    store = str(tmp_path / "new")
    for model in (wrapped, "nosuch/folder/x", mi.load(TINY, trust_remote_code=True)):
        with pytest.raises(UserError) as told:
            service.run(Heads(), model, PROMPTS, store=store)
        assert "\n" not in str(told.value)
    with pytest.raises(UserError, match="'mine' is an object in this process's memory"):
        service.ablate(wrapped, PROMPTS, heads=["0.1"])
    with pytest.raises(UserError, match="layer 9 does not exist"):
        service.ablate(TINY, PROMPTS, heads=["9.1"])
    with pytest.raises(UserError, match="holds a function"):
        service.ablate(TINY, PROMPTS, heads=["0.1"], value=lambda site, layer: None)
    assert not Path(store).exists()


def test_an_experiment_that_the_service_has_not_is_refused_before_anything_is_written(service, tmp_path, monkeypatch):
    monkeypatch.setattr("mathinterp.service.codec._known", lambda kind: None)
    with pytest.raises(UserError, match=r"knows no experiment 'tests.toy_scan:ToyScan'.*`experiment` tests"):
        service.run(ToyScan(2), TINY, PROMPTS, store=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_model_that_the_service_finds_otherwise_is_refused(service, tmp_path, monkeypatch):
    monkeypatch.setattr("mathinterp.service.place.encode_prompts", lambda prompts: [])
    with pytest.raises(UserError, match=r"prompts on node .* is not the driver's"):
        service.run(Heads(), TINY, PROMPTS, store=str(tmp_path))
    monkeypatch.undo()
    scan = partial(service.run, model=TINY, prompts=PROMPTS, store=str(tmp_path))
    described = service.requests.resolve(ModelSpec(TINY), "cpu")
    other = replace(described, fingerprint="0123456789abcdef")
    monkeypatch.setattr(service.requests, "resolve", lambda *_: other)
    for ask in (lambda: service.ablate(TINY, PROMPTS, heads=["0.1"]), lambda: scan(Heads())):
        with pytest.raises(UserError, match=r"model .* is not the driver's \(fingerprint"):
            ask()
    monkeypatch.undo()
    monkeypatch.setattr(Heads, "parameters", lambda self: {"other": time.time()})
    with pytest.raises(UserError, match="reads the parameters of `heads` otherwise"):
        service.run(Heads(), TINY, PROMPTS, store=str(tmp_path))


def test_a_service_with_little_room_serves_several_models(tmp_path):
    with served(1, limits=Limits(card=0, memory=1)) as (url, _, _):
        service, models = mi.connect(url), (TINY, "random:llama-tiny:1")
        for name in (*models, *models):
            service.ablate(name, PROMPTS, heads=["0.1"])
        found = {row["model"]: (row["level"], row["requests"]) for row in service.status()["models"]}
    assert found == {TINY: ("disk", 2), "random:llama-tiny:1": ("memory", 2)}


# ---- who may ask ----


def raw(url: str, method: str = "GET", path: str = "/v1/service", **more: Any) -> tuple[int, dict[str, Any]]:
    answer = urllib3.request(method, url + path, retries=False, **more)
    return answer.status, json.loads(answer.data)


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.delenv("MATHINTERP_SERVICE_TOKEN", raising=False)
    compared = []
    same = listening.hmac.compare_digest
    monkeypatch.setattr(listening.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    with served(1, token=TOKEN) as (url, _, _):
        for token in (None, "another token, as long", TOKEN[:-1], TOKEN + "s", TOKEN.upper()):
            with pytest.raises(UserError, match=f"the service at {url} wants another token; set MATHINTERP_SERVICE"):
                mi.connect(url, token=token)
        assert len(compared) == 5  # in constant time
        assert mi.connect(url, token=TOKEN).status()["queue"] == 0
        assert mi.connect(url, token=f"{TOKEN}\n").status()["queue"] == 0  # as open("token").read() has it
        with pytest.raises(UserError, match="`token` has letters that no token has"):
            mi.connect(url, token="ä" * 20)
        monkeypatch.setenv("MATHINTERP_SERVICE_TOKEN", TOKEN)
        assert repr(mi.connect(url)) == f"<service at {url}, 1 replica on cpu>"


def test_pages_of_a_browser_and_other_names_are_refused(service):
    url = service.requests.url
    assert raw(url)[0] == 200
    assert raw(url, headers={"Host": "evil.example"})[0] == 403
    assert raw(url, headers={"Origin": "http://evil.example"})[0] == 403
    status, told = raw(url, "POST", "/v1/sessions", body=b"{}", headers={"Content-Type": "text/plain"})
    assert (status, told["kind"]) == (415, "user")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/sessions", b"{", "no JSON"),
        ("/v1/sessions", b"[1]", "no JSON object"),
        ("/v1/sessions", b"{}", "no spec"),
        ("/v1/experiments", b'{"experiment": {"~": "os:system", "fields": {}}}', "no experiment 'os:system'"),
        ("/v1/sessions", b'{"spec": {"name": "bundled"}, "experiment": {"~": "os:x"}}', "no experiment 'os:x'"),
        ("/v1/sessions/nosuch/replicas", b"{}", "does not know this question"),
        ("/v1/ablate", b'{"spec": {"name": "bundled", "trust_remote_code": true}}', "runs no code"),
        ("/v1/nosuch", b"{}", "Not Found"),
        ("/v1/ablate", b'{"spec": {"name": "bundled"}, "model_fingerprint": "\\ud800"}', "surrogates not allowed"),
        ("/v1/ablate", b'{"spec": {"name": "\xed\xa0\x80"}}', "no JSON"),
        ("/v1/sessions", b"[" * 100_000, "no JSON"),
        ("/v1/experiments", NESTED, "nested too deep"),
    ],
)
def test_requests_that_are_none_are_one_line(service, path, body, said):
    status, told = raw(service.requests.url, "POST", path, body=body, headers={"Content-Type": "application/json"})
    assert 400 <= status < 500
    assert said in told["error"]
    assert "\n" not in told["error"]


def test_a_body_that_is_not_packed_as_its_header_says_is_refused(service):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, told = raw(service.requests.url, "POST", "/v1/sessions", body=b"{}", headers=headers)
    assert (status, told["kind"]) == (400, "user")


def test_no_service_a_wrong_url_and_a_service_that_ends_meanwhile(tmp_path):
    with pytest.raises(UserError, match=r"no service answers at http://127.0.0.1:9 .* 'mathinterp serve start'"):
        mi.connect("http://127.0.0.1:9")
    for url in ("127.0.0.1:8390", "ftp://x", "http://a:b@127.0.0.1:1", "http://", "http://h:99999", "http://x/y"):
        with pytest.raises(UserError, match="give a URL like"):
            mi.connect(url)
    with served(1) as (url, _, _):
        stream = mi.connect(url).stream(ToyScan(50, seconds=0.1), TINY, PROMPTS, store=str(tmp_path))
        next(stream)
    with pytest.raises(Unfinished):
        for _ in stream:
            pass


def answering(with_bytes: bytes) -> tuple[str, threading.Thread]:
    """A server that answers one request with these bytes, whatever it is, and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(10_000)
            connection.sendall(with_bytes)

    thread = threading.Thread(target=answer)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


def test_what_is_no_service_is_told_in_words_not_as_an_object_of_python():
    for answer, said in (
        (b"", "it closed the connection"),
        (b"\x00\x00\x18\x04\x00\x00\r\n", "what listens there speaks no HTTP"),  # Ray's port, which speaks gRPC
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "it closed the connection"),
    ):
        url, thread = answering(answer)
        with pytest.raises(UserError, match=f"^no service answers at {url} .{said}.; 'mathinterp serve start'"):
            mi.connect(url)
        thread.join()


@pytest.mark.slow
def test_the_command_line_attaches_and_says_what_is_wrong_in_one_line(service, tmp_path):
    run = lambda *words: CliRunner().invoke(main, ["scan", "heads", *words])  # noqa: E731
    words = ["--model", TINY, "--limit", "4", "--store", str(tmp_path), "--json", "-q"]
    told = json.loads(run(*words, "--service", service.requests.url, "--address", "auto").stdout)
    assert (told["shards_done"], told["failed"]) == (told["shards"], [])
    assert Store(tmp_path).rows("SELECT run_id, status FROM runs") == [{"run_id": told["run_id"], "status": "finished"}]
    for more, said in (
        (["--service", "http://127.0.0.1:9"], "no service answers"),
        (["--service", service.requests.url, "--gpus-per-replica", "1"], "--gpus-per-replica is said when the service"),
        (["--service", service.requests.url, "--model", "nosuch"], "nosuch"),
    ):
        done = run(*words, *more)
        assert done.exit_code == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
