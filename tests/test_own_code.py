"""An experiment that is written anew has rows of its own: its code is part of the run's id, in a notebook as anywhere.

Here a notebook is the module ``__main__``, whose cells are run by ``exec``.
"""

import copy
import functools
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mathinterp as mi
from mathinterp.code_digest import code_digest
from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.experiments.heads import Heads
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
PROMPTS = [("3 + 4 =", "7")]
HEAD = """
from dataclasses import dataclass, field
from typing import Any, Callable
import pyarrow as pa
from mathinterp.experiments import Experiment, Shard, Table
SCHEMA = pa.schema([("shown", pa.float64())])
"""
CELL = '''
@dataclass(frozen=True)
class Written(Experiment):
    """One row."""
    edit: Any = None
    name = "written"
    tables = {"written_rows": Table(SCHEMA, doc="a row.")}
    def parameters(self): return {}
    def shards(self, shape, prompts): return [Shard("written_rows", 0)]
    def prepare(self, subject): return subject
    def run(self, state, shard):
        return pa.table([[float(BODY)]], schema=SCHEMA)
'''


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Runs cells in a module ``__main__`` that has no file; what registry learns is forgotten at the end."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(registry, "_added", {})
    exec(HEAD, vars(module))

    def run(*cells: str) -> ModuleType:
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), vars(module))
        return module

    yield run
    for cached in (registry.stored, registry.experiments):
        cached.cache_clear()


def shown(experiment: Any, store: Path) -> tuple[str, float]:
    """The run's id, and its one number."""
    run = mi.run(experiment, mi.wrap(tiny_model("llama"), tiny_tokenizer()), PROMPTS, store=str(store), progress=False)
    return run.id, run.table("written_rows")["shown"].item()


@pytest.mark.slow
def test_a_class_written_anew_in_a_notebook_gets_its_own_rows(notebook, tmp_path) -> None:
    ids = {}
    for body in ("1", "2", "1", "1 # a comment\n"):
        run_id, number = shown(notebook(CELL.replace("BODY", body)).Written(), tmp_path)
        assert number == float(body[0]), "the rows of what the class was before"
        ids[body] = ids.get(body, run_id)
        assert ids[body] == run_id, "the same code again is the same run"
    assert ids["1"] == ids["1 # a comment\n"] != ids["2"]


