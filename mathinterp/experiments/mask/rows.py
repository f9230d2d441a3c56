"""The rows of a learned mask: trained once for both tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from mathinterp.engine.attribution.mask import Learned, MaskSettings, learn, open_probability
from mathinterp.experiments.mask.tables import MASK_SCORES, MASK_TRAINING

if TYPE_CHECKING:
    from mathinterp.experiments.base import Subject
    from mathinterp.experiments.mask import Mask


@dataclass
class MaskState:
    """What a replica keeps between shards."""

    scan: Mask
    subject: Subject

    @cached_property
    def learned(self) -> Learned:
        """The trained mask."""
        scan = self.scan
        settings = MaskSettings(
            scan.steps, scan.learning_rate, scan.budget, scan.penalty, scan.batch, scan.mask_seed
        )  # fmt: skip
        return learn(self.subject.anatomy, self.subject.prompts, settings, self.subject.max_tokens)


def score_rows(state: MaskState) -> pa.Table:
    """A row for each head and MLP."""
    shape, location_N = state.subject.anatomy.shape, state.learned.location_N
    heads: list[int | None] = [*range(shape.n_heads), None]
    columns = {
        "node": ["mlp" if head is None else "head" for head in heads] * shape.n_layers,
        "layer": [layer for layer in range(shape.n_layers) for _ in heads],
        "head": heads * shape.n_layers,
        "log_alpha": location_N.tolist(),
        "open": open_probability(location_N).tolist(),
    }
    return pa.Table.from_pydict(columns, MASK_SCORES)


def training_rows(state: MaskState) -> pa.Table:
    """A row for each step."""
    rows = [
        {"step": step, "loss": loss, "change": change, "open": share}
        for step, (loss, change, share) in enumerate(state.learned.steps, start=1)
    ]
    return pa.Table.from_pylist(rows, MASK_TRAINING)
