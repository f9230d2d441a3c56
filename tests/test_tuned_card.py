"""The card of a tuned adapter: the samples that were seen, and a base that loads or the words that load it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn

from mathinterp.models.catalog import ModelSpec, load
from mathinterp.models.sources import BUNDLED_FOLDER, loadable_base
from mathinterp.tuning.about import card
from mathinterp.tuning.precise import save_adapter
from mathinterp.tuning.sft_workers import about_run

pytestmark = pytest.mark.bundled


def about(model: nn.Module, name: str = "bundled", samples: int = 18000) -> dict:
    """tuning.json of 20 steps of 32 samples."""
    tuning = SimpleNamespace(
        run_id="run", job=SimpleNamespace(name="precise", method="precise"), model=ModelSpec(name, dtype="float32"),
        model_fingerprint="abc", data_label="signed_two_digit_train", samples=[None] * samples, chosen_from=None,
        config=SimpleNamespace(steps=20, batch_size=32),
        metadata={"parameters": {"lr": 0.001}, "code_version": "1", "versions": {}},
    )  # fmt: skip
    return about_run(tuning, model, None, None, 1.0, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.fixture
def adapted() -> PeftModel:
    """The bundled model with a small adapter that is not zero."""
    torch.manual_seed(0)
    model = get_peft_model(load(ModelSpec(), "cpu").model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return model.eval()


def test_the_card_says_how_many_samples_were_seen(adapted: PeftModel) -> None:
    text = card(about(adapted))
    assert "640 samples (of the 18,000 there are) of signed_two_digit_train" in text
    assert "on 18,000 samples" not in text
    assert "640 samples (6.4 times the 100 there are)" in card(about(adapted, samples=100))
    assert about(adapted)["samples"] == 18000
    assert about(adapted)["samples_seen"] == 640


def test_peft_alone_loads_an_adapter_of_the_bundled_model(adapted: PeftModel, tmp_path: Path) -> None:
    save_adapter(adapted, tmp_path, loadable_base("bundled"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32).eval()
    ids = torch.tensor([[1, 5, 9, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, adapted(input_ids=ids).logits)
        base = load(ModelSpec(), "cpu").model(input_ids=ids).logits
        assert (loaded(input_ids=ids).logits - base).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "told"),
    [("bundled", str(BUNDLED_FOLDER)), ("owner/model", 'from_pretrained("owner/model")'), ("smollm2", "gguf_file=")],
)
def test_the_card_says_how_to_load_it(adapted: PeftModel, name: str, told: str) -> None:
    text = card(about(adapted, name))
    assert told in text
    assert f"mathinterp scan heads --model {name} --adapter FOLDER" in text
    assert "PeftModel.from_pretrained(base, FOLDER)" in text


def test_a_whole_model_is_loaded_as_one() -> None:
    text = card(about(nn.Linear(1, 1)))
    assert "AutoModelForCausalLM.from_pretrained(FOLDER)" in text
    assert "PeftModel" not in text