CHANGES = {  # what it uses: before, after
    "a function beside it": ("def f(): return 1", "def f(): return 2", "f()"),
    "a function of that": ("def g(): return 1\ndef f(): return g()", "def g(): return 2\ndef f(): return g()", "f()"),
    "a global number": ("N = 1", "N = 2", "N"),
    "a list": ("N = [1]", "N = [2]", "N[0]"),
    "an array": ("import numpy as np\nN = np.ones(1)", "import numpy as np\nN = np.ones(1) * 2", "N[0]"),
    "a closure": ("def of(n):\n return lambda: n\nf = of(1)", "def of(n):\n return lambda: n\nf = of(2)", "f()"),
    "a default": ("def f(n=1): return n", "def f(n=2): return n", "f()"),
    "a decorated function": (
        "import torch\n@torch.inference_mode()\ndef f(): return 1",
        "import torch\n@torch.inference_mode()\ndef f(): return 2", "f()",
    ),
    "a cached function": (
        "import functools\n@functools.cache\ndef f(): return 1",
        "import functools\n@functools.cache\ndef f(): return 2", "f()",
    ),
    "a class": ("class C:\n def f(self): return 1", "class C:\n def f(self): return 2", "C().f()"),
    "an object": (
        "class C:\n def __init__(self, n): self.n = n\nc = C(1)",
        "class C:\n def __init__(self, n): self.n = n\nc = C(2)", "c.n",
    ),
    "what it derives from": ("class C:\n n = 1", "class C:\n n = 2", "self.n"),
    "a set": ("N = {'a', 'b', 'c'}", "N = {'a', 'b', 'd'}", "1 + ('d' in N)"),
    "inside a comprehension": ("def f(): return 1", "def f(): return 2", "sum(f() for _ in range(1))"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_its_code_names_counts(notebook, tmp_path, what) -> None:
    before, after, body = CHANGES[what]
    cell = CELL.replace("BODY", body)
    if what == "what it derives from":
        cell = cell.replace("Written(Experiment)", "Written(Experiment, C)")
    first, again, changed = (shown(notebook(one, cell).Written(), tmp_path) for one in (before, before, after))
    assert first == again
    assert first[0] != changed[0]
    assert (first[1], changed[1]) == (1, 2)


@pytest.mark.slow
def test_functions_given_to_an_experiment_count(notebook, tmp_path) -> None:
    written = notebook(CELL.replace("BODY", "self.edit(1)")).Written
    scale = 2
    found = [
        shown(written(edit), tmp_path)
        for edit in (lambda n: n, lambda n: n + 1, lambda n: n * scale * 2, functools.partial(lambda m, n: m * n, 5))
    ]
    assert [number for _, number in found] == [1, 2, 4, 5]
    assert len(dict(found)) == 4
    scale = 3
    assert shown(written(lambda n: n * scale * 2), tmp_path)[1] == 6, "what a closure holds"


def test_what_only_shows_rows_does_not_count(notebook, tmp_path) -> None:
    cell = CELL.replace("BODY", "1")
    summary = "    @classmethod\n    def summarize(cls, results, shown): raise ValueError('{}')\n"
    one, other = (shown(notebook(cell + summary.format(text)).Written(), tmp_path) for text in "ab")
    assert one == other


def test_modules_count_as_they_are_loaded_also_late_ones(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "written_code"
    package.mkdir()
    (package / "__init__.py").write_text(HEAD + CELL.replace("float(BODY)", "self.late()") + (
        "    def late(self):\n        from written_code.rows import number\n        import written_helper\n"
        "        return number() + written_helper.more\n"
    ))  # fmt: skip
    texts = {"rows.py": "def number(): return 1\n", "../written_helper.py": "more = 0\n"}
    for name, text in texts.items():
        (package / name).write_text(text)
    module = importlib.import_module("written_code")
    before = code_digest(module.Written)
    assert code_digest(module.Written) == before
    (package / "rows.py").write_text("def number(): return 20\n")
    assert code_digest(module.Written) == before, "what runs is what was loaded"
    importlib.invalidate_caches()
    importlib.reload(sys.modules["written_code.rows"])
    assert code_digest(module.Written) != before
    with_rows = code_digest(module.Written)
    (package / "../written_helper.py").write_text("more = 300\n")
    assert code_digest(module.Written) != with_rows
    for name in ("written_code", "written_code.rows", "written_helper"):
        sys.modules.pop(name)


def test_the_digest_is_alike_in_every_process(tmp_path) -> None:
    script = tmp_path / "script.py"
    text = HEAD + CELL.replace("BODY", "1 + ('a' in {'b', 'c'}) + len(N)") + (
        "N = {'x', 'y', 'z'}\nfrom mathinterp.code_digest import code_digest\nprint(code_digest(Written))\n"
    )  # fmt: skip
    found = set()
    for seed, blank in (("1", ""), ("2", ""), ("3", "# moved down\n\n\n")):
        script.write_text(blank + text)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        found.add(subprocess.check_output([sys.executable, script], env=environment, text=True))
    assert len(found) == 1


def test_what_cannot_be_told_is_refused_before_anything_is_stored(notebook, tmp_path) -> None:
    written = notebook("import threading\nLOCK = threading.Lock()", CELL.replace("BODY", "LOCK.locked()")).Written
    with pytest.raises(UserError, match="`LOCK` of `run` is what it was in an earlier run cannot be told") as told:
        shown(written(), tmp_path / "store")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "store").exists()


def test_ours_have_no_code_in_their_parameters() -> None:
    assert Heads().identity() == Heads().parameters()


def test_what_python_keeps_on_a_class_that_was_stored_does_not_count(notebook: Callable[..., ModuleType]) -> None:
    class Part:
        """Somebody's value."""

    written = notebook(CELL.replace("BODY", "1")).Written
    before = written(edit=Part()).identity()
    copy.copy(Part())
    pickle.dumps(written())
    assert "__slotnames__" in vars(written)
    assert written(edit=Part()).identity() == before
