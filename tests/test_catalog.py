"""From a name to a model: what is found, what is loaded, and the one line a user gets when something is wrong."""

import json
import os
import shutil
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from mathinterp.errors import UserError
from mathinterp.models import sources
from mathinterp.models.catalog import ModelSpec, known_models, load, resolve, resolve_dtype
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def message(spec: ModelSpec | str, *, loading: bool = False) -> str:
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    with pytest.raises(UserError) as error:
        load(spec, "cpu") if loading else resolve(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_a_folder_of_every_family(name: str, tmp_path: Path) -> None:
    loaded = load(ModelSpec(str(save_tiny(tmp_path / name, name)), dtype="float64"), "cpu")
    expected = tiny_model(name, dtype=torch.float32).state_dict()
    found = loaded.model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key].double()) for key in expected)
    assert loaded.model.config._attn_implementation == loaded.anatomy.family.attention_backend
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config.use_cache is False


def test_resolved_once_loaded_later(llama: Path) -> None:
    resolved = resolve(ModelSpec(str(llama), dtype="bfloat16"))
    assert (resolved.shape.n_heads, resolved.shape.n_groups, resolved.dtype) == (4, 2, "bfloat16")
    assert resolved.label == llama.name
    loaded = load(resolved, "cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.fingerprint == resolved.fingerprint
    assert loaded.tokenizer("3 plus 5 is").input_ids == tiny_tokenizer()("3 plus 5 is").input_ids


def test_a_spec_is_plain_json() -> None:
    spec = ModelSpec("smollm2", adapter="runs/arith", dtype="float16")
    assert ModelSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    assert spec.label == "smollm2+arith"
    assert ModelSpec("random:llama-2-7b").label == "random:llama-2-7b"


def test_dtype_of_auto() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("auto", "cuda", bfloat16_supported=False) == "float16"
    assert resolve_dtype("float64", "cuda") == "float64"
    expected = "dtype 'int8' is not known (known: auto, float32, bfloat16, float16, float64)"
    assert message(ModelSpec("random:llama-tiny", dtype="int8")) == expected


def test_loading_leaves_transformers_as_talkative_as_it_was(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(ModelSpec(str(llama)), "cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_a_chat_template_in_a_file_of_its_own_comes_from_the_hub_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions of transformers save it beside tokenizer_config.json."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    def download(name: str, allow_patterns: list[str]) -> str:
        for file in folder.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(ModelSpec("some/model")).tokenizer.chat_template == "{{ messages[0].content }}"


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert message("./nowhere") == "model folder './nowhere' does not exist"
    assert message("a/b/c") == "model folder 'a/b/c' does not exist"
    assert message("nobody/nothing").startswith(
        "model 'nobody/nothing' is no folder here and could not be had from the hub: "
    )
    assert message("nowhere.gguf") == "model file 'nowhere.gguf' does not exist"
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    expected = f"model '{file}' is a file but not a .gguf file: give a Hugging Face folder or a .gguf file"
    assert message(str(file)) == expected
    assert message("random:llama-9") == (
        "model 'random:llama-9': no shape 'llama-9' is known (known: llama-tiny, smollm2-135m, llama-2-7b, "
        "llama-2-13b, llama-2-70b, llama-3-8b, mistral-7b, qwen2.5-7b, gemma-2-9b, gpt-j-6b, pythia-6.9b)."
        " Did you mean 'llama-tiny'?"
    )


def test_folders_that_are_not_models(folder: Path) -> None:
    config = (folder / "config.json").read_bytes()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    assert message(str(folder)) == (
        f"model folder '{folder}' has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
    )
    (folder / "model.safetensors").unlink()
    expected = f"model folder '{folder}' has no weights (model.safetensors or model.safetensors.index.json)"
    assert message(str(folder)) == expected
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert message(str(folder)) == (
        f"model folder '{folder}' holds only pickled weights, which can run code when read: convert them once, where "
        "you trust them, with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )
    (folder / "adapter_config.json").write_text("{}")
    assert message(str(folder)) == (
        f"model folder '{folder}' also holds adapter_config.json, so it is unclear what its weights are: "
        "move the adapter into a folder of its own and give that as `adapter`"
    )
    (folder / "config.json").unlink()
    expected = f"'{folder}' is a PEFT adapter, not a model: give it as `adapter` and its base as `model`"
    assert message(str(folder)) == expected
    (folder / "adapter_config.json").unlink()
    assert message(str(folder)) == f"model folder '{folder}' has no config.json"
    (folder / "config.json").write_bytes(config)


def test_configs_that_cannot_be_used(folder: Path) -> None:
    config = folder / "config.json"
    edit_json(config, quantization_config={"quant_method": "gptq"})
    expected = f"model '{folder}' is quantised (gptq): give the unquantised weights or a .gguf file"
    assert message(str(folder)) == expected
    edit_json(config, model_type="mamba")
    assert message(str(folder)).startswith("model family 'mamba' is not known (known: falcon, gemma2, ")
    edit_json(config, model_type=None)
    assert message(str(folder)) == f"model '{folder}': config.json has no model_type"
    config.write_text('{"model_type": ')
    expected = f"'{config}': broken JSON (Expecting value at column 16)"
    assert message(str(folder)) == expected


def test_a_config_that_says_it_is_not_quantised(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config=None)
    assert load(ModelSpec(str(folder)), "cpu").model.num_parameters() > 0
    for nonsense, named in (("int8", "int8"), ({}, "unknown"), (False, "False")):
        edit_json(folder / "config.json", quantization_config=nonsense)
        expected = f"model '{folder}' is quantised ({named}): give the unquantised weights or a .gguf file"
        assert message(str(folder)) == expected


def test_weights_that_are_missing_left_over_or_misshapen(folder: Path) -> None:
    """transformers would only warn, and draw a missing weight at random."""
    edit_weights(folder, lambda tensors: tensors.update(surplus=torch.zeros(2)))
    assert message(str(folder), loading=True) == (
        f"model '{folder}' holds weights that the model has no place for: 1 in all, first surplus"
    )
    edit_weights(folder, lambda tensors: (tensors.pop("surplus"), tensors.pop("model.layers.1.mlp.up_proj.weight")))
    assert message(str(folder), loading=True) == (
        f"model '{folder}' lacks weights that the model needs: 1 in all, first model.layers.1.mlp.up_proj.weight"
    )
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(40, 31)}))
    assert message(str(folder), loading=True) == (
        f"model '{folder}' holds weights of another shape than its config says: 1 in all, "
        "first model.layers.1.mlp.up_proj.weight (40 x 31 instead of 40 x 32)"
    )


def test_an_untied_unembedding_must_be_there_and_a_tied_one_need_not(folder: Path, tmp_path: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert message(str(folder), loading=True) == (
        f"model '{folder}' lacks weights that the model needs: 1 in all, first lm_head.weight"
    )
    tied = save_tiny(tmp_path / "gemma2", "gemma2")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    model = load(ModelSpec(str(tied)), "cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_that_are_not_numbers(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"].view(-1)[7].fill_(torch.nan))
    assert message(str(folder), loading=True) == (
        "model 'model' has NaN or infinite weights in 1 of 30 tensors (as float32), "
        "first model.layers.2.mlp.down_proj.weight"
    )
    edit_weights(folder, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"].view(-1)[7].fill_(1e6))
    load(ModelSpec(str(folder)), "cpu")
    overflowing = message(ModelSpec(str(folder), dtype="float16"), loading=True)
    assert "in 1 of 30 tensors (as float16), first model.layers.2.mlp.down_proj.weight" in overflowing


def test_shards_that_are_missing_or_broken(folder: Path) -> None:
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    load(ModelSpec(str(folder)), "cpu")
    content = shards[1].read_bytes()
    shards[1].unlink()
    expected = f"model folder '{folder}' lacks 1 of its {len(shards)} weight files: ['{shards[1].name}']"
    assert message(str(folder)) == expected
    shards[1].write_bytes(content[:-100])
    assert message(str(folder), loading=True).startswith(f"model '{folder}' cannot be loaded: ")


@pytest.mark.parametrize("name", ["../{}/model.safetensors", "{}/model.safetensors", "part/../../{}/model.safetensors"])
def test_an_index_that_names_files_of_other_folders(folder: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    weights = folder / "model.safetensors"
    tensors = list(load_file(weights))
    weights.rename(elsewhere / "model.safetensors")
    (folder / "part").mkdir()
    place = name.format(elsewhere if name.startswith("{") else os.path.relpath(elsewhere, folder.parent))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (folder / place).is_file()
    assert message(str(folder)).endswith(f"names '{place}', a file outside of the model's folder; it is not read")


def test_known_models_are_listed(monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", llama)
    entries = {entry.name: entry for entry in known_models()}
    assert list(entries)[:2] == ["bundled", "smollm2"]
    assert entries["bundled"].available
    assert entries["bundled"].shape == (
        "llama, 3 layers x 4 heads (2 key/value groups), d_model 32, 40 neurons per layer, vocabulary 160"
    )
    assert entries["random:llama-2-7b"].shape == (
        "llama, 32 layers x 32 heads, d_model 4096, 11008 neurons per layer, vocabulary 32000"
    )
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", tmp_path / "absent")
    bundled = known_models()[0]
    assert (bundled.available, bundled.how_to_get) == (False, "train it: python -m recipes.train_bundled")
