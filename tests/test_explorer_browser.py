"""The page in a real browser, from a file: nothing fails, nothing is fetched, and what it shows is what SQL says."""

import re
from pathlib import Path
from typing import Any

import pytest

from mathinterp.report.page import write_report
from mathinterp.store import Store
from tests.browser import EXPLORED, PHONE, WIDE, explore, in_a_browser, opened, serious, shown_run
from tests.explorer_pages import head_store, made_up_grid, made_up_page, odd_store, with_attention

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path, str, str]:
    """Two models' head scans, an attention scan of the first, and the page that compares them."""
    folder = tmp_path_factory.mktemp("explorer")
    store, first = head_store(folder / "store")
    _, second = head_store(folder / "store", seed=1, model="tuned", model_fingerprint="weights-2")
    with_attention(store, left=(1, 2))
    return store, write_report(store, folder / "page", compare=(first, second)).page, first, second


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with 1.64 million cells."""
    return made_up_page(tmp_path_factory.mktemp("large"), made_up_grid(1024, 1600))


def test_every_view_opens_with_its_charts(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    _, page, first, _ = two_runs
    with opened(browser, page, viewport=WIDE) as tab:
        links = tab.locator("nav a")
        assert links.count() == 5
        for i in range(links.count()):
            links.nth(i).click()
            view = tab.locator(links.nth(i).get_attribute("href"))
            view.wait_for(state="visible")
            assert tab.locator(".view:visible").count() == 1
            assert links.nth(i).get_attribute("aria-current") == "page"
            charts = view.locator("figure.chart")
            for j in range(charts.count()):
                charts.nth(j).scroll_into_view_if_needed()
                charts.nth(j).locator("canvas").wait_for()
        section = shown_run(tab, first)
        with tab.expect_download() as download:
            section.locator("button.save[data-kind=svg]").click()
        assert download.value.suggested_filename == f"heads-{first}.svg"
        assert "<svg" in Path(download.value.path()).read_text()
        with tab.expect_download() as download:
            section.locator("button.save[data-kind=png]").click()
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_the_overview_has_a_picture_and_a_finding_of_each_run(
    browser: Any, two_runs: tuple[Store, Path, str, str]
) -> None:
    store, page, first, _ = two_runs
    costly = "SELECT count_if(drop > .1) AS n FROM head_effects WHERE run_id = $run AND operation = 'all'"
    ((costs,),) = [row.values() for row in store.rows(costly, {"run": first})]
    with opened(browser, page, viewport=WIDE) as tab:
        cards = tab.locator("#overview .runs > li")
        assert cards.count() == 3
        for i in range(3):
            cards.nth(i).scroll_into_view_if_needed()
            cards.nth(i).locator(".thumbnail canvas").wait_for()
        finding = cards.filter(has_text=first).locator(".finding").inner_text()
        assert finding.startswith(f"{costs} of 6 heads cost")
        cards.filter(has_text=first).get_by_role("link").click()
        tab.locator(f"#run-{first}").wait_for(state="visible")


def test_no_panel_is_left_alone_in_the_last_row(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    """Where three of four fit, two and two."""
    _, page, first, _ = two_runs
    with opened(browser, page, viewport={"width": 1100, "height": 900}) as tab:
        canvas = shown_run(tab, first).locator("figure.chart canvas")
        canvas.wait_for()
        room = tab.locator(f"#run-{first} .drawn").first.bounding_box()["width"]
        assert 3 * 230 < room < 4 * 230
        assert canvas.bounding_box()["width"] < 430
        assert canvas.bounding_box()["height"] > 330, "two rows"


def test_a_chart_tells_the_effect_under_the_pointer(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    store, page, first, _ = two_runs
    with opened(browser, page, viewport=WIDE) as tab:
        canvas = shown_run(tab, first).locator("figure.chart canvas")
        box = canvas.bounding_box()
        told = None
        for y in range(60, 200, 10):  # to where the first panel's cells are
            canvas.hover(position={"x": 70, "y": min(y, box["height"] - 2)})
            tip = tab.locator("#vg-tooltip-element.visible")
            tab.wait_for_timeout(50)
            if tip.count():
                told = tip.inner_text()
                break
        assert told is not None
        name, drop = re.search(r"node\s+(\S+)", told), re.search(r"fall of accuracy\s+(\S+) points", told)
        assert name is not None
        assert drop is not None
        layer, head = name[1].split(".")
        (row,) = store.rows(
            "SELECT drop FROM head_effects WHERE run_id = $run AND operation = 'all' AND layer = $layer AND head = $h",
            {"run": first, "layer": int(layer), "h": int(head)},
        )
        assert float(drop[1].replace("−", "-")) == pytest.approx(100 * row["drop"], rel=1e-3)


def test_choosing_heads_and_prompts_gives_the_counts_of_sql(
    browser: Any, two_runs: tuple[Store, Path, str, str]
) -> None:
    store, page, first, _ = two_runs
    broken = """SELECT layer || '.' || head AS head, operation, prompt_id FROM ablated_prompts
                WHERE run_id = $run AND baseline_whole = 1 AND whole_right = 0"""
    rows = store.rows(broken, {"run": first})
    with opened(browser, page, viewport=WIDE) as tab:
        section = shown_run(tab, first)
        explore(tab)
        status = section.locator(".status")
        assert f"6 of 6 heads, 9 of 9 prompts: {len(rows)} answers broken" in status.inner_text()
        section.get_by_label("Operation", exact=True).select_option("sub")
        assert f"3 of 9 prompts: {sum(row['operation'] == 'sub' for row in rows)} answer" in status.inner_text()
        section.get_by_label("Heads", exact=True).fill("1")
        mine = [row for row in rows if row["operation"] == "sub" and row["head"].startswith("1.")]
        assert f"3 of 6 heads, 3 of 9 prompts: {len(mine)} answer" in status.inner_text()
        section.get_by_label("Sentences with").fill("no such sentence")
        assert "0 of 9 prompts: 0 answers broken" in status.inner_text()
        section.get_by_role("button", name="Choose all again").click()
        assert f": {len(rows)} answers broken" in status.inner_text()
        table = section.get_by_role("region", name="heads that matter").locator("tbody tr")
        counts = {
            table.nth(i).locator("td").nth(0).inner_text(): int(table.nth(i).locator("td").nth(1).inner_text())
            for i in range(6)
        }
        assert counts == {head: sum(row["head"] == head for row in rows) for head in counts}


def test_dragging_chooses_and_a_click_drills_down(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    store, page, first, _ = two_runs
    with opened(browser, page, viewport=WIDE) as tab:
        section = shown_run(tab, first)
        explore(tab)
        heat = section.locator("canvas").nth(2)
        heat.scroll_into_view_if_needed()
        box = heat.bounding_box()
        tab.mouse.move(box["x"] + 2, box["y"] + 2)
        tab.mouse.down()
        tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
        tab.mouse.up()
        assert re.match("3 of 6 heads, 5 of 9 prompts", section.locator(".status").inner_text())
        section.get_by_role("button", name="Choose all again").click()
        heads = section.get_by_role("region", name="heads that matter").locator("tbody button")
        name = heads.first.inner_text()
        heads.first.click()
        layer, head = map(int, name.split("."))
        fallen = store.rows(
            """SELECT text, answer, list(s.predicted_id ORDER BY s.position) AS ids
               FROM ablated_prompts AS a JOIN head_scan AS s USING (run_id, layer, head, prompt_id)
               JOIN prompts AS p USING (prompt_id)
               WHERE run_id = $run AND layer = $layer AND head = $head AND baseline_whole = 1 AND whole_right = 0
               GROUP BY ALL""",
            {"run": first, "layer": layer, "head": head},
        )
        words = {40: "1", 41: "2", 77: "<token 77>"}
        expected = {(row["text"], row["answer"], "".join(words[each] for each in row["ids"])) for row in fallen}
        told = section.locator(".sentences tbody tr")
        found = {tuple(told.nth(i).locator("td").nth(j).inner_text() for j in (0, 2, 4)) for i in range(told.count())}
        assert found == expected
        assert f"breaks {len(expected)} sentence" in section.locator(".sentences h4").inner_text()
        bars = section.locator(".sentences .bars").first.inner_text()
        number = int(told.first.locator("td").first.inner_text().split()[0])
        assert f"bos {50 + 5 * number} %" in bars


def test_the_keyboard_reaches_everything(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    _, page, first, _ = two_runs
    with opened(browser, page, viewport=WIDE) as tab:
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.className") == "skip"
        tab.goto(f"{page.as_uri()}#run-{first}")
        section = tab.locator(f"#run-{first}")
        section.locator(".grid > .open").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_function(EXPLORED)
        heat = section.locator("canvas").nth(2)
        heat.focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowDown")
        assert "head 0.1" in tab.locator("#said").inner_text()
        tab.keyboard.press("Enter")
        assert section.locator(".sentences h4").inner_text().lower().startswith("head 0.1 breaks")
        assert tab.evaluate("document.activeElement.tagName") == "H4"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_serious_is_found_by_axe(
    browser: Any, two_runs: tuple[Store, Path, str, str], scheme: str, viewport: dict[str, int]
) -> None:
    _, page, first, _ = two_runs
    with opened(browser, page, viewport=viewport, color_scheme=scheme) as tab:
        assert serious(tab) == []
        for place in ("compare", f"run-{first}"):
            tab.goto(f"{page.as_uri()}#{place}")
            tab.locator(f"#{place} canvas").first.wait_for()
            if place != "compare":
                explore(tab)
                tab.locator(f"#{place} .panels button.link").first.click()
            assert serious(tab) == []
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"


def test_the_phone_has_a_menu_and_the_theme_a_button(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    _, page, first, _ = two_runs
    with opened(browser, page, viewport=PHONE, color_scheme="light") as tab:
        assert not tab.locator("nav").is_visible()
        tab.get_by_role("button", name="Runs").click()
        shown_run(tab, first)
        assert not tab.locator("nav").is_visible()
        background = "getComputedStyle(document.body).backgroundColor"
        light = tab.evaluate(background)
        theme = tab.locator("#theme")
        for name in ("light", "dark"):
            theme.click()
            assert theme.inner_text() == f"Theme: {name}"
        assert tab.evaluate(background) != light
        tab.reload()
        assert theme.inner_text() == "Theme: dark"


def test_copying_gives_the_sql(browser: Any, two_runs: tuple[Store, Path, str, str]) -> None:
    store, page, first, _ = two_runs
    with opened(browser, page, viewport=WIDE, permissions=["clipboard-read", "clipboard-write"]) as tab:
        shown_run(tab, first).get_by_role("button", name="Copy SQL").first.click()
        tab.get_by_text("Copied").wait_for()
        text = tab.evaluate("navigator.clipboard.readText()")
        for query in text.split(";\n")[:-1]:
            store.rows(query)
        assert f"run_id = '{first}'" in text


def test_odd_text_is_shown_and_runs_nothing(browser: Any, tmp_path: Path) -> None:
    page = write_report(odd_store(tmp_path / "store"), tmp_path / "page").page
    with opened(browser, page, viewport=WIDE) as tab:
        assert "failed </script><img src=x onerror=alert(1)>" in tab.locator(".alert").inner_text()
        tab.locator("nav li li a").first.click()
        tab.locator(".view:visible figure.chart canvas").wait_for()
        assert tab.locator(".view:visible h2").inner_text().startswith("heads: </script><img src=x onerror=alert(1)>")
        explore(tab)
        tab.locator(".view:visible .panels button.link").first.click()
        rows = tab.locator(".sentences tbody tr")
        assert rows.count() == 4
        texts = [rows.nth(i).locator("td").first.inner_text() for i in range(4)]
        assert sum(text.endswith("... (100,000 characters)") for text in texts) == 1
        assert all("<img src=x onerror=alert(1)>" in text and "שלום" in text for text in texts)
        assert tab.locator("img").count() == 0
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_large_grid_opens(browser: Any, large: Path) -> None:
    with opened(browser, large, viewport=WIDE) as tab:
        section = shown_run(tab, "0123456789ab")
        explore(tab)
        assert "1,024 of 1,024 heads, 1,600 of 1,600 prompts" in section.locator(".status").inner_text()
        assert "824 others left out for size" in section.locator(".hint").last.inner_text()


@pytest.mark.alone
def test_a_filter_over_a_million_cells_takes_under_50_ms(browser: Any, large: Path) -> None:
    with opened(browser, large, viewport=WIDE) as tab:
        shown_run(tab, "0123456789ab")
        explore(tab)
        for operation in ("add", "sub", "all", "mul", "all", "div", "all", "all"):
            tab.locator(".controls select").first.select_option(operation)
        took = tab.evaluate("performance.getEntriesByName('filter').map((entry) => entry.duration)")
        assert len(took) >= 8
        assert sorted(took)[len(took) // 2] < 50, took


@pytest.mark.alone
def test_the_page_is_interactive_in_under_two_seconds(
    browser: Any, large: Path, two_runs: tuple[Store, Path, str, str]
) -> None:
    for page in (large, two_runs[1]):
        with opened(browser, page, viewport=WIDE) as tab:
            tab.wait_for_function("performance.getEntriesByName('interactive').length")
            assert tab.evaluate("performance.getEntriesByName('interactive')[0].startTime") < 2000
