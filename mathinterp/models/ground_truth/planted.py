"""A model whose circuit is known, because it was written."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mathinterp.models.ground_truth.written import Written
from mathinterp.models.units import Head, Mlp, Neuron
from mathinterp.prompts.prompt import Prompt


@dataclass(frozen=True)
class Planted:
    """A written model, the prompts that it answers, all rightly, and what computes the answers.

    circuit: each head and MLP of it, and what it does; all others are decoys.
    neurons: those that were written, where the prompts of a scan make every one of them fire; else none.
    writers: of these, the ones that write the answer itself.
    stand_ins: heads of the circuit that act only when the head they are named for is out.
    """

    name: str
    written: Written = field(repr=False)
    prompts: tuple[Prompt, ...] = field(repr=False)
    circuit: Mapping[Head | Mlp, str]
    neurons: tuple[Neuron, ...] = ()
    writers: tuple[Neuron, ...] = ()
    stand_ins: Mapping[Head, Head] = field(default_factory=dict)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a word."""
        return self.written.tokenizer()

    def model(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
        """A copy of the transformers model."""
        model: PreTrainedModel = copy.deepcopy(self.written.model)
        torch.nn.Module.to(model, device, dtype)
        return model


Build = Callable[[], Planted]


def prompt_of(text: str, answer: int, other: str, distractor: int, **operands: Any) -> Prompt:
    """A prompt named by its text, the counterfactual of which has the distractor for an answer."""
    return Prompt(text, text, str(answer), counterfactual=other, distractor=str(distractor), **operands)
