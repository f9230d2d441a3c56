"""The job of an arithmetic LoRA adapter for a model of the catalog.

Knows PEFT; knows nothing about the loop or about Ray.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.models.catalog import ModelSpec, load
from mathinterp.tuning.accuracy import Accuracy, accuracy_table
from mathinterp.tuning.cards import Record, adapter_card
from mathinterp.tuning.examples import ADAPTER_MIXTURE, CELLS, Mixture


@dataclass(frozen=True)
class AdapterJob:
    """A LoRA adapter on all linear layers of a model of the catalog."""

    model: ModelSpec
    rank: int = 16
    alpha: int = 32
    prompts_per_cell: int = 500
    mixture: Mixture = ADAPTER_MIXTURE

    def build(self, device: torch.device, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The frozen base model in its own dtype with the adapter in float32."""
        torch.manual_seed(seed)
        loaded = load(self.model, device)
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        return get_peft_model(loaded.model, config), loaded.tokenizer  # type: ignore[return-value]

    def export(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: Record, folder: Path
    ) -> list[Accuracy]:
        """A PEFT adapter folder in bfloat16; accuracies are of the base with that adapter as the catalog loads them."""
        assert isinstance(model, PeftModel)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        model.peft_config["default"].base_model_name_or_path = self.model.label  # not a path of this machine
        model.save_pretrained(str(folder))
        saved = load(replace(self.model, adapter=str(folder)), model.device)
        cells = [cell for cell in CELLS if cell.form != "words" and cell.digits < 3]
        table = accuracy_table(saved.model, tokenizer, cells=cells, prompts_per_cell=self.prompts_per_cell)
        card = adapter_card(self.model.label, self.rank, self.alpha, saved.dtype, record, self.mixture, table)
        (folder / "README.md").write_text(card, encoding="utf-8")
        return table
