"""LoRA adapters: merged exactly, and refused in one line when they were made for another base."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mathinterp.errors import UserError
from mathinterp.models import sources
from mathinterp.models.catalog import LoadedModel, ModelSpec, load, resolve
from tests.tiny import save_tiny, tiny_model

LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt_neox": ["query_key_value", "dense"],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save_adapter(folder: Path, name: str = "llama", config: PeftConfig | None = None, **fields: Any) -> Path:
    """A random adapter for the tiny model ``name``."""
    torch.manual_seed(0)
    if config is None:
        config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": LINEARS.get(name), **fields})
        config.init_lora_weights = False
    get_peft_model(tiny_model(name, dtype=torch.float32), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), "llama")


def load_with(base: Path, adapter: Path, dtype: str = "float32") -> LoadedModel:
    return load(ModelSpec(str(base), adapter=str(adapter), dtype=dtype), "cpu")


def refusal(base: Path, adapter: Path | str) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(base), adapter=str(adapter)))
    assert "\n" not in str(error.value)
    return str(error.value)


def by_hand(name: str, adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    """W + scale B A in float64, from the adapter's own file."""
    tensors = {key: value.double() for key, value in load_file(adapter / "adapter_model.safetensors").items()}
    expected = {key: value.double() for key, value in tiny_model(name, dtype=torch.float32).state_dict().items()}
    modules = dict(tiny_model(name).named_modules())
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        expected[f"{path}.weight"] += update.T if isinstance(modules[path], Conv1D) else update
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LINEARS))
def test_merged_weights_are_base_plus_update(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", name)
    adapter = save_adapter(tmp_path / "adapter", name, fan_in_fan_out=name == "gpt2")
    expected = by_hand(name, adapter, scale=5 / 3)
    exact = load_with(folder, adapter, "float64")
    single = load_with(folder, adapter, "float32")
    half = load_with(folder, adapter, "bfloat16")
    assert set(exact.model.state_dict()) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(exact.model.state_dict()[key], value, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(single.model.state_dict()[key].double(), value, rtol=1e-6, atol=1e-6)
        assert torch.equal(half.model.state_dict()[key], single.model.state_dict()[key].bfloat16())


def test_a_merged_model_is_a_plain_one(base: Path, tmp_path: Path) -> None:
    loaded = load_with(base, save_adapter(tmp_path / "adapter"), "bfloat16")
    plain = load(ModelSpec(str(base), dtype="bfloat16"), "cpu")
    kinds = [type(module) for module in loaded.model.modules()]
    assert kinds == [type(module) for module in plain.model.modules()]
    assert isinstance(loaded.model, PreTrainedModel)
    assert {str(parameter.dtype) for parameter in loaded.model.parameters()} == {"torch.bfloat16"}
    for name, buffer in plain.model.named_buffers():
        assert torch.equal(buffer, loaded.model.get_buffer(name)), "rotary frequencies stay in float32"
        assert buffer.dtype == loaded.model.get_buffer(name).dtype
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.fingerprint != plain.fingerprint


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_adapter_is_merged_where_the_layers_lie(name: str, tmp_path: Path) -> None:
    spec = ModelSpec(
        str(save_tiny(tmp_path / "base", name)), adapter=str(save_adapter(tmp_path / "adapter", name)), dtype="float32"
    )
    one, two = (load(spec, "cuda:0", further) for further in ((), ("cuda:1",)))
    assert len(two.anatomy.cards) == 2
    merged = two.model.state_dict()
    for key, weights in one.model.state_dict().items():
        torch.testing.assert_close(merged[key].cpu(), weights.cpu(), rtol=1e-6, atol=1e-6, msg=key)
    ids = torch.arange(9, device="cuda:0")[None]
    torch.testing.assert_close(two.model(ids).logits, one.model(ids).logits, rtol=1e-5, atol=1e-5)


def test_an_untied_unembedding_may_be_adapted(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", target_modules=["lm_head", "o_proj"])
    expected = by_hand("llama", adapter, scale=5 / 3)
    found = load_with(base, adapter, "float64").model.state_dict()
    torch.testing.assert_close(found["lm_head.weight"], expected["lm_head.weight"], rtol=1e-14, atol=1e-14)


def test_nothing_is_printed(base: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    capfd.readouterr()
    recwarn.clear()
    load_with(base, adapter)
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_an_adapter_that_comes_with_the_package(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ADAPTERS_FOLDER", tmp_path)
    save_adapter(tmp_path / "arith")
    resolved = resolve(ModelSpec(str(base), adapter="arith"))
    assert resolved.adapter == tmp_path / "arith"
    assert resolved.label == f"{base.name}+arith"
    expected = "adapter folder 'nothing' does not exist (adapters that come along: ['arith'])."
    assert refusal(base, "nothing") == expected


def test_an_adapter_for_another_base(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "qwen3", "qwen3", target_modules=["k_proj"])
    assert refusal(base, adapter) == (
        f"adapter '{adapter}' was made for another base: tensor base_model.model.model.layers.0.self_attn.k_proj."
        "lora_B.weight is 32 x 3, model has 16 x 3"
    )
    adapter = save_adapter(tmp_path / "gpt2", "gpt2", fan_in_fan_out=True)
    assert refusal(base, adapter).startswith(f"adapter '{adapter}' was made for another base: Target modules ")


def test_an_adapter_for_a_deeper_or_shallower_base(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name.replace("layers.2", "layers.3"): tensors[name].clone()}, file)
    assert refusal(base, adapter) == (
        f"adapter '{adapter}' was made for another base: the model has no place for tensor "
        f"{name.replace('layers.2', 'layers.3')}"
    )
    del tensors[name]
    save_file(tensors, file)
    assert refusal(base, adapter) == f"adapter '{adapter}' does not fit: its file lacks 1 tensors, first {name}"


def test_the_name_of_the_base_does_not_matter(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/other-model"}))
    renamed = load_with(base, adapter)
    original = load_with(base, save_adapter(tmp_path / "original"))
    for (name, weight), expected in zip(renamed.model.named_parameters(), original.model.parameters(), strict=True):
        assert torch.equal(weight, expected), name


def test_adapters_that_cannot_be_merged(base: Path, tmp_path: Path) -> None:
    whole = save_adapter(tmp_path / "whole", modules_to_save=["lm_head"])
    assert refusal(base, whole) == (
        f"adapter '{whole}' also replaces whole modules (lm_head): merge it into its base with PEFT, save the result, "
        "and give that folder as the model"
    )
    ia3 = save_adapter(
        tmp_path / "ia3", config=IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    )
    assert refusal(base, ia3) == f"adapter '{ia3}' is of type PeftType.IA3: only LoRA adapters can be merged"
    tied = save_tiny(tmp_path / "gemma2", "gemma2")
    ends = save_adapter(tmp_path / "ends", "llama", target_modules=["lm_head", "q_proj"])
    assert refusal(tied, ends) == (
        f"adapter '{ends}' changes lm_head, which this model shares between embedding and unembedding"
    )


def test_adapter_folders_that_are_not(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    config = (adapter / "adapter_config.json").read_text()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    assert refusal(base, adapter).startswith(f"adapter file '{weights}' cannot be read: ")
    weights.unlink()
    assert refusal(base, adapter) == f"adapter folder '{adapter}' has no adapter_model.safetensors"
    (adapter / "adapter_model.bin").write_bytes(b"x")
    assert refusal(base, adapter) == (
        f"adapter folder '{adapter}' has no adapter_model.safetensors (it has pickled weights: save the adapter again "
        "with safe_serialization=True)"
    )
    weights.write_bytes(b"x")
    (adapter / "adapter_config.json").write_text(config[:20])
    assert "adapter_config.json" in refusal(base, adapter)
    (adapter / "adapter_config.json").unlink()
    assert refusal(base, adapter) == f"adapter folder '{adapter}' has no adapter_config.json"
    shutil.rmtree(adapter)
    assert refusal(base, adapter).startswith(f"adapter folder '{adapter}' does not exist")


def test_random_weights_take_no_adapter(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"model 'random:llama-tiny' has random weights and takes no adapter"):
        resolve(ModelSpec("random:llama-tiny", adapter=str(adapter)))
