"""A full scan that takes over what an adaptive one computed: which cells, and which are left.

The rows of a block are stored in the batch shapes of that block; those that are left are computed in others, and may
differ from an undisturbed full scan's in last bits. So such a scan is a run of its own, whose parameters name the
adaptive run and, as a hash, the cells taken over: its rows, too, are a function of its run id.

A node's cells that are left are its prompts from some point of the random order on. Each such point is a batch of
prompts with clean passes of its own, so that some cells are computed anew where that takes less time.

Shape legend: N node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments.adaptive.drops import Node
from mathinterp.experiments.base import Context, Shard
from mathinterp.experiments.results import Results, Summary

if TYPE_CHECKING:
    from mathinterp.experiments.adaptive.scan import Adaptive

CLEAN_PASSES = 2.0  # of the whole model, that a batch of prompts takes beside its edits


@dataclass(frozen=True)
class Reused:
    """What is taken over, and the shards of the run that does so."""

    order_seed: int
    shards: tuple[Shard, ...]  # of nodes and baseline: those taken over first
    cells: int  # taken over: nodes on prompts
    of: int  # all
    compared: tuple[Shard, ...]  # of batch shapes with prompts that have their baseline in the shape of ``first``
    chosen: tuple[str, ...] | None = None  # ids of the prompts that nodes are decided about, where not all are

    @property
    def first(self) -> Shard:
        """The one whose batch shape stands for the run: of the nodes that are most prompts short."""
        computed = (shard for shard in self.shards if "stored" not in shard.work)
        return next(computed, self.shards[0])

    @property
    def cut(self) -> str:
        """12 hex digits of which cells are taken over and how the rest is cut."""
        works = [[shard.key, shard.work] for shard in self.shards]
        return hashlib.sha256(json.dumps(works, sort_keys=True).encode()).hexdigest()[:12]


def find_reused(scan: Adaptive, context: Context) -> Reused:
    """Of the finished adaptive run that ``scan.reuse`` names; UserError unless it is of the same scan."""
    assert scan.reuse is not None
    record = _record(scan, context)
    twin = scan.adaptive(record["parameters"])
    _require_same(scan, twin, context, record)
    prompts, shape = context.read(scan), context.model.shape
    growing = twin.growing(shape, prompts)
    assert growing is not None
    computed = [*growing.first(), *(Shard(**shard) for shard in record.get("grown", []))]
    blocks = [shard for shard in computed if "prompts" in shard.work]
    if scan.choosing is None:
        return cut(twin, scan.reuse, blocks, len(prompts), shape.n_layers)
    # Clean passes anew may choose others where a prediction is nearly a tie: blocks would be of other prompts.
    chosen = scan.population(context.store.read_shard(scan.reuse, scan.choosing.key), prompts)
    found = cut(twin, scan.reuse, blocks, len(chosen), shape.n_layers)
    choosing = replace(scan.choosing, work={"stored": [scan.reuse, scan.choosing.key]}, cost=0.01)
    ids = tuple(item.prompt.prompt_id for item in chosen)
    return replace(found, shards=(choosing, *found.shards), chosen=ids)


def _record(scan: Adaptive, context: Context) -> dict[str, Any]:
    run, record = scan.reuse, context.store.record(str(scan.reuse))
    if record is None:
        hint = _still_there(str(run), context) or "; `mathinterp sql` lists view runs"
        raise UserError(f"`reuse`: there is no run {run} in {context.store.url}{hint}")
    if record["scan"] != scan.name or "decide" not in record["parameters"]:
        raise UserError(f"`reuse`: run {run} is no adaptive {scan.name} scan (one with `decide`)")
    if set(record["shards"]) - context.store.finished_shards(str(run), record):
        raise UserError(f"`reuse`: run {run} is not finished; the command that began it goes on")
    return record


def _still_there(run: str, context: Context) -> str:
    """Which finished runs took over the rows of one that is gone."""
    if not context.store.files.find("runs", ".json"):
        return ""
    taken = "SELECT run_id FROM runs WHERE parameters ->> 'reuse' = $run AND status = 'finished' ORDER BY run_id"
    found = [row["run_id"] for row in context.store.rows(taken, {"run": run})]
    if not found:
        return ""
    what = f"run {found[0]}, which took over its rows, is" if len(found) == 1 else f"runs {', '.join(found)} are"
    return f" any more, but {what} finished and whole: read its rows by that id with `mathinterp sql` or `report`"


def _require_same(scan: Adaptive, twin: Adaptive, context: Context, record: Mapping[str, Any]) -> None:
    if context.run_id(twin) == scan.reuse:
        return
    mine: dict[str, Any] = {**twin.parameters(), "dtype": context.model.dtype}
    differing = [f"`{name}`" for name, value in mine.items() if record["parameters"].get(name) != value]
    differing += ["the model"] if record["model_fingerprint"] != context.model.fingerprint else []
    reason = f"differs in {', '.join(differing)}" if differing else "is of other prompts or another version"
    raise UserError(f"`reuse`: run {scan.reuse} {reason}; give what it was given, or leave `reuse` out")


def cut(scan: Adaptive, run: str, blocks: Sequence[Shard], population: int, n_layers: int) -> Reused:
    """What of an adaptive run's shards is taken over, and shards of what is left."""
    stops: dict[Node, int] = {}
    for shard in blocks:
        for node in _nodes(scan, shard):
            stops[node] = max(stops.get(node, 0), shard.work["prompts"][1])
    weights = {node: (n_layers - node[0]) / n_layers for node in stops}
    points = starting_points(stops, weights, population)
    begins = {node: max(point for point in points if point <= stop) for node, stop in stops.items()}
    shards, cells = [], 0
    tables = {"baseline": 0, scan.node_table: 0}

    def add(table: str, work: dict[str, Any], cost: float) -> None:
        shards.append(Shard(table, tables[table], work, cost))
        tables[table] += 1

    for shard in blocks:
        start, stop = shard.work["prompts"]
        work: dict[str, Any] = {"stored": [run, shard.key]}
        work |= {name: shard.work[name] for name in ("prompts", "per_layer")}
        kept = [node for node in _nodes(scan, shard) if stop <= begins[node]]
        cells += len(kept) * (stop - start)
        if shard.table == "baseline" and stop <= points[0]:
            add("baseline", work, 0.01)
        elif kept:
            add(scan.node_table, {**work, **scan.named(kept)}, 0.01)
    # The computed baseline serves all cells from the first point on: in its own shape, those taken over, later points'.
    mixed = [shard for shard in shards if shard.work["prompts"][0] >= points[0]]
    compared = sorted(mixed, key=_prompts_in)[-1:]
    for point in (point for point in points if point < population):
        nodes = sorted((node for node, begin in begins.items() if begin == point), key=_place)
        layers = {node[0] for node in nodes}
        per_layer = sum(weights[node] for node in nodes) / sum((n_layers - layer) / n_layers for layer in layers)
        batch = {"prompts": [point, population], "per_layer": per_layer}
        if scan.has_baseline and point == points[0]:
            add("baseline", batch, 0.5)
        for file in scan.files(nodes):
            cost = sum(n_layers - layer for layer, _ in file) * (1 - point / population)
            add(scan.node_table, {**batch, **scan.named(file)}, cost)
        if point != points[0]:
            compared.append(shards[-1])
    return Reused(scan.order_seed, tuple(shards), cells, len(stops) * population, tuple(compared))


