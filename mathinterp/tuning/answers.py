"""Loss and accuracy on the answers alone: the unembedding runs where an answer token is predicted, nowhere else.

Knows a model's decoder and unembedding, and samples; knows nothing about training or files.
Shapes: B samples, T tokens, N answer tokens, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.data import Sample

WIDTH_MULTIPLE = 8


class AnswerLoss(nn.Module):
    """The summed cross-entropy of the answer tokens; the unembedding runs at their positions only."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        """``model`` owns the parameters (with an adapter or without); ``anatomy`` is that of its base."""
        super().__init__()
        self.model = model
        self._parts = anatomy  # not a module: its parts are registered through ``model``

    def logits(self, input_ids_BT: torch.Tensor, before_N: torch.Tensor) -> torch.Tensor:
        """N x V logits at the flat positions ``before_N`` of B x T. Padding is on the right, where no token looks."""
        hidden_BTD = self._parts.decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        logits_NV = self._parts.unembedding(hidden_BTD.flatten(0, 1)[before_N])
        cap = self._parts.shape.logit_softcap
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    def forward(self, input_ids_BT: torch.Tensor, before_N: torch.Tensor, gold_N: torch.Tensor) -> torch.Tensor:
        """The sum over the answer tokens, in float32 or better."""
        logits_NV = self.logits(input_ids_BT, before_N)
        return cross_entropy(
            logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float(), gold_N, reduction="sum"
        )


def collate(samples: Sequence[Sample], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``input_ids_BT`` padded on the right, ``before_N`` (flat positions that predict the answers), ``gold_N``."""
    width = -(-max(len(sample.input_ids) for sample in samples) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    rows = [[*sample.input_ids, *[pad_id] * (width - len(sample.input_ids))] for sample in samples]
    before = [row * width + index - 1 for row, sample in enumerate(samples) for index in sample.answer]
    gold = [sample.input_ids[index] for sample in samples for index in sample.answer]
    return torch.tensor(rows), torch.tensor(before), torch.tensor(gold)


@dataclass(frozen=True)
class Evaluation:
    """Teacher-forced figures of some samples; an answer matches iff all its tokens are the likeliest ones."""

    samples: int
    answer_tokens: int
    loss: float  # nats an answer token
    token_accuracy: float
    exact_match: float


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    anatomy: Anatomy,
    samples: Sequence[Sample],
    *,
    device: torch.device,
    pad_id: int,
    micro_batch: int = 64,
) -> Evaluation:
    """Loss and accuracy on the answer tokens, the end token included, of the model as it is."""
    was_training = model.training
    model.eval()
    scorer = AnswerLoss(model, anatomy)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
    loss, right, exact, tokens = 0.0, 0, 0, 0
    for first in range(0, len(order), micro_batch):
        piece = [samples[index] for index in order[first : first + micro_batch]]
        input_ids_BT, before_N, gold_N = (array.to(device) for array in collate(piece, pad_id))
        with autocast(device):
            logits_NV = scorer.logits(input_ids_BT, before_N).float()
        loss += cross_entropy(logits_NV, gold_N, reduction="sum").item()
        right_N = (logits_NV.argmax(-1) == gold_N).cpu()
        right += int(right_N.sum())
        exact += sum(bool(part.all()) for part in right_N.split([len(sample.answer) for sample in piece]))
        tokens += len(right_N)
    model.train(was_training)
    return Evaluation(len(samples), tokens, loss / tokens, right / tokens, exact / len(samples))


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; a CPU computes in the weights' dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
