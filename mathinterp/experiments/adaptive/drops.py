"""The drop of each prompt: what the statistics of an adaptive scan are about.

Knows rows of a scan; knows nothing about decisions. Of an ablation D = mean over the prompt's scored tokens of
(baseline correct - correct), between -1 and 1; first_token counts the first token alone, exact_match the whole answer
as one. Of a path scan D is minus the effect, clipped to the same range.

Shape legend: N node, P prompt, T position of a scored token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

Node = tuple[int, int | None]  # layer and head; no head: the layer's MLP


def drops(
    rows: pa.Table, baseline: pa.Table, nodes: Sequence[Node], prompt_ids: Sequence[str], scoring: str
) -> np.ndarray:
    """D (N P) of ``nodes`` on ``prompt_ids``, from rows of head_scan or mlp_scan and of the same prompts' baseline.

    Raises ValueError unless there is exactly one row for each node, prompt and scored token.
    """
    before_1PT = _correct(baseline, [(0, None)], prompt_ids, lambda table: np.zeros(len(table), np.int64))
    number = {node: index for index, node in enumerate(nodes)}

    def node_of(table: pa.Table) -> np.ndarray:
        layers = table["layer"].to_pylist()
        heads = table["head"].to_pylist() if "head" in table.column_names else [None] * len(layers)
        return np.array([number.get(node, -1) for node in zip(layers, heads, strict=True)], np.int64)

    after_NPT = _correct(rows, nodes, prompt_ids, node_of, positions=before_1PT.shape[2])
    if not np.array_equal(after_NPT >= 0, np.broadcast_to(before_1PT >= 0, after_NPT.shape)):
        raise ValueError("rows and baseline are not of the same nodes, prompts and tokens")
    if scoring == "first_token":
        before_1PT, after_NPT = before_1PT[..., :1], after_NPT[..., :1]
    lost_NPT = np.where(after_NPT < 0, 0, before_1PT - after_NPT)
    if scoring == "exact_match":
        return np.asarray((before_1PT != 0).all(axis=2).astype(float) - (after_NPT != 0).all(axis=2))
    return np.asarray(lost_NPT.sum(axis=2) / (before_1PT >= 0).sum(axis=2))


def losses(rows: pa.Table, column: str, nodes: Sequence[Node], prompt_ids: Sequence[str]) -> np.ndarray:
    """D (N P), minus a column of path_scan clipped to -1 and 1; ValueError unless each node has each prompt once."""
    number = {node: index for index, node in enumerate(nodes)}
    place = {name: index for index, name in enumerate(prompt_ids)}
    ids = zip(rows["layer"].to_pylist(), rows["head"].to_pylist(), strict=True)
    node = np.array([number.get(one, -1) for one in ids], np.int64)
    prompt = np.array([place.get(name, -1) for name in rows["prompt_id"].to_pylist()], np.int64)
    found_NP = np.full((len(nodes), len(prompt_ids)), np.nan)
    if len(node) != found_NP.size or min(node.min(), prompt.min()) < 0:
        raise ValueError("there are rows of other nodes or prompts, or some are missing")
    found_NP[node, prompt] = np.clip(-rows[column].to_numpy().astype(float), -1, 1)
    if np.isnan(found_NP).any():
        raise ValueError("a node has two rows of one prompt")
    return found_NP


def _correct(
    table: pa.Table,
    nodes: Sequence[Node],
    prompt_ids: Sequence[str],
    node_of: Callable[[pa.Table], np.ndarray],
    positions: int | None = None,
) -> np.ndarray:
    """1 where right, 0 where wrong, -1 where there is no such token: N P T."""
    import pyarrow.compute as pc  # 30 ms that no command's help waits for

    table = table.filter(pc.greater_equal(table["position"], 0))  # negative ones are of distractors
    number = {name: index for index, name in enumerate(prompt_ids)}
    prompt = np.array([number.get(name, -1) for name in table["prompt_id"].to_pylist()], np.int64)
    position, node = table["position"].to_numpy().astype(np.int64), node_of(table)
    width = positions or int(position.max(initial=0)) + 1
    found_NPT = np.full((len(nodes), len(prompt_ids), width), -1, np.int8)
    if len(node) and (min(node.min(), prompt.min()) < 0 or position.max() >= width):
        raise ValueError("there are rows of other nodes, prompts or tokens")
    found_NPT[node, prompt, position] = table["correct"].to_numpy(zero_copy_only=False)
    if (found_NPT >= 0).sum() != len(node):
        raise ValueError("a token has two rows")
    if not (found_NPT[..., 0] >= 0).all():
        raise ValueError("rows of a node or prompt are missing")
    return found_NPT
