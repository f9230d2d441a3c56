"""Rankings under draws of prompts: counts of each prompt times its values, one matrix product per operation.

Shape legend: P prompt, N node, D draw; draw 0 is the run's own prompts, each once. Knows arrays; knows nothing about
stores or how rows were computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ranking import Array, Ranking
from mathinterp.experiments.stability.tables import FIRST, STABILITY_NODES, STABILITY_OVERLAPS

OVER = ("prompts", "templates")
ALL = "all"


@dataclass(frozen=True)
class Grid:
    """Values of single prompts, and what the prompts and nodes are; nodes layer by layer."""

    operation_P: Array
    template_P: Array
    kind_N: Array
    layer_N: Array
    unit_N: Array  # -1: a whole layer
    n_PN: Array  # P x 1 where it is the same for all nodes
    known_PN: Array
    values: Mapping[str, Array]  # P x N each


def grid_of(rows: pa.Table, prompts: pa.Table, ranking: Ranking) -> Grid:
    """Rows of ``ranking.values`` and those of their prompts (prompt_id, operation, template) as matrices.

    Raises UserError unless there are nodes, and all have the same prompts, which are in the store.
    """
    if not rows.num_rows:
        raise UserError("it has no values of single prompts to draw from")
    node_n, nodes = _numbered(rows, ("node", "layer", "unit"))
    prompt_n, found = _numbered(rows, ("prompt_id",))
    shape = found.num_rows, nodes.num_rows
    there_PN = np.zeros(shape, bool)
    there_PN[prompt_n, node_n] = True
    if rows.num_rows != there_PN.size or not there_PN.all():
        raise UserError(
            f"not every node has every prompt: {rows.num_rows:,} values of {shape[1]:,} nodes and {shape[0]:,} prompts;"
            " a ranking can be drawn again only of a run that kept them all"
        )

    def matrix(name: str, kind: type) -> Array:
        filled = np.empty(shape, kind)
        filled[prompt_n, node_n] = rows[name].to_numpy()
        return filled

    about = {row["prompt_id"]: row for row in prompts.to_pylist()}
    if missing := [name for name in found["prompt_id"].to_pylist() if name not in about]:
        raise UserError(f"its prompts are no longer in the store ('{missing[0]}')")
    listed = [about[name] for name in found["prompt_id"].to_pylist()]
    n_PN = matrix("n", np.float64)
    return Grid(
        np.array([row["operation"] for row in listed]),
        np.array([row["template"] or "" for row in listed]),
        np.array(nodes["node"].to_pylist()),
        nodes["layer"].to_numpy(),
        nodes["unit"].to_numpy(),
        n_PN[:, :1] if (n_PN == n_PN[:, :1]).all() else n_PN,
        matrix("known", np.bool_),
        {name: matrix(name, np.float64) for name in ranking.means},
    )


def _numbered(rows: pa.Table, names: Sequence[str]) -> tuple[Array, pa.Table]:
    """The number of each row's group, and the groups in order of ``names``; a null unit counts as -1."""
    code_n, size, kept = np.zeros(rows.num_rows, np.int64), 1, []
    for name in names:
        column = rows[name].combine_chunks()
        if pa.types.is_string(column.type):
            values = column.dictionary_encode()
            place = np.argsort(np.argsort(np.array(values.dictionary.to_pylist(), str)))
            own_n, own_size = place[values.indices.to_numpy()], len(place)
        else:
            column = column.cast(pa.int64()).fill_null(-1)
            own_n = column.to_numpy() + 1
            own_size = int(own_n.max(initial=0)) + 1
        code_n, size = code_n * own_size + own_n, size * own_size
        kept.append(column)
    row_c = np.full(size, -1)  # of each code a row that has it
    row_c[code_n] = np.arange(rows.num_rows)
    there_c = row_c >= 0
    groups = pa.table(dict(zip(names, kept, strict=True))).take(pa.array(row_c[there_c]))
    return (np.cumsum(there_c) - 1)[code_n], groups


def resampled(grid: Grid, ranking: Ranking, parameters: Mapping[str, Any], draws: int, seed: int) -> list[pa.Table]:
    """Rows of stability_nodes and of stability_overlaps."""
    nodes: list[dict[str, Any]] = []
    overlaps: list[dict[str, Any]] = []
    for number, over in enumerate(OVER):
        random = np.random.default_rng([seed, number])
        for operation, units, means in _drawn(grid, over, draws, random):
            known_N = grid.known_PN[_of(grid, operation)].mean(axis=0)
            keys = ranking.order(means, parameters)
            for kind in dict.fromkeys(grid.kind_N.tolist()):
                mine = np.flatnonzero(grid.kind_N == kind)
                rank_DN = _ranks([key[:, mine] for key in keys])
                which = {"over": over, "operation": operation, "node": kind}
                nodes.append({**which, **_nodes(grid, mine, rank_DN, known_N, ranking.most)})
                overlaps += [{**which, "units": units, **row} for row in _overlaps(rank_DN)]
    return [_table(nodes, STABILITY_NODES), _table(overlaps, STABILITY_OVERLAPS)]


