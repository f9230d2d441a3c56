"""The served page over HTTP: who is answered, SQL that only reads within limits, what unfinished runs are told as."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from mathinterp.errors import UserError
from mathinterp.report import asking, live
from mathinterp.report.explore import Exploring, explore
from mathinterp.service.listening import is_ours
from mathinterp.store import Store
from tests.small_store import NO_NOISE, fill, open_run, prompt, scores

PROMPTS = [prompt(f"p{number}") for number in range(4)]
IDS = [item.prompt.prompt_id for item in PROMPTS]


def baseline() -> list[dict]:
    return [{"prompt_id": prompt_id} for prompt_id in IDS]


def heads(count: int = 2) -> list[dict]:
    return [{"layer": 0, "head": head, "prompt_id": prompt_id} for head in range(count) for prompt_id in IDS]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("explored") / "store"
    fill(Store(folder), PROMPTS, baseline(), heads())
    return str(folder)


@pytest.fixture(scope="module")
def page(store: str) -> Iterator[Exploring]:
    with explore(store) as page:
        yield page


def asked(page: Exploring, method: str, path: str, body: object = None, **headers: str | None) -> tuple[int, bytes]:
    """Status and body of a request as a page of ours makes it; a header that is None is left out."""
    given = {
        "Cookie": f"{page.cookie}={page.token}",
        "Origin": f"http://127.0.0.1:{page.port}",
        **({} if body is None else {"Content-Type": "application/json"}),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    sent = {name: value for name, value in given.items() if value is not None}
    content = None if body is None else json.dumps(body).encode()
    answer = urllib3.request(
        method, f"http://127.0.0.1:{page.port}{path}", body=content, headers=sent,
        retries=False, redirect=False, timeout=300,
    )  # fmt: skip
    return answer.status, answer.data


def sql(page: Exploring, query: str, **headers: str | None) -> tuple[int, dict]:
    status, body = asked(page, "POST", "/sql", {"query": query}, **headers)
    return status, json.loads(body)


EVERYTHING = [
    ("GET", "/"), ("GET", "/index.html"), ("GET", "/state"), ("GET", "/views"), ("GET", "/assets/app.js"),
    ("GET", "/sql.js"), ("POST", "/sql"), ("POST", "/sql.csv"), ("GET", "/?token="), ("GET", "/?token=wrong"),
    ("GET", "/nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
def test_nothing_is_answered_without_the_token(page: Exploring, method: str, path: str) -> None:
    body = {"query": "SELECT 1"} if method == "POST" else None
    for cookie in (None, f"{page.cookie}=wrong", f"{page.cookie}={page.token[:-1]}", f"other={page.token}"):
        status, told = asked(page, method, path, body, Cookie=cookie)
        assert (status, json.loads(told)) == (
            401, {"error": "this needs the token: open the URL that the command printed"}
        )  # fmt: skip


@pytest.mark.slow
def test_the_printed_url_leaves_the_token_in_a_cookie_that_no_script_and_no_other_site_has(page: Exploring) -> None:
    first = urllib3.request("GET", page.url, redirect=False, timeout=300)
    assert re.fullmatch(rf"{page.cookie}={page.token}; HttpOnly; Path=/; SameSite=Strict", first.headers["Set-Cookie"])
    assert page.token.encode() not in first.data
    assert len(page.token) >= 32
    assert page.token not in repr(page)
    status, body = asked(page, "GET", "/", Origin=None)
    assert status == 200
    assert b'<section id="sql"' in body
    assert page.token.encode() not in body


def test_the_token_is_compared_in_constant_time(page: Exploring, monkeypatch: pytest.MonkeyPatch) -> None:
    from mathinterp.service import listening

    compared, same = [], listening.hmac.compare_digest
    monkeypatch.setattr(listening.hmac, "compare_digest", lambda a, b: compared.append(a) or same(a, b))
    assert sql(page, "SELECT 1")[0] == 200
    assert compared == [page.token.encode()]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "192.168.1.5:{port}", ""]
)
def test_another_name_for_this_machine_is_refused(page: Exploring, host: str) -> None:
    status, told = asked(page, "GET", "/state", Host=host.format(port=page.port))
    assert status in (400, 403), told  # 400: HTTP itself wants a name
    assert asked(page, "GET", "/state", Host=f"localhost:{page.port}")[0] == 200


def test_names_of_a_server_that_others_reach_are_its_own_and_numbers() -> None:
    assert is_ours("127.0.0.1:8391", "0.0.0.0")
    assert is_ours("10.1.2.3:8391", "0.0.0.0")  # a number is no name that DNS could lead here
    assert is_ours("[fe80::1]:8391", "::")
    assert is_ours("node7.cluster:8391", "node7.cluster")
    assert not is_ours("evil.example:8391", "0.0.0.0")
    assert not is_ours("10.1.2.3:8391", "127.0.0.1")
    assert not is_ours(None, "0.0.0.0")


@pytest.mark.slow
def test_a_query_comes_from_our_page_alone(page: Exploring) -> None:
    for origin in (None, "null", "http://evil.example", f"https://127.0.0.1:{page.port}", "http://127.0.0.1:1"):
        assert sql(page, "SELECT 1", Origin=origin) == (403, {"error": "a query must come from this page"})
    assert sql(page, "SELECT 1", Content_Type="text/plain")[0] == 415
    assert asked(page, "GET", "/sql?query=SELECT+1")[0] == 404
    assert asked(page, "GET", "/../../etc/passwd")[0] == 404
    assert asked(page, "GET", "/assets/%2e%2e/%2e%2e/runs")[0] == 404


REFUSED = [
    ("COPY (SELECT 1) TO '{file}'", "SQL: this only reads, and a statement of kind COPY does not"),
    ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}'", "SQL: this only reads"),
    ("SELECT * FROM read_csv('/etc/passwd')", "Permission Error: Cannot access file"),
    ("SELECT * FROM read_text('{outside}')", "Permission Error: Cannot access file"),
    ("ATTACH '{file}'", "SQL: this only reads"),
    ("INSTALL httpfs", "SQL: this only reads"),
    ("SET enable_external_access = true", "SQL: this only reads"),
    ("DROP VIEW runs", "SQL: this only reads"),
    ("CREATE TABLE t AS SELECT 1", "SQL: this only reads"),
    ("SELECT 1; SELECT 2", "SQL: 2 statements"),
    ("SELECT * FROM run", "Table with name run does not exist! Did you mean runs?"),
    ("SELEC 1", "SQL: Parser Error"),
    ("  ", "SQL: no query was given"),
    ("SELECT error('<script>\n')", "SQL: Invalid Input Error: <script>"),
    ("SELECT * FROM read_duckdb('{outside}')", "Permission Error: Cannot access file"),
    ("SELECT * FROM query($$COPY (SELECT 1) TO '{file}'$$)", "Expected a single SELECT statement"),
    ("WITH x AS (COPY (SELECT 1) TO '{file}') SELECT 1", "has COPY in it"),
    ("SET VARIABLE files_head_scan = []", "SQL: this only reads"),
]


@pytest.mark.parametrize(("query", "told"), REFUSED)
def test_a_query_only_reads_the_store(page: Exploring, tmp_path: Path, query: str, told: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    for path in ("/sql", "/sql.csv"):
        status, body = asked(page, "POST", path, {"query": query.format(file=tmp_path / "made", outside=outside)})
        assert status == 400
        assert told in json.loads(body)["error"]
        assert "\n" not in json.loads(body)["error"]
    assert [file.name for file in tmp_path.iterdir()] == ["outside"]


def test_what_is_no_query_is_refused(page: Exploring) -> None:
    for body in ([], {"query": 3}, {}, "x"):
        assert asked(page, "POST", "/sql", body)[0] == 400
    assert asked(page, "POST", "/sql", {"query": "x" * 2**20})[0] == 413


def test_rows_are_those_of_the_store(page: Exploring, store: str) -> None:
    columns = "layer, head, prompt_id, logprob::DOUBLE / 3 AS third, NULL AS none"
    query = f"SELECT {columns} FROM head_scan ORDER BY head, prompt_id"
    status, answer = sql(page, query)
    expected = Store(store).rows(query)
    assert status == 200
    assert answer["columns"] == ["layer", "head", "prompt_id", "third", "none"]
    assert answer["numbers"] == [True, True, False, True, False]
    assert answer["rows"] == [["0", str(row["head"]), row["prompt_id"], f"{row['third']:.4g}", "-"] for row in expected]
    assert answer["told"].startswith("8 rows, ")
    status, csv = asked(page, "POST", "/sql.csv", {"query": query})
    assert status == 200
    lines = csv.decode().splitlines()
    assert lines[0] == '"layer","head","prompt_id","third","none"'
    assert lines[1:] == [f'0,{row["head"]},"{row["prompt_id"]}",{row["third"]!r},' for row in expected]
    assert sql(page, "SELECT 1 AS a, 2 AS a")[1]["rows"] == [["1", "2"]]
    assert sql(page, "SELECT 1 WHERE false")[1]["told"].startswith("0 rows")
    assert asked(page, "POST", "/sql.csv", {"query": "SELECT 1 AS a WHERE false"}) == (200, b'"a"\n')


def test_what_is_no_number_and_what_is_infinite_is_not_shown_as_missing(page: Exploring) -> None:
    values = "'NaN'::DOUBLE AS a, 'inf'::FLOAT AS b, '-inf'::DOUBLE AS c, NULL::DOUBLE AS d, ['NaN'::DOUBLE, NULL] AS e"
    status, answer = sql(page, f"SELECT {values}")
    assert status == 200
    assert answer["rows"] == [["NaN", "inf", "-inf", "-", "[NaN, null]"]]
    assert answer["numbers"] == [True, True, True, True, False]


def test_a_huge_result_is_cut_and_says_so(page: Exploring, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer = sql(page, "SELECT * FROM range(123456)")
    assert (status, len(answer["rows"])) == (200, asking.ROWS)
    assert answer["told"].startswith("the first 1,000 rows of 123,456, ")
    assert len(asked(page, "POST", "/sql.csv", {"query": "SELECT * FROM range(123456)"})[1].splitlines()) == 123457
    monkeypatch.setattr(asking, "COUNT_SECONDS", 0.2)
    status, answer = sql(page, "SELECT * FROM range(1000000000000)")
    assert (status, len(answer["rows"])) == (200, asking.ROWS)
    assert re.match(r"the first 1,000 rows of more than [\d,]+ \(counting them was stopped\)", answer["told"])
    assert sql(page, "SELECT repeat('é', 100000) AS long")[1]["rows"] == [["é" * 500 + "… (100,000 characters)"]]


ENDLESS = "SELECT count(*) FROM range(1000000000000) AS a, range(1000000) AS b"


@pytest.mark.slow
def test_an_endless_query_is_stopped_and_the_next_one_is_answered(store: str) -> None:
    with explore(store, query_seconds=4.0) as page:
        check_endless(page)


def check_endless(page: Exploring) -> None:
    started = time.monotonic()
    for query in (ENDLESS, "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT sum(n) FROM t"):
        status, answer = sql(page, query)
        assert status == 400
        assert answer["error"].startswith("SQL: stopped; a query from the page may take 4 s.")
    assert 7.5 < time.monotonic() - started < 60
    assert sql(page, "SELECT 41 + 1 AS n")[1]["rows"] == [["42"]]


def test_a_query_that_would_take_all_memory_is_refused(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MEMORY_SHARE", 0.0)
    asker = asking.Asker(store)
    assert asker.table("SELECT current_setting('memory_limit')").rows == [["256.0 MiB"]]
    with pytest.raises(UserError, match="SQL: Out of Memory Error"):
        asker.table("SELECT list(a) FROM (SELECT range || repeat('x', 50) AS a FROM range(50000000))", 60.0)


@pytest.mark.slow
def test_a_query_stops_when_whoever_asked_goes_away(store: str) -> None:
    with explore(store, query_seconds=300.0) as page:
        for _ in range(3):  # more than there are askers
            connection = http.client.HTTPConnection("127.0.0.1", page.port)
            head = {"Cookie": f"{page.cookie}={page.token}", "Origin": f"http://127.0.0.1:{page.port}"}
            connection.request(
                "POST", "/sql", json.dumps({"query": ENDLESS}), {**head, "Content-Type": "application/json"}
            )
            time.sleep(0.5)
            connection.sock.close()
        assert sql(page, "SELECT 1")[1]["rows"] == [["1"]]
        ends = threading.Thread(target=lambda: sql(page, ENDLESS), daemon=True)
        ends.start()
        time.sleep(0.5)
        started = time.monotonic()
    assert time.monotonic() - started < 30  # and nobody waits for it at the end


@pytest.mark.slow
def test_a_csv_file_that_is_not_whole_does_not_look_whole(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.Asker.csv, "__defaults__", (1.0,))
    with explore(store) as page, pytest.raises(urllib3.exceptions.ProtocolError):
        asked(page, "POST", "/sql.csv", {"query": "SELECT * FROM range(1000000000000)"})


@pytest.mark.slow
def test_the_state_follows_runs_and_the_page_follows_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live, "SHARE", 10.0**9)
    monkeypatch.setattr(live, "MOST_SECONDS", 0.0)
    store = Store(tmp_path)
    run = open_run(store, ["baseline/00000", "head_scan/00000", "head_scan/00001"], model="<b>odd")
    store.write_prompts("feedbeef00000000", PROMPTS)
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", baseline()), {})
    with explore(str(tmp_path)) as page:
        state = json.loads(asked(page, "GET", "/state")[1])
        expected = {"run": run.run_id, "scan": "heads", "model": "<b>odd", "prompts": "two-digit", "status": "at work"}
        assert state["others"] == [{**expected, "done": 1, "shards": 3}]
        assert state["finished"] == 0
        first = urllib3.request("GET", page.url, redirect=False, timeout=300)
        assert first.status == 200
        index = asked(page, "GET", "/")[1].decode()
        assert f'data-version="{state["version"]}"' in index
        assert run.run_id in index
        assert "<b>" not in index
        tag = urllib3.request(
            "GET", f"http://127.0.0.1:{page.port}/state", headers={"Cookie": f"{page.cookie}={page.token}"}
        ).headers["ETag"]
        assert asked(page, "GET", "/state", If_None_Match=tag) == (304, b"")
        for shard in range(2):
            store.write_shard(
                run.run_id, "head_scan", shard, scores("head_scan", heads()[4 * shard : 4 * shard + 4]), {}
            )
        assert sql(page, "SELECT count(*) AS n FROM head_scan")[1]["rows"] == [["8"]]
        run.note({"noise_floor": NO_NOISE})
        assert run.finish() == []
        state = json.loads(asked(page, "GET", "/state")[1])
        assert (state["finished"], state["others"]) == (1, [])
        assert asked(page, "GET", "/state", If_None_Match=tag)[0] == 200
        index = asked(page, "GET", "/")[1].decode()
        assert f'data-version="{state["version"]}"' in index
        assert f'id="run-{run.run_id}"' in index


def test_rows_of_an_unfinished_run_come_with_a_note(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["baseline/00000", "head_scan/00000", "head_scan/00001"])
    store.write_prompts("feedbeef00000000", PROMPTS)
    store.write_shard(run.run_id, "head_scan", 0, scores("head_scan", heads()), {})
    with explore(str(tmp_path)) as page:
        for _ in range(2):  # each time
            status, answer = sql(page, "SELECT * FROM head_scan")
            assert (status, len(answer["rows"]), len(answer["notes"])) == (200, 8, 1)
            assert answer["notes"][0].startswith(f"unfinished: {run.run_id} (heads: 1 of 2 shards)")
        assert sql(page, "SELECT * FROM runs")[1]["notes"] == []


@pytest.mark.slow
def test_two_runs_are_compared_and_named_ones_are_shown_alone(tmp_path: Path) -> None:
    first, second, third = (
        fill(Store(tmp_path), PROMPTS, baseline(), heads(), model=name, model_fingerprint=name) for name in "abc"
    )
    with explore(str(tmp_path), run_ids=[third], compare=(first, second)) as page:
        index = asked(page, "GET", "/")[1].decode()
        assert all(f'id="run-{run}"' in index for run in (first, second, third))
        assert 'id="compare"' in index
    with explore(str(tmp_path), run_ids=[third]) as page:
        index = asked(page, "GET", "/")[1].decode()
        assert f'id="run-{third}"' in index
        assert f'id="run-{first}"' not in index


def test_mistakes_are_told_before_anything_is_served(store: str, tmp_path: Path, page: Exploring) -> None:
    with pytest.raises(UserError, match="there is no store at"):
        explore(str(tmp_path / "none"))
    with pytest.raises(UserError, match="there is no run 'nothing'"):
        explore(store, run_ids=["nothing"])
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{page.port} \(Address already in use\); choose"):
        explore(store, port=page.port)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(store: str) -> None:
    words = [sys.executable, "-m", "mathinterp", "explore", "--store", store, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        assert urllib3.request("GET", url, redirect=False).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stdout.read() == "Open it in a browser; Ctrl-C ends it\n"
        assert process.stderr.read().strip() == "mathinterp: the page is no longer served"
