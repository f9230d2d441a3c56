"""What a LoRA adapter's options say is what runs: PEFT's unmerged model, option by option, or a refusal in one line."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft.tuners.lora.config as lora
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from transformers import AutoModelForCausalLM

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.loading import load_weights
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer

IDS = torch.tensor([[1, 40, 7, 41, 9, 3, 55]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Llama as it is, with tied embeddings, with biases; GPT-2, whose weights are transposed."""
    root = tmp_path_factory.mktemp("bases")
    folders = {"llama": save_tiny(root / "llama", "llama"), "gpt2": save_tiny(root / "gpt2", "gpt2")}
    for name, changes in (("tied", {"tie_word_embeddings": True}), ("biased", {"attention_bias": True})):
        config = tiny_config("llama")
        config.update(changes)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
        folders[name] = root / name
    return folders


def plain(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def save_adapter(folder: Path, base: Path, init: str | None = None, **options: Any) -> Path:
    """An adapter whose every tensor is far from where it began; ``init`` is written over what PEFT could begin with."""
    torch.manual_seed(1)
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    tuned = get_peft_model(plain(base), LoraConfig(**{**defaults, **options}))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or name.endswith(".bias"):
                parameter.add_(0.2 * torch.randn(parameter.shape))
    tuned.save_pretrained(folder)
    if init is not None:
        write_option(folder, init_lora_weights=init, loftq_config={"loftq_bits": 4, "loftq_iter": 1})
    return folder


def write_option(adapter: Path, **options: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))


def log_probabilities(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.double().log_softmax(-1)


def refusal(base: Path, adapter: Path) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(base), adapter=str(adapter)))
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"adapter '{adapter}' ", "")


BLOCKS = asdict(lora.BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2))
HONOURED: dict[str, tuple[str, dict[str, Any]]] = {
    "regular expression": ("llama", {"target_modules": r".*\.(q|o)_proj"}),
    "all linear layers of tied embeddings": ("tied", {"target_modules": "all-linear"}),
    "excluded modules": ("llama", {"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "both ends, untied": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "parameters": ("llama", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
    "ranks and alphas": ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 32}}),
    "rank-stabilised": ("llama", {"use_rslora": True}),
    "DoRA": ("llama", {"use_dora": True}),
    "DoRA, transposed": ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "transposed, unsaid": ("gpt2", {"target_modules": ["c_attn", "c_fc"]}),
    "trained biases": ("biased", {"bias": "all"}),
    "a bias beside a bias": ("biased", {"lora_bias": True, "target_modules": ["q_proj"]}),
    "block-diagonal": ("llama", {"use_bdlora": BLOCKS}),
    "KaSA": ("llama", {"kasa_config": asdict(lora.KasaConfig())}),
    "MonteCLoRA": ("llama", {"monteclora_config": asdict(lora.MontecloraConfig())}),
    **{f"init {mode}": ("llama", {"init_lora_weights": mode}) for mode in ("gaussian", "eva", "orthogonal", "mica")},
    **{f"init {mode}": ("llama", {"init_lora_weights": mode}) for mode in ("pissa", "olora")},
    "init pissa with DoRA": ("llama", {"init_lora_weights": "pissa", "use_dora": True}),
    "init pissa, transposed": (
        "gpt2", {"init_lora_weights": "pissa", "target_modules": ["c_attn"], "fan_in_fan_out": True},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HONOURED))
