"""The slow twin of path patching: full forward passes with plain hooks, one pair and one node at a time, in float64."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest
import torch

from mathinterp.engine.hooks import edited_input, edited_output
from mathinterp.engine.pairs import CleanPairs, Ends, Pairs, ends_of
from mathinterp.engine.paths.frozen import Measures, PathEngine
from mathinterp.engine.paths.nodes import Node
from mathinterp.engine.paths.patching import EndPatching
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from tests.tiny import TINY_FAMILIES, VOCABULARY, tiny_model

EXACT = {"rtol": 1e-10, "atol": 1e-11}


def nodes_of(layer: int) -> list[Node]:
    return [Head(layer, 3), Head(layer, 0), Mlp(layer)]


def random_pairs(count: int = 4, seed: int = 0) -> Pairs:
    """Pairs of 5 to 9 tokens that differ in one token before END; END itself is the same."""
    rng = np.random.default_rng(seed)
    original, counterfactual = [], []
    for _ in range(count):
        ids = [1, *(int(i) for i in rng.integers(4, VOCABULARY, size=int(rng.integers(4, 9))))]
        other = list(ids)
        other[-3] = 4 + (ids[-3] - 3) % (VOCABULARY - 4)  # within the windows that reach END
        original.append(tuple(ids))
        counterfactual.append(tuple(other))
    return Pairs(tuple(original), tuple(counterfactual), rng.integers(4, VOCABULARY, size=count))


PAIRS = random_pairs()


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    if request.param == "gemma2":  # its eager attention sums the softmax in float32
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    return anatomy_of(request.param)


@cache
def anatomy_of(family: str) -> Anatomy:
    """No test here changes weights."""
    return Anatomy(tiny_model(family))


def make_engine(
    anatomy: Anatomy, pairs: Pairs, freeze: str, own: Ends | None = None, other: Ends | None = None
) -> PathEngine | EndPatching:
    """The engine of ``freeze``, in batches that are smaller than the rows there are."""
    own, other = own or ends_of(anatomy, pairs.original), other or ends_of(anatomy, pairs.counterfactual)
    return (EndPatching if freeze == "none" else PathEngine)(anatomy, CleanPairs(pairs, own, other), max_rows=8)


# ---- the twin ----

Sites = dict[tuple[str, int], torch.Tensor]  # ("head" or "mlp", layer) -> activation T Z of one sentence


def forward(anatomy: Anatomy, ids: tuple[int, ...], edits: dict[tuple[str, int], Callable]) -> torch.Tensor:
    """Logits V at END; ``edits`` change o_proj's input ("head") or the MLP's output ("mlp") of a layer."""
    with ExitStack() as hooks, torch.no_grad():
        for (site, layer), edit in edits.items():
            if site == "head":
                hooks.enter_context(edited_input(anatomy.output_projection(layer), edit))
            else:
                hooks.enter_context(edited_output(anatomy.mlp(layer), edit))
        return anatomy.model(torch.tensor([ids])).logits[0, -1]


@cache
def activations(anatomy: Anatomy, ids: tuple[int, ...]) -> Sites:
    kept: Sites = {}

    def keeper(site: tuple[str, int]) -> Callable:
        def keep(value: torch.Tensor) -> torch.Tensor:
            kept[site] = value[0].clone()
            return value

        return keep

    sites = [(site, layer) for site in ("head", "mlp") for layer in range(anatomy.shape.n_layers)]
    forward(anatomy, ids, {site: keeper(site) for site in sites})
    return kept


def patched_logits(anatomy: Anatomy, pair: int, node: Node, freeze: str, everywhere: bool = False) -> torch.Tensor:
    """Logits at END with ``node`` as on X_c, at END or at every token; the frozen rest as on X_r."""
    own, other = activations(anatomy, PAIRS.original[pair]), activations(anatomy, PAIRS.counterfactual[pair])
    tokens = slice(None) if everywhere else slice(-1, None)

    def put(site: tuple[str, int], columns: slice, hold: bool) -> Callable:
        def edit(value: torch.Tensor) -> torch.Tensor:
            value = own[site][None].clone() if hold else value.clone()
            if site == where:
                value[0, tokens, columns] = other[site][tokens, columns]
            return value

        return edit

    where = ("head" if isinstance(node, Head) else "mlp", node.layer)
    columns = anatomy.head_slice(node.head) if isinstance(node, Head) else slice(None)
    held = {"none": [], "heads": ["head"], "all": ["head", "mlp"]}[freeze]
    sites = {(site, n) for site in held for n in range(anatomy.shape.n_layers)} | {where}
    return forward(anatomy, PAIRS.original[pair], {s: put(s, columns, s[0] in held) for s in sites})


def expected(logits: Iterator[torch.Tensor]) -> np.ndarray:
    """Logit, log-probability and centred logit of the gold token: 3 P."""
    rows = [
        (float(v[gold]), float(v.log_softmax(0)[gold]), float(v[gold] - v.mean()))
        for v, gold in zip(logits, PAIRS.gold_P, strict=True)
    ]
    return np.array(rows).T


def three(measures: Measures, node: int | None = None) -> np.ndarray:
    columns = (measures.logit, measures.logprob, measures.centred)
    return np.stack([(c if node is None else c[node]).numpy() for c in columns])
