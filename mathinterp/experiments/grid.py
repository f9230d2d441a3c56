"""A dense grid of nodes by prompts: what became of each answer, for pages that show every cell.

Knows arrays, and the rows that scans of single nodes share; knows no page. What an experiment's cells say, its own
``grid`` says: ``ablation_grid`` is that of ablations, ``paths/grid.py`` that of path scans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mathinterp.experiments.results import Results, Row

MISSING = 255  # a cell without rows: not computed
RIGHT_BEFORE, RIGHT_AFTER, CHANGED = 1, 2, 4  # bits of a cell
MOST_WEIGHTS = 2_000_000  # of attention; heads that matter most come first

CELLS = """SELECT {unit}, a.prompt_id, bool_and(b.correct)::TINYINT + 2 * bool_and(a.correct)::TINYINT AS cell,
                  sum(a.logprob::DOUBLE - b.logprob) AS change
           FROM {table} AS a JOIN scored_baseline AS b USING (run_id, prompt_id, position)
           WHERE run_id = $run GROUP BY ALL"""
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
DECISIONS = """SELECT layer, coalesce(head, -1) AS head, decision, threshold, estimate, low, high, prompts_used, cells,
                      exact FROM decisions WHERE run_id = $run"""
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
class Quantity:
    """A number of each cell.

    unit: "%" or "points" of a fraction, else a word after the number.
    values: N x P; NaN where nothing was computed.
    """

    title: str
    unit: str
    values: np.ndarray


@dataclass(frozen=True)
class Outcomes:
    """What the bits of cells say: right before and not after is worse, wrong before and right after is better.

    worse, better: what a node does, and what is then done: ("break", "broken").
    legend: a line each for worse, better, the same and wrong, the same and right; empty where that cannot be.
    about: what is counted, a sentence or two.
    """

    worse: tuple[str, str]
    better: tuple[str, str]
    legend: tuple[str, str, str, str]
    about: str


@dataclass(frozen=True)
class Decisions:
    """What an adaptive scan decided: a row of ``DECISIONS`` for each node, None for one without; ``unit`` of 100 *."""

    unit: str
    rows: Sequence[Row | None]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Each node by each prompt; N nodes, P prompts.

    word: what a node is called, in the singular.
    layers, heads: N; heads are -1 for MLPs.
    prompts: prompt_id, text, answer, operation, predicted (the unchanged model's answer), and ``extras``.
    cells: N x P of bits RIGHT_BEFORE, RIGHT_AFTER and CHANGED (another prediction), as ``outcomes`` reads them; or
        MISSING.
    quantities: the first orders sentences, and is chosen first where ``by_quantity``.
    answers, after: the predictions of the changed cells, row by row: ``answers[after[i]]``. None: predictions under the
        intervention are not stored.
    logprobs: P, of the right answer without the intervention, nats; the last quantity is its change. None: not shown.
    """

    word: str
    layers: np.ndarray
    heads: np.ndarray
    prompts: Sequence[Row]
    cells: np.ndarray
    outcomes: Outcomes
    quantities: Sequence[Quantity]
    by_quantity: bool = False
    answers: Sequence[str] | None = None
    after: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    extras: Sequence[str] = ()
    attention: Attention | None = None
    decisions: Decisions | None = None


class Places:
    """Where rows of nodes and prompts are in a grid: ``layer``, ``head`` (null or -1 for an MLP), ``prompt_id``."""

    def __init__(self, rows: pd.DataFrame, prompts: Sequence[Row]):
        self.nodes = pd.MultiIndex.from_frame(_units(rows).drop_duplicates().sort_values(["layer", "head"]))
        self.prompts = pd.Index([row["prompt_id"] for row in prompts])
        self.layers, self.heads = (self.nodes.get_level_values(level).to_numpy() for level in (0, 1))

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes and prompts."""
        return len(self.nodes), len(self.prompts)

    def node(self, rows: pd.DataFrame) -> np.ndarray:
        """The node of each row; -1 for none."""
        found: np.ndarray = self.nodes.get_indexer(pd.MultiIndex.from_frame(_units(rows)))
        return found

    def cell(self, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Node and prompt of each row."""
        return self.node(rows), self.prompts.get_indexer(rows["prompt_id"])

    def filled(self, rows: pd.DataFrame, values: pd.Series) -> np.ndarray:
        """N x P, NaN where there is no row."""
        made = np.full(self.shape, np.nan, np.float32)
        made[self.cell(rows)] = values
        return made