def test_answers_are_those_of_peft_unmerged(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, options = HONOURED[name]
    folder = bases[base]
    adapter = save_adapter(tmp_path / "adapter", folder, **options)
    expected = log_probabilities(PeftModel.from_pretrained(plain(folder), str(adapter)).eval())
    assert (expected - log_probabilities(plain(folder))).abs().max() > 0.1, "the adapter does nothing"
    for dtype in ("float32", "float64"):
        found = log_probabilities(load(ModelSpec(str(folder), adapter=str(adapter), dtype=dtype), "cpu").model)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_modules": r".*\.q_proj|.*lm_head"}, "changes lm_head"),
        ({"target_modules": r".*(proj|head)"}, "changes lm_head"),
        ({"target_modules": r"model\.embed_tokens"}, "changes embed_tokens"),
        ({"target_modules": [], "target_parameters": ["lm_head.weight"]}, "changes lm_head"),
    ],
)
def test_shared_weights_are_told_by_what_matches(
    options: dict[str, Any], named: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", bases["tied"], **options)
    told = f"{named}, which this model shares between embedding and unembedding"
    assert refusal(bases["tied"], adapter) == told


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_bias": True}, "it has a bias (lora_bias) for model.layers.0.self_attn.q_proj, which has none"),
        ({"alora_invocation_tokens": [5, 6]}, "cannot be merged (alora_invocation_tokens): it acts from its"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "cannot be merged (layer_replication): it repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "approximates the base's factors at random, each time others: give"),
        ({"init_lora_weights": "lora_ga", "lora_ga_config": lora.LoraGAConfig()}, "changed the base by gradients"),
        ({"init": "corda"}, "changed the base by data that the adapter does not hold: give the adapter"),
        ({"init": "loftq"}, "fits the base as it was quantised: save that base dequantised"),
        ({"init": "tomorrow"}, "init_lora_weights 'tomorrow' is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_before_weights_are_read(
    options: dict[str, Any], named: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", bases["llama"], **options)
    assert named in refusal(bases["llama"], adapter)


def test_the_command_line_refuses_in_one_line(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", bases["llama"], lora_bias=True)
    words = ["scan", "heads", "--model", bases["llama"], "--adapter", adapter, "--store", tmp_path / "s", "--limit", 4]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 2
    assert "lora_bias" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_the_advice_for_a_changed_base_works(bases: dict[str, Path], tmp_path: Path) -> None:
    """Advice: with the changed base itself as the model, init_lora_weights is set to true."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    tuned = get_peft_model(plain(bases["llama"]), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    expected = log_probabilities(tuned.eval())
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.unload().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    assert "set init_lora_weights to true" in refusal(tmp_path / "base", tmp_path / "adapter")
    write_option(tmp_path / "adapter", init_lora_weights=True)
    spec = ModelSpec(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    torch.testing.assert_close(log_probabilities(load(spec, "cpu").model), expected, rtol=1e-4, atol=1e-4)


def test_options_of_a_newer_peft_are_not_dropped(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", bases["llama"])
    write_option(adapter, use_tomorrow=None, lora_tomorrow=False)
    resolve(ModelSpec(str(bases["llama"]), adapter=str(adapter)))
    write_option(adapter, use_tomorrow={"scale": 2})
    assert "options that this version of PEFT does not know (use_tomorrow)" in refusal(bases["llama"], adapter)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"target_modules": "("}, "cannot be put on this model: "), ({"r": 0}, "cannot be put on this model: `r`")],
)
def test_options_that_peft_itself_refuses(
    options: dict[str, Any], named: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", bases["llama"])
    write_option(adapter, **options)
    assert refusal(bases["llama"], adapter).startswith(named)


def test_no_way_of_initialising_at_all_leaves_the_base_as_it_is(bases: dict[str, Path], tmp_path: Path) -> None:
    """null, which PEFT takes as false."""
    adapter = save_adapter(tmp_path / "adapter", bases["llama"])
    write_option(adapter, init_lora_weights=None)
    expected = log_probabilities(PeftModel.from_pretrained(plain(bases["llama"]), str(adapter)).eval())
    found = log_probabilities(load(ModelSpec(str(bases["llama"]), adapter=str(adapter)), "cpu").model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_merge_that_is_not_pefts_forward_pass_is_refused_with_the_figure(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way of adapting that we do not know to be unmergeable: here PEFT merges other weights than it runs."""
    adapter = save_adapter(tmp_path / "adapter", bases["llama"])
    resolved = resolve(ModelSpec(str(bases["llama"]), adapter=str(adapter)))
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 1.01 * right(self, name))
    with pytest.raises(
        UserError, match=r"log-probabilities are off by 0\.\d+ of PEFT's unmerged ones \(at most 0\.001"
    ):
        load_weights(bases["llama"], resolved.config, device=torch.device("cpu"), dtype=torch.float32, adapter=adapter)
