"""The reproduction as a page and as JSON: what a reader sees, from whom numbers are, and odd text in it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mathinterp.cli.reproduce import _command
from mathinterp.errors import UserError
from mathinterp.text import printable
from mathinterp.workflows.papers import ITEMS
from mathinterp.workflows.papers.item import Item
from mathinterp.workflows.reproduce import ItemResult, Reproduction
from mathinterp.workflows.reproduction_page import as_json, from_json, markdown
from mathinterp.workflows.verdicts import Measured, compare
from tests.explorer_pages import ODD

ROOT = Path(__file__).parents[1]
BY_ID = {item.id: item for item in ITEMS}
MARKDOWN = MarkdownIt("commonmark").enable("table")  # raw HTML is let through, to be found


def measured(item: Item) -> list[Measured]:
    """What a run might give for every printed number."""
    return [Measured(c.what, c.value, c.value - 1, c.value + 1, 50, c.unit, c.rank) for c in item.cells]


def made_up(*names: str, model: str = "m", own: str = "", **changes: object) -> Reproduction:
    """These items, where the model is the paper's own each with ours in the interval."""
    results = []
    for item in (BY_ID[name] for name in names):
        same = item.model == own
        lines = compare(item, measured(item), () if same else (f"another model than the paper's {item.model}",), same)
        results.append(ItemResult(item, lines, {}, {}))
    ran = ({"stage": "paths", "run_id": "0" * 12, "prompts": model, "n_prompts": 8, "wall_seconds": 1.5},)
    found = Reproduction(model, "f" * 16, "float32", own, "store", None, tuple(results), {}, ran, {"gender": model})
    return replace(found, **changes)


def test_numbers_that_are_second_hand_are_marked_wherever_they_are_read() -> None:
    page = markdown([made_up("a-table1", "b-paths-heads", own="Llama-2-7B")], _command)
    assert "**Second hand**: paper B's text was not at hand." in page
    sections = dict(re.findall(r"^### ([ab]-\S+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert "| paper (Llama-2-7B), second hand | m |" in sections["b-paths-heads"]
    assert "**Second hand**: numbers from a reader's notes" in sections["b-paths-heads"]
    assert "in the interval, 0 outside; the paper's numbers are second hand" in sections["b-paths-heads"]
    assert "econd hand" not in sections["a-table1"]
    assert "econd hand" not in markdown([made_up("a-table1")], _command)  # nothing on the page is
    assert [item["second_hand"] for item in as_json(made_up("a-table1", "b-paths-heads"))["items"]] == [False, True]


def test_a_verdict_on_some_numbers_counts_those_that_do_not_compare() -> None:
    item = BY_ID["a-table1"]
    lines = compare(item, measured(item)[:10], (), same_model=True)
    assert ItemResult(item, lines, {}, {}).verdict == "10 of 10 in the interval, 0 outside, 20 not comparable"
    assert {line.why for line in lines[10:]} == {"ours has no such row"}
    assert {line.why for line in compare(item, (), (), same_model=True, ran=False)} == {"nothing was measured"}


def test_a_run_is_listed_without_the_place_of_its_file_and_a_training_without_prompts() -> None:
    ran = [
        {"stage": stage, "run_id": "0" * 12, "prompts": prompts, "n_prompts": n, "wall_seconds": 2.0}
        for stage, prompts, n in (("svamp", "svamp:/home/me/SVAMP.json", 1000), ("full", "signed_train", 0))
    ]
    page = markdown([made_up("a-table1", ran=tuple(ran))], _command)
    assert "| svamp | 000000000000 | SVAMP.json (1,000) | 2 s |" in page
    assert "| full | 000000000000 | signed\\_train | 2 s |" in page


@given(st.one_of(st.just(ODD), st.text(max_size=40)))
def test_text_of_a_model_a_file_or_an_error_is_shown_as_it_is(text: str) -> None:
    page = markdown([made_up("a-table1", "a-table11", model=text)], _command)
    tokens = [child for token in MARKDOWN.parse(page) for child in (token, *(token.children or []))]
    assert not {token.type for token in tokens} & {"html_inline", "html_block", "image", "fence", "code_block"}
    links = [token.attrs["href"] for token in tokens if token.type == "link_open"]
    assert links == ["#a-table1", "#a-table11"]
    assert len([token for token in tokens if token.type == "table_open"]) == 5
    assert printable(page) == page


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("items", 0, "lines", 0, "ours", "value"), "many"), (("items", 0, "lines", 0, "ours", "value"), 10**400),
        (("items", 0, "lines", 0, "verdict"), "good"), (("items", 0, "lines", 0), None), (("items",), {"id": "x"}),
        (("missing",), ["x"]), (("ran", 0), {}), (("ran", 0, "n_prompts"), "x"),
        (("items", 0, "id"), "\n\x1b"),
    ],
)  # fmt: skip
def test_a_saved_reproduction_with_anything_else_in_it_is_refused_in_one_line(
    place: tuple[str | int, ...], value: object
) -> None:
    saved = json.loads(json.dumps(as_json(made_up("a-table1"))))
    assert from_json(saved, "file") == made_up("a-table1")
    at = saved
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    with pytest.raises(UserError, match="file is no reproduction") as refused:
        from_json(saved, "file")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_the_documentations_sheet_is_in_step_with_the_registry() -> None:
    page = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    models = re.search(r"^## Models\n\n.*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)[1].count("\n")
    sections = dict(re.findall(r"^### ([ab]-\S+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [item.id for item in ITEMS]
    for item in ITEMS:
        text = sections[item.id]
        assert f"Paper {item.paper}, {item.place}; {item.model}: {item.measures}." in text
        assert f"`mathinterp reproduce --only {item.id}`" in text
        rows = [row.split("|")[2].strip() for row in text.splitlines() if row.startswith("| ")]
        shown = [cell for cell in rows if cell and not cell.startswith("paper (")]
        assert shown == [f"{cell.unit}: {cell.text}" if cell.rank else cell.text for cell in item.cells]
        assert len(re.findall(r"^- .*(not comparable|in the interval)", text, re.MULTILINE)) == models
