"""Damaged and foreign files: found by checksums, named in one line, left out, and never in the way of the rest."""

import json
import logging
import os
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Store
from mathinterp.store.query import refusal
from mathinterp.store.writer import damage
from tests.small_store import FINGERPRINT, fill, head_rows, open_run, prompt, write_head


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Store, str]:
    """A finished run of a baseline and one head over three prompts."""
    store = Store(tmp_path)
    ids = [str(i) for i in range(3)]
    heads = [{"layer": 0, "head": 0, "prompt_id": i} for i in ids]
    return store, fill(store, [prompt(i) for i in ids], [{"prompt_id": i} for i in ids], heads)


def shard(store: Store, run: str, table: str = "head_scan", index: int = 0) -> Path:
    return Path(store.url, table, f"run_id={run}", f"shard-{index:05d}.parquet")


def flip(path: Path, where: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    path.write_bytes(content)


def test_no_flipped_bit_of_a_data_page_gives_other_values_in_silence(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = open_run(store).run_id
    path = Path(write_head(store, run, count=500)["path"])
    whole, rows, found = path.read_bytes(), pq.read_table(path), 0
    random = np.random.default_rng(0)
    footer_bytes = int.from_bytes(whole[-8:-4], "little")
    for where in random.integers(4, len(whole) - 8 - footer_bytes, 100):
        path.write_bytes(whole)
        flip(path, int(where), int(random.integers(8)))
        with path.open("rb") as file:
            known = damage(file)
        found += known is not None
        assert known is not None or pq.read_table(path).equals(rows), where  # a page's header has bits that say nothing
    assert found >= 80


@pytest.mark.slow
def test_a_footer_that_duckdb_alone_cannot_read_never_breaks_the_rest(filled) -> None:
    store, _run = filled
    path = next(Path(store.url).glob("prompts/*/prompts.parquet"))
    whole, refused = path.read_bytes(), []
    with duckdb.connect() as reader:
        for where in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
            path.write_bytes(whole)
            flip(path, where, where % 8)
            with path.open("rb") as file:
                if damage(file) is None and refusal(reader, str(path)):
                    refused.append(where)
    assert len(refused) > 10
    for where in refused[:: len(refused) // 3]:
        path.write_bytes(whole)
        flip(path, where, where % 8)
        seen = Store(store.url)
        assert len(seen.rows("SELECT * FROM head_scan")) == 3
        assert seen.rows("SELECT * FROM prompts") == []
        assert len(seen.problems) == 1
        Store(store.url).write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
        assert len(Store(store.url).rows("SELECT * FROM prompts")) == 3


def another_answer(path: Path) -> None:
    """A good file of the same prompts with another answer: what some changed bits of a footer make of one."""
    table = pq.read_table(path)
    answers = table["answer"].to_pylist()
    changed = table.set_column(table.schema.get_field_index("answer"), "answer", [["0" + answers[0], *answers[1:]]])
    pq.write_table(changed.cast(table.schema), path, write_page_checksum=True)


@pytest.mark.slow
@pytest.mark.parametrize("change", [another_answer, lambda path: flip(path, path.stat().st_size - 40)])
def test_a_changed_prompts_file_that_every_reader_takes_is_found(filled, change) -> None:
    store, run = filled
    path = next(Path(store.url).glob("prompts/*/prompts.parquet"))
    whole = path.read_bytes()
    change(path)
    assert len(Store(store.url).rows("SELECT * FROM prompts")) == 3, "the case shows what readers do not notice"
    assert not Store(store.url).has_finished(run, FINGERPRINT)
    done = CliRunner().invoke(main, ["check", "--store", store.url])
    assert done.exit_code == 1
    assert "its checksum is not the one that was written beside it; left out" in done.stderr
    assert Store(store.url).rows("SELECT * FROM prompts") == []
    Store(store.url).write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
    assert len(Store(store.url).rows("SELECT * FROM prompts")) == 3
    assert path.read_bytes() == whole
    assert CliRunner().invoke(main, ["check", "--store", store.url]).exit_code == 0


@pytest.mark.slow
def test_prompts_of_an_early_version_get_their_checksum_when_asked_for_again(filled) -> None:
    store, run = filled
    kept = sorted(Path(store.url).glob("*/*/*.sha256"))
    assert [each.name for each in kept] == ["answer_tokens.parquet.sha256", "prompts.parquet.sha256"]
    for each in kept:
        each.unlink()
    assert CliRunner().invoke(main, ["check", "--store", store.url]).exit_code == 0
    assert not Store(store.url).has_finished(run, FINGERPRINT), "asked for again, they are written anew"
    Store(store.url).write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
    assert all(each.exists() for each in kept)
    assert Store(store.url).has_finished(run, FINGERPRINT)


@pytest.mark.slow
def test_a_flipped_bit_is_found_on_resume_by_check_and_before_a_report(filled, tmp_path, caplog) -> None:
    store, run = filled
    path = shard(store, run)
    whole = path.read_bytes()
    flip(path, 100)
    done = CliRunner().invoke(main, ["check", "--store", store.url, "--json"])
    assert done.exit_code == 1
    (told,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert (told["intact"], told["missing"]) == (1, ["head_scan/00000"])
    assert "its checksum is not the one that the record of its run has" in done.stderr
    assert Store(store.url).rows("SELECT status FROM runs") == [{"status": "unfinished"}]  # no longer counted
    for reader in (
        lambda: open_run(Store(store.url), parameters={"scoring": "token"}).missing_shards(),
        lambda: CliRunner().invoke(main, ["report", "--store", store.url, "--out", str(tmp_path / "page")]),
    ):
        path.write_bytes(whole)
        assert open_run(Store(store.url), parameters={"scoring": "token"}).finish() == []
        flip(path, 100)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            reader()
        assert sum("its checksum is not the one" in message for message in caplog.messages) == 1
    path.write_bytes(whole)
    again = open_run(Store(store.url), parameters={"scoring": "token"})
    assert again.missing_shards() == []
    assert again.finish() == []
    assert CliRunner().invoke(main, ["check", "--store", store.url]).exit_code == 0


def test_a_file_without_checksums_is_readable_and_check_says_so(filled) -> None:
    store, run = filled
    path, record = shard(store, run), Path(store.url, "runs", f"{run}.json")
    table = pq.read_table(path)
    config = json.loads(table.schema.metadata[b"mathinterp"])
    del config["rows"]
    pq.write_table(table.replace_schema_metadata({b"mathinterp": json.dumps(config)}), path)
    old = json.loads(record.read_text())
    del old["files"]
    record.write_text(json.dumps(old))
    assert Store(store.url).rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]
    done = CliRunner().invoke(main, ["check", "--store", store.url, "--runs", run, "--json"])
    assert done.exit_code == 0, done.output
    (told,) = json.loads(done.stdout)["runs"]
    assert (told["intact"], told["unproved"], told["missing"]) == (1, 1, [])


def test_rows_count_only_from_shards_that_the_record_lists_with_their_number_of_rows(filled, caplog) -> None:
    store, run = filled
    extra = Store(store.url).write_shard(run, "head_scan", 7, head_rows(), {})["path"]
    seen = Store(store.url)
    assert seen.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]
    assert [problem for problem in seen.problems if "none of the 2 shards of its run" in problem] == seen.problems != []
    os.remove(extra)
    path = shard(store, run)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    seen = Store(store.url)
    assert seen.rows("SELECT shards_done, status FROM runs") == [{"shards_done": 1, "status": "unfinished"}]
    assert "it has 0 rows, and was written with 3" in seen.problems[0]
    fewer = Store(store.url).write_shard(run, "head_scan", 0, head_rows(2), {})["path"]
    seen = Store(store.url)
    assert seen.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 0}]
    assert f"{fewer}: it has 2 rows, and the record of its run says 3" in seen.problems[0]