def _units(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["layer", "head"]].fillna(-1).astype(int)


ANSWERS = Outcomes(
    ("break", "broken"), ("mend", "mended"), ("right → wrong", "wrong → right", "wrong → wrong", "right → right"),
    "An answer is what the model predicts at each counted token, the right ones before it given; it is right if every"
    " one is.",
)  # fmt: skip


def ablation_grid(results: Results, node: str, table: str) -> Grid | None:
    """The grid of a scan that ablates one ``node`` ("head" or "mlp") at a time; None: it has no rows of the kind.

    Of an adaptive scan, the cells that were computed.
    """
    unit = "a.layer, a.head" if node == "head" else "a.layer, -1 AS head"
    found = results.frame(CELLS.format(table=table, unit=unit))
    if found.empty:
        return None
    prompts = results.rows(PROMPTS)
    places = Places(found, prompts)
    cells = np.full(places.shape, MISSING, np.uint8)
    cells[places.cell(found)] = found["cell"]
    change = places.filled(found, found["change"])
    words = token_words(results)
    changed = results.frame(AFTER.format(table=table, unit=unit))
    codes, texts = pd.factorize(changed["predicted"])
    flat = np.ravel_multi_index(places.cell(changed), places.shape)
    cells.ravel()[flat] |= CHANGED
    return Grid(
        word="head" if node == "head" else "MLP",
        layers=places.layers,
        heads=places.heads,
        prompts=[{**row, "predicted": written(row["predicted"], words)} for row in prompts],
        cells=cells,
        outcomes=ANSWERS,
        quantities=[Quantity("change of log-probability", "nats", change)],
        answers=[written([int(each) for each in text.strip("[]").split(",")], words) for text in texts],
        after=codes[np.argsort(flat)],
        attention=attention_of(results, places, cells, change) if node == "head" else None,
        decisions=decisions_of(results, places, "points"),
    )


def decisions_of(results: Results, places: Places, unit: str) -> Decisions | None:
    """Of an adaptive scan; None of any other."""
    found = {(row["layer"], row["head"]): row for row in results.rows(DECISIONS)}
    return Decisions(unit, [found.get((int(layer), int(head))) for layer, head in places.nodes]) if found else None


def token_words(results: Results) -> dict[int, str]:
    """The text of each answer token of the run's prompts, by its id."""
    return {row["token_id"]: row["token"] for row in results.rows(TOKENS)}


def written(predicted: Sequence[int], words: Mapping[int, str]) -> str:
    """Predicted tokens as text; of a token that is no answer token of these prompts only the number is stored."""
    return "".join(words.get(int(each), f"<token {each}>") for each in predicted)


def attention_of(results: Results, places: Places, cells: np.ndarray, change: np.ndarray) -> Attention | None:
    """Of the first finished attention scan of the same model that has some of the sentences."""
    for run in results.rows(ATTENTION_RUNS, own=results.run_id):
        rows = results.frame(ATTENTION, own=results.run_id, attention=run["run_id"])
        rows = rows[np.minimum(*places.cell(rows)) >= 0]
        if not rows.empty:
            return _by_importance(run["run_id"], rows, places, cells, change)
    return None


def _by_importance(run: str, rows: pd.DataFrame, places: Places, cells: np.ndarray, change: np.ndarray) -> Attention:
    """As many heads as there is room for: those that make most prompts worse, then those that lose most, first."""
    where, prompt = places.cell(rows)
    types, there = sorted(rows["token_type"].unique()), np.unique(where)
    broken = ((cells & (RIGHT_BEFORE | RIGHT_AFTER)) == RIGHT_BEFORE).sum(1)
    order = np.lexsort((np.nansum(change, 1)[there], -broken[there]))
    heads = there[order][: max(1, MOST_WEIGHTS // (places.shape[1] * len(types)))]
    place = pd.Index(heads).get_indexer(where)
    mass = np.full((len(heads), places.shape[1], len(types)), np.nan, np.float32)
    kept = place >= 0
    at = place[kept], prompt[kept], pd.Index(types).get_indexer(rows["token_type"][kept])
    mass[at] = rows["mass"][kept]
    return Attention(run, types, heads, mass, len(there) - len(heads))
