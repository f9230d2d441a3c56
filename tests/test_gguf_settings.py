"""What a GGUF file says is what is computed: settings and tensors are used, or the file is refused by name.

The twin is the model the file was written from, in plain transformers; it has never seen a GGUF file.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.gguf_metadata import read_gguf
from tests.tiny_gguf import changed_config, drawn_model, settings_of, write_gguf

IDS = torch.tensor([[1, 20, 5, 31, 7, 44, 9, 60, 11, 23, 90, 17]])
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def message(file: Path) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(file)))
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(tmp_path: Path, family: str, *, config: PreTrainedConfig | None = None, **written: Any) -> str:
    """What is said about a file of a tiny model that was written with more, or other, settings or tensors."""
    file = write_gguf(tmp_path / "refused.gguf", drawn_model(config or changed_config(family)), **written)
    said = message(file)
    assert said.startswith(f"GGUF file '{file}' ")
    return said.removeprefix(f"GGUF file '{file}' ")


def assert_computes(file: Path, config: PreTrainedConfig) -> None:
    """The file's model gives the logits of the model it was written from, fresh and from the cache."""
    expected = drawn_model(config)(IDS).logits
    for _ in range(2):
        found = load(ModelSpec(str(file)), "cpu").model(IDS).logits
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, rope theta, epsilon": {
        "rms_norm_eps": 0.01, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
    "llama, wide heads": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {},
    "qwen3, one key": {"num_key_value_heads": 1},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma2, no caps": {
        "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "sliding_window": 3,
    },
    "phi3": {},
    "gpt2": {},
    "gpt2, epsilon": {"layer_norm_epsilon": 0.1, "n_inner": 24},
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_file_computes_what_its_model_computes(case: str, tmp_path: Path) -> None:
    """Caps, windows, positions, head widths and epsilons that are not those of the config's class."""
    config = changed_config(case.split(",")[0], **CONFIGS[case])
    off = {name: 0.0 for name in ("attn_logit_softcapping", "final_logit_softcapping") if "no caps" in case}
    assert_computes(write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed=off), config)


@pytest.mark.slow
def test_a_window_that_the_loader_does_not_read(tmp_path: Path) -> None:
    """Phi-3's is given to the config; Llama's layers have no place for one."""
    config = changed_config("phi3", sliding_window=4)
    file = write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed={"attention.sliding_window": 4})
    assert_computes(file, config)
    assert not torch.allclose(
        drawn_model(config)(IDS).logits, drawn_model(changed_config("phi3"))(IDS).logits, atol=1e-2
    )
    assert refusal(tmp_path, "llama", changed={"attention.sliding_window": 4}) == (
        "sets llama.attention.sliding_window to 4, but transformers' llama computes with 0: give the model as a "
        "Hugging Face folder"
    )
    beyond = write_gguf(
        tmp_path / "beyond.gguf", drawn_model(changed_config("llama")), changed={"attention.sliding_window": 512}
    )
    assert_computes(beyond, changed_config("llama"))  # 512 positions are all there are


@pytest.mark.slow
def test_linear_rope_scaling_is_applied_and_others_are_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = changed_config("llama", rope_parameters=scaling)
    for settings in ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        assert_computes(write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed=settings), config)
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    plain = changed_config("llama")
    assert_computes(write_gguf(tmp_path / "none.gguf", drawn_model(plain), changed=neutral), plain)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    assert refusal(tmp_path, "qwen2", changed=yarn) == (
        "scales rotary positions (qwen2.rope.scaling.type yarn, factor 4.0), which transformers does not read from it: "
        "give the model as a Hugging Face folder"
    )


@pytest.mark.slow
def test_the_rotary_factors_of_llama_3_are_applied(tmp_path: Path) -> None:
    """The converter writes them as a tensor, which transformers passes over."""
    config = changed_config("llama", head_dim=64, rope_parameters=dict(LLAMA3_ROPE, rope_theta=500000.0))
    model = drawn_model(config)
    inverse = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].double()
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = (plain / inverse).float().numpy()
    assert factors.max() > 7
    assert factors.min() == pytest.approx(1.0)
    file = write_gguf(tmp_path / "tiny.gguf", model, extra_tensors={"rope_freqs.weight": factors})
    assert_computes(file, config)
    rope = resolve(ModelSpec(str(file))).config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("llama3", pytest.approx(8.0))
    far = torch.arange(300)[None] % 100
    assert torch.allclose(load(ModelSpec(str(file)), "cpu").model(far).logits, model(far).logits, atol=1e-4)
    ones = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    assert_computes(
        write_gguf(tmp_path / "ones.gguf", drawn_model(changed_config("llama")), extra_tensors=ones),
        changed_config("llama"),
    )


def test_rotary_factors_of_another_rule_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)}
    assert refusal(tmp_path, "llama", extra_tensors=factors) == (
        "scales rotary positions by the tensor rope_freqs.weight, and not by the rule of Llama 3, which transformers "
        "could be told: give the model as a Hugging Face folder"
    )
    long = {f"rope_factors_{kind}.weight": np.ones(4, dtype=np.float32) for kind in ("long", "short")}
    assert refusal(tmp_path, "phi3", extra_tensors=long) == (
        "holds tensors that the model has no place for: 2 in all, first rope_factors_long.weight"
    )


