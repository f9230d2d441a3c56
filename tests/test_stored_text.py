"""Text from records and files is text: it becomes no SQL, HTML, terminal command or path, and no link is followed."""

import json
import tempfile
from pathlib import Path

import altair as alt
import duckdb
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mathinterp.cli.main import main
from mathinterp.cli.output import print_table
from mathinterp.cluster.replica import loading_turn
from mathinterp.errors import UserError
from mathinterp.experiments.figures import save
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.report.contents import render
from mathinterp.report.page import write_report
from mathinterp.report.runs import Found
from mathinterp.store import Store
from mathinterp.store.reading import check_reads
from mathinterp.text import file_name, one_line, printable, quoted
from tests.explorer_pages import made_up_run
from tests.small_store import fill, open_run, prompt

IMAGE = "<img src=x onerror=alert(1)>"
TEXT = st.text() | st.text(alphabet="'\"\\\n\r;-/*$%[]{}\x00\x1b\u2028é", max_size=12)
DUCK = duckdb.connect()


# ---- SQL ----


@given(TEXT)
def test_quoted_text_comes_back_from_sql(text):
    assert DUCK.execute(f"SELECT {quoted(text)} AS a, 1 AS b").fetchall() == [(text, 1)]
    check_reads(DUCK, f"SELECT {quoted(text)} AS a")
    [(found,)] = DUCK.execute(f"SELECT a[1] FROM (SELECT [{quoted(text)}] AS a)").fetchall()
    assert found == text


@given(TEXT)
def test_a_comment_ends_with_its_line(text):
    assert DUCK.execute(f"-- {one_line(text)}\nSELECT 1").fetchall() == [(1,)]
    assert len(one_line(text).splitlines()) <= 1


@given(TEXT)
def test_a_run_id_in_a_query_for_people_is_a_string(text):
    asked = Results(None, text).query("SELECT $run AS a")  # type: ignore[arg-type]
    assert DUCK.execute(asked).fetchall() == [(text,)]


@pytest.mark.slow
def test_names_of_files_that_look_like_sql_run_none(tmp_path):
    store = Store(tmp_path / "store")
    fill(store, [prompt("1")], [{"prompt_id": "1"}])
    evil = "x'); CREATE TABLE t (a INT); --\n; CREATE TABLE u (a INT);"
    for folder in ("baseline/run_id=x", "runs"):
        (tmp_path / "store" / folder).mkdir(exist_ok=True)
        for ending in (".parquet", ".json"):
            (tmp_path / "store" / folder / f"{evil}{ending}").write_bytes(b"no")
    store.write_views()
    client = duckdb.connect()
    client.execute((tmp_path / "store" / "views.sql").read_text())
    assert client.sql("SELECT prompt_id FROM baseline").fetchall() == [("1",)]
    assert client.sql("SELECT count(*) FROM duckdb_tables()").fetchall() == [(0,)]


@pytest.mark.slow
def test_a_record_whose_id_is_sql_or_html_makes_no_file_and_no_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("store")
    fill(store, [prompt("1")], [{"prompt_id": "1"}], [{"layer": 0, "head": 1, "prompt_id": "1"}])
    real = json.loads(next(Path("store/runs").iterdir()).read_text())
    for evil in ("x'; COPY (SELECT 42 AS a) TO 'f.csv'; --", IMAGE):
        record = {**real, "run_id": evil, "shards": [], "model": evil}
        (Path("store/runs") / f"{evil}.json").write_text(json.dumps(record))
        for words in (["report"], ["report", "--run", evil], ["sql", "SELECT * FROM runs"]):
            CliRunner().invoke(main, [*words, "--store", "store"])
    assert not Path("f.csv").exists()
    pages = list(tmp_path.rglob("*.html"))
    assert not any(IMAGE in page.read_text() for page in pages)


# ---- HTML ----


def test_every_text_of_the_page_is_escaped():
    summary = Summary([Shown(IMAGE, [{IMAGE: IMAGE}]), IMAGE, Shown(IMAGE, [])], {}, [IMAGE], [IMAGE])
    names = ("run_id", "scan", "model", "prompts", "dtype", "model_fingerprint", "prompts_fingerprint", "code_version")
    run = made_up_run(summary, parameters={IMAGE: IMAGE}, command=f'"{IMAGE}', **dict.fromkeys(names, IMAGE))
    page = render(IMAGE, Found([run], [{**run.run, "why": IMAGE}], [IMAGE]))
    assert "<img" not in page
    assert page.count("&lt;img") > 40
    assert '"&#34;&lt;img' not in page, "text that holds a quotation mark ends no attribute"
    assert "&#34;&lt;img" in page


