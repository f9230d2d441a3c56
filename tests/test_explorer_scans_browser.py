"""Path scans and adaptive scans in a real browser: what is chosen and drilled into is what SQL says."""

from pathlib import Path
from typing import Any

import pytest

from mathinterp.report.page import write_report
from mathinterp.store import Store
from tests.browser import PHONE, WIDE, explore, in_a_browser, opened, serious, shown_run
from tests.explorer_pages import adaptive_store, path_store

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path, str, str]:
    """An adaptive head scan, a path scan, and their page."""
    folder = tmp_path_factory.mktemp("scans")
    _, heads = adaptive_store(folder / "store")
    store, paths = path_store(folder / "store")
    return store, write_report(store, folder / "page").page, heads, paths


def cells_of(rows: Any) -> list[list[str]]:
    return [[cell.inner_text() for cell in row.locator("td").all()] for row in rows.all()]


def test_a_path_scan_is_chosen_from_both_sides_and_drilled_into(
    browser: Any, scans: tuple[Store, Path, str, str]
) -> None:
    store, page, _, run = scans
    rows = store.rows("SELECT *, layer || '.' || head AS name FROM path_scan")
    with opened(browser, page, viewport=WIDE) as tab:
        section = shown_run(tab, run)
        explore(tab)
        status = section.locator(".status")

        def said(nodes: int, prompts: int, chosen: list[dict[str, Any]]) -> None:
            lowered, raised = (sum(sign * row["effect"] > 0.05 for row in chosen) for sign in (-1, 1))
            counts = f"{nodes} of 6 nodes, {prompts} of 8 prompts"
            if len(chosen) < nodes * prompts:
                counts += f", {len(chosen)} of {nodes * prompts} cells computed"
            assert status.inner_text() == f"{counts}: {lowered} answer{'s' * (lowered != 1)} lowered, {raised} raised"

        said(6, 8, rows)
        for named, mine in (
            ("MLP 1", [row for row in rows if row["node"] == "mlp" and row["layer"] == 1]),
            ("mlp", [row for row in rows if row["node"] == "mlp"]),
            ("0.1, mlp0", [row for row in rows if (row["layer"], row["head"]) in ((0, 1), (0, None))]),
        ):
            section.get_by_label("Nodes", exact=True).fill(named)
            said(len({(row["layer"], row["head"]) for row in mine}), 8, mine)
        section.get_by_label("Nodes", exact=True).fill("")
        section.get_by_role("region", name="prompts that matter").locator("tbody button").first.click()
        ((text, *_),) = cells_of(section.get_by_role("region", name="prompts that matter").locator("tbody tr"))
        mine = [row for row in rows if row["prompt_id"] == f"p{text.split()[0]}"]
        said(6, 1, mine)
        section.get_by_role("button", name="Choose all again").click()
        section.get_by_role("region", name="nodes that matter").get_by_role("button", name="node 0.1").click()
        lowered = sorted(
            (row for row in rows if row["name"] == "0.1" and row["effect"] < -0.05), key=lambda row: row["effect"]
        )
        heading = section.locator(".sentences h4").inner_text().lower()
        assert heading == f"node 0.1 lowers {len(lowered)} sentence{'s' * (len(lowered) != 1)} of the chosen 8"
        found = cells_of(section.locator(".sentences tbody tr"))
        assert len(found) == len(lowered) > 0
        for (sentence, other, _, right, _, chance, effect, nats), row in zip(found, lowered, strict=True):
            number = int(row["prompt_id"][1:])
            assert (sentence, other) == (f"{number} plus {number + 1} equals", f"{number} nothing {number + 1} equals")
            assert right == "12"
            before, after = (float(part.removesuffix(" %")) for part in chance.split(" → "))
            assert before == pytest.approx(77.9, abs=0.05)
            assert after == pytest.approx(77.88 * 2.718281828 ** row["logprob_change"], rel=0.02)
            assert float(effect.replace("−", "-")) == pytest.approx(100 * row["effect"], abs=0.5)
            assert float(nats.replace("−", "-")) == pytest.approx(row["logprob_change"], abs=0.02)


def test_absent_cells_of_an_adaptive_scan_count_nowhere_and_decisions_are_told(
    browser: Any, scans: tuple[Store, Path, str, str]
) -> None:
    store, page, run, _ = scans
    counted = """SELECT layer || '.' || head AS name, count(*) AS n, count_if(was AND NOT now) AS broken FROM (
                     SELECT layer, head, prompt_id, bool_and(b.correct) AS was, bool_and(s.correct) AS now
                     FROM head_scan AS s JOIN baseline AS b USING (run_id, prompt_id, position) GROUP BY ALL)
                 GROUP BY ALL"""
    expected = {row["name"]: (str(row["broken"]), str(row["n"])) for row in store.rows(counted)}
    with opened(browser, page, viewport=WIDE) as tab:
        section = shown_run(tab, run)
        explore(tab)
        broken = sum(int(broken) for broken, _ in expected.values())
        assert section.locator(".status").inner_text().startswith(
            f"6 of 6 heads, 9 of 9 prompts, 30 of 54 cells computed: {broken} answers broken"
        )  # fmt: skip
        rows = cells_of(section.get_by_role("region", name="heads that matter").locator("tbody tr"))
        assert {row[0]: (row[1], row[3]) for row in rows} == expected
        decided = {row[0]: row[5:] for row in rows}
        assert decided["0.0"] == ["above", "25"], "certain, so there is no interval"
        assert decided["1.0"] == ["above", "25 (12.5 to 50)"]
        assert decided["1.2"] == ["none", "-"]
        section.get_by_label("Decision", exact=True).select_option("above")
        assert section.locator(".status").inner_text().startswith("2 of 6 heads, 9 of 9 prompts, 12 of 18 cells")
        section.get_by_role("region", name="heads that matter").get_by_role("button", name="head 1.0").click()
        told = section.locator(".sentences").inner_text()
        assert "of the 3 computed of the chosen 9" in told
        assert "Decided after 3 of 10 prompts: above 5 points; the drop is estimated as 25 points" in told
        assert "interval 12.5 to 50, which holds at every look" in told
        explorer = "document.querySelector('.view:not([hidden]) .room').explorer"
        assert tab.evaluate(f"{explorer}.onHeat(.99, .99)")[-1] == "not computed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_serious_is_found_by_axe(
    browser: Any, scans: tuple[Store, Path, str, str], scheme: str, viewport: dict[str, int]
) -> None:
    _, page, *runs = scans
    with opened(browser, page, viewport=viewport, color_scheme=scheme) as tab:
        for run in runs:
            tab.goto(f"{page.as_uri()}#run-{run}")
            tab.locator(f"#run-{run} canvas").first.wait_for()
            explore(tab)
            tab.locator(f"#run-{run} .panels button.link").first.click()
            assert serious(tab) == []
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
