"""The plain engine: padded batches, full forward passes, ordinary hooks.

The slow, obvious twin of packed.PackedEngine, with the same methods, and the way for families that do not take
a tree mask. Pads on the right only, so position ids are the default ones. T is the padded length.
"""

from collections.abc import Sequence

import numpy as np
import torch

from mathinterp.engine.batching import like_lengths
from mathinterp.engine.hooks import caught_input, caught_site
from mathinterp.engine.intervention import CLEAN, Intervention, Tokens, first_middle_last, label, no_op, site_width
from mathinterp.engine.placement import Placement, hooked
from mathinterp.engine.scores import Answers, ScoreBoard, Scores, answer_logits, answers_of, check_finite, score
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


class PlainEngine:
    """Scores answer tokens under interventions, one a pass over all prompts.

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
    def run(self, interventions: Sequence[Intervention], base: Intervention = CLEAN) -> Scores:
        """See ``choose.Runner.run``; ``base`` saves nothing here."""
        board = ScoreBoard(len(interventions), len(self.answers), self.anatomy)
        placement = Placement(self.anatomy, len(self.prompts), self.length, self._flat)
        for row, changes in enumerate(interventions):
            for batch in self.batches:
                with hooked(placement, [changes], batch):
                    hidden = self._forward(batch)
                self._score_batch(board, row, batch, hidden)
        result = board.scores(self.answers.gold_A)
        check_finite(result, [label(changes) for changes in interventions], self.answers, self.prompts)
        return result

    def noise_floor(self, baseline: Scores) -> dict[str, float]:
        """How far a no-op edit of the first, middle and last layer strays from the baseline, on all answers."""
        layers = first_middle_last(self.anatomy.shape.n_layers)
        return self.run([no_op(self.anatomy, layer) for layer in layers]).noise(baseline)

    def _flat(self, tokens: Tokens) -> np.ndarray:
        flat: np.ndarray = tokens.prompt_n * self.length + tokens.token_n
        return flat

    @torch.inference_mode()
    def activations(self, site: str, layer: int, tokens: Tokens) -> torch.Tensor:
        """Clean activations at ``site`` of the n tokens: n Z."""
        width = site_width(self.anatomy, site)
        everything = torch.zeros(len(self.prompts), self.length, width, dtype=self.dtype, device=self.device)
        for batch in self.batches:
            with caught_site(self.anatomy, site, layer) as caught:
                self._forward(batch)
            assert len(caught) == 1, f"the {site} hook of layer {layer} fired {len(caught)} times, not once"
            everything[batch, : caught[0].shape[1]] = caught[0]
        return everything[tokens.prompt_n, tokens.token_n]

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


@torch.inference_mode()
def next_token_probabilities(anatomy: Anatomy, token_ids: Sequence[int], changes: Intervention) -> torch.Tensor:
    """Probabilities (V) of the token after one sentence, which is the intervention's prompt 0."""
    placement = Placement(anatomy, 1, len(token_ids), lambda tokens: tokens.token_n)
    with hooked(placement, [changes]), caught_input(anatomy.final_norm) as caught:
        anatomy.decoder(input_ids=torch.tensor([list(token_ids)], device=anatomy.device), use_cache=False)
    return answer_logits(anatomy, caught[0][0, -1:])[0].softmax(-1)
