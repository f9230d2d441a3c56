"""The plain engine: padded batches, full forward passes, ordinary hooks.

The slow, obvious twin of replay.PackedEngine, with the same methods, and the way for families that do not take
a tree mask. Pads on the right only, so position ids are the default ones. T is the padded length.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from mathinterp.engine.batching import like_lengths
from mathinterp.engine.edits import Edit, PlacedReplacement, Replacement, site_width
from mathinterp.engine.hooks import caught_input, caught_site, edited_input, edited_output
from mathinterp.engine.scores import Answers, ScoreBoard, Scores, answers_of, check_finite, score
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


class PlainEngine:
    """Scores answer tokens under edits of heads or MLPs, one edit a pass over all prompts.

    Args:
        anatomy: the model; its weights decide device and dtype.
        prompts: tokenized prompts.
        batch_size: prompts in one forward pass.
    """

    name = "plain"

    def __init__(self, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], *, batch_size: int = 64):
        self.anatomy, self.prompts, self.batch_size = anatomy, prompts, batch_size
        self.device, self.dtype = anatomy.device, anatomy.dtype
        self.answers: Answers = answers_of(prompts)
        self.length = max(len(prompt.fed) for prompt in prompts)
        lengths = [len(prompt.fed) for prompt in prompts]
        self.batches = [np.array(rows) for rows in like_lengths(lengths, anatomy.shape.positions, batch_size)]

    def baseline(self) -> Scores:
        """Scores of the unedited model (1 x A)."""
        board = ScoreBoard(1, len(self.answers), self.anatomy)
        for batch in self.batches:
            self._score_batch(board, 0, batch, self._forward(batch))
        return board.scores(self.answers.gold_A)

    @torch.inference_mode()
    def run_edits(self, layer: int, edits: Sequence[Edit], replacement: Replacement) -> Scores:
        """Scores under each edit of ``layer`` by itself: E x A; see ``PackedEngine.run_edits``."""
        board = ScoreBoard(len(edits), len(self.answers), self.anatomy)
        placed = self.place(replacement)
        for row, edit in enumerate(edits):
            for batch in self.batches:
                with self._hooked(layer, edit, placed, batch):
                    hidden = self._forward(batch)
                self._score_batch(board, row, batch, hidden)
        result = board.scores(self.answers.gold_A)
        check_finite(result, [edit.label for edit in edits], self.answers, self.prompts)
        return result

    def place(self, replacement: Replacement) -> PlacedReplacement:
        """``replacement`` laid out over prompts x tokens."""
        flat = None
        if replacement.prompt_n is not None and replacement.token_n is not None:
            flat = replacement.prompt_n * self.length + replacement.token_n
        return PlacedReplacement.place(replacement, len(self.prompts), self.length, flat)

    def _hooked(
        self, layer: int, edit: Edit, placed: PlacedReplacement, batch: np.ndarray
    ) -> AbstractContextManager[None]:
        anatomy = self.anatomy

        def cut(clean_BTZ: torch.Tensor, columns: slice) -> torch.Tensor:
            length = clean_BTZ.shape[1]
            if placed.where_RT is None:
                return placed.apply(clean_BTZ, columns=columns)
            trimmed = PlacedReplacement(placed.values[batch, :length], placed.where_RT[batch, :length])
            return trimmed.apply(clean_BTZ, columns=columns)

        def edit_heads(inputs_BTZ: torch.Tensor) -> torch.Tensor:
            edited = inputs_BTZ.clone()
            for head in edit.heads:
                columns = anatomy.head_slice(head)
                edited[..., columns] = cut(inputs_BTZ[..., columns], columns)
            return edited

        if edit.site == "mlp":
            # a copy: Falcon's layers add attention's output into the MLP's in place
            return edited_output(anatomy.mlp(layer), lambda output: cut(output, slice(None)).clone())
        return edited_input(anatomy.output_projection(layer), edit_heads)

    @torch.inference_mode()
    def token_values(self, site: str, layer: int, prompt_n: np.ndarray, token_n: np.ndarray) -> torch.Tensor:
        """Clean activations at ``site`` of the n tokens: n Z."""
        width = site_width(self.anatomy, site)
        everything = torch.zeros(len(self.prompts), self.length, width, dtype=self.dtype, device=self.device)
        for batch in self.batches:
            with caught_site(self.anatomy, site, layer) as caught:
                self._forward(batch)
            assert len(caught) == 1, f"the {site} hook of layer {layer} fired {len(caught)} times, not once"
            everything[batch, : caught[0].shape[1]] = caught[0]
        return everything[prompt_n, token_n]

    @torch.inference_mode()
    def _forward(self, batch: np.ndarray) -> torch.Tensor:
        """Last layer's output B T D, before the final norm."""
        sequences = [self.prompts[i].fed for i in batch]
        length = max(map(len, sequences))
        token_ids = torch.zeros(len(batch), length, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            token_ids[row, : len(sequence)] = torch.tensor(sequence)
        with caught_input(self.anatomy.final_norm) as caught:  # causal attention never looks right: no mask is needed
            self.anatomy.decoder(input_ids=token_ids.to(self.device), use_cache=False)
        return caught[0]

    def _score_batch(self, board: ScoreBoard, row: int, batch: np.ndarray, hidden_BTD: torch.Tensor) -> None:
        place = {int(prompt): i for i, prompt in enumerate(batch)}
        chosen = np.flatnonzero(np.isin(self.answers.prompt_A, batch))
        rows = np.array([place[int(p)] for p in self.answers.prompt_A[chosen]])
        picked = hidden_BTD[rows, self.answers.row_A[chosen]][None]
        gold = torch.from_numpy(self.answers.gold_A[chosen]).to(self.device)
        board.fill(row, torch.from_numpy(chosen).to(self.device), score(self.anatomy, picked, gold))