@pytest.mark.slow
def test_missing_prompts_are_named(filled) -> None:
    store, _ = filled
    assert len(Store(store.url).rows("SELECT * FROM head_effects")) == 2
    os.remove(Path(store.url, "prompts", f"prompts_fingerprint={FINGERPRINT}", "prompts.parquet"))
    seen = Store(store.url)
    seen.rows("SELECT * FROM head_effects")
    assert len(seen.problems) == 1
    assert "no readable prompts of run" in seen.problems[0]


def broken_record(record: dict) -> dict[str, bytes]:
    deep = "[" * 100_000 + "]" * 100_000
    whole = json.dumps(record)
    changed = {"no shards": {"shards": []}, "number": {"shards": 0}, "content": {"scan": "mlps"}}
    changed["time"] = {"started_at": "x"}
    return {
        "nothing": b"", "list": b"[]", "latin": whole.replace('"m"', '"\xe9"').encode("latin1"),
        "deep": (whole[:-1] + f', "more": {deep}}}').encode(), "nan": (whole[:-1] + ', "more": NaN}').encode(),
        "digits": (whole[:-1] + f', "more": {"9" * 5000}}}').encode(),
        "surrogate": whole.replace('"m"', '"\\ud800"').encode(),
        **{kind: json.dumps({**record, **change}).encode() for kind, change in changed.items()},
    }  # fmt: skip


