"""What a training job trains and what it leaves behind, and the job of the bundled model.

Knows model folders; knows nothing about the loop or about Ray.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.tuning.accuracy import Accuracy, accuracy_table
from mathinterp.tuning.bundled import build_tokenizer, bundled_config
from mathinterp.tuning.cards import Record, bundled_card
from mathinterp.tuning.examples import BUNDLED_MIXTURE, Mixture


class TrainingJob(Protocol):
    """One kind of training, plain data so that it travels to the workers."""

    @property
    def mixture(self) -> Mixture:
        """The samples to train on."""

    def build(self, device: torch.device, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model before the first step, on ``device``, the parameters to train requiring a gradient."""

    def export(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: Record, folder: Path
    ) -> list[Accuracy]:
        """Write what the job makes, with its model card, and return the accuracies measured on what was written."""


@dataclass(frozen=True)
class BundledJob:
    """The bundled arithmetic model, from random weights."""

    layers: int = 8
    heads: int = 8
    d_model: int = 256
    d_ff: int = 608
    prompts_per_cell: int = 1000
    mixture: Mixture = BUNDLED_MIXTURE

    def build(self, device: torch.device, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A randomly initialised Llama in float32."""
        torch.manual_seed(seed)
        config = bundled_config(layers=self.layers, heads=self.heads, d_model=self.d_model, d_ff=self.d_ff)
        model = LlamaForCausalLM(config)
        model.to(device=device)  # type: ignore[call-arg]
        return model, build_tokenizer()

    def export(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: Record, folder: Path
    ) -> list[Accuracy]:
        """A model folder in bfloat16; accuracies are of those weights, computed in float32."""
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        saved: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        saved.to(device=model.device)  # type: ignore[call-arg]
        table = accuracy_table(saved, tokenizer, prompts_per_cell=self.prompts_per_cell)
        (folder / "README.md").write_text(bundled_card(saved, record, self.mixture, table), encoding="utf-8")
        return table
