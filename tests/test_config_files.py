"""config.json and the weights beside it: what they say is computed, or refused by name, before or at loading."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, load, resolve
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in TINY_FAMILIES:
        save_tiny(folder / name, name)
    return folder


def changed(saved: Path, name: str, tmp_path: Path, **fields: Any) -> Path:
    """A copy of a tiny model with other fields in its config.json."""
    folder = Path(shutil.copytree(saved / name, tmp_path / "model", dirs_exist_ok=True))
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


def refusal(folder: Path, *, loading: bool = False) -> str:
    with pytest.raises(UserError) as error:
        load(ModelSpec(str(folder)), "cpu") if loading else resolve(ModelSpec(str(folder)))
    assert "\n" not in str(error.value)
    return str(error.value)


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    save_file({**held, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}, file, {"format": "pt"})


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


NO_PLACE = "has no place for: take it out if the model was trained without it"


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "attn_logit_softcapping", 5.0), ("llama", "sliding_window", 4), ("llama", "logits_scaling", 8.0),
        ("llama", "num_local_experts", 8), ("llama", "layer_norm_eps", 0.1), ("qwen2", "query_pre_attn_scalar", 8),
        ("mistral", "final_logit_softcapping", 5.0), ("gpt2", "rope_theta", 500.0), ("gptj", "rope_theta", 500.0),
        ("gptj", "rope_scaling", {"type": "linear", "factor": 2.0}), ("gemma2", "hidden_act", "silu"),
        ("gpt_neox", "sliding_window", 4), ("phi3", "qk_layernorm", True), ("gemma2", "sliding_window_size", 2),
    ],
)  # fmt: skip
def test_fields_that_the_class_would_keep_and_never_read(
    family: str, name: str, value: Any, saved: Path, tmp_path: Path
) -> None:
    folder = changed(saved, family, tmp_path, **{name: value})
    assert refusal(folder) == (
        f"model folder '{folder}': config.json sets {name} to {json.dumps(value)}, which transformers' {family} "
        + NO_PLACE
    )
    resolve(ModelSpec(str(changed(saved, family, tmp_path, **{name: None}))))


@pytest.mark.parametrize(
    ("family", "name", "meant"),
    [
        ("llama", "rms_norm_epss", "rms_norm_eps"), ("mistral", "sliding_windows", "sliding_window"),
        ("gemma2", "attn_logit_softcaping", "attn_logit_softcapping"), ("llama", "rope_scalling", "rope_scaling"),
    ],
)  # fmt: skip
def test_fields_with_a_letter_wrong(family: str, name: str, meant: str, saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, family, tmp_path, **{name: 7.5})
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields.pop(meant, None)
    file.write_text(json.dumps(fields))
    assert refusal(folder) == (
        f"model folder '{folder}': config.json sets {name}, which transformers' {family} does not know: if it means "
        f"{meant}, name it so, else take it out"
    )


@pytest.mark.slow
def test_fields_that_say_nothing_about_results_are_no_hindrance(saved: Path, tmp_path: Path) -> None:
    """As found in published checkpoints."""
    published: dict[str, dict[str, Any]] = {
        "llama": {"unsloth_fixed": True, "is_llama_config": True, "rope_interleaved": False, "activation": "swiglu"},
        "qwen2": {"use_mrope": False, "max_window_layers": 28},
        "gemma2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4, "cache_implementation": "hybrid"},
        "gpt2": {"n_ctx": 512, "_num_labels": 1, "task_specific_params": {"text-generation": {"do_sample": True}}},
        "mistral": {"attn_implementation": "flash_attention_2", "attention_dropout_prob": 0.1, "pad_token": "</s>"},
        "gptj": {"rotary": True, "gradient_checkpointing": False},
        "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 10000, "attention_probs_dropout_prob": 0},
        "phi3": {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    }
    for family, fields in published.items():
        assert resolve(ModelSpec(str(changed(saved, family, tmp_path / family, **fields)))).config.model_type == family


def test_kinds_of_rotary_scaling_that_are_not_known(saved: Path, tmp_path: Path) -> None:
    known = "default, linear, dynamic, yarn, longrope, llama3"
    for kind in ("linaer", "ntk-by-parts", "mrope"):
        folder = changed(saved, "llama", tmp_path, **rope(kind, factor=4.0))
        assert refusal(folder) == (
            f"model folder '{folder}': config.json scales rotary positions by the type '{kind}', which is not known "
            f"here (known: {known})"
        )


def test_parameters_of_rotary_scaling_that_are_not_read(saved: Path, tmp_path: Path) -> None:
    for family, kind, parameters, unread, read in (
        ("llama", "default", {"factor": 8.0}, "factor", "rope_theta"),
        ("qwen2", "linear", {"factor": 4.0, "beta_fast": 16}, "beta_fast", "factor"),
        ("llama", "linear", {"factor": 4.0, "facter": 2.0}, "facter", "factor"),
        ("mistral", "dynamic", {"factor": 4.0, "alpha": 1000.0}, "alpha", "factor"),
    ):
        folder = changed(saved, family, tmp_path / family, **rope(kind, **parameters))
        assert refusal(folder) == (
            f"model folder '{folder}': config.json sets {unread} for rotary positions of type '{kind}', which does not "
            f"read it (it reads: {read}): correct the type or the name"
        )
    folder = changed(saved, "llama", tmp_path, **rope("linear", factor="4"))
    assert refusal(folder).endswith('sets the factor of rotary positions to "4", which is no number')
    folder = changed(saved, "llama", tmp_path, **rope("linear"))
    assert "Missing required keys" in refusal(folder)


def test_two_rotary_scalings_that_differ(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, "llama", tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert refusal(folder) == (
        f"model folder '{folder}': config.json sets rope_scaling and rope_parameters to different values: keep the "
        "right one"
    )


def test_a_part_of_a_head_that_is_not_rotated(saved: Path, tmp_path: Path) -> None:
    """Llama's layers always rotate the whole head; Phi-3's and GPT-NeoX's do what the config says."""
    folder = changed(saved, "llama", tmp_path, **rope("default", partial_rotary_factor=0.5))
    assert refusal(folder) == (
        f"model folder '{folder}': config.json rotates 0.5 of each head (4 of 8 numbers), but transformers' llama "
        "rotates 8"
    )
    resolve(ModelSpec(str(changed(saved, "phi3", tmp_path / "phi3", **rope("default", partial_rotary_factor=0.5)))))


