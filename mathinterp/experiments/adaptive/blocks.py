"""What a replica keeps of an adaptive ablation scan: the engines of the last blocks of prompts it computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mathinterp.engine.scores import answers_of, worst_noise
from mathinterp.engine.tree.attention import serves
from mathinterp.engine.tree.forest import Planter
from mathinterp.engine.tree.packing import CPU_TOKENS, GPU_TOKENS, BatchShape, shape_of_batches
from mathinterp.experiments.ablated import AblationState, engines_of, means_noted, prepare, private_from
from mathinterp.experiments.adaptive.order import block_of
from mathinterp.experiments.base import Shard, Subject
from mathinterp.prompts.prompt import with_distractors

if TYPE_CHECKING:
    from mathinterp.experiments.ablation import Ablation
    from mathinterp.experiments.adaptive.reuse import Reused

KEPT = 2  # blocks: near the end of one, shards of the next are given out


class Blocks:
    """The scan's state on a replica, block by block; an engine is built when a shard first needs it.

    Where layers are compiled, batches of all blocks have one shape, whatever their prompts and edits.

    Args:
        first: a shard of the first block.
        most_at_once: edits of one layer that the scan may ask for at once.
        order_P: indices of the prompts in the run's random order.
        compiled: compile layers.
        reused: what a full scan takes over; its noise is also that between batch shapes.

    Attributes:
        ablation: of the block asked for last.
        notes: of the first block, which stand for the run.
    """

    def __init__(
        self,
        scan: Ablation,
        subject: Subject,
        first: Shard,
        most_at_once: int,
        order_P: np.ndarray,
        *,
        compiled: bool,
        reused: Reused | None = None,
    ):
        self.anatomy = subject.anatomy
        self._scan, self._subject, self._most = scan, subject, most_at_once
        self._order_P = order_P
        self._kept: dict[tuple[int, int, int], AblationState] = {}
        self._whole: AblationState | None = None
        if scan.ablation in ("mean", "dataset_mean"):  # over all prompts, not over those of a block
            self._whole = engines_of(scan, subject, most_at_once, 0, checked=False)
        self._shape = self._one_shape() if compiled else None
        self.ablation = self.of(first)
        self.notes: dict[str, Any] = self.ablation.notes | means_noted(scan, subject.prompts)
        if reused is not None:
            self.notes["reused"] = {"cells": reused.cells, "of": reused.of}
            for shard in reused.compared:
                across = noise_between(self.of(first), self.of(shard))
                self.notes["noise_floor"] = worst_noise([self.notes["noise_floor"], across])
            self.of(first)

    def of(self, shard: Shard) -> AblationState:
        """The state of the shard's block."""
        start, stop = shard.work["prompts"]
        places = block_of(self._order_P, start, stop)
        subject = replace(self._subject, prompts=[self._subject.prompts[place] for place in places])
        edits = self._edits(subject, shard.work["per_layer"])
        key = (start, stop, edits)
        state = self._kept.pop(key, None) or self._built(subject, places, edits)
        self._kept[key] = self.ablation = state
        for oldest in list(self._kept)[:-KEPT]:
            del self._kept[oldest]
        return state

    def _edits(self, subject: Subject, per_layer: float) -> int:
        """Edits of a batch, where so many of a layer are asked for."""
        if self._shape is None:
            return min(self._most, max(1, round(per_layer)))
        private = private_from(self._scan, subject.prompts)
        packs = sum(Planter([prompt.fed for prompt in subject.prompts], private).counts(self._shape.pack_size))
        return self._shape.edits_for(packs, per_layer, self._most)

    def _one_shape(self) -> BatchShape:
        prompts = with_distractors(self._subject.prompts)
        fed = [prompt.fed for prompt in prompts]
        most = self._subject.max_tokens or (GPU_TOKENS if self.anatomy.device.type == "cuda" else CPU_TOKENS)
        private = private_from(self._scan, prompts)
        dense = not serves(self.anatomy, fed)
        return shape_of_batches(
            self.anatomy, fed, answers_of(prompts), private_from=private, max_tokens=most, dense_masks=dense
        )

    def _built(self, subject: Subject, places: np.ndarray, edits: int) -> AblationState:
        if self._kept:  # noise, and packing against prompts alone, are looked at once
            state = engines_of(self._scan, subject, edits, 0, checked=False, shape=self._shape)
        else:
            state = prepare(self._scan, subject, edits, 0, shape=self._shape)
        state.whole, state.places = self._whole, places
        return state


def noise_between(wide: AblationState, block: AblationState) -> dict[str, float]:
    """How far the baseline of a block strays from that of more prompts, computed in batches of another shape."""

    def tokens(state: AblationState) -> list[tuple[str, int]]:
        answers, names = state.engine.answers, [item.prompt.prompt_id for item in state.prompts]
        return [(names[p], int(t)) for p, t in zip(answers.prompt_A, answers.position_A, strict=True)]

    place = {token: index for index, token in enumerate(tokens(wide))}
    same_A = np.array([place[token] for token in tokens(block)])
    return block.engine.baseline().noise(wide.engine.baseline().at(same_A))
