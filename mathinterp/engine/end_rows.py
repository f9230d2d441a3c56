"""Head sets edited at END alone, scored on the first answer token: one END row for each (set, prompt).

An edit at END changes no token before it, and the first answer token is what END's own logits predict. So what END
attends to is computed once per prompt (as in patching.py), and a set runs as one row a prompt, from the lowest layer in
which it differs from what is cached. ``PlainHeadSets`` is the slow, obvious twin.

Shape legend: P prompt (G of one length), R row (set x prompt), E set, L layer, D model width, Z o_proj input width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mathinterp.engine.batching import in_batches
from mathinterp.engine.edits import Replacement
from mathinterp.engine.head_sets import NO_HEADS, HeadSet, check_sets, edited_columns, labels_of
from mathinterp.engine.hooks import edited_input
from mathinterp.engine.pairs import ends_of
from mathinterp.engine.paths.frozen import CPU_ROWS, GPU_ROWS
from mathinterp.engine.paths.patching import Prefix, RowCache
from mathinterp.engine.scores import Answers, ScoreBoard, Scores, check_finite, score
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass
class _OneLength:
    """Prompts of one length: rows of one batch need neither padding nor masks of their own."""

    prompts_G: torch.Tensor  # indices
    prefix: Prefix


class EndHeadSets:
    """Scores first answer tokens (A = P, prompts in order) under sets of heads edited at END.

    Args:
        anatomy: the model; its weights decide device and dtype.
        prompts: tokenized prompts.
        max_rows: most rows in one batch; None = by device. Halved for good when memory runs out.
    """

    @torch.no_grad()
    def __init__(self, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], max_rows: int | None = None):
        self.anatomy, self.prompts = anatomy, prompts
        self.max_rows = max_rows or (GPU_ROWS if anatomy.device.type == "cuda" else CPU_ROWS)
        self.ends_P = np.array([prompt.end for prompt in prompts])
        gold_P = np.array([prompt.scored[0].token_id for prompt in prompts])
        self.answers = Answers(np.arange(len(prompts)), np.zeros(len(prompts), np.int64), self.ends_P, gold_P)
        self.gold_P = torch.from_numpy(gold_P).to(anatomy.device)
        sentences = [prompt.input_ids[: prompt.end + 1] for prompt in prompts]
        self.groups = []
        for end in np.unique(self.ends_P):
            members = np.flatnonzero(self.ends_P == end)
            prefix = Prefix(anatomy, [sentences[i] for i in members])
            self.groups.append(_OneLength(torch.from_numpy(members).to(anatomy.device), prefix))
        embedded_PD = ends_of(anatomy, sentences).embedded_PD
        self._base = NO_HEADS
        self._inputs_LPD = embedded_PD.new_empty(anatomy.shape.n_layers, *embedded_PD.shape)
        self._inputs_LPD[0] = embedded_PD
        self._fill_inputs(NO_HEADS, {}, 0)

    @torch.no_grad()
    def run_sets(
        self, sets: Sequence[HeadSet], replacements: Mapping[int, Replacement], base: HeadSet = NO_HEADS
    ) -> Scores:
        """See ``knockout.HeadSets.run_sets``; replacements must be for END of every prompt."""
        check_sets(sets, replacements, base)
        values = {layer: self._at_ends(replacement) for layer, replacement in replacements.items()}
        self._cache_inputs(base, values)
        order = sorted(range(len(sets)), key=lambda row: self._start([sets[row]]))  # sets of one start run together
        board = ScoreBoard(len(sets), len(self.answers), self.anatomy)
        for group in self.groups:
            self._run_group(board, [sets[row] for row in order], values, group)
        scores = board.scores(self.answers.gold_A)
        back = np.argsort(order)
        scores = Scores(
            scores.correct_EA[back], scores.logprob_EA[back], scores.logit_EA[back], scores.predicted_EA[back]
        )
        check_finite(scores, labels_of(sets), self.answers, self.prompts)
        return scores

    def _at_ends(self, replacement: Replacement) -> torch.Tensor:
        """What END's input of o_proj becomes in each prompt: P Z."""
        assert replacement.prompt_n is not None, "the replacement is for every token, not for END"
        assert replacement.token_n is not None
        order = np.argsort(replacement.prompt_n, kind="stable")
        assert np.array_equal(replacement.prompt_n[order], np.arange(len(self.prompts))), "not one row a prompt"
        assert np.array_equal(replacement.token_n[order], self.ends_P), "the replacement is for other tokens than END"
        return replacement.values[torch.from_numpy(order).to(replacement.values.device)]

    def _start(self, sets: Sequence[HeadSet]) -> int:
        """The first layer that must run: the lowest in which a set differs from the cached base, at most the last."""
        layers = [layer for heads in sets for layer, _ in heads - self._base]
        return min([*layers, self.anatomy.shape.n_layers - 1])

    def _cache_inputs(self, base: HeadSet, values: Mapping[int, torch.Tensor]) -> None:
        """Every layer's END input with the heads of ``base`` edited."""
        if base == self._base:
            changed = {layer for layer, _ in base}  # the same heads, perhaps of other values
        else:
            changed = {layer for layer, _ in base ^ self._base} | {layer for layer, _ in base}
        if changed:
            self._fill_inputs(base, values, min(changed))
        self._base = base

    def _fill_inputs(self, base: HeadSet, values: Mapping[int, torch.Tensor], start: int) -> None:
        """The inputs of layers after ``start``, from that of ``start``."""
        for group in self.groups:
            outputs = self._layer_outputs(start, [base], values, group)
            for layer, hidden_RD in zip(range(start + 1, len(self._inputs_LPD)), outputs, strict=False):
                self._inputs_LPD[layer, group.prompts_G] = hidden_RD

    def _run_group(
        self, board: ScoreBoard, sets: Sequence[HeadSet], values: Mapping[int, torch.Tensor], group: _OneLength
    ) -> None:
        def run(start: int, stop: int) -> None:
            self._score(board, start, sets[start:stop], values, group)

        rows = len(group.prompts_G)
        at_once = max(1, self.max_rows // rows)
        if (fitting := in_batches(len(sets), at_once, run, rows)) < at_once:
            self.max_rows = fitting * rows

    def _score(
        self,
        board: ScoreBoard,
        row: int,
        sets: Sequence[HeadSet],
        values: Mapping[int, torch.Tensor],
        group: _OneLength,
    ) -> None:
        """Scores of some sets into the board's rows from ``row``."""
        for hidden_RD in self._layer_outputs(self._start(sets), sets, values, group):
            final_RD = hidden_RD
        final_EGD = final_RD.unflatten(0, (len(sets), -1))
        board.fill(row, group.prompts_G, score(self.anatomy, final_EGD, self.gold_P[group.prompts_G]))

    def _layer_outputs(
        self, start: int, sets: Sequence[HeadSet], values: Mapping[int, torch.Tensor], group: _OneLength
    ) -> Iterator[torch.Tensor]:
        """END's output R D of layers ``start``.. under each set, set by set."""
        layers = range(start, self.anatomy.shape.n_layers)
        cache = RowCache(group.prefix.read, torch.arange(len(group.prompts_G)).repeat(len(sets)))
        memo: dict[int, Any] = {}
        hidden_RD = self._inputs_LPD[start, group.prompts_G].repeat(len(sets), 1)
        for layer in layers:
            call = group.prefix.call(group.prefix.layer_calls[layer], cache, memo)
            edited_EZ = edited_columns(self.anatomy, layer, sets)
            hook = self._hooked(layer, edited_EZ, values[layer][group.prompts_G]) if edited_EZ.any() else nullcontext()
            with hook:
                hidden_RD = call(self.anatomy.layers[layer], hidden_RD[:, None])[:, 0]
            yield hidden_RD
        assert cache.reads == len(layers), "a layer did not read the cached tokens"

    def _hooked(self, layer: int, edited_EZ: torch.Tensor, values_GZ: torch.Tensor) -> Any:
        where_E11Z = edited_EZ.to(self.anatomy.device)[:, None, None]

        def edit(inputs_R1Z: torch.Tensor) -> torch.Tensor:
            clean_EG1Z = inputs_R1Z.unflatten(0, (len(where_E11Z), -1))
            return torch.where(where_E11Z, values_GZ[:, None].to(clean_EG1Z.dtype), clean_EG1Z).flatten(0, 1)

        return edited_input(self.anatomy.output_projection(layer), edit)