def test_a_rotary_base_under_a_name_that_is_not_read(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, "gpt_neox", tmp_path, rope_theta=77.0)
    assert refusal(folder) == (
        f"model folder '{folder}': config.json sets rope_theta to 77.0, but transformers' gpt_neox computes with "
        "10000.0"
    )


@pytest.mark.parametrize("name", [name for name in TINY_FAMILIES if not name.startswith("opt")])  # has neither
def test_what_old_checkpoints_hold_beside_their_weights(name: str, saved: Path, tmp_path: Path) -> None:
    """Causal masks and rotary frequencies load where they are the model's own, and are refused where they are not."""
    folder = changed(saved, name, tmp_path)
    model = tiny_model(name, dtype=torch.float32)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    own = [buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")]
    if own:
        held, wrong = {"model.layers.0.self_attn.rotary_emb.inv_freq": own[0]}, own[0] / 4
    elif name.startswith("gpt"):
        held, wrong = {"transformer.h.0.attn.bias": mask}, mask & mask.flip(-1)
    else:
        pytest.fail(f"{name} has neither")
    add_tensors(folder, **held)
    if name == "gemma3":  # two tables: no checkpoint holds one of a layer
        assert "has no place for" in refusal(folder, loading=True)
        return
    load(ModelSpec(str(folder)), "cpu")
    add_tensors(folder, **dict.fromkeys(held, wrong))
    assert refusal(folder, loading=True) == (
        f"model '{folder}' holds the tensor {next(iter(held))}, which transformers leaves out and which is not what "
        "the model computes in its place"
    )


def test_a_bias_that_would_pass_as_a_mask(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, "gptj", tmp_path)
    add_tensors(folder, **{"transformer.h.1.attn.bias": torch.ones(32)})
    assert "holds the tensor transformer.h.1.attn.bias, which transformers leaves out" in refusal(folder, loading=True)


def test_an_unembedding_of_its_own_that_the_config_ties(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, "llama", tmp_path, tie_word_embeddings=True)
    assert refusal(folder, loading=True) == (
        f"model '{folder}' holds an unembedding that is not its embedding, but its config.json says that they are one "
        "(tie_word_embeddings): correct the config, or take the wrong one out of the weights"
    )
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load(ModelSpec(str(folder)), "cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
