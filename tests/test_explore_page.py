"""The served page in a browser: runs appear and grow, the reader stays where they are, and asks SQL in its pane."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.report.explore import explore
from mathinterp.store import Store
from tests.browser import chromium, in_a_browser, serious
from tests.small_store import NO_NOISE, fill, open_run, prompt, scores

PROMPTS = [prompt(f"p{number}") for number in range(4)]
BASELINE = [{"prompt_id": item.prompt.prompt_id} for item in PROMPTS]
HEADS = [{"layer": 0, "head": head, "correct": False, **row} for head in range(2) for row in BASELINE]
TOP = "(selector) => document.querySelector(selector).getBoundingClientRect().top"
ODD = '<img src=x onerror="alert(1)">'

pytestmark = in_a_browser


@pytest.fixture
def tab() -> Iterator:
    """A tab of a browser; whatever its console says against the page fails the test."""
    with chromium() as browser:
        tab = browser.new_context(viewport={"width": 1200, "height": 700}, accept_downloads=True).new_page()
        tab.set_default_timeout(120_000)
        wrong: list[str] = []
        tab.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda asked: wrong.append(asked.url) if "127.0.0.1" not in asked.url[:20] else None)
        yield tab
        refused = "Failed to load resource: the server responded with a status of 400 (Bad Request)"  # a wrong query
        assert [line for line in wrong if line != refused and not line.startswith(("data:", "blob:"))] == []


def ask(tab, query: str) -> str:
    """Type a query and run it; what is then said."""
    tab.fill("#query", query)
    tab.keyboard.press("Control+Enter")
    tab.wait_for_selector("#sql .status:not(:has-text('Running…')):not(:empty)")
    return tab.inner_text("#sql .status")


def test_a_run_appears_and_grows_while_it_is_written_and_the_reader_stays(tab, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = fill(store, PROMPTS, BASELINE, HEADS)
    with explore(str(tmp_path)) as page:
        tab.goto(page.url)
        tab.wait_for_url(f"http://127.0.0.1:{page.port}/")
        tab.click(f'nav a[href="#run-{first}"]')
        tab.wait_for_selector(f"#run-{first} .chart.done")
        tab.evaluate("scrollTo(0, 150)")
        place = tab.evaluate(TOP, f"#run-{first} h3")
        assert tab.is_hidden("#live")

        run = open_run(store, ["baseline/00000", "head_scan/00000"], model=ODD, model_fingerprint="weights-2")
        tab.wait_for_selector("#live progress")
        assert tab.inner_text("#live li").startswith(f"{run.run_id} heads: {ODD} on two-digit")
        store.write_shard(run.run_id, "baseline", 0, scores("baseline", BASELINE), {})
        tab.wait_for_selector("#live li:has-text('1 of 2 shards, at work')")
        assert tab.evaluate("document.querySelector('#live progress').position") == 0.5
        store.write_shard(run.run_id, "head_scan", 0, scores("head_scan", HEADS), {})
        run.note({"noise_floor": NO_NOISE})
        assert run.finish() == []

        tab.wait_for_selector(f'nav a[href="#run-{run.run_id}"]')
        assert f"New on this page: heads: {ODD} on two-digit" in tab.inner_text("#live")
        assert tab.is_visible(f"#run-{first}")
        assert tab.evaluate(TOP, f"#run-{first} h3") == pytest.approx(place, abs=2)  # what is read stays where it is
        assert tab.get_attribute(f'nav a[href="#run-{first}"]', "aria-current") == "page"
        tab.click(f'nav a[href="#run-{run.run_id}"]')
        tab.wait_for_selector(f"#run-{run.run_id} .chart.done")
        assert "2 runs" in tab.text_content("#overview")


def test_sql_is_asked_in_the_pane(tab, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    run = fill(store, PROMPTS, BASELINE, HEADS, model=ODD)
    with explore(str(tmp_path / "store"), query_seconds=8.0) as page:
        tab.goto(page.url)
        tab.click("nav a[href='#sql']")
        assert re.match(r"1 row, ", ask(tab, "SELECT model, run_id FROM runs"))
        assert tab.locator("#sql tbody td").all_inner_texts() == [ODD, run]
        assert "the first 1,000 rows of 5,000" in ask(tab, "SELECT * FROM range(5000)")
        assert tab.locator("#sql tbody tr").count() == 1000
        ask(tab, "SELECT 'NaN'::DOUBLE, 'inf'::DOUBLE, '-inf'::DOUBLE, NULL::DOUBLE")
        assert tab.locator("#sql tbody td").all_inner_texts() == ["NaN", "inf", "-inf", "-"]
        ask(tab, "SELECT * FROM range(5000)")
        with tab.expect_download() as saved:
            tab.click("text=Download CSV")
        assert len(saved.value.path().read_text().splitlines()) == 5001
        said = ask(tab, "SELECT count(*) FROM range(1000000000000) AS a, range(1000000) AS b")
        assert said.startswith("SQL: stopped; a query from the page may take 8 s.")
        assert "this only reads" in ask(tab, f"COPY (SELECT 1) TO '{tmp_path / 'made'}'")
        assert "Did you mean runs?" in ask(tab, "SELECT * FROM run")
        assert not (tmp_path / "made").exists()
        tab.fill("#view-search", "head_effects")
        tab.click(".views details:not([hidden]) summary:has-text('head_effects')")
        tab.click(".views details[open] button")
        assert tab.input_value("#query") == "SELECT * FROM head_effects LIMIT 50"
        tab.click(f'nav a[href="#run-{run}"]')
        tab.locator(f"#run-{run} button:has-text('Ask here')").first.click()
        assert run in tab.input_value("#query")
        assert re.match(r"\d+ rows?, ", ask(tab, tab.input_value("#query")))


def test_views_that_cannot_be_listed_are_said_and_sql_is_answered_all_the_same(
    tab, tmp_path: Path, monkeypatch
) -> None:
    def refused(store: Store, seconds: float) -> None:
        raise UserError(f"the store is away {ODD}")

    monkeypatch.setattr("mathinterp.report.front.list_views", refused)
    fill(Store(tmp_path), PROMPTS, BASELINE, HEADS)
    with explore(str(tmp_path)) as page:
        tab.goto(page.url)
        tab.click("nav a[href='#sql']")
        tab.wait_for_selector("#sql .views .warning")
        assert tab.inner_text("#sql .views") == f"The views cannot be listed: the store is away {ODD}"
        assert tab.locator("#view-search").count() == 0
        assert re.match(r"1 row, ", ask(tab, "SELECT model FROM runs"))


def test_the_pane_is_usable_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    """Nothing serious for axe, nothing wider than the screen, ids whole: with rows, long words and an error."""
    run = fill(Store(tmp_path), PROMPTS, BASELINE, HEADS)
    long = f"SELECT '{'x' * 3000}' AS \"{'long name ' * 20}\", 1.5 AS b"
    with explore(str(tmp_path)) as page, chromium() as browser:
        for width, scheme in ((390, "dark"), (390, "light"), (1280, "dark"), (1280, "light")):
            tab = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
            tab.set_default_timeout(120_000)
            tab.goto(page.url)
            tab.wait_for_url(f"http://127.0.0.1:{page.port}/")
            tab.goto(f"http://127.0.0.1:{page.port}/#sql")
            for query in (f"FROM {'y' * 500}", long, "FROM head_effects"):
                ask(tab, query)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
            cell = tab.locator("#sql tbody td > div").first
            assert cell.inner_text() == run
            assert cell.evaluate("(cell) => cell.clientHeight") < 30  # one line
            tab.click(".views details:nth-of-type(2) summary")
            assert serious(tab) == []


def test_a_store_that_is_away_is_said_and_what_is_shown_stays(tab, tmp_path: Path) -> None:
    run = fill(Store(tmp_path / "store"), PROMPTS, BASELINE, HEADS)
    with explore(str(tmp_path / "store")) as page:
        tab.goto(page.url)
        tab.wait_for_selector(f'nav a[href="#run-{run}"]')
        (tmp_path / "store").rename(tmp_path / "away")
        tab.wait_for_selector("#live.away:has-text('there is no store at')")
        assert "as of before" in tab.inner_text("#live")
        assert tab.is_visible(f'nav a[href="#run-{run}"]')
        (tmp_path / "away").rename(tmp_path / "store")
        tab.wait_for_selector("#live:not(.away)", state="attached")


def test_the_answer_shown_is_that_of_the_last_query(tab, tmp_path: Path) -> None:
    """Ctrl+Enter while a query runs: its answer, here held back, would else take the place of the later one's."""
    tab.add_init_script("""
        const fetched = window.fetch;
        let asked = 0;
        window.fetch = async (where, ...more) => {
          const late = where === "sql" && asked++ === 0, answer = await fetched(where, ...more);
          if (late) await new Promise((done) => setTimeout(done, 2000));
          return answer;
        };
    """)
    fill(Store(tmp_path), PROMPTS, BASELINE, HEADS)
    with explore(str(tmp_path)) as page:
        tab.goto(page.url)
        tab.click("nav a[href='#sql']")
        tab.fill("#query", "SELECT 'first' AS a")
        tab.keyboard.press("Control+Enter")
        tab.wait_for_timeout(300)
        tab.fill("#query", "SELECT 'second' AS a")
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#sql tbody td:has-text('second')")
        tab.wait_for_timeout(4000)
        assert tab.locator("#sql tbody td").all_inner_texts() == ["second"]
        assert re.match(r"1 row, ", tab.inner_text("#sql .status"))
        assert tab.is_enabled("text=Run")
        assert tab.is_disabled("text=Stop")


@pytest.mark.bundled
def test_a_scan_that_runs_meanwhile_comes_onto_the_page(tab, tmp_path: Path) -> None:
    fill(Store(tmp_path), PROMPTS, BASELINE, HEADS)
    model, prompts = mi.load("bundled", device="cpu"), mi.prompts("two_digit", limit=16)
    with explore(str(tmp_path)) as page:
        tab.goto(page.url)
        tab.wait_for_selector("#overview")
        run = mi.run(mi.experiments.Heads(layers="0"), model, prompts, store=str(tmp_path), progress=False)
        tab.wait_for_selector(f'#overview a[href="#run-{run.id}"]')
        tab.click(f'nav a[href="#run-{run.id}"]')
        tab.wait_for_selector(f"#run-{run.id} .chart.done")
        shown = tab.locator(f"#run-{run.id}").inner_text()
        assert all(str(part) in shown for part in run.summary.parts if isinstance(part, str))
