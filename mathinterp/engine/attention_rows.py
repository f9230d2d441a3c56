"""END's row of the attention matrix, from the model's own eager attention (method.md section 4).

Fused attention never forms the matrix, so the model runs eager attention for these passes and gets its own back
afterwards. Whatever the model's attention does (grouped queries, windows, soft-caps) is in the rows. A head is a query
head.

Shape legend: B prompt of one batch, L layer, H query head, T token, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mathinterp.engine.hooks import caught_input
from mathinterp.engine.lens.lens import wide_dtype
from mathinterp.engine.pairs import Batch
from mathinterp.engine.scores import answer_logits
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import at_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def eager_attention(model: "PreTrainedModel") -> Iterator[None]:
    """Within the block the model uses eager attention; afterwards what it used before, also after an exception.

    Raises UserError if the model's code cannot change its attention.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        if model.config._attn_implementation != "eager":
            raise UserError(
                f"{type(model).__name__} cannot be switched to eager attention, which alone shows its weights;"
                " take a model whose code comes with transformers"
            )
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def end_attention(anatomy: Anatomy, batch: Batch, layers: Sequence[int]) -> torch.Tensor:
    """Attention weights at END of the query heads of ``layers``: B L H T, in float32 (float64 for a float64 model).

    Weights of padding are 0; a row sums to 1, up to rounding in the model's dtype.
    """
    wide = wide_dtype(anatomy.dtype)
    caught: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    with eager_attention(anatomy.model), ExitStack() as hooks:
        for layer in layers:
            hook = _keep_end_row(caught[layer], batch)
            hooks.callback(anatomy.attention(layer).register_forward_hook(hook).remove)
        batch.forward(anatomy)
    for layer, rows in caught.items():
        assert len(rows) == 1, f"the attention hook of layer {layer} fired {len(rows)} times, not once"
    return torch.stack([caught[layer][0].to(wide) for layer in layers], dim=1)


def _keep_end_row(kept: list[torch.Tensor], batch: Batch) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        weights_BHTT = output[1] if isinstance(output, tuple) else None
        if weights_BHTT is None:
            raise UserError(f"{type(module).__name__} gives no attention weights under eager attention")
        weights_BHTT = at_home(module, weights_BHTT)
        rows = torch.arange(len(batch.ends), device=weights_BHTT.device)
        kept.append(weights_BHTT[rows, :, batch.ends])

    return hook


@torch.inference_mode()
def end_logits(anatomy: Anatomy, batch: Batch) -> torch.Tensor:
    """Logits at END under the attention that the model has now: B V."""
    with caught_input(anatomy.final_norm) as caught:
        batch.forward(anatomy)
    return answer_logits(anatomy, batch.at_end(caught[0]))


def eager_deviation(anatomy: Anatomy, batch: Batch) -> float:
    """Largest difference of log-probabilities at END, nats, between eager attention and the model's own."""
    own = end_logits(anatomy, batch).log_softmax(dim=-1)
    with eager_attention(anatomy.model):
        eager = end_logits(anatomy, batch).log_softmax(dim=-1)
    return float((own - eager).abs().max())
