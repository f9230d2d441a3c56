"""What a replica keeps of an adaptive ablation scan: the engines of the last blocks of prompts it computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mathinterp.experiments.ablated import AblationState, engines_of, means_noted, prepare
from mathinterp.experiments.adaptive.order import block_of
from mathinterp.experiments.base import Shard, Subject

if TYPE_CHECKING:
    from mathinterp.experiments.ablation import Ablation

KEPT = 2  # blocks: near the end of one, shards of the next are given out


class Blocks:
    """The scan's state on a replica, block by block; an engine is built when a shard first needs it.

    Attributes:
        ablation: of the block asked for last.
        notes: of the first block, which stand for the run.
    """

    def __init__(self, scan: Ablation, subject: Subject, first: Shard, most_at_once: int, order_P: np.ndarray):
        self.anatomy = subject.anatomy
        self._scan, self._subject, self._most = scan, subject, most_at_once
        self._order_P = order_P
        self._kept: dict[tuple[int, int, int], AblationState] = {}
        self._whole: AblationState | None = None
        if scan.ablation in ("mean", "dataset_mean"):  # over all prompts, not over those of a block
            self._whole = engines_of(scan, subject, most_at_once, 0, checked=False)
        self.ablation = self.of(first)
        self.notes: dict[str, Any] = self.ablation.notes | means_noted(scan, subject.prompts)

    def of(self, shard: Shard) -> AblationState:
        """The state of the shard's block."""
        (start, stop), edits = shard.work["prompts"], min(self._most, max(1, round(shard.work["per_layer"])))
        key = (start, stop, edits)
        state = self._kept.pop(key, None) or self._built(start, stop, edits)
        self._kept[key] = self.ablation = state
        for oldest in list(self._kept)[:-KEPT]:
            del self._kept[oldest]
        return state

    def _built(self, start: int, stop: int, edits: int) -> AblationState:
        places = block_of(self._order_P, start, stop)
        subject = replace(self._subject, prompts=[self._subject.prompts[place] for place in places])
        if self._kept:  # noise, and packing against prompts alone, are looked at once
            state = engines_of(self._scan, subject, edits, 0, checked=False)
        else:
            state = prepare(self._scan, subject, edits, 0)
        state.whole, state.places = self._whole, places
        return state
