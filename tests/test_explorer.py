"""The page's data say what the store's rows say: cells, answers, attention, comparisons, charts; odd text is safe."""

import base64
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest

from mathinterp.errors import UserError
from mathinterp.experiments.grid import ablation_grid
from mathinterp.experiments.results import Results
from mathinterp.report.compare import matched
from mathinterp.report.contents import contents
from mathinterp.report.grids import quantised, restored
from mathinterp.report.page import write_report
from mathinterp.report.runs import find
from mathinterp.report.scripts import packed, script, spec_of
from mathinterp.store import Store
from tests.explorer_pages import (
    HEADS,
    MANY,
    PROMPTS,
    head_store,
    made_up_grid,
    made_up_page,
    odd_store,
    with_attention,
)
from tests.small_store import FINGERPRINT, fill, open_run, prompt


def given(content: bytes) -> list[Any]:
    """The values in a script's call."""
    call = re.fullmatch(r"mathinterp\.\w+\((.*)\);\n", content.decode("ascii"), re.DOTALL)
    assert call is not None
    values: list[Any] = json.loads(f"[{call[1]}]")
    return values


def unpacked(text: str, kind: Any) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)


# ---- the grid ----


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["token", "first_token", "exact_match"])
def test_each_cell_of_the_page_is_what_the_stored_rows_say(tmp_path: Path, scoring: str) -> None:
    """The twin reads the tables' rows one by one; it shares no SQL and no array with the grid."""
    store, run = head_store(tmp_path / "store", scoring=scoring)
    data = given(dict(contents(store))[f"assets/data/{run}.js"])[1]
    shape = len(HEADS), len(PROMPTS)
    (nats,) = data["quantities"]
    cells, levels = (unpacked(text, np.uint8).reshape(shape) for text in (data["cells"], nats["levels"]))
    after = iter(unpacked(data["after"], np.uint16))
    baseline, scan = (
        store.rows(f"SELECT * FROM {table} WHERE run_id = $run", {"run": run}) for table in ("baseline", "head_scan")
    )
    places, columns = list(zip(data["layers"], data["heads"], strict=True)), [row[0] for row in data["prompts"]]
    assert places == HEADS
    for (h, (layer, head)), (p, prompt_id) in itertools.product(enumerate(places), enumerate(columns)):
        old = sorted((r for r in baseline if r["prompt_id"] == prompt_id), key=lambda r: r["position"])
        new = sorted(
            (r for r in scan if (r["layer"], r["head"], r["prompt_id"]) == (layer, head, prompt_id)),
            key=lambda r: r["position"],
        )
        if scoring == "first_token":
            old, new = old[:1], new[:1]
        assert bool(cells[h, p] & 1) == all(r["correct"] for r in old)
        assert bool(cells[h, p] & 2) == all(r["correct"] for r in new)
        words = {40: "1", 41: "2"}
        answers = [
            "".join(words.get(r["predicted_id"], f"<token {r['predicted_id']}>") for r in rows) for rows in (old, new)
        ]
        assert data["prompts"][p][3] == answers[0]
        assert bool(cells[h, p] & 4) == (answers[0] != answers[1])
        if answers[0] != answers[1]:
            assert data["answers"][next(after)] == answers[1]
        change = sum(n["logprob"] - o["logprob"] for n, o in zip(new, old, strict=True))
        assert restored(levels[h : h + 1, p], nats["bound"])[0] == pytest.approx(change, abs=nats["error"] + 1e-6)
    assert next(after, None) is None


@pytest.mark.slow
def test_shares_of_broken_prompts_are_those_of_head_effects(tmp_path: Path) -> None:
    store, run = head_store(tmp_path / "store")
    grid = ablation_grid(Results(store, run), "head", "head_scan")
    assert grid is not None
    for operation in ("add", "sub", "mul"):
        mine = np.array([row["operation"] == operation for row in grid.prompts])
        right = grid.cells[:, mine] & 3
        drops = ((right == 1).sum(1) - (right == 2).sum(1)) / mine.sum()
        rows = store.rows(
            "SELECT baseline_prompt_accuracy - prompt_accuracy AS drop FROM head_effects"
            " WHERE run_id = $run AND operation = $operation ORDER BY layer, head",
            {"run": run, "operation": operation},
        )
        np.testing.assert_allclose(drops, [row["drop"] for row in rows], atol=1e-12)


