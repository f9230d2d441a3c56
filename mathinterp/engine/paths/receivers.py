"""Path patching from a sender to one chosen receiver (method.md section 3): which earlier nodes feed a given node.

Two passes over END rows. First the sender takes its X_c output and the change goes on to the receiver's input; what is
frozen between them is as in frozen.py ("heads": MLPs between them run; "all": nothing does). Then the receiver
alone takes the output that this input gives it, everything else reads X_r again, and the change goes on to the logits
under the same ``freeze``. A receiver is a head's query, key or value at END, or an MLP. As only END is patched, a key
or value differs where END attends to itself alone.
"""

from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import nn

from mathinterp.engine.hooks import caught_input, caught_output, edited_output
from mathinterp.engine.in_flight import turns
from mathinterp.engine.pairs import CleanPairs, Ends
from mathinterp.engine.paths.frozen import FinalRows, PathEngine
from mathinterp.engine.paths.nodes import Node, Receiver
from mathinterp.engine.paths.patching import ByLength, Prefix, RowCache
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head


class ReceiverEngine(ByLength):
    """Senders patched for one receiver; methods as in PathEngine, freeze "heads" or "all"."""

    def __init__(self, anatomy: Anatomy, clean: CleanPairs, receiver: Receiver, *, max_rows: int | None = None):
        receiver.check(anatomy.shape)
        super().__init__(anatomy, clean, partial(OneReceiver, anatomy, receiver=receiver, max_rows=max_rows))


class OneReceiver(PathEngine):
    """END rows of sentences of one length, through the receiver."""

    def __init__(self, anatomy: Anatomy, clean: CleanPairs, receiver: Receiver, *, max_rows: int | None = None):
        super().__init__(anatomy, clean, max_rows=max_rows, compiled=False)
        self.receiver = receiver
        if receiver.head is not None:
            self.prefix = Prefix(anatomy, clean.pairs.original)
            self.read_module, self.read_features = receiving_features(anatomy, receiver)

    @torch.no_grad()
    def noise_floor(self) -> float:
        """Largest difference that patching X_r's own head 0 of layer 0 makes."""
        return self._patched([Head(0, 0)], "heads", self.original)[0].difference(self.baseline)

    def _carried_rows(self, nodes: Sequence[Node], source: Ends) -> Generator[FinalRows]:
        at = self.receiver.layer
        for input_RD, attention_RD, pair_R, kept in self._heard(nodes, source, mlps_run=True):
            residual_RD = self.residual_LPD[at, pair_R]
            output = self._output(input_RD, attention_RD, pair_R)
            if self.receiver.head is None:
                after = self.layer(at, residual_RD, self.original.attention_LPD[at, pair_R], output)
            else:
                after = self.layer(at, residual_RD, output)
            yield self.carry(at + 1, after, pair_R), pair_R, kept

    def _direct_rows(self, nodes: Sequence[Node], source: Ends) -> Generator[FinalRows]:
        anatomy, at = self.anatomy, self.receiver.layer
        is_mlp = self.receiver.head is None
        norm = (anatomy.mlp_post_norm(at) if is_mlp else anatomy.attention_post_norm(at)) or nn.Identity()
        clean_PD = (self.original.mlp_LPD if is_mlp else self.original.attention_LPD)[at]
        for input_RD, attention_RD, pair_R, kept in self._heard(nodes, source, mlps_run=False):
            output = self._output(input_RD, attention_RD, pair_R)
            change = norm(output) - norm(clean_PD[pair_R])
            yield self.residual_LPD[-1, pair_R] + change, pair_R, kept

    def _heard(
        self, nodes: Sequence[Node], source: Ends, mlps_run: bool
    ) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
        """First pass: input of the receiver's layer, its attention output, pairs, and how many rows count."""
        at, layer = self.receiver.layer, nodes[0].layer
        for node in nodes:
            assert self.receiver.hears(node, self.anatomy.shape.parallel), f"{node} is no sender"
        if layer < at and mlps_run:
            for hidden, pair_R, kept in self.entering(nodes, source):
                between = self.carry(layer + 1, hidden, pair_R, stop=at)
                yield between, self.original.attention_LPD[at, pair_R], pair_R, kept
            return
        changes = self.direct_changes if layer < at else self.attention_changes
        change = changes(nodes, source).flatten(0, 1)
        for row_R, kept in turns(self.anatomy.cards, self._batches(len(nodes))):
            pair_R = row_R % len(self.pairs)
            residual, attention = self.residual_LPD[at, pair_R], self.original.attention_LPD[at, pair_R]
            if layer < at:
                yield residual + change[row_R], attention, pair_R, kept
            else:  # a head of the receiving MLP's own layer
                yield residual, attention + change[row_R], pair_R, kept

    def _output(self, input_RD: torch.Tensor, attention_RD: torch.Tensor, pair_R: torch.Tensor) -> torch.Tensor:
        """What the receiver's block gives with the receiver's input changed alone: MLP or attention output, R D."""
        at = self.receiver.layer
        if self.receiver.head is None:
            with caught_output(self.anatomy.mlp(at)) as caught:
                self.layer(at, input_RD, attention_RD)
            return caught[0][:, 0]
        columns = self.anatomy.head_slice(self.receiver.head)
        change = self._head_output(input_RD, pair_R) - self.original.heads_LPZ[at, pair_R][:, columns]
        return attention_RD + change @ self.anatomy.output_weight(at)[columns]

    def _head_output(self, input_RD: torch.Tensor, pair_R: torch.Tensor) -> torch.Tensor:
        """The receiving head's slice of o_proj's input, its q, k or v at END read from ``input_RD``: R d_head."""
        assert self.receiver.head is not None
        anatomy, at = self.anatomy, self.receiver.layer
        norm = anatomy.attention_norm(at)
        module, features = self.read_module, self.read_features
        changed_R1F = module(norm(input_RD[:, None]))[..., features]

        def put(clean: torch.Tensor) -> torch.Tensor:
            clean = clean.clone()
            clean[..., features] = changed_R1F
            return clean

        call = self.prefix.call(self.prefix.attention_calls[at], RowCache(self.prefix.read, pair_R), {})
        with edited_output(module, put), caught_input(anatomy.output_projection(at)) as caught:
            call(anatomy.attention(at), norm(self.residual_LPD[at, pair_R][:, None]))
        return caught[0][:, 0, anatomy.head_slice(self.receiver.head)]


def receiving_features(anatomy: Anatomy, receiver: Receiver) -> tuple[nn.Module, torch.Tensor]:
    """The module that computes the receiver's q, k or v, and which of its output features they are.

    Grouped queries share keys and values: the features are the group's, but only the receiving head's output is taken.
    """
    assert receiver.head is not None
    shape = anatomy.shape
    projection = {"q": anatomy.query, "k": anatomy.key, "v": anatomy.value}[receiver.part](receiver.layer)
    group = receiver.head if receiver.part == "q" else receiver.head // (shape.n_heads // shape.n_groups)
    features = projection.places.to(anatomy.device)
    return projection.module, features[group * shape.d_head : (group + 1) * shape.d_head]
