"""Path patching from a sender to a receiver against two hooked passes, in float64 on every family."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mathinterp.engine.hooks import edited_output
from mathinterp.engine.pairs import CleanPairs, ends_of
from mathinterp.engine.paths.nodes import Node, Receiver
from mathinterp.engine.paths.receivers import ReceiverEngine, receiving_features
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from tests.path_twin import EXACT, PAIRS, activations, expected, forward, three


def receiver_logits(anatomy: Anatomy, pair: int, node: Node, freeze: str, receiver: Receiver) -> torch.Tensor:
    """Algorithm 1 in two hooked passes: what the receiver gives with the sender patched, then that alone put in."""
    own, other = activations(anatomy, PAIRS.original[pair]), activations(anatomy, PAIRS.counterfactual[pair])
    held = ["head"] if freeze == "heads" else ["head", "mlp"]
    sites = [(site, n) for site in held for n in range(anatomy.shape.n_layers)]
    sender = ("head" if isinstance(node, Head) else "mlp", node.layer)
    target = ("mlp" if receiver.head is None else "head", receiver.layer)
    columns = anatomy.head_slice(node.head) if isinstance(node, Head) else slice(None)
    heard: list[torch.Tensor] = []
    if receiver.head is None:
        module, features = anatomy.mlp(receiver.layer), slice(None)
    else:
        module, features = receiving_features(anatomy, receiver)

    def listen(value: torch.Tensor) -> torch.Tensor:
        heard.append(value[0, -1, features].clone())
        return value

    def first_pass(site: tuple[str, int]) -> Callable:
        def edit(value: torch.Tensor) -> torch.Tensor:
            value = own[site][None].clone() if site in sites else value.clone()
            if site == sender:
                value[0, -1, columns] = other[site][-1, columns]
            return value

        return edit

    with edited_output(module, listen):  # sees the module's own output, before an edit holds it
        forward(anatomy, PAIRS.original[pair], {site: first_pass(site) for site in {*sites, sender}})

    def second_pass(site: tuple[str, int]) -> Callable:
        def edit(value: torch.Tensor) -> torch.Tensor:
            new = own[site][None].clone() if site in sites else value.clone()
            if site == target:
                new[0, -1, part] = heard[0] if receiver.head is None else value[0, -1, part]
            return new

        return edit

    part = slice(None) if receiver.head is None else anatomy.head_slice(receiver.head)

    def put(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[0, -1, features] = heard[0]
        return value

    with ExitStack() as hooks:
        if receiver.head is not None:
            hooks.enter_context(edited_output(module, put))
        return forward(anatomy, PAIRS.original[pair], {site: second_pass(site) for site in {*sites, target}})


@pytest.mark.parametrize(
    ("freeze", "receiver"),
    [("heads", "2.1.q"), ("all", "2.2.k"), ("heads", "1.3.v"), ("heads", "1.mlp"), ("all", "1.mlp")],
)
def test_sender_to_receiver_equals_two_hooked_passes(anatomy: Anatomy, freeze: str, receiver: str) -> None:
    asked = Receiver.parse(receiver)
    own, other = ends_of(anatomy, PAIRS.original), ends_of(anatomy, PAIRS.counterfactual)
    engine = ReceiverEngine(anatomy, CleanPairs(PAIRS, own, other), asked, max_rows=8)
    for layer in range(asked.layer + 1):
        both: list[Node] = [Head(layer, 3), Mlp(layer)]
        nodes = [node for node in both if asked.hears(node, anatomy.shape.parallel)]
        if not nodes:
            continue
        found = engine.patched(nodes, freeze)
        for row, node in enumerate(nodes):
            slow = expected(receiver_logits(anatomy, p, node, freeze, asked) for p in range(len(PAIRS)))
            np.testing.assert_allclose(three(found, row), slow, **EXACT)
            if isinstance(node, Head):
                assert np.abs(slow - three(engine.baseline)).max() > 1e-7, "a patch did nothing"
