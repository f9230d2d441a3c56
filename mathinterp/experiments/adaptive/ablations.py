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
from mathinterp.experiments.adaptive.order import order_of
from mathinterp.experiments.adaptive.scan import Adaptive
from mathinterp.experiments.base import Shard, Subject

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.experiments.adaptive.blocks import Blocks
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

    def prepare(self, subject: Subject) -> Any:
        """Clean pass (and counterfactual pass) over all prompts, or over those of the first block."""
        from mathinterp.experiments.ablated import prepare
        from mathinterp.experiments.adaptive.blocks import Blocks

        shape = subject.anatomy.shape
        if self.decide is not None:
            first = self.shards(shape, subject.prompts)[0]
            order_P = order_of(subject.prompts, self.weights(subject.prompts), self.order_seed)
            return Blocks(self, subject, first, self.edits_per_batch(shape), order_P)
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