@pytest.mark.slow
def test_cells_without_rows_are_missing_and_no_loss(tmp_path: Path) -> None:
    """A head of which one prompt's rows are not there; and a scan of MLPs."""
    store = Store(tmp_path / "store")
    prompts = [prompt("p0"), prompt("p1")]
    baseline = [{"prompt_id": "p0"}, {"prompt_id": "p1"}]
    heads = [{"layer": 0, "head": 0, "prompt_id": "p0"}, {"layer": 0, "head": 1, "prompt_id": "p0", "correct": False},
             {"layer": 0, "head": 1, "prompt_id": "p1"}]  # fmt: skip
    run = fill(store, prompts, baseline, heads, [{"layer": 3, "prompt_id": "p1", "correct": False}])
    grid = ablation_grid(Results(store, run), "head", "head_scan")
    assert grid is not None
    assert grid.cells.tolist() == [[3, 255], [1, 3]]
    assert np.isnan(grid.quantities[0].values).tolist() == [[False, True], [False, False]]
    mlps = ablation_grid(Results(store, run), "mlp", "mlp_scan")
    assert mlps is not None
    assert (mlps.word, mlps.layers.tolist(), mlps.heads.tolist()) == ("MLP", [3], [-1])
    assert mlps.cells.tolist() == [[255, 1]]
    assert (
        ablation_grid(
            Results(store, open_run(store, model="other", model_fingerprint="w2").run_id), "head", "head_scan"
        )
        is None
    )


def test_changes_come_back_within_the_error_that_is_told() -> None:
    rng = np.random.default_rng(0)
    change = rng.normal(0, 3, (40, 50)).astype(np.float32)
    change[3, 4], change[5, 6] = np.nan, 0
    levels, bound = quantised(change)
    back = restored(levels, bound)
    assert np.isnan(back[3, 4])
    assert back[5, 6] == 0
    assert levels.dtype == np.uint8
    assert np.nanmax(np.abs(back - change)) <= bound / 127
    assert quantised(np.zeros((2, 2), np.float32)) == (pytest.approx(np.full((2, 2), 128)), 1.0)


@pytest.mark.slow
def test_attention_on_a_sentence_is_that_of_the_scan(tmp_path: Path) -> None:
    store, run = head_store(tmp_path / "store")
    other = with_attention(store, left=(1, 2))
    found = given(dict(contents(store, [run]))[f"assets/data/{run}.js"])[1]["attention"]
    assert (found["run"], found["types"], found["left_out"]) == (other, ["bos", "operator"], 0)
    assert sorted(found["heads"]) == [0, 1, 2, 3, 4]
    mass = unpacked(found["mass"], np.uint8).reshape(5, len(PROMPTS), 2) / 254
    listed = [row["prompt_id"] for row in find(store, [run]).shown[0].grid.prompts]  # type: ignore[union-attr]
    for p, prompt_id in enumerate(listed):
        np.testing.assert_allclose(mass[:, p, 0], 0.5 + int(prompt_id[1:]) / 20, atol=0.5 / 254 + 1e-6)
    stranger, second = head_store(tmp_path / "store", model="b", model_fingerprint="weights-2")
    assert given(dict(contents(stranger, [second]))[f"assets/data/{second}.js"])[1]["attention"] is None


@pytest.mark.slow
def test_a_grid_of_a_large_model_is_small_enough(tmp_path: Path) -> None:
    grid = made_up_grid(1024, 1600)
    page = made_up_page(tmp_path, grid)
    size = sum(file.stat().st_size for file in page.parent.rglob("*") if file.is_file())
    assert size < 12e6, f"{size / 1e6:.1f} MB"
    data = given((tmp_path / "assets" / "data" / "0123456789ab.js").read_bytes())[1]
    np.testing.assert_array_equal(unpacked(data["cells"], np.uint8).reshape(grid.cells.shape), grid.cells)
    np.testing.assert_array_equal(unpacked(data["after"], np.uint16), grid.after)


# ---- charts and scripts ----