def _of(grid: Grid, operation: str) -> Array:
    """Which prompts are of an operation."""
    return np.ones(len(grid.operation_P), bool) if operation == ALL else grid.operation_P == operation


def _drawn(
    grid: Grid, over: str, draws: int, random: np.random.Generator
) -> Iterator[tuple[str, int, dict[str, Array]]]:
    """Operation, how many units are drawn there, and the means D x N, of each operation and then of all together.

    An operation of a single template has no draws over templates, and then all together have none.
    """
    together: list[dict[str, Array]] = []
    drawn_units = []
    operations = np.unique(grid.operation_P)
    for operation in operations.tolist():
        mine = grid.operation_P == operation
        drawn = grid.template_P[mine] if over == "templates" else np.arange(mine.sum())
        unit_P = np.unique(drawn, return_inverse=True)[1]
        units = int(unit_P.max()) + 1
        if units < 2 and over == "templates":
            continue
        count_DP = np.vstack([np.ones(units), random.multinomial(units, np.full(units, 1 / units), draws)])[:, unit_P]
        n_DN = count_DP @ grid.n_PN[mine]
        means = {name: count_DP @ values_PN[mine] / n_DN for name, values_PN in grid.values.items()}
        together.append(means)
        drawn_units.append(units)
        yield operation, units, means
    if together and len(together) == len(operations):
        whole = {name: np.mean([means[name] for means in together], axis=0) for name in grid.values}
        yield ALL, min(drawn_units), whole


def _ranks(keys: Sequence[Array]) -> Array:
    """D x N ranks, 0 = first, of nodes by keys (the first counts most); equal nodes keep their order."""
    order_DN = np.lexsort(tuple(reversed(list(keys))), axis=-1)
    rank_DN = np.empty_like(order_DN)
    np.put_along_axis(rank_DN, order_DN, np.arange(order_DN.shape[1])[None], axis=1)
    return rank_DN


def _middle(values: Array) -> Array:
    """Of each column the two of its values that hold 95 % of them."""
    return np.quantile(values, [0.025, 0.975], axis=0, method="inverted_cdf")


def _nodes(grid: Grid, mine: Array, rank_DN: Array, known_N: Array, most: int | None) -> dict[str, Any]:
    shown = np.argsort(rank_DN[0])[:most]
    low_N, high_N = _middle(rank_DN[1:, shown] + 1)
    firsts = {
        f"in_first_{k}": (rank_DN[1:, shown] < k).mean(axis=0) if len(mine) > k else [None] * len(shown) for k in FIRST
    }
    unit_N = [None if unit < 0 else int(unit) for unit in grid.unit_N[mine][shown]]
    return {
        "layer": grid.layer_N[mine][shown], "unit": unit_N, "rank": rank_DN[0, shown] + 1,
        "rank_low": low_N, "rank_high": high_N, **firsts, "known": known_N[mine][shown],
    }  # fmt: skip


def _overlaps(rank_DN: Array) -> Iterator[dict[str, Any]]:
    nodes = rank_DN.shape[1]
    for k in FIRST:
        if nodes <= k:
            continue
        first_DN = (rank_DN < k).astype(np.float32)
        shared_DD = (first_DN @ first_DN.T).astype(np.float64)
        jaccard_DD = shared_DD / (2 * k - shared_DD)
        own_D = jaccard_DD[1:, 0]
        low, high = _middle(own_D)
        pairs = jaccard_DD[1:, 1:][np.triu_indices(len(own_D), 1)]
        yield {
            "k": k, "jaccard": own_D.mean(), "jaccard_low": low, "jaccard_high": high, "pairwise": pairs.mean(),
            "nodes": nodes,
        }  # fmt: skip


def _table(parts: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows from columns of many values (as many as ``layer`` has, if there is one) and of one."""
    tables = []
    for part in parts:
        length = len(part["layer"]) if "layer" in part else 1
        columns = [
            pa.array(part[field.name], field.type)
            if np.ndim(part[field.name])
            else pa.repeat(pa.scalar(part[field.name], field.type), length)
            for field in schema
        ]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()
