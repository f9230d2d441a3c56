"""Figures: charts that hold the stored numbers and say how sure they are, with text that stays text; their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mathinterp.errors import UserError
from mathinterp.experiments import figures, stability
from mathinterp.experiments.charts import node_map, signed_colour
from mathinterp.experiments.figures import (
    MANY,
    Q,
    Tip,
    data_of,
    headed,
    interval,
    label_of,
    records,
    rows_of,
    save,
    wrapped,
)  # fmt: skip
from mathinterp.experiments.results import Results
from mathinterp.experiments.stability.figure import draw as draw_stability
from mathinterp.report.page import draw
from mathinterp.store import Store
from mathinterp.tuning.training.figure import draw as draw_tuning
from mathinterp.tuning.training.tables import TUNING_RUNS
from tests.charts import check_parts, expressions_of, parts_of, table_of, texts_of
from tests.small_store import fill, open_run, prompt, scores

PROMPTS = [prompt("p0", "add"), prompt("p1", "sub")]
RIGHT = [{"prompt_id": "p0", "correct": True}, {"prompt_id": "p1", "correct": True}]
ODD = ["datum.x", "$5 and $6", "<b>&amp;</b><img src=x onerror=alert(1)>", "a.b[c]'\"\\", "שלום עולם", "🧮 é\u202e",
       "\x00\x1b[31m\ud800",
       "{signal: 'x'}", "constructor", "a\nb\tc"]  # fmt: skip


@pytest.fixture
def head_store(tmp_path: Path) -> tuple[Store, str]:
    """Heads 0.0 to 1.1; only 1.0 breaks addition."""
    store = Store(tmp_path / "store")
    return store, fill(store, PROMPTS, RIGHT, broken_heads())


def broken_heads() -> list[dict[str, Any]]:
    return [
        {"layer": layer, "head": head, "prompt_id": p, "correct": not (layer == 1 and head == 0 and p == "p0")}
        for layer in (0, 1) for head in (0, 1) for p in ("p0", "p1")
    ]  # fmt: skip


def many(layers: int, heads: int, operations: int = 5) -> pd.DataFrame:
    """Effects of a map, as a large model has them."""
    draw = np.random.default_rng(0)
    rows = pd.MultiIndex.from_product(
        [range(layers), range(heads), ["all", "add", "sub", "mul", "div"][:operations]],
        names=["layer", "head", "operation"],
    ).to_frame(index=False)
    effect = draw.normal(0, 0.03, len(rows))
    return rows.assign(
        node="head", drop=effect, low=effect - 0.02, high=effect + 0.02, q=draw.uniform(size=len(rows)) ** 9,
        sure=draw.uniform(size=len(rows)) < 0.1, n=4088,
    )  # fmt: skip


def map_of(rows: pd.DataFrame) -> figures.Figure:
    tips = [Tip("drop", "fall", "points"), interval("low", "high", "points"), Q, Tip("n", "n", "whole")]
    return node_map(rows, signed_colour("drop", rows["drop"], "fall", "points"), tips, dot="sure")


# ---- what a chart holds ----


@pytest.mark.slow
def test_the_map_of_a_head_scan_holds_the_stored_effects(head_store: tuple[Store, str]) -> None:
    figure = draw(*head_store)
    assert figure.to_dict()["facet"]["sort"] == ["all", "add", "sub"]
    rows = table_of(figure, "drop").set_index(["operation", "name"])
    assert (rows.loc["sub", "drop"] == 0).all()
    assert rows.loc["add", "drop"].to_dict() == {"0.0": 0, "0.1": 0, "1.0": 1, "1.1": 0}
    assert rows.loc[("all", "1.0"), "drop"] == 0.5
    stored = head_store[0].rows("SELECT * FROM head_effects WHERE operation = 'all' AND layer = 1 AND head = 0")[0]
    shown = rows.loc[("all", "1.0")]
    for column, view in (("drop_low", "drop_low"), ("drop_high", "drop_high"), ("q", "q_value"), ("n", "n")):
        assert shown[column] == pytest.approx(stored[view], rel=1e-3)
    assert shown["sure"] == {True: "yes", False: "no"}[stored["sure"]]
    assert check_parts(figure) == 1


@pytest.mark.slow
def test_colours_are_as_far_on_both_sides_of_nothing_and_text_has_none(head_store: tuple[Store, str]) -> None:
    spec = draw(*head_store).to_dict()
    ((cells, _),) = parts_of(spec)
    low, high = cells["encoding"]["color"]["scale"]["domain"]
    assert -low == high == 1
    assert cells["encoding"]["color"]["scale"]["domainMid"] == 0
    written = json.dumps({**spec, "datasets": {}})
    colours = spec["config"]["range"]["diverging"]
    assert (colours[0], colours[16], colours[-1]) == ("#0072b2", "#eceae6", "#c8470a")  # gain, nothing, harm
    assert not any(name in written for name in ("labelColor", "titleColor", "background", '"fill":', "subtitleColor"))


@pytest.mark.slow
def test_a_run_that_is_not_finished_or_says_little_is_told_under_the_title(head_store: tuple[Store, str]) -> None:
    store, run = head_store
    title = " ".join(draw(store, run).to_dict()["title"]["subtitle"])
    assert "m, two-digit" in title
    assert "rough figures: under 12 prompts for operation 'add' (1), 'sub' (1)" in title
    assert "unfinished" not in title
    part = open_run(store, ["baseline/00000", "head_scan/00000", "head_scan/00001"], model_fingerprint="weights-2")
    store.write_shard(part.run_id, "baseline", 0, scores("baseline", RIGHT), {})
    store.write_shard(part.run_id, "head_scan", 0, scores("head_scan", broken_heads()), {})
    assert "unfinished: 2 of 3 shards" in " ".join(draw(store, part.run_id).to_dict()["title"]["subtitle"])


@pytest.mark.slow
def test_where_accuracy_ranks_nothing_the_map_is_of_log_probabilities_and_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    heads = [{**row, "correct": True, "logprob": -0.5 - row["head"]} for row in broken_heads()]
    run = fill(store, PROMPTS, RIGHT, heads)
    spec = draw(store, run).to_dict()
    ((cells, _),) = parts_of(spec)
    assert cells["encoding"]["color"]["field"] == "logprob_change"
    assert cells["encoding"]["color"]["legend"]["title"] == "change of log-probability (nats)"
    assert "accuracy ranks nothing in add: 100 % right" in " ".join(spec["title"]["subtitle"])


def test_a_chart_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="no rows to draw yet"):
        data_of(pd.DataFrame({"a": []}))


def test_numbers_are_rounded_to_four_digits_and_what_is_none_is_null() -> None:
    frame = pd.DataFrame(
        {"a": [0.123456789, np.nan, np.inf], "b": pd.array([1, None, 3], dtype="Int32"), "c": [True, False, None],
         "d": ["x\x1b", None, "y"]}
    )  # fmt: skip
    assert records(frame) == [
        {"a": 0.1235, "b": 1, "c": "yes", "d": "x\\x1b"},
        {"a": None, "b": None, "c": "no", "d": None},
        {"a": None, "b": 3, "c": None, "d": "y"},
    ]


# ---- large maps ----


@pytest.mark.slow
def test_the_map_of_a_large_model_is_small_and_looks_as_one_of_json_rows(monkeypatch, tmp_path: Path) -> None:
    assert len(json.dumps(map_of(many(32, 32)).to_dict())) < 330_000
    largest = map_of(many(80, 64))
    assert len(json.dumps(largest.to_dict())) < 400_000
    assert set(table_of(largest, "operation")["operation"]) == {"all"}
    rows = many(4, 32)
    short = map_of(rows)
    assert len(rows) > MANY
    assert isinstance(next(iter(short.to_dict()["datasets"].values())), str)
    assert len(table_of(short, "drop")) == len(rows)
    monkeypatch.setattr(figures, "MANY", len(rows) + 1)
    plain = map_of(rows)
    assert isinstance(next(iter(plain.to_dict()["datasets"].values())), list)
    (one, _), (other, _) = save(short, tmp_path / "csv"), save(plain, tmp_path / "json")
    assert one.read_bytes() == other.read_bytes()


# ---- text of a store ----


@pytest.mark.slow
def test_text_of_a_store_is_text_and_no_expression(tmp_path: Path) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in ODD]
    store = Store(tmp_path / "store")
    prompts = [prompt(f"p{i}", text) for i, text in enumerate(texts)]
    right = [{"prompt_id": f"p{i}", "correct": True} for i in range(len(texts))]
    heads = [{**row, "layer": 0, "head": head, "correct": head == 0} for row in right for head in (0, 1)]
    run = fill(store, prompts, right, heads, model=" ".join(texts))
    figure = draw(store, run)
    plain = Store(tmp_path / "plain")
    ours = draw(plain, fill(plain, PROMPTS, RIGHT, broken_heads()))
    assert set(expressions_of(figure.to_dict())) == set(expressions_of(ours.to_dict()))
    assert not any(text in expression for text in ODD for expression in expressions_of(figure.to_dict()))
    check_parts(figure)
    _, svg = save(figure, tmp_path / "odd")
    drawn = texts_of(svg.read_text("utf-8"))
    for text in ("datum.x", "$5 and $6", "a.b[c]'\"\\", "{signal: 'x'}", "\u200bconstructor"):
        assert text in drawn
    assert any("<img src=x" in text for text in drawn)
    assert "<img" not in svg.read_text("utf-8")


@pytest.mark.slow
def test_a_heading_without_an_end_is_cut_and_control_characters_are_shown(tmp_path: Path) -> None:
    figure = headed(map_of(many(2, 2)), "x" * 100_000, "a map", ["\x1b[31m" * 2_000, "word " * 20_000], "1.5")
    spec = figure.to_dict()
    assert len(json.dumps(spec["title"])) < 3_000
    assert label_of(figure) == "1.5"
    assert len(wrapped("word " * 20_000, 30)) == 6
    _, svg = save(figure, tmp_path / "long")
    assert "\\x1b[31m" in texts_of(svg.read_text("utf-8"))[1] or "\\x1b[31m" in svg.read_text("utf-8")


# ---- files ----


@pytest.mark.slow
def test_files_are_a_picture_and_text_that_can_be_selected(head_store: tuple[Store, str], tmp_path: Path) -> None:
    png, svg = save(draw(*head_store), tmp_path / "graph-1.5")
    assert (png.name, svg.name) == ("graph-1.5.png", "graph-1.5.svg"), "a dot in a name is no suffix"
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {"What each head costs when it is ablated", "all", "add", "sub", "layer"} <= set(texts_of(svg.read_text()))


# ---- figures of what is no experiment ----


@pytest.mark.slow
def test_stability_has_a_figure_with_its_bar(head_store: tuple[Store, str], monkeypatch) -> None:
    store, run = head_store
    assert draw_stability(Results(store, run)) is None, "nothing was drawn again"
    heads = [{"layer": 0, "head": head, "prompt_id": p, "correct": head > 1} for head in range(8) for p in ("p0", "p1")]
    other = fill(store, PROMPTS, RIGHT, heads, model_fingerprint="weights-8")
    stability.stability_of(store, other, draws=20)
    figure = draw_stability(Results(store, other))
    assert figure is not None
    rows, view = table_of(figure, "compared"), store.sql(f"SELECT * FROM stability_overlap WHERE run_id = '{other}'")
    assert len(rows) == 2 * len(view) > 0
    pairwise = rows[rows["compared"].str.endswith("any two draws")]
    assert sorted(pairwise["jaccard"]) == pytest.approx(sorted(view["pairwise"]), rel=1e-3)
    assert pairwise["low"].isna().all(), "the range is of draws with the run's own ranking"
    assert {part["encoding"]["x"].get("datum") for part, _ in parts_of(figure.to_dict())} >= {0.8}
    assert check_parts(figure) == 1
    assert rows_of(figure)


def test_the_course_of_a_fine_tuning_has_a_figure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["tuning_runs/00000"], scan="precise")
    assert draw_tuning(Results(store, run.run_id)) is None, "nothing was trained yet"
    course = [{"step": step, "loss": 1 / step, "lr": 1e-3, "samples_per_second": 9.0, "tokens_per_second": 90.0,
               "memory": 2_000_000_000, "trained_parameters": 512} for step in (10, 20, 30)]  # fmt: skip
    store.write_shard(run.run_id, "tuning_runs", 0, pa.Table.from_pylist(course, TUNING_RUNS), {})
    figure = draw_tuning(Results(store, run.run_id))
    assert figure is not None
    assert list(table_of(figure, "loss")["loss"]) == [0.1, 0.05, 0.03333]
    assert check_parts(figure) == 3