def test_charts_are_whole_and_need_no_reader_of_csv() -> None:
    """A reader of CSV makes code of column names, which the page's policy forbids."""
    text = "a,b\n1,x\n,y\n2.5,\n"
    chart = alt.Chart(
        alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse={"a": "number", "b": "string"}))
    ).mark_point()
    layered = (chart.encode(x="a:Q") + chart.encode(y="a:Q")).to_dict()
    spec = spec_of(alt.LayerChart.from_dict(layered))
    assert '"csv"' not in json.dumps(spec)
    (columns,) = spec["datasets"].values()
    assert columns == {"columns": {"a": [1.0, None, 2.5], "b": ["x", "y", None]}}
    many = alt.Chart(pd.DataFrame({"a": range(6000)})).mark_point().encode(x="a:Q")
    assert len(next(iter(spec_of(many)["datasets"].values()))) == 6000


def test_a_script_holds_its_text_and_ends_where_it_should() -> None:
    content = script("figure", "key", {"text": MANY})
    assert b"<" not in content
    assert content.count(b"\n") == 1
    assert given(content) == ["key", {"text": MANY}]
    with pytest.raises(ValueError, match="JSON"):
        script("figure", float("nan"))
    counts = np.arange(5, dtype=">u4")
    np.testing.assert_array_equal(unpacked(packed(counts), "<u4"), counts)


# ---- two runs ----


def effects(places: list[tuple[int, int]], values: list[float], operation: str = "all") -> pd.DataFrame:
    rows = [("head", layer, head, operation, value) for (layer, head), value in zip(places, values, strict=True)]
    return pd.DataFrame(rows, columns=["node", "layer", "head", "operation", "effect"])


def test_components_are_matched_by_place_and_only_where_that_means_something() -> None:
    one, other = effects([(0, 0), (0, 1)], [0.1, 0.2]), effects([(0, 1), (0, 0)], [0.5, 0.4])
    both, why = matched(one, other, same_model=False)
    assert dict(zip(both["head"], both["difference"], strict=True)) == {0: pytest.approx(0.3), 1: pytest.approx(0.3)}
    assert "heads of one place in different models need not do the same" in why
    part = effects([(0, 1)], [0.5])
    assert len(matched(one, part, same_model=True)[0]) == 1
    none, why = matched(one, part, same_model=False)
    assert none.empty
    assert "do not compare" in why
    assert matched(one, effects([(3, 3)], [1.0]), same_model=True)[0].empty
    none, why = matched(one, effects([(0, 0), (0, 1)], [1.0, 2.0], "sub"), same_model=True)
    assert none.empty
    assert "no operation in common" in why


@pytest.mark.slow
def test_the_difference_of_two_runs_is_that_of_their_effects_by_sql(tmp_path: Path) -> None:
    store, first = head_store(tmp_path / "store")
    _, second = head_store(tmp_path / "store", seed=1, model="tuned", model_fingerprint="weights-2")
    made = dict(contents(store, compare=(first, second)))
    spec = given(made["assets/data/compare-difference.js"])[1]
    ((rows, *_),) = [list(spec["datasets"].values())]
    expected = store.rows(
        "SELECT a.layer || '.' || a.head AS name, operation, b.drop - a.drop AS difference FROM head_effects AS a"
        " JOIN head_effects AS b USING (layer, head, operation) WHERE a.run_id = $first AND b.run_id = $second",
        {"first": first, "second": second},
    )
    found = {(row["name"], row["operation"]): row["difference"] for row in rows}
    assert len(found) == len(expected) == len(HEADS) * 4
    for row in expected:
        assert found[row["name"], row["operation"]] == pytest.approx(row["difference"], rel=1e-3, abs=1e-4)
    assert "assets/data/compare-scatter.js" in made
    page = made["index.html"].decode()
    assert "Different model: m (weights-1) and tuned (weights-2)." in page
    assert f"The same prompts: two-digit ({FINGERPRINT})." in page