def starting_points(stops: Mapping[Node, int], weights: Mapping[Node, float], population: int) -> list[int]:
    """From which prompts of the order on nodes are computed, so that clean passes and edits together are fewest.

    Each node begins at the last point that is not after its stop; cells that it has beyond are not taken over.

    Args:
        stops: node -> prompts it has.
        weights: node -> what one edit of it costs, in passes of the whole model.
    """
    ends = sorted(set(stops.values()))
    weight = [sum(weights[node] for node, stop in stops.items() if stop == end) for end in ends]
    best: dict[int, tuple[float, list[int]]] = {}  # from the i-th end on, which is a point itself
    for i in reversed(range(len(ends))):
        left = population - ends[i]
        ways = [(sum(weight[i:]) * left, list[int]())]
        ways += [(sum(weight[i:j]) * left + best[j][0], best[j][1]) for j in range(i + 1, len(ends))]
        cost, points = min(ways)
        best[i] = CLEAN_PASSES * left + cost, [ends[i], *points]
    return best[0][1]


def _nodes(scan: Adaptive, shard: Shard) -> list[Node]:
    return [] if shard.table == "baseline" else scan.nodes_in(shard)


def _prompts_in(shard: Shard) -> int:
    start, stop = shard.work["prompts"]
    return int(stop - start)


def _place(node: Node) -> tuple[int, int, bool]:
    """Layer by layer, its MLP last."""
    layer, head = node
    return layer, head or 0, head is None


def with_reused(results: Results, summary: Summary) -> Summary:
    """The summary, and a line of what was taken over, if something was."""
    rows = results.rows(
        """SELECT parameters ->> 'reuse' AS run, (notes -> 'reused' ->> 'cells')::BIGINT AS cells,
                  (notes -> 'reused' ->> 'of')::BIGINT AS total FROM run_records WHERE run_id = $run"""
    )
    for row in rows:
        if row["cells"] is not None:
            share = f"{100 * row['cells'] / row['total']:.2g} %"
            said = f"{row['cells']:,} of {row['total']:,} cells ({share}) are those of run {row['run']}."
            return replace(summary, parts=[*summary.parts, said], data={**summary.data, "reused": row})
    return summary
