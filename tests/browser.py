"""A headless Chromium for tests of pages: one that fails on any error and on any request but for files and data."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ALLOWED = ("file:", "data:", "blob:")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or name one in CHROMIUM; pages are not opened"
)

in_a_browser = [pytest.mark.browser, pytest.mark.slow, needs_chromium]  # marks of a file of such tests
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
EXPLORED = "() => document.querySelector('.view:not([hidden]) .room')?.explorer"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, page: Path | str, *, allowed: tuple[str, ...] = ALLOWED, **settings: Any) -> Iterator[Any]:
    """The page, opened; fails at its end for anything in the console, an error or a request that is not allowed.

    Args:
        page: a file, or a URL.
        settings: of the browser's context: viewport, color_scheme, ...
    """
    context = browser.new_context(**settings)
    tab, wrong = context.new_page(), list[str]()
    tab.on("console", lambda message: wrong.append(f"console {message.type}: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on("request", lambda request: request.url.startswith(allowed) or wrong.append(f"request: {request.url}"))
    tab.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    tab.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}") or dialog.dismiss())
    tab.goto(page if isinstance(page, str) else page.as_uri())
    yield tab
    context.close()
    assert not wrong, wrong


def explore(tab: Any) -> None:
    """Open the grid of the view that is shown."""
    tab.locator(".view:not([hidden]) .grid > .open").click()
    tab.wait_for_function(EXPLORED)


def shown_run(tab: Any, run: str) -> Any:
    """Go to a run by its link; its section."""
    tab.locator(f"nav a[href='#run-{run}']").click()
    section = tab.locator(f"#run-{run}")
    section.wait_for(state="visible")
    return section


def serious(tab: Any) -> list[str]:
    """What axe-core finds of serious and critical faults of accessibility."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab, options={"preload": False}).response["violations"]  # which would fetch style sheets
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in found if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]  # fmt: skip
