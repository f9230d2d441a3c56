"""Which nodes run on which prompts: an adaptive scan as a run that grows, block by block.

Block b is the prompts between two looks at the data. Which nodes run in it follows from the rows of the blocks before
it alone: those that judge.py leaves open. A replica that would idle at the end of a block may begin with the next one;
what is then run of a node that turns out to be decided is stored, and no decision depends on it.

Shape legend: N node, P prompt of the random order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.adaptive.judge import ABOVE, NOT_ABOVE, OPEN, Rule, Verdicts, judge
from mathinterp.experiments.adaptive.looks import looks
from mathinterp.experiments.adaptive.order import order_of
from mathinterp.experiments.adaptive.tables import DECISIONS
from mathinterp.experiments.base import Shard
from mathinterp.experiments.growing import Growing, Read

if TYPE_CHECKING:
    from mathinterp.experiments.adaptive.scan import Adaptive
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

WORDS = {ABOVE: "above", NOT_ABOVE: "not above", OPEN: "open"}


class AdaptiveRun(Growing):
    """The blocks of one run: given out, finished, judged."""

    closing = Shard("decisions", 0)

    def __init__(self, scan: Adaptive, shape: ModelShape, prompts: Sequence[TokenizedPrompt]):
        self._scan, self._layers = scan, shape.n_layers
        self._nodes = scan.decided_nodes(shape)
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self._rule = Rule(float(scan.decide or 0) / 100, scan.fdr)
        self._prompts, self._choosing = prompts, scan.choosing
        self._grown: list[Shard] = []  # restored, of blocks that are not known yet
        self._done: set[str] = set()
        self._begun = self._choosing is None
        self._first = [self._choosing] if self._choosing else []
        if self._begun:
            self._begin(prompts)
            self._first = self._cut(0)

    def _begin(self, population: Sequence[TokenizedPrompt]) -> None:
        """The prompts that nodes are decided about are known."""
        weights_P = self._scan.weights(population)
        self._ids = [item.prompt.prompt_id for item in population]
        self.order_P = order_of(population, weights_P, self._scan.order_seed)
        self._weights_P = weights_P[self.order_P]
        self._ends = looks(len(population), self._rule)
        self._values_NP = np.full((len(self._nodes), len(population)), np.nan)
        self._given: list[dict[str, Shard]] = [{} for _ in self._ends]  # by block
        self._block = 0  # the one that is not judged yet
        self._open = set(range(len(self._nodes)))
        self._verdicts: Verdicts | None = None

    def first(self) -> list[Shard]:
        """The shard that chooses prompts, if there is one; else all nodes on the first block."""
        return self._first

    def restore(self, grown: Sequence[Shard], done: Collection[str]) -> None:
        """See Growing; raises UserError if the looks were others."""
        self._done |= set(done)
        self._grown = list(grown)
        if self._begun:
            self._take_up()

    def _take_up(self) -> None:
        for shard in self._grown:
            block = shard.work["block"]
            if not 0 <= block < len(self._ends) or shard.work["prompts"] != list(self._span(block)):
                raise UserError(
                    f"shard {shard.key} of this run is of other prompts than this version would decide by; use another"
                    " `store`"
                )
            self._given[block][shard.key] = shard

    def finished(self, key: str, read: Read) -> list[Shard]:
        """See Growing."""
        self._done.add(key)
        return self.follow(read)

    def follow(self, read: Read) -> list[Shard]:
        """The next block's shards once a block is done and judged."""
        new: list[Shard] = []
        if not self._begun and self._choosing is not None and self._choosing.key in self._done:
            self._begun = True
            self._begin(self._scan.population(read(self._choosing), self._prompts))
            self._take_up()
        while self._begun and not self.over:
            new += self._cut(self._block)
            if not self._given[self._block].keys() <= self._done:
                break
            self._judge(read)
        return new

    def early(self) -> Shard | None:
        """A file of the next block, of nodes that are open so far; its baseline first."""
        if not self._begun or self.over or self._block + 1 == len(self._ends):
            return None
        following = self._block + 1
        return next(iter(self._cut(following, most=1)), None)

    @property
    def over(self) -> bool:
        """Whether all nodes are decided, or all prompts were run."""
        return self._begun and (not self._open or self._block == len(self._ends))

    def _span(self, block: int) -> tuple[int, int]:
        return self._ends[block - 1] if block else 0, self._ends[block]

    def _cut(self, block: int, most: int | None = None) -> list[Shard]:
        """Shards of a block that were not given yet: its baseline, then files of the nodes that are open."""
        given, (start, stop) = self._given[block], self._span(block)
        left = sorted(self._open - {index for shard in given.values() for index in self._members(shard)})
        work: dict[str, Any] = {"block": block, "prompts": [start, stop], "per_layer": self._per_layer()}
        part = (stop - start) / len(self._ids)
        new = []
        if self._scan.has_baseline and f"baseline/{block:05d}" not in given:
            new.append(Shard("baseline", block, work, 0.5 * part))
        number = sum(shard.table != "baseline" for shards in self._given for shard in shards.values())
        for nodes in self._scan.files([self._nodes[index] for index in left]):
            cost = part * sum(self._layers - layer for layer, _ in nodes)
            new.append(Shard(self._scan.node_table, number, {**work, **self._scan.named(nodes)}, cost))
            number += 1
        new = new[:most]
        given.update({shard.key: shard for shard in new})
        return new

    def _per_layer(self) -> float:
        """Open nodes of a layer, on average over those layers that have any, each weighed by what is replayed of it."""
        layers = [self._nodes[index][0] for index in self._open]
        weights = {layer: self._layers - layer for layer in layers}
        return sum(self._layers - layer for layer in layers) / sum(weights.values())

    def _members(self, shard: Shard) -> list[int]:
        nodes = () if shard.table == "baseline" else self._scan.nodes_in(shard)
        return [self._number[node] for node in nodes]

    def _judge(self, read: Read) -> None:
        start, stop = self._span(self._block)
        places_P = self.order_P[start:stop]
        ids = [self._ids[place] for place in places_P]
        shards = list(self._given[self._block].values())
        baseline = next((read(shard) for shard in shards if shard.table == "baseline"), None)
        for shard in shards:
            if shard.table != "baseline":
                members = self._members(shard)
                try:
                    found = self._scan.drops(read(shard), baseline, [self._nodes[index] for index in members], ids)
                except ValueError as error:
                    raise UserError(
                        f"the stored rows of shard {shard.key} are not those that it is said to have ({error}); use"
                        " another `store`, or delete the run's record and its result folders"
                    ) from error
                self._values_NP[members, start:stop] = found
        self._block += 1
        self._verdicts = judge(self._rule, self._values_NP, self._ends, self._block, self._weights_P)
        self._open = {int(index) for index in np.flatnonzero(self._verdicts.decision_N == OPEN)}

    def close(self) -> pa.Table:
        """A row a node."""
        assert self.over
        assert self._verdicts is not None
        run_N = np.zeros(len(self._nodes), np.int64)
        for block, shards in enumerate(self._given):
            start, stop = self._span(block)
            for shard in shards.values():
                if shard.key in self._done:
                    run_N[self._members(shard)] += stop - start
        found = self._verdicts
        columns: dict[str, Any] = {
            "node": ["mlp" if head is None else "head" for _, head in self._nodes],
            "layer": [layer for layer, _ in self._nodes],
            "head": [head for _, head in self._nodes],
            "threshold": np.full(len(self._nodes), self._rule.threshold),
            "decision": [WORDS[int(decision)] for decision in found.decision_N],
            "exact": found.exact_N,
            "prompts_used": found.used_N,
            "prompts_run": run_N,
            "cells": np.full(len(self._nodes), len(self._ids)),
            "e_above": found.e_above_N,
            "e_below": found.e_below_N,
            "estimate": found.estimate_N,
            "low": found.low_N,
            "high": found.high_N,
        }
        return pa.Table.from_arrays([pa.array(columns[f.name]).cast(f.type) for f in DECISIONS], schema=DECISIONS)
