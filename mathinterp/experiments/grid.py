"""A dense grid of ablated components by prompts: what became of each answer. For pages that show every cell.

Knows arrays and the views of ablations; knows no page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mathinterp.experiments.results import Results, Row

MISSING = 255  # a cell without rows
RIGHT_BEFORE, RIGHT_AFTER, CHANGED = 1, 2, 4  # bits of a cell
MOST_WEIGHTS = 2_000_000  # of attention; heads that matter most come first

CELLS = """SELECT layer, head, prompt_id, baseline_whole + 2 * whole_right AS cell, logprob_change AS change
           FROM ablated_prompts WHERE run_id = $run AND node = $node"""
PROMPTS = """SELECT b.prompt_id, any_value(p.text) AS text, any_value(p.answer) AS answer,
                    any_value(b.operation) AS operation, list(s.predicted_id ORDER BY b.position) AS predicted
             FROM scored_baseline AS b JOIN baseline AS s USING (run_id, prompt_id, position)
             JOIN run_records AS r USING (run_id)
             JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = b.prompt_id
             WHERE run_id = $run GROUP BY b.prompt_id ORDER BY operation, b.prompt_id"""
AFTER = """SELECT {unit}, prompt_id, list(a.predicted_id ORDER BY position)::VARCHAR AS predicted
           FROM {table} AS a JOIN baseline AS b USING (run_id, prompt_id, position)
           JOIN scored_baseline AS s USING (run_id, prompt_id, position)
           WHERE run_id = $run GROUP BY ALL HAVING bool_or(a.predicted_id <> b.predicted_id)"""
TOKENS = """SELECT token_id, any_value(token) AS token FROM answer_tokens
            JOIN run_records AS r USING (prompts_fingerprint) WHERE run_id = $run GROUP BY token_id"""
ATTENTION_RUNS = """SELECT r.run_id FROM runs AS r, run_records AS own
                    WHERE own.run_id = $own AND r.scan = 'attention' AND r.status = 'finished'
                        AND r.model_fingerprint = own.model_fingerprint
                    ORDER BY r.prompts_fingerprint = own.prompts_fingerprint DESC, r.started_at"""
ATTENTION = """SELECT a.layer, a.head, mine.prompt_id, a.token_type, a.mass
               FROM attention_scan AS a JOIN run_records AS r USING (run_id)
               JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = a.prompt_id
               JOIN (SELECT p.prompt_id, p.text FROM prompts AS p JOIN run_records AS r USING (prompts_fingerprint)
                     WHERE r.run_id = $own) AS mine ON mine.text = p.text
               WHERE a.run_id = $attention"""


@dataclass(frozen=True)
class Attention:
    """The attention of heads at the token before the answer, by token type, on the grid's own sentences."""

    run_id: str
    types: Sequence[str]
    heads: np.ndarray  # which components of the grid, H
    mass: np.ndarray  # H x prompts x types, of 1; NaN where the scan has no such prompt
    left_out: int  # heads that have rows, and had no room


@dataclass(frozen=True)
class Grid:
    """Each component by each prompt; N components, P prompts.

    word: what a component is called, in the singular.
    layers, heads: N; heads are -1 for whole layers.
    prompts: prompt_id, text, answer, operation, and predicted: the unchanged model's answer.
    cells: N x P of bits RIGHT_BEFORE and RIGHT_AFTER (every counted token is right) and CHANGED (another prediction);
        or MISSING.
    change: N x P, summed over the counted tokens: log-probability of the right answer, nats; NaN where missing.
    answers, after: the predictions of the changed cells, row by row: ``answers[after[i]]``.
    """

    word: str
    layers: np.ndarray
    heads: np.ndarray
    prompts: Sequence[Row]
    cells: np.ndarray
    change: np.ndarray
    answers: Sequence[str]
    after: np.ndarray
    attention: Attention | None


