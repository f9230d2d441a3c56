"""Files of models, adapters and data that are no JSON or of wrong types and shapes: one line, before anything loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mathinterp.cli.main import main
from mathinterp.cli.reference import commands
from mathinterp.errors import UserError
from mathinterp.models.adapters import check_adapter
from mathinterp.models.catalog import ModelSpec, load, resolve
from tests.tiny import save_tiny, tiny_model

settings.register_profile("mathinterp", deadline=None, derandomize=True)  # the same examples on every machine
settings.load_profile("mathinterp")

DEEP = b"[" * 100_000 + b"]" * 100_000
NO_JSON = {
    "deep": DEEP, "deep inside": b'{"a": ' + DEEP + b"}", "deeper than any data": b'{"a":' * 101 + b"1" + b"}" * 101,
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}', "not UTF-8": b'{"a": "\xff"}', "nothing": b"",
    "long number": b'{"a": ' + b"9" * 5000 + b"}", "large number": b'{"a": 1e999}', "NaN": b'{"a": NaN}',
    "null": b"null", "list": b"[]", "text": b'"x"', "number": b"0",
}  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=4), st.integers(-3, 40), st.integers(), st.floats(),
    st.lists(st.integers(-1, 3) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-1, 3) | st.none(), max_size=2),
)  # fmt: skip
TAKES_MODEL = [
    words for words, each in commands(main)
    if not isinstance(each, click.Group) and any(option.name == "model" for option in each.params)
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and an adapter of it."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny(folder / "model", "llama")
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny_model("llama", dtype=torch.float32), options).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of both in the current folder. Nothing may load, and Ray must not start."""
    for name in ("model", "adapter"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("Ray started, or weights were loaded")

    monkeypatch.setattr("ray.init", forbidden)
    monkeypatch.setattr("mathinterp.models.catalog.load_weights", forbidden)
    return tmp_path


def refused(*words: str) -> str:
    """The line that refuses a command: exit code 2, and nothing is written."""
    before = sorted(Path().rglob("*"))
    result = CliRunner().invoke(main, [*words])
    assert isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code == 2, (words, result.output)
    assert result.stderr.count("mathinterp: ") == 1
    assert sorted(Path().rglob("*")) == before, words
    return result.stderr.splitlines()[-1]


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def needed(words: str) -> list[str]:
    """What a command asks for beside a model."""
    command = dict(commands(main))[words]
    wanted = [each for each in command.params if (each.required or each.name == "out") and each.name != "model"]
    wanted = [each for each in wanted if each.required or words.startswith("tune ")]
    return [word for each in wanted for word in ([each.opts[0]] if isinstance(each, click.Option) else []) + ["4.1"]]


# ---- JSON ----


@pytest.mark.slow
@pytest.mark.parametrize("words", TAKES_MODEL)
def test_every_command_refuses_a_config_that_is_no_json_object(place: Path, words: str) -> None:
    for content in (DEEP, b"null", b"\xff"):
        (place / "model/config.json").write_bytes(content)
        refused(*words.split(), *needed(words), "--model", "model")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize("file", ["model/config.json", "adapter/adapter_config.json", "model/generation_config.json",
                                  "prompts.jsonl", "data.jsonl", "concepts.json", "model/model.safetensors.index.json",
                                  "adapter/tuning.json"])  # fmt: skip
def test_no_file_of_json_gives_a_traceback(file: str, name: str) -> None:
    Path(file).write_bytes(NO_JSON[name])
    if file.endswith("index.json"):
        Path("model/model.safetensors").unlink()
    scan = ["scan", "heads", "--model", "model", "--limit", "4"]
    run = {
        "prompts.jsonl": [*scan, "--prompts", file], "concepts.json": ["scan", "concepts", "--concepts", file],
        "data.jsonl": ["tune", "full", "--model", "model", "--out", "new", "--data", file],
        "model/generation_config.json": ["evaluate", "--model", "model", "--tasks", "one_digit"],
        "adapter/tuning.json": ["tune", "merge", "adapter", "--model", "model", "--out", "new"],
    }  # fmt: skip
    assert len(refused(*run.get(file, [*scan, "--adapter", "adapter"]))) < 600


# ---- models ----

SHAPES: dict[str, dict[str, Any]] = {
    "layers without end": {"num_hidden_layers": 10**7}, "layers beyond any number": {"num_hidden_layers": 10**30},
    "a layer too many": {"num_hidden_layers": 4}, "a layer too few": {"num_hidden_layers": 2},
    "another width": {"hidden_size": 64}, "heads that do not divide it": {"num_attention_heads": 7, "head_dim": None},
    "other heads": {"num_attention_heads": 6, "head_dim": 8}, "another vocabulary": {"vocab_size": 161},
    "width without end": {"intermediate_size": 10**7}, "null": {"num_attention_heads": None},
    "text": {"hidden_size": "32"}, "0": {"num_hidden_layers": 0}, "a list": {"rope_parameters": [1]},
    "an unknown rotation": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    "no rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "a rotation by nothing": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
    "biases": {"attention_bias": True},
}  # fmt: skip


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", SHAPES)
def test_a_config_of_another_shape_than_its_weights(name: str) -> None:
    edit(Path("model/config.json"), **SHAPES[name])
    assert "model" in refused("scan", "heads", "--model", "model", "--limit", "4")
    assert "model" in refused("plan", "heads", "--model", "model", "--limit", "4")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_of_which_the_config_says_nothing(dtype: torch.dtype) -> None:
    file = Path("model/model.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones_like(tensors["model.layers.1.mlp.up_proj.weight"]).to(
        dtype
    )
    save_file(tensors, file, metadata={"format": "pt"})
    assert "holds model.layers.1.mlp.up_proj.weight as" in refused("scan", "heads", "--model", "model", "--limit", "4")


def drawn(file: Path, work: Callable[[], object], name: str, value: Any) -> None:
    """``work`` with a field of a JSON file replaced: it is done, or refused in one line."""
    content, refusal = file.read_bytes(), ""
    edit(file, **{name: value})
    try:
        work()
    except UserError as error:
        refusal = str(error)
    finally:
        file.write_bytes(content)
    assert "\n" not in refusal


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_any_value_of_any_field_of_a_config_is_loaded_or_refused(made: Path, data: st.DataObject) -> None:
    config = made / "model/config.json"
    name = data.draw(st.sampled_from(sorted(json.loads(config.read_text()))))
    drawn(config, lambda: load(ModelSpec(str(made / "model")), "cpu"), name, data.draw(VALUES))


# ---- adapters ----


@pytest.mark.slow
@settings(max_examples=80)
@given(name=st.sampled_from(sorted(LoraConfig.__dataclass_fields__)), value=VALUES)
def test_any_value_of_any_option_of_an_adapter_is_taken_or_refused(made: Path, name: str, value: Any) -> None:
    base = resolve(ModelSpec(str(made / "model"))).config
    drawn(made / "adapter/adapter_config.json", lambda: check_adapter(made / "adapter", base), name, value)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_adapter_weights_that_are_no_numbers(value: float) -> None:
    file = Path("adapter/adapter_model.safetensors")
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    said = refused("scan", "heads", "--model", "model", "--adapter", "adapter", "--limit", "4")
    assert "is not of finite floating-point numbers" in said


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("name", "value"), [("init_lora_weights", []), ("modules_to_save", 3), ("use_rslora", "no"),
                                             ("r", "2"), ("rank_pattern", []), ("lora_alpha", "4")])  # fmt: skip
def test_options_of_wrong_types(name: str, value: object) -> None:
    edit(Path("adapter/adapter_config.json"), **{name: value})
    said = refused("scan", "heads", "--model", "model", "--adapter", "adapter", "--limit", "4")
    assert f"adapter_config.json sets {name} to" in said