@pytest.mark.slow
def test_runs_that_do_not_compare_are_said_not_to(tmp_path: Path) -> None:
    store, first = head_store(tmp_path / "store")
    attention = with_attention(store, left=(1, 2))
    made = dict(contents(store, compare=(first, attention)))
    assert not [name for name in made if "compare-" in name]
    assert (
        "Component by component they do not compare: attention ranks no heads or MLPs." in made["index.html"].decode()
    )
    with pytest.raises(UserError, match="no run 123456"):
        next(contents(store, compare=(first, "123456")))


# ---- what is not whole, and odd text ----


@pytest.mark.slow
def test_runs_and_files_that_are_not_whole_are_named_and_not_drawn(tmp_path: Path) -> None:
    store, run = head_store(tmp_path / "store")
    stopped = open_run(store, model="stopped", model_fingerprint="weights-2").run_id
    failed = open_run(store, model="failing", model_fingerprint="weights-3")
    failed.finish(errors={"head_scan/00000": "ValueError: layer 3 is NaN\nTraceback"})
    _, damaged = head_store(tmp_path / "store", model="damaged", model_fingerprint="weights-4")
    file = next((tmp_path / "store" / "head_scan" / f"run_id={damaged}").iterdir())
    file.write_bytes(file.read_bytes()[:-100])
    unknown = open_run(store, ["baseline/00000"], scan="elsewhere", model_fingerprint="weights-5").run_id
    page = dict(contents(Store(tmp_path / "store")))["index.html"].decode()
    alert = page[page.index('<aside class="alert"') : page.index("</aside>")]
    for each in (stopped, failed.run_id, damaged, unknown):
        assert each in alert
        assert f'id="run-{each}"' not in page
    assert "0 of 2 shards are there; ValueError: layer 3 is NaN<" in alert
    assert "1 of 2 shards are there" in alert
    assert file.name in alert
    assert f'id="run-{run}"' in page
    named = dict(contents(Store(tmp_path / "store"), [damaged]))["index.html"].decode()
    assert "(1 of 2 shards: incomplete)" in named


@pytest.mark.slow
def test_odd_text_is_text_in_every_file(tmp_path: Path) -> None:
    store = odd_store(tmp_path / "store")
    made = dict(contents(store))
    page = made.pop("index.html").decode()
    assert page.count("<script") == page.count("</script>") == 4
    assert "<img" not in page
    assert not set(page) & {"\x00", "\u2028", "\u2029", "\u202e"}
    assert "49" not in page[page.index("<main") :].replace("0.49", "") or "{{ 7*7 }}" in page
    assert "שלום" in page
    data = [content for name, content in made.items() if name.startswith("assets/data/")]
    assert len(data) == 2
    assert not any(b"<" in content for content in data)
    texts = [row[1] for row in given(next(c for c in data if b'"cells"' in c))[1]["prompts"]]
    assert sum(text.endswith("... (100,000 characters)") for text in texts) == 1


@pytest.mark.slow
def test_a_served_page_has_a_place_for_sql_and_needs_no_finished_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    stopped = open_run(store).run_id
    served = dict(contents(store, served=True))["index.html"].decode()
    assert '<section id="sql" class="view"></section>' in served
    assert '<script src="sql.js" defer></script>' in served
    assert "connect-src 'self'" in served
    assert stopped in served
    with pytest.raises(UserError, match="no finished run"):
        next(contents(store))
    _, run = head_store(tmp_path / "store")
    page = dict(contents(store))["index.html"].decode()
    assert f'id="run-{run}"' in page
    assert not re.search(r'connect-src|sql\.js|id="sql"', page)


@pytest.mark.slow
def test_a_page_is_replaced_as_a_whole_and_pictures_are_asked_for(tmp_path: Path) -> None:
    store, run = head_store(tmp_path / "store")
    out = tmp_path / "page"
    written = write_report(store, out, pictures=True)
    assert sorted(path.name for path in written.figures) == [f"heads-{run}.png", f"heads-{run}.svg"]
    assert all(path.stat().st_size > 1000 for path in written.figures)
    (out / "assets" / "data" / "of-before.js").write_text("")
    (out / "note.txt").write_text("kept")
    assert write_report(store, out).figures == []
    assert sorted(path.name for path in (out / "assets" / "data").iterdir()) == [f"{run}-figure.js", f"{run}.js"]
    assert (out / "note.txt").read_text() == "kept"
