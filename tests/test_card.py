"""The results card: figures are those of the stored rows, and text of a store is shown as it is."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from markdown_it.token import Token

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.report.card import results_card, write_card
from mathinterp.store import Store
from mathinterp.text import SHOWN, escaped, one_line
from tests.explorer_pages import MANY, ODD, ODD_COMMAND, head_store, odd_store
from tests.small_store import open_run, scores

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # raw HTML is let through, to be found
MARKUP = {"text", "softbreak", "strong_open", "strong_close"}


def inline(text: str) -> list[Token]:
    """What is within paragraphs, headings and cells."""
    return [child for token in MARKDOWN.parse(text) for child in token.children or []]


def tables(text: str) -> list[list[list[str]]]:
    """Tables of a card: rows of cells, as they are shown."""
    found: list[list[list[str]]] = []
    for token in MARKDOWN.parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and found and token.level == 4:
            found[-1][-1].append("".join(child.content for child in token.children or []))
    return found


HARD = [
    "<script>alert(1)</script>", "[a](http://evil.example)", "![a](b)", "a | b", "`code` ``x``", "*a* _b_ **c** ~~d~~",
    "# title", "- item", "1. item", "12) item", "+ item", "> quote", "| --- |", "&lt;&#60;", "a\\|b", "\\", "$x^2$",
    "http://evil.example", "www.evil.example", "<http://a.b>", "me@evil.example", "a\n\n# b", "---", "===", "    code",
    "[^1]", "\u202egnirts", "  ", "🧮 שלום", ODD,
]  # fmt: skip


@pytest.mark.parametrize("text", HARD)
def test_text_is_shown_as_it_is(text: str) -> None:
    for before, after in (("", ""), ("- ", ""), ("## ", ""), ("x\n\n", "\n\ny")):
        children = inline(f"{before}{escaped(text)}{after}")
        assert {child.type for child in children} <= {"text", "softbreak"}
        assert one_line(text) in " ".join(child.content for child in children) + " "
    cell = tables(f"| a | b |\n| --- | --- |\n| {escaped(text)} | c |\n")
    assert cell == [[["a", "b"], [one_line(text), "c"]]]
    assert not re.search(r"(?<!\\)://|www\.", escaped(text))  # GitHub makes links of these by themselves


def test_long_text_is_cut_and_says_so() -> None:
    assert escaped("x" * 1000) == "x" * SHOWN + "… (1,000 characters)"


@pytest.mark.slow
def test_a_store_of_odd_text_gives_a_card_without_markup(tmp_path: Path) -> None:
    store = odd_store(tmp_path)
    card = results_card(store)
    assert len(card) < 20_000 < len(MANY)
    assert {child.type for child in inline(card)} <= MARKUP
    code = [token.content for token in MARKDOWN.parse(card) if token.type == "fence"]
    assert code[0] == f"{ODD_COMMAND}\n"
    shown = "".join(child.content for child in inline(card))
    assert one_line(ODD) in shown
    with pytest.raises(UserError, match="has none of its 1 shards"):
        results_card(store, [row["run_id"] for row in store.rows("SELECT run_id FROM runs WHERE status = 'failed'")])


@pytest.mark.slow
def test_figures_are_those_of_the_rows_and_what_limits_them_is_said(tmp_path: Path) -> None:
    store, run = head_store(tmp_path)
    card = results_card(store)
    facts = dict(tables(card)[0])
    assert (facts["run"], facts["model"]) == (run, "m (weights-1)")
    assert facts["noise floor"] == "0 nats, 0 of 1 predictions flipped"
    (drops,) = [each for each in tables(card) if "drop (points)" in each[0]]
    rows = store.rows(
        """SELECT operation, layer || '.' || head AS node, 100 * drop AS drop, 100 * drop_low AS low,
                  100 * drop_high AS high, q_value AS q FROM head_effects WHERE run_id = $run""",
        {"run": run},
    )
    expected = {
        (row["operation"], row["node"]): [f"{row[name]:.4g}" for name in ("drop", "low", "high", "q")] for row in rows
    }
    place = [drops[0].index(name) for name in ("drop (points)", "low (points)", "high (points)", "q")]
    assert len(drops) > 3
    for row in drops[1:]:
        assert [row[each] for each in place] == expected[row[0], row[1]]
    assert "- Prompts: 9 (add 3, mul 3, sub 3)" in card
    assert "No command was recorded" in card
    assert f"WHERE run_id = '{run}'" in card
    assert "- Doubtful: " in card  # nine prompts are few


@pytest.mark.slow
def test_a_card_is_of_the_model_that_was_scanned_last(tmp_path: Path) -> None:
    store, first = head_store(tmp_path)
    _, second = head_store(tmp_path, seed=1, model="other", model_fingerprint="weights-2")
    assert results_card(store).startswith("# Results card: other\n")
    assert first not in results_card(store)
    both = results_card(store, [first, second])
    assert both.startswith("# Results card: m, other\n")
    assert both.count("\n## ") == 2


@pytest.mark.slow
def test_a_run_that_is_not_finished_is_not_taken_for_one(tmp_path: Path) -> None:
    store, _ = head_store(tmp_path)
    run = open_run(
        store, ["baseline/00000", "head_scan/00000", "head_scan/00001"], parameters={"scoring": "exact_match"}
    )
    for table, more in (("baseline", {}), ("head_scan", {"layer": 0, "head": 0})):
        rows = [{"prompt_id": f"p{i}", "position": position, **more} for i in range(9) for position in (0, 1)]
        store.write_shard(run.run_id, table, 0, scores(table, rows), {})
    assert run.run_id not in results_card(store)
    assert "**Not finished: what follows is of the shards that are there by chance.**" in results_card(
        store, [run.run_id]
    )


@pytest.mark.slow
def test_the_command_writes_the_card_and_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = head_store(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    words = ["report", "--store", str(tmp_path / "store"), "--card", "new/card.md"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.output) == (0, "new/card.md\n")
    assert (tmp_path / "new" / "card.md").read_text() == results_card(store)
    assert not (tmp_path / "report").exists()
    with pytest.raises(UserError, match="no run nothing in"):
        write_card(store, tmp_path / "other.md", ["nothing"])
    with pytest.raises(UserError, match="has no finished run"):
        results_card(Store(tmp_path / "none"))
    assert not (tmp_path / "other.md").exists()
