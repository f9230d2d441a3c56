"""Figures and the page: drawn from stored rows, with the stored numbers in them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import vl_convert
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.results import Shown, Summary
from mathinterp.report.contents import render
from mathinterp.report.page import draw, write_report
from mathinterp.report.runs import Found
from mathinterp.report.scripts import vega_bundle
from mathinterp.store import Store, query
from tests.explorer_pages import made_up_run
from tests.small_store import fill, open_run, prompt

PROMPTS = [prompt("p0", "add"), prompt("p1", "sub")]
BASELINE = [{"prompt_id": "p0", "correct": True}, {"prompt_id": "p1", "correct": True}]


@pytest.fixture
def head_store(tmp_path: Path) -> tuple[Store, str]:
    """Heads 0.0 to 1.1; only 1.0 breaks addition."""
    store = Store(tmp_path / "store")
    heads = [
        {"layer": layer, "head": head, "prompt_id": p, "correct": not (layer == 1 and head == 0 and p == "p0")}
        for layer in (0, 1)
        for head in (0, 1)
        for p in ("p0", "p1")
    ]
    return store, fill(store, PROMPTS, BASELINE, heads)


@pytest.mark.slow
def test_the_page_names_the_run_and_its_figures_and_shows_the_rows(head_store: tuple[Store, str]) -> None:
    store, run = head_store
    written = write_report(store, Path(store.url).parent / "page", pictures=True)
    assert sorted(path.suffix for path in written.figures) == [".png", ".svg"]
    assert all(path.stat().st_size > 1000 for path in written.figures)
    page = written.page.read_text(encoding="utf-8")
    assert run in page
    assert "heads: m on two-digit, float32" in page
    leading = page[page.index("Largest drops") :]
    first, second = "<td>all</td><td>1.0</td><td>50</td><td>50</td>", "<td>all</td><td>0.0</td><td>100</td><td>0</td>"
    assert 0 < leading.index(first) < leading.index(second), "the head that costs most comes first"
    assert f"FROM head_effects WHERE run_id = &#39;{run}&#39;" in page


def test_text_on_the_page_is_escaped() -> None:
    summary = Summary([Shown("a < b", [{"<i>": "<script>"}]), "x & y"], {}, ["SELECT '<'"], ["<b>few</b>"])
    page = render("s3://<bucket>", Found([made_up_run(summary, model="<m>")]))
    for text in ("a &lt; b", "&lt;i&gt;", "&lt;script&gt;", "x &amp; y", "&lt;b&gt;few", "&lt;bucket&gt;", "&lt;m&gt;"):
        assert text in page
    assert "<script>" not in page
    assert "<m>" not in page


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty cache folder, and what Vega's bundle is asked to end with, each time that one is made."""
    made: list[str] = []

    def bundled(snippet: str) -> str:
        made.append(snippet)
        return f"vega \u2028 \r {snippet}"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vl_convert, "javascript_bundle", bundled)
    vega_bundle.cache_clear()
    yield made
    vega_bundle.cache_clear()


def test_vega_is_bundled_once_a_machine(own_cache: list[str], tmp_path: Path) -> None:
    first = vega_bundle()
    assert b"vega \xe2\x80\xa8 \r " in first
    vega_bundle.cache_clear()  # as in another process
    assert vega_bundle() == first
    assert len(own_cache) == 1
    (kept,) = (tmp_path / "cache" / "mathinterp" / "vega").iterdir()
    for damaged in (kept.read_bytes()[:-5], b"", b"\xff", kept.read_bytes().replace(b"vega", b"evil")):
        kept.write_bytes(damaged)
        vega_bundle.cache_clear()
        assert vega_bundle() == first, "a damaged one is made anew"
    assert len(own_cache) == 5


def test_a_cache_that_cannot_be_written_keeps_no_vega(own_cache: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert vega_bundle().startswith(b"(() => {\nvega ")
    assert len(own_cache) == 1


def test_a_user_without_a_home_gets_vega_too(own_cache: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert vega_bundle().startswith(b"(() => {\nvega ")
    assert len(own_cache) == 1


@pytest.mark.slow
def test_what_a_run_was_is_asked_once_for_the_page(
    head_store: tuple[Store, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[str](), query.arrow
    monkeypatch.setattr(query, "arrow", lambda *given: asked.append(" ".join(given[1].split())) or ask(*given))
    write_report(head_store[0], tmp_path / "page")
    assert sum("FROM runs WHERE run_id = $run" in sql for sql in asked) == 1
    assert sum("FROM head_effects" in sql and "AS most" in sql for sql in asked) == 1, "whether accuracy ranks"
    assert len(asked) == len(set(asked))


@pytest.mark.slow
def test_unknown_runs_and_scans_without_a_figure_are_refused(head_store: tuple[Store, str], tmp_path: Path) -> None:
    store, _ = head_store
    with pytest.raises(UserError, match="no run 123456"):
        write_report(store, tmp_path / "page", ["123456"])
    other = fill(store, PROMPTS, BASELINE, mlps=[{"layer": 0, "prompt_id": "p0"}], scan="elsewhere")
    with pytest.raises(UserError, match="scan of elsewhere, which has no figure"):
        draw(store, other)


@pytest.mark.slow
def test_an_unfinished_run_is_left_out_unless_named(head_store: tuple[Store, str], tmp_path: Path) -> None:
    store, run = head_store
    stopped = open_run(store, ["head_scan/00000"], model="other", model_fingerprint="weights-2")
    written = write_report(store, tmp_path / "page", pictures=True)
    assert [path.name for path in written.figures] == [f"heads-{run}.png", f"heads-{run}.svg"]
    with pytest.raises(UserError, match=f"run {stopped.run_id} has none of its 1 shards"):
        write_report(store, tmp_path / "other", [stopped.run_id])
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_command_says_where_the_page_is(head_store: tuple[Store, str], tmp_path: Path) -> None:
    store, _ = head_store
    result = CliRunner().invoke(main, ["report", "--store", store.url, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "index.html").is_file()
    nowhere = CliRunner().invoke(main, ["report", "--store", str(tmp_path / "none")])
    assert nowhere.exit_code == 2
    assert "there is no store" in nowhere.output
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused = CliRunner().invoke(main, ["report", "--store", store.url, "--out", str(blocked / "x")])
    assert refused.exit_code == 2
    assert "cannot be made" in refused.output
