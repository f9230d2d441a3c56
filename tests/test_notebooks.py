"""The notebooks run from top to bottom, and are kept without outputs."""

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


def test_the_first_scan(tmp_path, monkeypatch):
    """Executed as a reader would, on fewer prompts; what it shows is what the store holds."""
    monkeypatch.setenv("MATHINTERP_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MATHINTERP_LIMIT", "32")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    book = nbformat.read(FOLDER / "01_first_scan.ipynb", as_version=4)
    client = NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises CellExecutionError with the cell and its traceback

    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 1
    tables = [output for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) >= 3  # leading heads, heads per operation, broken answers

    (run,) = Store(tmp_path / "store").rows("SELECT run_id, status, shards_done, shards FROM runs")
    assert run["status"] == "finished"
    printed = "".join(output.get("text", "") for output in outputs)
    assert f"run {run['run_id']}: {run['shards']} shards computed" in printed
    strongest = "SELECT layer, head FROM head_effects WHERE operation = 'all' ORDER BY drop DESC, layer, head LIMIT 1"
    (head,) = Store(tmp_path / "store").rows(strongest)
    assert f"without head {head['layer']}.{head['head']}:" in printed
