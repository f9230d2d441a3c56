"""Run the notebooks from top to bottom and keep them with what they show.

    make notebooks                          # all
    python -m recipes.notebooks 02 04       # those whose names begin so

Each runs in an empty folder, in a kernel that is this interpreter, whatever kernels are installed; nothing is written
unless all of its cells ran.
"""

import base64
import hashlib
import io
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parents[1] / "notebooks"
KERNEL = "this-interpreter"
PROGRESS = re.compile(r"shards \d+/\d+, ")
CELL_SECONDS = 1800  # on a busy machine
QUIET = (  # tqdm and Ray miss ipywidgets, which come with Jupyter and show nothing here
    "import logging, warnings; warnings.filterwarnings('ignore', 'IProgress not found');"
    " logging.getLogger('ray.widgets.util').setLevel('WARNING')"
)


@contextmanager
def this_interpreter(folder: Path) -> Iterator[None]:
    """Inside the block the kernel KERNEL is this interpreter; ``folder`` holds its description."""
    kernel = folder / "kernels" / KERNEL
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", f"--IPKernelApp.exec_lines={QUIET}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    with mock.patch.dict(os.environ, {"JUPYTER_PATH": str(folder)}):
        yield


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook."""
    book: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return book


def executed(path: Path, further: str = "") -> nbformat.NotebookNode:
    """The notebook with what its cells show, run in an empty folder; ``further`` is the code of a last cell.

    Raises CellExecutionError with the cell and its traceback.
    """
    book = read(path)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    if further:
        book.cells.append(nbformat.v4.new_code_cell(further))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, this_interpreter(Path(folder) / "jupyter"):
        work = Path(folder) / "work"
        work.mkdir()
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(
            book, timeout=CELL_SECONDS, kernel_name=KERNEL, resources=resources, record_timing=False,
            coalesce_streams=True,
        ).execute()  # fmt: skip
    return book


def code_digest(book: nbformat.NotebookNode) -> str:
    """Of the code cells, in order: kept beside the outputs, it tells whether they come from this code."""
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def tidy(book: nbformat.NotebookNode) -> None:
    """Pack pictures, and drop what bars of progress left, which says how fast the machine was."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not PROGRESS.search(str(each.get("data", "")))]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = smaller(output.data["image/png"])


def smaller(picture: str) -> str:
    """A PNG in base64, the same pixel by pixel, better packed."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(picture))).save(packed, "PNG", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def write(path: Path) -> str:
    """Run a notebook and write it to its file; returns how long that took."""
    started, before = time.monotonic(), _processor_seconds()
    kept = read(path).metadata
    book = executed(path)
    tidy(book)
    book.metadata = {**kept, "code_digest": code_digest(book)}
    nbformat.write(book, path)  # type: ignore[no-untyped-call]
    return f"{time.monotonic() - started:.0f} s, {_processor_seconds() - before:.0f} s of processor without Ray's"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: list[str]) -> None:
    """Write all notebooks, or those whose names begin so."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.name.startswith(tuple(names)):
            print(f"{path.stem}: {write(path)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
