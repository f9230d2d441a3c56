"""What a vector of the residual stream says: the vocabulary's first tokens under the lens (method.md section 5)."""

from typing import TYPE_CHECKING

import torch

from mathinterp.forward.lens import Lens
from mathinterp.models.anatomy import Anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 10
AT_ONCE = 512  # vectors projected together


class TopTokens:
    """The first tokens of Lens(vector), without the lens's constants; positive scales change nothing."""

    def __init__(self, anatomy: Anatomy, tokenizer: "PreTrainedTokenizerBase"):
        self.lens, self.tokenizer = Lens(anatomy), tokenizer

    @torch.no_grad()
    def of(self, vectors_ND: torch.Tensor) -> list[list[str]]:
        """For each vector its first SHOWN tokens as text, the likeliest first."""
        found: list[list[str]] = []
        for part_ND in vectors_ND.split(AT_ONCE):
            logits_NV = self.lens.directions(part_ND)
            count = min(SHOWN, logits_NV.shape[1])
            for ids in logits_NV.topk(count, dim=1).indices.tolist():
                found.append([str(self.tokenizer.decode([token_id])) for token_id in ids])
        return found
