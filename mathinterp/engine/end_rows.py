"""Interventions at END alone, scored on the first answer token: one END row for each (intervention, prompt).

A change at END moves no token before it, and the first answer token is what END's own logits predict. So what END
attends to is computed once per prompt (as in patching.py), and an intervention runs as one row per prompt.

Shape legend: P prompt (G of one length), R row (intervention x prompt), E intervention, L layer, D model width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mathinterp.engine.intervention import CLEAN, Intervention, Tokens
from mathinterp.engine.pairs import ends_of
from mathinterp.engine.paths.frozen import CPU_ROWS, GPU_ROWS
from mathinterp.engine.paths.patching import Prefix, RowCache
from mathinterp.engine.placement import Placement, hooked
from mathinterp.engine.replay import Replay
from mathinterp.engine.scores import Answers
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass
class _OneLength:
    """Prompts of one length: rows of one batch need neither padding nor masks of their own."""

    prompts_G: torch.Tensor  # indices
    prefix: Prefix


class EndRows(Replay[_OneLength]):
    """Scores first answer tokens (A = P, prompts in order); values must be for END of every prompt.

    Args:
        anatomy: the model; its weights decide device and dtype.
        prompts: tokenized prompts.
        max_rows: most rows in one batch; None = by device. Halved for good when memory runs out.
    """

    @torch.no_grad()
    def __init__(self, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], max_rows: int | None = None):
        self.ends_P = np.array([prompt.end for prompt in prompts])
        gold_P = np.array([prompt.scored[0].token_id for prompt in prompts])
        answers = Answers(np.arange(len(prompts)), np.zeros(len(prompts), np.int64), self.ends_P, gold_P)
        self.gold_P = torch.from_numpy(gold_P).to(anatomy.device)
        sentences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
        groups = []
        for end in np.unique(self.ends_P):
            members = np.flatnonzero(self.ends_P == end)
            prefix = Prefix(anatomy, [sentences[i] for i in members])
            groups.append(_OneLength(torch.from_numpy(members).to(anatomy.device), prefix))
        embedded_PD = ends_of(anatomy, sentences).embedded_PD
        inputs_LPD = embedded_PD.new_empty(anatomy.shape.n_layers, *embedded_PD.shape)
        inputs_LPD[0] = embedded_PD
        most = max_rows or (GPU_ROWS if anatomy.device.type == "cuda" else CPU_ROWS)
        super().__init__(anatomy, prompts, answers, groups, inputs_LPD, most)
        for group in groups:
            self._fill(inputs_LPD, 0, CLEAN, self._placement(), group)

    def _placement(self) -> Placement:
        return Placement(self.anatomy, len(self.prompts), 1, self._flat)

    def _flat(self, tokens: Tokens) -> np.ndarray:
        assert np.array_equal(np.sort(tokens.prompt_n), np.arange(len(self.prompts))), "not one token per prompt"
        assert np.array_equal(tokens.token_n, self.ends_P[tokens.prompt_n]), "the value is for other tokens than END"
        return tokens.prompt_n

    def _index(self, group: _OneLength) -> torch.Tensor:
        return group.prompts_G

    def _size(self, group: _OneLength) -> int:
        return len(group.prompts_G)

    def _prompts_in(self, group: _OneLength) -> float:
        return len(group.prompts_G)

    def _outputs(
        self, start: int, interventions: Sequence[Intervention], placement: Placement, group: _OneLength
    ) -> Iterator[torch.Tensor]:
        """END's output R D."""
        changes = [change for each in interventions for change in each]
        assert all(change.value.tokens or change.tokens for change in changes), "an edit of every token, not of END"
        layers = range(start, self.anatomy.shape.n_layers)
        cache = RowCache(group.prefix.read, torch.arange(len(group.prompts_G)).repeat(len(interventions)))
        memo: dict[int, Any] = {}
        hidden_RD = self._inputs_LRTD[start, group.prompts_G].repeat(len(interventions), 1)
        for layer in layers:
            call = group.prefix.call(group.prefix.layer_calls[layer], cache, memo)
            with hooked(placement, interventions, group.prompts_G, [layer]):
                hidden_RD = call(self.anatomy.layers[layer], hidden_RD[:, None])[:, 0]
            yield hidden_RD
        assert cache.reads == len(layers), "a layer did not read the cached tokens"

    def _picked(
        self, last: torch.Tensor, count: int, group: _OneLength
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return group.prompts_G, self.gold_P[group.prompts_G], last.unflatten(0, (count, -1))