@pytest.mark.parametrize("kind", broken_record({}))
def test_a_broken_record_is_named_and_the_other_runs_answer(filled, kind) -> None:
    store, run = filled
    path = Path(store.url, "runs", f"{run}.json")
    other = open_run(store, ["baseline/00000"], dtype="bfloat16")
    store.write_shard(other.run_id, "baseline", 0, _baseline(), {})
    other.finish()
    path.write_bytes(broken_record(json.loads(path.read_text()))[kind])
    seen = Store(store.url)
    assert seen.rows("SELECT run_id, status FROM runs") == [{"run_id": other.run_id, "status": "finished"}]
    assert any(f"runs/{run}.json: not a run's record" in problem for problem in seen.problems)
    assert seen.rows("SELECT DISTINCT run_id FROM baseline") == [{"run_id": other.run_id}]


def _baseline():
    return head_rows().drop_columns(["layer", "head"])


def test_a_record_whose_id_is_not_its_hash_is_foreign(filled) -> None:
    store, run = filled
    record = json.loads(Path(store.url, "runs", f"{run}.json").read_text())
    Path(store.url, "runs", "0123456789ab.json").write_text(json.dumps({**record, "run_id": "0123456789ab"}))
    seen = Store(store.url)
    assert seen.rows("SELECT run_id FROM runs") == [{"run_id": run}]
    assert "its id is not the hash of what it holds" in seen.problems[0]


def footer(path: Path, config: bytes) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"mathinterp": config}), path)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "odd", ["pipe", "loop", "folder loop", "list", "number", "deep", "garbled page", "views", "views pipe"]
)
def test_one_bad_thing_never_breaks_the_rest(filled, odd) -> None:
    store, run = filled
    other = open_run(store, ["head_scan/00000", "head_scan/00001"], dtype="bfloat16").run_id
    write_head(store, other, 0)
    path = Path(write_head(store, other, 1, count=500)["path"])
    views = Path(store.url, "views.sql")
    if odd in ("pipe", "loop"):
        path.unlink()
        os.mkfifo(path) if odd == "pipe" else path.symlink_to(path)
    elif odd == "folder loop":
        path.unlink()
        (path.parent / "again").symlink_to(path.parent, target_is_directory=True)
    elif odd in ("list", "number", "deep"):
        footer(path, {"list": b"[]", "number": b"7", "deep": b"[" * 100_000 + b"]" * 100_000}[odd])
    elif odd == "garbled page":
        column = pq.read_metadata(path).row_group(0).column(4)
        content = bytearray(path.read_bytes())
        start = column.data_page_offset
        content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
        path.write_bytes(content)
    else:
        views.unlink()
        views.write_bytes(b"\xff\xfe") if odd == "views" else os.mkfifo(views)
    for query, expected in [
        (f"SELECT count(DISTINCT prompt_id) AS n FROM head_scan WHERE run_id = '{run}'", 3),
        ("SELECT sum(logprob) IS NOT NULL AS n FROM head_scan", True),
        ("SELECT count(*) AS n FROM runs", 2),
    ]:
        done = CliRunner().invoke(main, ["sql", "--store", store.url, "--json", query])
        assert done.exit_code == 0, (done.output, done.exception)
        assert json.loads(done.stdout) == [{"n": expected}]
    named = done.stderr + CliRunner().invoke(main, ["check", "--store", store.url]).stderr
    assert odd.startswith("views") or "left out" in named


def test_what_may_not_be_read_is_named(filled, monkeypatch) -> None:
    store, run = filled
    other = open_run(store, ["head_scan/00000"], dtype="bfloat16").run_id
    write_head(store, other, 0)
    opened, listed = os.open, os.scandir
    refused = {str(shard(store, other)), str(Path(store.url, "runs", f"{other}.json"))}

    def refuse(path, *more, **named):
        if str(path) in refused:
            raise PermissionError(13, "Permission denied")
        return opened(path, *more, **named)

    monkeypatch.setattr("os.open", refuse)
    seen = Store(store.url)
    assert seen.rows("SELECT run_id FROM runs") == [{"run_id": run}]
    assert any("Permission denied" in problem for problem in seen.problems)
    monkeypatch.undo()

    def refuse_folder(path):
        if str(path).endswith(f"run_id={other}"):
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr("os.scandir", refuse_folder)
    seen = Store(store.url)
    assert seen.rows("SELECT DISTINCT run_id FROM head_scan") == [{"run_id": run}]
    assert any("cannot be listed (Permission denied)" in problem for problem in seen.problems)