# ---- terminals ----


@given(st.text())
def test_what_is_printed_holds_nothing_that_a_terminal_obeys(text):
    shown = printable(text)
    assert not any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in shown)
    assert printable(shown) == shown


def test_control_characters_and_markup_in_tables_are_shown(capsys):
    evil = "\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]plain[/bold] :smile: [/nothing]"
    print_table([{evil: evil, "list": [evil]}], title=evil)
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    assert shown.count(r"\x1b[31mred\x1b]0;title\x07") == 3
    assert shown.count("[bold]plain[/bold] :smile: [/nothing]") == 4


def test_control_characters_in_rows_messages_and_warnings_are_shown(tmp_path):
    store = Store(tmp_path)
    fill(store, [prompt("1")], [{"prompt_id": "\x1b[31m1"}])
    (tmp_path / "baseline" / "run_id=\x1b[2J").mkdir()
    (tmp_path / "baseline" / "run_id=\x1b[2J" / "shard-00000.parquet").write_bytes(b"half")
    done = CliRunner().invoke(main, ["sql", "--store", str(tmp_path), "SELECT prompt_id FROM baseline"])
    assert r"\x1b[31m1" in done.stdout
    assert r"run_id=\x1b[2J" in done.stderr
    refused = CliRunner().invoke(main, ["report", "--store", str(tmp_path), "--run", "\x1b[31m"])
    assert r"\x1b[31m" in refused.stderr
    assert "\x1b" not in done.output + refused.output


# ---- paths and links ----


@given(st.text())
def test_a_files_name_is_no_path(text):
    assert not set(file_name(text)) & set("/\\\0\n")


@pytest.mark.slow
def test_the_report_replaces_links_and_leaves_their_targets(tmp_path):
    store = Store(tmp_path / "store")
    run = fill(store, [prompt("1")], [{"prompt_id": "1"}], [{"layer": 0, "head": 1, "prompt_id": "1"}])
    page = tmp_path / "page"
    page.mkdir()
    (tmp_path / "kept").write_text("kept")
    names = ["index.html", "assets", f"heads-{run}.png", f"heads-{run}.svg"]
    for name in names:
        (page / name).symlink_to(tmp_path / "kept")
    write_report(store, page, pictures=True)
    assert (tmp_path / "kept").read_text() == "kept"
    assert sorted(path.name for path in page.iterdir()) == sorted(names)
    assert not any(path.is_symlink() for path in page.iterdir())


@pytest.mark.parametrize("which", ["write_bytes", "write_text"])
def test_a_figure_that_cannot_be_written_leaves_no_half_file(tmp_path, monkeypatch, which):
    write = getattr(Path, which)

    def half(self, what, **_):
        write(self, what[: len(what) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, which, half)
    chart = alt.Chart(alt.InlineData(values=[{"a": 1}])).mark_point().encode(x="a:Q")
    with pytest.raises(OSError, match="disk full"):
        save(chart, tmp_path / "figure")
    assert [path.suffix for path in tmp_path.iterdir()] == ([] if which == "write_bytes" else [".png"])


@pytest.mark.parametrize(
    "words",
    [
        ["sql", "--store", "loop"],
        ["sql", "--store", "loop/deeper"],
        ["report", "--store", "loop"],
        ["report", "--store", "store", "--out", "loop"],
        ["scan", "heads", "--limit", "2", "--store", "loop"],
        ["sql", "--store", "store", "SELECT 1", "--output", "loop.csv"],
        ["tune", "precise", "--heads", "0.6", "--data", "signed_two_digit_train", "--steps", "1", "--out", "loop"],
    ],
)
def test_a_loop_of_links_is_told_in_one_line(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("loop.csv").symlink_to("loop.csv")
    open_run(Store("store"), [])
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    assert "leads round in a loop" in done.stderr


def test_the_loading_lock_is_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with loading_turn(1):
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [lock.stat().st_mode & 0o777 for lock in folder.iterdir()] == [0o600]
    (tmp_path / "precious").write_text("precious")
    (folder / "0").unlink()
    (folder / "0").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), loading_turn(1):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("kind", ["a link", "open to others"])
def test_a_lock_folder_that_is_not_ones_own_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with loading_turn(1):
        (folder,) = tmp_path.iterdir()
    (folder / "0").unlink()
    folder.rmdir()
    others = tmp_path / "others"
    others.mkdir()
    (others / "0").write_text("precious")
    folder.symlink_to(others) if kind == "a link" else others.rename(folder)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="belongs to others too"), loading_turn(1):
        pass
    assert (folder / "0").read_text() == "precious"
