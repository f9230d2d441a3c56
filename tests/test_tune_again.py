"""``tune merge`` and ``tune zero`` given again: done before, the same, exit 0; another folder is left alone."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mathinterp.cli.main import main
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.tuning.controls import LoraJob
from tests.tiny import save_tiny, tiny_model

COMMANDS = {
    "merge": ["tune", "merge", "adapter", "--model", "model", "--out", "out"],
    "zero": ["tune", "zero", "--model", "model", "--heads", "0.1", "--neurons", "1.3", "--out", "out"],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and an adapter of it that changes something."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model", "llama")
    tuned = get_peft_model(tiny_model("llama", dtype=torch.float32), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tuned.save_pretrained("adapter")


def cli(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


def files() -> dict[str, tuple[bytes, int]]:
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in Path().rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_done_before_and_the_same(name: str) -> None:
    assert cli(*COMMANDS[name]).exit_code == 0
    before = files()
    again = cli(*COMMANDS[name])
    assert again.exit_code == 0, again.output
    assert "'out' is already there, the same" in again.stderr
    assert files() == before
    assert not list(Path().glob(".out*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("change", ["a weight", "a file more", "a file less", "another question"])
def test_something_else_there_is_refused_and_kept(name: str, change: str) -> None:
    assert cli(*COMMANDS[name]).exit_code == 0
    words = list(COMMANDS[name])
    if change == "a weight":
        tensors = load_file("out/model.safetensors")
        tensors["lm_head.weight"][0, 0] += 1
        save_file(tensors, "out/model.safetensors", metadata={"format": "pt"})
    elif change == "a file more":
        Path("out/notes.txt").write_text("mine")
    elif change == "a file less":
        Path("out/generation_config.json").unlink()
    elif name == "zero":
        words[words.index("0.1")] = "0.2"
    else:
        words += ["--dtype", "bfloat16"]
    before = files()
    result = cli(*words)
    assert result.exit_code == 2
    assert "--out 'out' exists already and holds something else; give a new folder" in result.stderr
    assert files() == before
    assert not list(Path().glob(".out*"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_no_model_is_refused_before_anything_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mathinterp.tuning.edit.load", lambda *_: pytest.fail("loaded"))
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine")
    assert "--out 'out' exists already; give a new folder" in cli(*COMMANDS[name]).stderr


def test_adapters_are_written_with_their_modules_sorted() -> None:
    """PEFT writes the members of a set, whose order is another in every process."""
    loaded = load(ModelSpec("model"), "cpu")
    job = LoraJob(rank=2, alpha=4)
    job.export(job.build(loaded), loaded.tokenizer, Path("written"), "model")
    modules = json.loads(Path("written/adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 5
    assert modules == sorted(modules)
