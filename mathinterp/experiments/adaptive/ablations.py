"""Ablation scans of heads or MLPs that can be adaptive: each node's drop of accuracy is decided about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.adaptive import drops
from mathinterp.experiments.adaptive.drops import Node
from mathinterp.experiments.adaptive.judge import accuracy_weights
from mathinterp.experiments.adaptive.scan import Adaptive
from mathinterp.experiments.base import Shard, Subject

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.experiments.adaptive.blocks import Blocks
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class AdaptiveAblation(Adaptive, Ablation):
    """What such scans share."""

    def __post_init__(self) -> None:
        Ablation.__post_init__(self)
        Adaptive.__post_init__(self)

    def parameters(self) -> dict[str, Any]:
        """Those of the ablation, and of decisions where there are any."""
        return {**Ablation.parameters(self), **self.decision_parameters()}

    def weights(self, prompts: Sequence[TokenizedPrompt]) -> np.ndarray:
        """Those under which the mean of all prompts' drops is that of head_effects over 'all' operations."""
        tokens = self.parameters()["scoring"] == "token"
        units = [len(item.scored) if tokens else 1 for item in prompts]
        return accuracy_weights(units, [item.prompt.operation or "none" for item in prompts])

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (node, prompt)."""
        start, stop = shard.work.get("prompts", (0, len(prompts)))
        return len(shard.work.get("heads") or shard.work.get("layers") or [None]) * int(stop - start)

    def compiles(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], device_type: str) -> bool:
        """Not for blocks of prompts: each has batches of its own shape, and each shape would cost a compilation."""
        return self.decide is None and super().compiles(shape, prompts, device_type)

    def prepare(self, subject: Subject) -> Any:
        """Clean pass (and counterfactual pass) over all prompts, or over those of the first block."""
        from mathinterp.experiments.ablated import prepare
        from mathinterp.experiments.adaptive.blocks import Blocks
        from mathinterp.experiments.adaptive.growth import AdaptiveRun

        shape = subject.anatomy.shape
        if self.decide is not None:
            run = AdaptiveRun(self, shape, subject.prompts)
            return Blocks(self, subject, run.first()[0], self.edits_per_batch(shape), run.order_P)
        return prepare(self, subject, self.edits_per_batch(shape), len(self.decided_nodes(shape)))

    def notes(self, state: AblationState | Blocks) -> dict[str, Any]:
        """Engine, packing and noise floor of the run."""
        return state.notes

    def drops(
        self, rows: pa.Table, baseline: pa.Table | None, nodes: Sequence[Node], prompt_ids: Sequence[str]
    ) -> np.ndarray:
        """See drops.py."""
        assert baseline is not None
        return drops.drops(rows, baseline, nodes, prompt_ids, self.parameters()["scoring"])
