"""The notebooks run from top to bottom, use the library's face alone, and are kept with what they show."""

import base64
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from mathinterp.store import Store
from recipes.notebooks import FOLDER, code_digest, executed, read, smaller, tidy

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMITS = {
    "01_first_scan": 16,
    "02_paper_a": 16,
    "03_paper_b": 16,
    "04_precise_sft": 16,
    "05_your_model": 24,
    "06_how_sure": 32,
}
ON_RAY = ("02_paper_a", "04_precise_sft", "05_your_model")  # which train, or start a service
MOST_PNG = 100_000  # bytes
MEASURED = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s?(%|points\b|nats\b|heads\b|neurons\b|tokens\b)")
LEVELS = {"95 %", "5 %"}  # of intervals and tests, by convention


def code_of(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds_shown(book: nbformat.NotebookNode) -> list[list[str]]:
    """What each code cell shows: tables, pictures, words."""
    return [sorted({kind for each in cell.outputs for kind in each.get("data", ["text"])}) for cell in code_of(book)]


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_the_six_notebooks_and_the_documentation_names_them():
    assert [path.stem for path in NOTEBOOKS] == list(LIMITS)
    page = (FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [name for name in LIMITS if f"notebooks/{name}.ipynb" not in page] == []


@each_notebook
def test_notebooks_are_stored_as_they_ran(path):
    book = read(path)
    nbformat.validate(book)
    code = code_of(book)
    assert book.metadata["code_digest"] == code_digest(book), "'make notebooks' runs the cells as they are now"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert all(0 < len(base64.b64decode(picture)) < MOST_PNG for picture in pictures)
    text = json.dumps([{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs])
    assert not re.search(r"/(?:work|tmp|home|root|Users)/|Warning|shards \d+/\d+, ", text)


@each_notebook
def test_notebooks_use_what_import_mathinterp_gives(path):
    code = "\n".join(cell.source for cell in code_of(read(path)))
    imported = re.findall(r"^\s*(?:import|from)\s+(mathinterp.*)$", code, re.MULTILINE)
    assert imported == ["mathinterp as mi"]
    assert not re.search(r"run_id = '?\{", code), "runs are named by $run"


@each_notebook
def test_what_a_text_says_was_measured_is_in_the_code_or_the_papers(path):
    """A figure of ours in a text would stay when the result changes; one that code prints or asserts does not."""
    book = read(path)
    code = re.sub(r"#.*|[,_](?=\d{3})", "", "\n".join(cell.source for cell in code_of(book)))
    texts = [
        part for cell in book.cells if cell.cell_type == "markdown" for part in re.split(r"\n\n|\n- ", cell.source)
    ]
    ours = [found for text in texts if "paper" not in text.lower() for found in MEASURED.findall(text)]
    written = [(number.replace(",", ""), f"{number} {unit}") for number, unit in ours]
    assert [
        said for number, said in written if said not in LEVELS and not re.search(rf"(?<![\d.]){number}(?![\d.])", code)
    ] == []


@each_notebook
def test_links_between_notebooks_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert all((FOLDER / name).is_file() for name in re.findall(r"\]\((\w+\.ipynb)\)", text))
    assert "What you have learned, and what not to" in text


def test_pictures_are_packed_without_loss():
    pixels = np.arange(64 * 48 * 4, dtype=np.uint8).reshape(64, 48, 4)
    plain = io.BytesIO()
    Image.fromarray(pixels).save(plain, "PNG", compress_level=1)
    packed = base64.b64decode(smaller(base64.b64encode(plain.getvalue()).decode()))
    assert (np.asarray(Image.open(io.BytesIO(packed))) == pixels).all()
    assert len(packed) < len(plain.getvalue())


@pytest.fixture
def small(tmp_path, monkeypatch) -> Iterator[Path]:
    """The store of a notebook that runs on few prompts."""
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "store"


def marked(name: str) -> object:
    marks = [pytest.mark.bundled, *([pytest.mark.ray, pytest.mark.own_ray] if name in ON_RAY else [])]
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [marked(name) for name in LIMITS if name != "01_first_scan"])
def test_a_notebook_runs_and_shows_what_the_stored_one_does(name, small, monkeypatch):
    """Executed as a reader would, on fewer prompts. What the numbers have to fulfil, its cells assert."""
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_LIMIT", str(LIMITS[name]))
    path = FOLDER / f"{name}.ipynb"
    book = executed(path)
    tidy(book)
    assert kinds_shown(book) == kinds_shown(read(path))
    assert {run["status"] for run in Store(small).rows("SELECT status FROM runs")} == {"finished"}


@pytest.mark.bundled
def test_the_first_scan(small, monkeypatch):
    """Executed as a reader would, on fewer prompts; what it shows is what the store holds."""
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_LIMIT", str(LIMITS["01_first_scan"]))
    book = executed(FOLDER / "01_first_scan.ipynb", "print('top:', top.to_json(orient='records'))")
    outputs = [output for cell in code_of(book) for output in cell.outputs]
    (figure,) = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(figure).startswith(b"\x89PNG")
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    tables = [html for html in shown if "<table" in html]  # the progress bar is HTML too
    assert len(tables) == 4  # scored tokens, leading heads, the published table's form, broken answers
    assert "original" in tables[2]

    store = Store(small)
    (run,) = store.rows("SELECT run_id, status, shards FROM runs")
    assert run["status"] == "finished"
    printed = "".join(output.get("text", "") for output in outputs)
    assert f"run {run['run_id']}: {run['shards']} shards computed" in printed

    top = json.loads(re.search(r"^top: (.*)$", printed, re.MULTILINE)[1])
    strongest = "SELECT layer, head, drop, drop_low, drop_high, q_value FROM head_effects WHERE operation = 'all'"
    expected = store.rows(f"{strongest} ORDER BY drop DESC, layer, head LIMIT 5")
    assert len(top) == len(expected) == 5
    for row, stored in zip(top, expected, strict=True):
        assert {name: row[name] for name in stored} == pytest.approx(stored, abs=1e-9)
    assert top[0]["drop"] > 0
    assert top[0]["drop_low"] <= top[0]["drop"] <= top[0]["drop_high"]
    assert all(first["drop"] >= second["drop"] for first, second in pairwise(top))
    assert f"without head {top[0]['layer']}.{top[0]['head']}:" in printed
    assert "ablating nothing changes 0 of " in printed
