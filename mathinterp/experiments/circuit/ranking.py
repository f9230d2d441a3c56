"""What circuits are made of: nodes with their scores, and the first k of them.

Knows the store's views and a model's sizes; knows nothing about how scores were computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mathinterp.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.models.anatomy import ModelShape
    from mathinterp.models.catalog import ResolvedModel
    from mathinterp.store import Store

LEVELS = ("node", "neuron")
ORDERINGS = ("signed", "absolute")
SITES = ("input", "head", "mlp", "neuron")  # within a layer in this order, as MIB numbers nodes
Place = tuple[str, int]


@dataclass(frozen=True, eq=False)
class NodeScores:
    """Scores of nodes. Travels inside the experiment.

    method: what gave the scores; "exact" for patching every node.
    source: ids of runs with commas between, or a file's name.
    scores: site and layer -> the more, the more the node speaks for the answer; NaN: not scored, always in the circuit.
        Of a "head" site one number per head, or heads x d_model for coordinates of what they write; of "mlp" and
        "input" one number or d_model; of "neuron" one per neuron.
    """

    method: str
    source: str
    scores: Mapping[Place, np.ndarray]

    @property
    def places(self) -> list[Place]:
        """In MIB's order, which decides ties."""
        return sorted(self.scores, key=lambda place: (place[1], SITES.index(place[0])))

    @cached_property
    def flat(self) -> np.ndarray:
        """All scores in one row."""
        return np.concatenate([self.scores[place].ravel() for place in self.places]).astype(np.float64)

    @property
    def scored(self) -> int:
        """Nodes that have a score: what fractions are of."""
        return int(np.isfinite(self.flat).sum())

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the nodes and their scores."""
        digest = hashlib.sha256(repr([(place, self.scores[place].shape) for place in self.places]).encode())
        digest.update(np.ascontiguousarray(self.flat, "<f8").tobytes())
        return digest.hexdigest()[:16]

    def first(self, count: int, ordering: str) -> dict[Place, np.ndarray]:
        """Which nodes the circuit of the ``count`` nodes of largest score (or absolute score) holds, place by place."""
        keys = np.abs(self.flat) if ordering == "absolute" else self.flat
        order = np.argsort(np.where(np.isfinite(keys), -keys, np.inf), kind="stable")
        kept = ~np.isfinite(self.flat)
        kept[order[:count]] = True
        found, start = {}, 0
        for place in self.places:
            shape = self.scores[place].shape
            stop = start + int(np.prod(shape))
            found[place] = kept[start:stop].reshape(shape)
            start = stop
        return found


def nothing(shape: ModelShape) -> dict[Place, np.ndarray]:
    """The empty circuit: no head, no MLP, and not the input either, as MIB has it."""
    found = {("input", 0): np.zeros(1, bool)}
    for layer in range(shape.n_layers):
        found["head", layer], found["mlp", layer] = np.zeros(shape.n_heads, bool), np.zeros(1, bool)
    return found


def scores_from(
    store: Store, runs: Sequence[str], level: str, model: ResolvedModel, effect: str = "logit_difference"
) -> NodeScores:
    """Scores of the heads and MLPs, or of the MLP neurons, of finished runs together; effect as in ``node_scores``.

    Raises UserError for a run of another model or without such nodes, for runs of different methods, prompts or dtypes,
    and for nodes that two of the runs score.
    """
    from mathinterp.experiments.attribution.ranking import node_scores

    places = ("neuron",) if level == "neuron" else ("head", "mlp")
    shape, scores, kinds = model.shape, dict[Place, np.ndarray](), dict[str, tuple[str, ...]]()
    for run in runs:
        found = node_scores(store, run, effect)
        kinds[run] = _kind(store, run, model)
        if kinds[run] != kinds[runs[0]]:
            raise UserError(
                f"runs {runs[0]} ({', '.join(kinds[runs[0]])}) and {run} ({', '.join(kinds[run])}) have scores that do"
                " not compare; `rank_from` takes runs of one method, prompt set and dtype"
            )
        rows = found[found["node"].isin(places)]
        if rows.empty:
            raise UserError(f"`level` {level}: run {run} scores no {' or '.join(places)}s; {_instead(level)}")
        _add(scores, rows, shape, run)
    method = kinds[runs[0]][0] + (", log-probability" if effect == "logprob" else "")
    return NodeScores(method, ",".join(runs), scores)


def _add(scores: dict[Place, np.ndarray], rows: pd.DataFrame, shape: ModelShape, run: str) -> None:
    widths = {"head": shape.n_heads, "mlp": 1, "neuron": shape.n_neurons}
    for _, group in rows.groupby(["node", "layer"]):
        site, layer = str(group["node"].iloc[0]), int(group["layer"].iloc[0])
        own = scores.setdefault((site, layer), np.full(widths[site], np.nan))
        units = np.zeros(len(group), int) if site == "mlp" else group["unit"].to_numpy(int)
        if np.isfinite(own[units]).any():
            raise UserError(f"run {run} scores {site}s of layer {layer} that an earlier one of `rank_from` scores, too")
        # D below 0: the node speaks for the answer. float32, as rows are: a mean's last bits vary from query to query.
        own[units] = -group["score"].to_numpy(np.float32)


def _kind(store: Store, run: str, model: ResolvedModel) -> tuple[str, str, str]:
    """What the scores are by, of which prompts and dtype; raises UserError for a run of another model."""
    (about,) = store.rows(
        """SELECT scan, model, model_fingerprint, prompts_fingerprint, dtype, parameters ->> 'method' AS method,
                  parameters ->> 'ablation' AS ablation, parameters ->> 'positions' AS positions
           FROM runs WHERE run_id = $run""",
        {"run": run},
    )
    if about["model_fingerprint"] != model.fingerprint:
        raise UserError(f"run {run} scored nodes of {about['model']}, not of {model.label}; give its `model`")
    if about["scan"] in ("heads", "mlps"):
        exact = (about["ablation"], about["positions"]) == ("resample", "all")
        method = "exact" if exact else str(about["ablation"])
    else:
        method = str(about["method"] or about["scan"]) + (" (end)" if about["positions"] == "end" else "")
    return method, f"prompts {about['prompts_fingerprint']}", str(about["dtype"])


def _instead(level: str) -> str:
    return "scan attribution with `neurons`" if level == "neuron" else "take another run"
