"""The notebooks run from top to bottom, and are kept without outputs."""

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
def test_notebooks_are_stored_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


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


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_first_scan(tmp_path, monkeypatch, kernel):
    """Executed as a reader would, on fewer prompts; what it shows is what the store holds."""
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MATHINTERP_NOTEBOOK_LIMIT", "16")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    book = nbformat.read(FOLDER / "01_first_scan.ipynb", as_version=4)
    book.cells.append(nbformat.v4.new_code_cell("print('top:', top.to_json(orient='records'))"))
    client = NotebookClient(book, timeout=300, kernel_name=kernel, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises CellExecutionError with the cell and its traceback

    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    (figure,) = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(figure).startswith(b"\x89PNG")
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    tables = [html for html in shown if "<table" in html]  # the progress bar is HTML too
    assert len(tables) == 3  # leading heads, the published table's form, broken answers
    assert "original" in tables[1]

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