@pytest.mark.parametrize(
    ("family", "key", "value", "instead"),
    [
        ("llama", "logit_scale", 0.25, "has no place for it"),
        ("llama", "attn_logit_softcapping", 5.0, "computes with 0.0"),
        ("llama", "expert_count", 8, "has no place for it"),
        ("llama", "attention.scale", 0.5, "has no place for it"),
        ("llama", "attention.value_length", 4, "computes with 8"),
        ("qwen2", "rope.dimension_count", 4, "computes with 8"),
        ("qwen2", "brand_new", True, "has no place for it"),
        ("qwen2", "attention.causal", False, "has no place for it"),
        ("phi3", "rope.dimension_count", 4, "computes with 8"),
    ],
)
def test_settings_without_a_place(family: str, key: str, value: Any, instead: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, family, changed={key: value}) == (
        f"sets {family}.{key} to {value}, but transformers' {family} {instead}: give the model as a Hugging Face folder"
    )


@pytest.mark.slow
def test_settings_that_are_left_out_mean_what_llama_cpp_takes(tmp_path: Path) -> None:
    """Heads that share the width, rotated whole, with a base of 10,000; the config class may have others."""
    for family in ("llama", "qwen2", "qwen3"):
        config = changed_config(family, num_key_value_heads=4, head_dim=8)
        names = ("rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length")
        left_out = dict.fromkeys(names)
        assert_computes(write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed=left_out), config)
    for family, key in (
        ("llama", "attention.layer_norm_rms_epsilon"),
        ("qwen2", "feed_forward_length"),
        ("gpt2", "attention.layer_norm_epsilon"),
        ("llama", "attention.head_count_kv"),
    ):
        assert refusal(tmp_path, family, changed={key: None}) == f"lacks the setting {family}.{key}"


def test_groups_that_are_left_out_are_as_many_as_heads(tmp_path: Path) -> None:
    """Qwen2's config class would take 32, and a file's tensors would not fit."""
    config = changed_config("qwen2", num_key_value_heads=4)
    file = write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed={"attention.head_count_kv": None})
    assert_computes(file, config)


def test_neutral_settings_are_no_hindrance(tmp_path: Path) -> None:
    config = changed_config("llama")
    neutral = {
        "expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0, "attention.causal": True, "vocab_size": 160,
        "rope.scaling.finetuned": False, "tensor_data_layout": "Meta AI original pth",
        "final_logit_softcapping": 0.0,
    }  # fmt: skip
    assert_computes(write_gguf(tmp_path / "tiny.gguf", drawn_model(config), changed=neutral), config)


def test_gemma_2_of_a_size_whose_attention_scale_is_not_known(tmp_path: Path) -> None:
    assert refusal(tmp_path, "gemma2") == (
        "does not say by what Gemma-2's attention is scaled (query_pre_attn_scalar), and heads of 16 are of no size "
        "that is known: give the model as a Hugging Face folder"
    )


@pytest.mark.slow
def test_gemma_2_27b_has_an_attention_scale_of_its_own(tmp_path: Path) -> None:
    config = changed_config("gemma2", num_hidden_layers=46, head_dim=128, query_pre_attn_scalar=8, layer_types=None)
    file = write_gguf(tmp_path / "tiny.gguf", drawn_model(config))
    assert resolve(ModelSpec(str(file))).config.query_pre_attn_scalar == 8  # 32 wide, 4 heads
    assert_computes(file, config)


def test_tensors_without_a_place_and_tensors_that_are_missing(tmp_path: Path) -> None:
    bias = {f"blk.{layer}.attn_q.bias": np.ones(32, dtype=np.float32) for layer in range(3)}
    assert refusal(tmp_path, "llama", extra_tensors=bias) == (
        "holds tensors that the model has no place for: 3 in all, first blk.0.attn_q.bias"
    )
    layer = {"blk.3.ffn_up.weight": np.ones((40, 32), dtype=np.float32)}
    assert refusal(tmp_path, "qwen2", extra_tensors=layer) == (
        "holds tensors that the model has no place for: 1 in all, first blk.3.ffn_up.weight"
    )
    assert refusal(tmp_path, "llama", without=["blk.1.ffn_up.weight"]) == (
        "lacks tensors: 1 in all, first blk.1.ffn_up.weight"
    )
    assert refusal(tmp_path, "llama", changed={"vocab_size": 128}) == (
        "has a token_embd.weight of 160 x 32, its settings say 128 x 32"
    )
    narrow = {"blk.1.ffn_up.weight": np.ones((39, 32), dtype=np.float32)}
    assert refusal(tmp_path, "llama", extra_tensors=narrow) == (
        "has a blk.1.ffn_up.weight of 39 x 32, its settings say 40 x 32"
    )


def test_files_that_are_parts_or_no_models(tmp_path: Path) -> None:
    assert refusal(tmp_path, "llama", other={"split.count": 3, "split.no": 0}) == (
        "is one of 3 parts (split.count): put them together with 'llama-gguf-split --merge'"
    )
    assert (
        refusal(tmp_path, "llama", other={"general.type": "adapter"}) == "holds no model but 'adapter' (general.type)"
    )


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", drawn_model(changed_config("llama")), changed={"logit_scale": 0.25})
    done = CliRunner().invoke(main, ["plan", "heads", "--model", str(file), "--store", str(tmp_path / "store")])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "sets llama.logit_scale to 0.25" in done.output


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    import gguf

    model = drawn_model(changed_config("gemma2", head_dim=256, query_pre_attn_scalar=256))
    file = write_gguf(tmp_path / "tiny.gguf", model)
    metadata, reader = read_gguf(file), gguf.GGUFReader(file)
    assert {name: (t.start, list(reversed(t.shape))) for name, t in metadata.tensors.items()} == {
        tensor.name: (tensor.data_offset, list(tensor.shape)) for tensor in reader.tensors
    }
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert metadata.settings == expected
    assert settings_of(model.config).keys() <= metadata.of_architecture().keys()
    norm = metadata.float32("output_norm.weight")
    assert norm is not None
    assert np.allclose(norm - 1, model.model.norm.weight.numpy())
