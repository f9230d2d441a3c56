"""The notebooks run from top to bottom, use the library's face alone, and are kept with what they show."""

import base64
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mathinterp.store import Store

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_what_import_mathinterp_gives(path):
    code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    imported = re.findall(r"^\s*(?:import|from)\s+(mathinterp.*)$", code, re.MULTILINE)
    assert imported == ["mathinterp as mi"]
    assert not re.search(r"run_id = '?\{", code), "runs are named by $run"


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """A kernel that is this interpreter, whatever kernels are installed for the user or the machine."""
    folder = tmp_path / "jupyter" / "kernels" / "this-interpreter"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Tests", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    return folder.name


@pytest.mark.bundled
def test_the_first_scan(tmp_path, monkeypatch, kernel):
    """Executed as a reader would, on fewer prompts; what it shows is what the store holds."""
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_LIMIT", "16")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(FOLDER / "01_first_scan.ipynb", as_version=4)
    book.cells.append(nbformat.v4.new_code_cell("print('top:', top.to_json(orient='records'))"))
    client = NotebookClient(book, timeout=300, kernel_name=kernel, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises CellExecutionError with the cell and its traceback

    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    (figure,) = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(figure).startswith(b"\x89PNG")
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    tables = [html for html in shown if "<table" in html]  # the progress bar is HTML too
    assert len(tables) == 4  # scored tokens, leading heads, the published table's form, broken answers
    assert "original" in tables[2]

    store = Store(tmp_path / "store")
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
    assert f"without head {top[0]['layer']}.{top[0]['head']}:" in printed
    assert "ablating nothing changes 0 of " in printed
