"""Single neurons zeroed: a neuron's coefficient is 0 at every token, which equals zeroing its column of down_proj.

method.md section 2. Sets of neurons may differ from prompt to prompt (paper A's mask and keep tables do) or be the same
for all. Full forward passes with hooks; down_proj's bias stays.

Shape legend: P prompt, B prompts of a batch, T token, K neuron, E set, A answer token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from mathinterp.engine.hooks import Edit, edited_input
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import ScoreBoard, Scores, check_finite
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron

NeuronMask = Mapping[int, torch.Tensor]  # layer -> boolean K (alike for all prompts) or P K; True = zeroed


def neuron_mask(anatomy: Anatomy, neurons: Sequence[Neuron]) -> NeuronMask:
    """The mask that zeroes ``neurons`` in every prompt: layer -> K."""
    mask: dict[int, torch.Tensor] = {}
    for layer, neuron in neurons:
        zeroed_K = mask.setdefault(layer, torch.zeros(anatomy.shape.n_neurons, dtype=torch.bool))
        zeroed_K[neuron] = True
    return mask


@contextmanager
def zeroed_neurons(anatomy: Anatomy, mask: NeuronMask, rows: torch.Tensor | np.ndarray | None = None) -> Iterator[None]:
    """Within the block, forward passes have the neurons of ``mask`` at zero; each hook must fire.

    Args:
        rows: B, the prompt of each row of the batch, for masks that differ from prompt to prompt; None where ``mask``
            is alike for all.
    """
    with ExitStack() as hooked:
        for layer, zeroed in mask.items():
            assert zeroed.ndim == 1 or rows is not None, "a mask for each prompt needs the rows' prompts"
            chosen = zeroed if zeroed.ndim == 1 else zeroed[rows]
            hooked.enter_context(edited_input(anatomy.down_projection(layer), _zero(chosen.to(anatomy.device))))
        yield


def _zero(zeroed: torch.Tensor) -> Edit:
    where = zeroed if zeroed.ndim == 1 else zeroed[:, None]  # K, or B 1 K

    def zero(coefficients_BTK: torch.Tensor) -> torch.Tensor:
        return coefficients_BTK.masked_fill(where, 0)

    return zero


class NeuronSets(PlainEngine):
    """Scores answer tokens under sets of zeroed neurons, a set a pass over all prompts, in padded batches."""

    @torch.inference_mode()
    def run_masks(self, masks: Sequence[NeuronMask]) -> Scores:
        """Scores under each mask by itself: E x A; an empty mask gives the unedited model's.

        Raises FloatingPointError, naming the mask's number and the prompt, where a score is NaN or infinite.
        """
        board = ScoreBoard(len(masks), len(self.answers), self.anatomy)
        for row, mask in enumerate(masks):
            for batch in self.batches:
                with zeroed_neurons(self.anatomy, mask, batch):
                    hidden_BTD = self._forward(batch)
                self._score_batch(board, row, batch, hidden_BTD)
        scores = board.scores(self.answers.gold_A)
        check_finite(scores, [f"neuron set {row}" for row in range(len(masks))], self.answers, self.prompts)
        return scores
