"""Path patching and attribution against full forward passes with plain hooks, in float64 on every family."""

from dataclasses import astuple

import numpy as np
import pytest
import torch

from mathinterp.engine.pairs import Ends, Pairs, ends_of
from mathinterp.engine.paths.attribution import direct_shares, first_order
from mathinterp.engine.paths.patching import EverywherePatching
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from tests.path_twin import EXACT, PAIRS, expected, forward, make_engine, nodes_of, patched_logits, three

# ---- identities ----


@pytest.mark.parametrize("freeze", ["heads", "all", "none"])
def test_end_rows_equal_hooked_full_forwards(anatomy: Anatomy, freeze: str) -> None:
    engine = make_engine(anatomy, PAIRS, freeze)
    clean = expected(forward(anatomy, ids, {}) for ids in PAIRS.original)
    np.testing.assert_allclose(three(engine.baseline), clean, **EXACT)
    for layer in range(anatomy.shape.n_layers):
        found = engine.patched(nodes_of(layer), freeze)
        for row, node in enumerate(nodes_of(layer)):
            slow = expected(patched_logits(anatomy, p, node, freeze) for p in range(len(PAIRS)))
            np.testing.assert_allclose(three(found, row), slow, **EXACT)
            if not (anatomy.shape.parallel and node == Mlp(0)):  # END's token is the same: so is its MLP
                assert np.abs(slow - clean).max() > 1e-6, "a patch did nothing"


def test_a_counterfactual_that_is_the_original_changes_nothing(anatomy: Anatomy) -> None:
    same = Pairs(PAIRS.original, PAIRS.original, PAIRS.gold_P)
    for freeze in ("heads", "all", "none"):
        engine = make_engine(anatomy, same, freeze)
        found = engine.patched(nodes_of(1), freeze)
        for row in range(len(nodes_of(1))):
            np.testing.assert_allclose(three(found, row), three(engine.baseline), rtol=1e-12, atol=1e-13)
        assert engine.noise_floor() < 1e-12
        assert engine.deviation() < 1e-10


def test_patching_at_every_token_equals_hooked_full_forwards(anatomy: Anatomy) -> None:
    engine = EverywherePatching(anatomy, PAIRS, ends_of(anatomy, PAIRS.original), max_tokens=20)
    for layer in (0, 1):
        nodes = nodes_of(layer)[1:]
        found = engine.patched(nodes)
        for row, node in enumerate(nodes):
            slow = expected(patched_logits(anatomy, p, node, "none", everywhere=True) for p in range(len(PAIRS)))
            np.testing.assert_allclose(three(found, row), slow, **EXACT)


# ---- attribution ----


@pytest.mark.parametrize("freeze", ["heads", "all", "none"])
def test_first_order_is_the_slope_of_the_patched_logit(anatomy: Anatomy, freeze: str) -> None:
    """Patching with X_r + t (X_c - X_r) moves the logit by t times the attribution, for small t."""
    own, other = ends_of(anatomy, PAIRS.original), ends_of(anatomy, PAIRS.counterfactual)
    engine = make_engine(anatomy, PAIRS, freeze)
    found = first_order(engine, freeze)
    exact_norm = isinstance(anatomy.final_norm, torch.nn.LayerNorm)  # an RMSNorm sums in float32
    step, tolerance = (1e-5, 1e-6) if exact_norm else (1e-3, 2e-3)
    for layer in range(anatomy.shape.n_layers):
        moved = []
        for t in (step, -step):
            between = Ends(*(a + t * (b - a) for a, b in zip(astuple(own), astuple(other), strict=True)))
            moved.append(make_engine(anatomy, PAIRS, freeze, own, between).patched(nodes_of(layer), freeze).logit)
        slope_NP = (moved[0] - moved[1]) / (2 * step)
        for row, node in enumerate(nodes_of(layer)):
            expected_P = found.heads_LHP[node] if isinstance(node, Head) else found.mlps_LP[layer]
            torch.testing.assert_close(slope_NP[row], expected_P, rtol=tolerance, atol=tolerance)
    assert found.heads_LHP.abs().max() > 1e-3


def test_direct_shares_sum_to_the_logit(anatomy: Anatomy) -> None:
    ends = ends_of(anatomy, PAIRS.original)
    shares, rest_P = direct_shares(anatomy, ends, torch.from_numpy(PAIRS.gold_P))
    logits = torch.stack(
        [forward(anatomy, ids, {})[gold] for ids, gold in zip(PAIRS.original, PAIRS.gold_P, strict=True)]
    )
    cap = anatomy.shape.logit_softcap
    uncapped = logits if cap is None else torch.atanh(logits / cap) * cap
    torch.testing.assert_close(
        shares.heads_LHP.sum((0, 1)) + shares.mlps_LP.sum(0) + rest_P, uncapped, rtol=1e-5, atol=1e-5
    )
