"""A driver that knows a model already builds none, and takes no word for one whose files have changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mathinterp.errors import UserError
from mathinterp.models import catalog
from mathinterp.models.catalog import ModelSpec, resolve
from tests.tiny import save_tiny

MODELING = "transformers.modeling_utils"  # with what it imports, 180 MB and some seconds
PREPARED = f"""
import sys
from mathinterp.cluster.run import prepare_work
from mathinterp.experiments.heads import Heads
from mathinterp.models.spec import ModelSpec
from mathinterp.prompts.given import prompts_of
from mathinterp.store import Store

folder, prompts, store = sys.argv[1:]
work = prepare_work(Heads(), ModelSpec(folder), prompts_of(prompts), on_gpu=False, store=Store(store))
print(len(work.prompts), {MODELING!r} in sys.modules, 'altair' in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a test may change, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "model", "llama")


@pytest.mark.slow
def test_a_driver_builds_a_model_once_and_then_does_without_the_classes_of_models(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "3 plus 5 is", "answer": "8", "operation": "add"}))
    words = [sys.executable, "-c", PREPARED, str(folder), str(prompts), str(tmp_path / "store")]
    said = [subprocess.run(words, capture_output=True, text=True, check=True, env=dict(os.environ)) for _ in range(2)]
    assert [each.stdout.split() for each in said] == [["1", "True", "False"], ["1", "False", "False"]]


@pytest.mark.slow
def test_a_replica_is_imported_without_searches_for_old_garbage_and_leaves_the_process_as_it_was() -> None:
    """They took a quarter of a replica's start."""
    code = "import gc; print(gc.get_threshold()); import mathinterp.cluster.replica; " \
           "print(gc.get_stats()[2]['collections'], gc.get_threshold())"  # fmt: skip
    words = [sys.executable, "-c", code]
    written = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):  # the first time modules may be compiled, which leaves garbage of its own
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=written)
    said = done.stdout.splitlines()
    assert said[1] == f"0 {said[0]}"


def test_a_model_found_loadable_is_looked_at_anew_when_its_files_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    real = catalog.check_stored
    monkeypatch.setattr(catalog, "check_stored", lambda at, config: looked.append(at) or real(at, config))
    for _ in range(2):
        resolve(ModelSpec(str(folder)))
    assert looked == [folder]
    [weights] = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(UserError, match=r"model\.norm\.weight"):
            resolve(ModelSpec(str(folder)))
    assert looked == [folder] * 3
