"""Loss and accuracy on the answers alone: the unembedding, and what it can of the last layer, runs where an answer
token is predicted, nowhere else.

Knows a model's decoder and unembedding, and batches; knows nothing about training or files.
Shapes: B rows, T tokens of a row, N answer tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import _IncompatibleKeys

from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.answer_rows import last_layer_on_rows
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layout import padded
from mathinterp.tuning.lower_layers import InputCache


class AnswerLoss(nn.Module):
    """A model as transformers' Trainer takes it: from a batch to the loss on its answer tokens.

    Its state dict holds the trained parameters and nothing else, so checkpoints do not repeat the frozen base.
    """

    model: nn.Module  # not registered: workers bring into line what trains, and nothing else
    accepts_loss_kwargs = True  # the Trainer hands over the answer tokens of the whole step, all workers together

    def __init__(self, model: nn.Module, anatomy: Anatomy, cache: InputCache | None = None) -> None:
        """``model`` owns the parameters (with an adapter or without); ``anatomy`` is that of its base."""
        super().__init__()
        self.trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)
        self.__dict__["model"] = model
        self._parts = anatomy
        self._cache = cache

    def logits(
        self,
        input_ids_BT: torch.Tensor,
        before_N: torch.Tensor,
        places: torch.Tensor | None = None,
        samples: Sequence[int] | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """N x V logits at the flat positions ``before_N`` of B x T; ``arguments`` (mask, positions) go to the decoder.

        With a cache, ``samples`` says which samples the batch holds, and ``places`` where.
        """
        lower: AbstractContextManager[None] = nullcontext()
        if self._cache is not None:
            assert samples is not None, "which samples these are"
            assert places is not None, "where their tokens are"
            lower = self._cache.standing_in(input_ids_BT, samples, places)
        with lower, last_layer_on_rows(self._parts, before_N.unique()):
            hidden_BTD = self._parts.decoder(input_ids=input_ids_BT, use_cache=False, **arguments).last_hidden_state
        logits_NV = self._parts.finished(self._parts.unembedding(hidden_BTD.flatten(0, 1)[before_N]))
        return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()

    def forward(
        self, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int = 1, **batch: Any
    ) -> dict[str, torch.Tensor]:
        """``loss``: the cross-entropy of the answer tokens ``labels`` (N), summed, over ``num_items_in_batch``.

        ``batch``: as ``logits`` takes it.
        """
        return {"loss": cross_entropy(self.logits(**batch), labels, reduction="sum") / num_items_in_batch}

    def train(self, mode: bool = True) -> Self:
        """Also of the model."""
        self.model.train(mode)
        return super().train(mode)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The trained parameters by name."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Overwrite the trained parameters; all of them must be there, and no other."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        assert trained.keys() == state_dict.keys(), "the checkpoint is of another run"
        for name, parameter in trained.items():
            parameter.copy_(state_dict[name])
        return _IncompatibleKeys([], [])


@dataclass(frozen=True)
class Evaluation:
    """Teacher-forced figures of some samples; an answer matches iff all its tokens are the likeliest ones."""

    samples: int
    answer_tokens: int
    loss: float  # nats an answer token
    token_accuracy: float
    exact_match: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    anatomy: Anatomy,
    samples: Sequence[Sample],
    *,
    device: torch.device,
    pad_id: int,
    micro_batch: int = 64,
    rank: int = 0,
    world_size: int = 1,
) -> Evaluation:
    """Loss and accuracy on the answer tokens, the end token included, of the model as it is.

    With several workers each takes its share, and all get the whole figures. All make as many forward passes, because
    sharded layers are gathered together.
    """
    was_training = model.training
    model.eval()
    scorer = AnswerLoss(model, anatomy)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
    share = order[rank::world_size]
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # loss, right tokens, right answers, tokens
    for first in range(0, -(-len(order) // world_size), micro_batch):
        counted = share[first : first + micro_batch]
        piece = [samples[index] for index in counted or order[:1]]
        batch = padded(piece, pad_id, anatomy.shape.positions)
        gold_N = batch["labels"].to(device)
        with autocast(device, anatomy.dtype):
            logits_NV = scorer.logits(batch["input_ids_BT"].to(device), batch["before_N"].to(device))
        if not counted:
            continue
        right_N = logits_NV.argmax(-1) == gold_N
        exact = torch.stack([part.all() for part in right_N.split([len(sample.answer) for sample in piece])])
        loss = cross_entropy(logits_NV, gold_N, reduction="sum")
        totals[:3] += torch.stack([loss.double(), right_N.sum(), exact.sum()])
        totals[3] += len(gold_N)
    if world_size > 1:
        torch.distributed.all_reduce(totals)
    model.train(was_training)
    loss_sum, right, exact_matches, tokens = totals.tolist()
    return Evaluation(len(samples), int(tokens), loss_sum / tokens, right / tokens, exact_matches / len(samples))


def computes_in_bfloat16(device: torch.device, dtype: torch.dtype) -> bool:
    """Products run in bfloat16 on a GPU, unless the weights are float64; a CPU computes in the weights' dtype."""
    return device.type == "cuda" and dtype != torch.float64


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context in which ``computes_in_bfloat16`` holds."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16(device, dtype))