def ablation_grid(results: Results, node: str, table: str) -> Grid | None:
    """The grid of a scan that ablates one ``node`` ("head" or "mlp") at a time; None: it has no rows of the kind."""
    found = results.frame(CELLS, node=node)
    if found.empty:
        return None
    prompts = results.rows(PROMPTS)
    units = found[["layer", "head"]].fillna(-1).astype(int)
    index = pd.MultiIndex.from_frame(units.drop_duplicates().sort_values(["layer", "head"]))
    column = pd.Index([row["prompt_id"] for row in prompts])
    where = index.get_indexer(pd.MultiIndex.from_frame(units)), column.get_indexer(found["prompt_id"])
    cells = np.full((len(index), len(column)), MISSING, np.uint8)
    change = np.full(cells.shape, np.nan, np.float32)
    cells[where], change[where] = found["cell"], found["change"]

    words = dict(zip(*(results.frame(TOKENS)[name] for name in ("token_id", "token")), strict=True))
    unit = "layer, head" if node == "head" else "layer"
    changed = results.frame(AFTER.format(table=table, unit=unit))
    changed["head"] = changed["head"] if node == "head" else -1
    codes, texts = pd.factorize(changed["predicted"])
    flat = index.get_indexer(pd.MultiIndex.from_frame(changed[["layer", "head"]].astype(int))) * len(column)
    flat += column.get_indexer(changed["prompt_id"])
    cells.ravel()[flat] |= CHANGED
    return Grid(
        word="head" if node == "head" else "MLP",
        layers=index.get_level_values(0).to_numpy(),
        heads=index.get_level_values(1).to_numpy(),
        prompts=[{**row, "predicted": _written(row["predicted"], words)} for row in prompts],
        cells=cells,
        change=change,
        answers=[_written([int(each) for each in text.strip("[]").split(",")], words) for text in texts],
        after=codes[np.argsort(flat)],
        attention=_attention(results, index, column, cells, change) if node == "head" else None,
    )


def _written(predicted: Sequence[int], words: Mapping[int, str]) -> str:
    """Predicted tokens as text; of a token that is no answer token of these prompts only the number is stored."""
    return "".join(words.get(int(each), f"<token {each}>") for each in predicted)


def _attention(
    results: Results, index: pd.MultiIndex, column: pd.Index, cells: np.ndarray, change: np.ndarray
) -> Attention | None:
    """Of the first finished attention scan of the same model that has some of the sentences."""
    for run in results.rows(ATTENTION_RUNS, own=results.run_id):
        rows = results.frame(ATTENTION, own=results.run_id, attention=run["run_id"])
        where = index.get_indexer(pd.MultiIndex.from_frame(rows[["layer", "head"]].astype(int)))
        rows, where = rows[where >= 0], where[where >= 0]
        if not rows.empty:
            return _by_importance(run["run_id"], rows, where, column, cells, change)
    return None


def _by_importance(
    run: str, rows: pd.DataFrame, where: np.ndarray, column: pd.Index, cells: np.ndarray, change: np.ndarray
) -> Attention:
    """As many heads as there is room for: those that break most prompts, then those that lose most, first."""
    types = sorted(rows["token_type"].unique())
    there = np.unique(where)
    broken = ((cells & (RIGHT_BEFORE | RIGHT_AFTER)) == RIGHT_BEFORE).sum(1)
    order = np.lexsort((np.nansum(change, 1)[there], -broken[there]))
    heads = there[order][: max(1, MOST_WEIGHTS // (len(column) * len(types)))]
    place = pd.Index(heads).get_indexer(where)
    mass = np.full((len(heads), len(column), len(types)), np.nan, np.float32)
    kept = place >= 0
    at = place[kept], column.get_indexer(rows["prompt_id"][kept]), pd.Index(types).get_indexer(rows["token_type"][kept])
    mass[at] = rows["mass"][kept]
    return Attention(run, types, heads, mass, len(there) - len(heads))
