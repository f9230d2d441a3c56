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
from mathinterp.models.units import Head, Mlp

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.experiments.adaptive.blocks import Blocks
    from mathinterp.experiments.grid import Grid
    from mathinterp.experiments.results import Results
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
        """One for each (node, prompt) that is not taken over."""
        if "stored" in shard.work:
            return 0
        start, stop = shard.work.get("prompts", (0, len(prompts)))
        return len(shard.work.get("heads") or shard.work.get("layers") or [None]) * int(stop - start)

    def compile_ahead(self, stand_in: Subject, shape: ModelShape) -> None:
        """One shape serves all blocks, in each layer of the stand-in."""
        if not self.by_blocks:
            super().compile_ahead(stand_in, shape)
            return
        from mathinterp.engine.packed import PackedEngine

        engine = self._blocks(stand_in, shape, compiled=True).ablation.engine
        assert isinstance(engine, PackedEngine)
        unit = self.batches(shape)[0][0]
        for layer in range(stand_in.anatomy.shape.n_layers):
            engine.compile_for([Mlp(layer) if isinstance(unit, Mlp) else Head(layer, unit.head)])

    def prepare(self, subject: Subject) -> Any:
        """Clean pass (and counterfactual pass) over all prompts, or over those of the first block."""
        from mathinterp.engine.choose import choose, pays_to_compile
        from mathinterp.experiments.ablated import prepare

        shape, nodes = subject.anatomy.shape, len(self.decided_nodes(subject.anatomy.shape))
        if not self.by_blocks:
            return prepare(self, subject, self.edits_per_batch(shape), nodes)
        packed = choose(self.engine, subject.anatomy.family.tree_mask) == "packed"
        pays = packed and pays_to_compile(subject.anatomy.device.type, subject.prompts, nodes)
        return self._blocks(subject, shape, compiled=pays)

    def _blocks(self, subject: Subject, shape: ModelShape, *, compiled: bool) -> Blocks:
        from mathinterp.experiments.adaptive.blocks import Blocks

        first = self.shards(shape, subject.prompts)[0] if self.reused is None else self.reused.first
        order_P, most = self.order(subject.prompts), self.edits_per_batch(shape)
        return Blocks(self, subject, first, most, order_P, compiled=compiled, reused=self.reused)

    def notes(self, state: AblationState | Blocks) -> dict[str, Any]:
        """Engine, packing and noise floor of the run."""
        return state.notes

    @classmethod
    def grid(cls, results: Results) -> Grid | None:
        """Nodes by prompts; of an adaptive run, whose nodes stopped at different prompts, what was computed."""
        from mathinterp.experiments.grid import ablation_grid

        return ablation_grid(results, cls.node_table.removesuffix("_scan"), cls.node_table)

    def drops(
        self, rows: pa.Table, baseline: pa.Table | None, nodes: Sequence[Node], prompt_ids: Sequence[str]
    ) -> np.ndarray:
        """See drops.py."""
        assert baseline is not None
        return drops.drops(rows, baseline, nodes, prompt_ids, self.parameters()["scoring"])
