"""Head sets: heads of several layers edited in one pass, for knock-out curves and iterative masking.

The engines of replay.py and plain.py edit one layer at a time. Here every edited layer's o_proj has a counted hook.
``PackedHeadSets`` runs many sets in one batch on the packed trees, from the lowest layer in which one of them differs
from what is cached; ``PlainHeadSets`` is its slow, obvious twin on padded batches.

Shape legend: P pack, N tree node, R row (set x pack), M answer slot, A answer token, E set, D model width, Z o_proj
input width.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

import numpy as np
import torch

from mathinterp.engine.batching import in_batches
from mathinterp.engine.choose import Engine
from mathinterp.engine.edits import Edit, PlacedReplacement, Replacement
from mathinterp.engine.hooks import Edit as HookEdit
from mathinterp.engine.hooks import caught_input, edited_input
from mathinterp.engine.layers import RecordedCalls
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.parts import gather_rows
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import ScoreBoard, Scores, answer_logits, check_finite, score
from mathinterp.engine.tree.packing import Group
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head

HeadSet = frozenset[Head]
NO_HEADS: HeadSet = frozenset()


class HeadSets(Protocol):
    """Scores answer tokens under sets of heads."""

    def run_sets(
        self, sets: Sequence[HeadSet], replacements: Mapping[int, Replacement], base: HeadSet = NO_HEADS
    ) -> Scores:
        """Scores under each set by itself: E x A; the empty set gives the unedited model's.

        Args:
            sets: heads edited together, of any layers.
            replacements: layer -> what its edited heads become; for every layer of every set.
            base: heads that are in all of the sets. A packed engine runs them once, and then each set only from its
                lowest layer with a head outside ``base``.
        Raises:
            FloatingPointError: a set gave NaN or infinity (names the heads and the prompt).
        """


def head_sets(engine: Engine) -> HeadSets:
    """The runner of head sets on the prompts of ``engine``: packed where the engine is, else plain."""
    if isinstance(engine, PackedEngine):
        return PackedHeadSets(engine)
    assert isinstance(engine, PlainEngine)
    return PlainHeadSets(engine.anatomy, engine.prompts, batch_size=engine.batch_size)


def by_layer(heads: HeadSet) -> dict[int, list[int]]:
    """Layer -> its heads of a set, both ascending."""
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        layers.setdefault(layer, []).append(head)
    return layers


class PlainHeadSets(PlainEngine):
    """One set a pass over all prompts, in padded batches."""

    @torch.inference_mode()
    def run_sets(
        self, sets: Sequence[HeadSet], replacements: Mapping[int, Replacement], base: HeadSet = NO_HEADS
    ) -> Scores:
        """See ``HeadSets.run_sets``; ``base`` saves nothing here."""
        check_sets(sets, replacements, base)
        board = ScoreBoard(len(sets), len(self.answers), self.anatomy)
        placed = {layer: self.place(replacement) for layer, replacement in replacements.items()}
        for row, heads in enumerate(sets):
            for batch in self.batches:
                with ExitStack() as hooks:
                    for layer, members in by_layer(heads).items():
                        edit = Edit.heads_of(layer, members)
                        hooks.enter_context(self._hooked(layer, edit, placed[layer], batch))
                    hidden = self._forward(batch)
                self._score_batch(board, row, batch, hidden)
        scores = board.scores(self.answers.gold_A)
        check_finite(scores, labels_of(sets), self.answers, self.prompts)
        return scores


class PackedHeadSets:
    """Many sets a batch, on the packs, recorded calls and cached layer inputs of a PackedEngine (which stays as it is).

    The last layer runs at every node, unlike the engine's own passes, so that hooks see its o_proj as they see others.
    """

    def __init__(self, engine: PackedEngine):
        self.engine, self.anatomy = engine, engine.anatomy
        self.max_tokens = engine.max_tokens
        self._base = NO_HEADS
        self._inputs_LPND = engine.residual_LPND  # every layer's input with the heads of _base edited

    @torch.inference_mode()
    def run_sets(
        self, sets: Sequence[HeadSet], replacements: Mapping[int, Replacement], base: HeadSet = NO_HEADS
    ) -> Scores:
        """See ``HeadSets.run_sets``."""
        check_sets(sets, replacements, base)
        engine = self.engine
        placed = {layer: engine.place(replacement) for layer, replacement in replacements.items()}
        self._cache_inputs(base, placed)
        order = sorted(range(len(sets)), key=lambda row: self._start([sets[row]]))  # sets of one start run together
        board = ScoreBoard(len(sets), len(engine.answers), self.anatomy)
        for group, calls in zip(engine.groups, engine.calls, strict=True):
            self._run_group(board, [sets[row] for row in order], placed, group, calls)
        scores = board.scores(engine.answers.gold_A)
        back = np.argsort(order)
        scores = Scores(
            scores.correct_EA[back], scores.logprob_EA[back], scores.logit_EA[back], scores.predicted_EA[back]
        )
        try:
            check_finite(scores, labels_of(sets), engine.answers, engine.prompts)
        except FloatingPointError:  # NaN spreads over a pack: plain passes name the prompt it came from
            PlainHeadSets(self.anatomy, engine.prompts).run_sets(sets, replacements)
            raise
        return scores

    def _start(self, sets: Sequence[HeadSet]) -> int:
        """The first layer that must run: the lowest in which a set differs from the cached base, at most the last."""
        layers = [layer for heads in sets for layer, _ in heads - self._base]
        return min([*layers, self.anatomy.shape.n_layers - 1])

    def _cache_inputs(self, base: HeadSet, placed: Mapping[int, PlacedReplacement]) -> None:
        """Every layer's input with the heads of ``base`` edited, on one pass over all packs."""
        clean = self.engine.residual_LPND
        self._base, self._inputs_LPND = NO_HEADS, clean
        if not base:
            return
        start, inputs = self._start([base]), clean.clone()
        for group, calls in zip(self.engine.groups, self.engine.calls, strict=True):
            outputs = self._layer_outputs(start, [base], placed, group, calls)
            for layer, hidden_RND in zip(range(start + 1, len(inputs)), outputs, strict=False):
                inputs[layer, group.span] = hidden_RND.to(inputs.device)
        self._base, self._inputs_LPND = base, inputs

    def _run_group(
        self,
        board: ScoreBoard,
        sets: Sequence[HeadSet],
        placed: Mapping[int, PlacedReplacement],
        group: Group,
        calls: RecordedCalls,
    ) -> None:
        def run(start: int, stop: int) -> None:
            self._score(board, start, sets[start:stop], placed, group, calls)

        rows = len(group.packs) * self.engine.forest.pack_size
        at_once = max(1, self.max_tokens // rows)
        if (fitting := in_batches(len(sets), at_once, run)) < at_once:
            self.max_tokens = fitting * rows

    def _score(
        self,
        board: ScoreBoard,
        row: int,
        sets: Sequence[HeadSet],
        placed: Mapping[int, PlacedReplacement],
        group: Group,
        calls: RecordedCalls,
    ) -> None:
        """Scores of some sets into the board's rows from ``row``."""
        for hidden_RND in self._layer_outputs(self._start(sets), sets, placed, group, calls):
            last_RND = hidden_RND
        last_RMD = gather_rows(last_RND, group.slots_PM.repeat(len(sets), 1))
        picked_EAD = last_RMD.unflatten(0, (len(sets), -1))[:, group.answer_packs, group.answer_slots]
        board.fill(row, group.answers, score(self.anatomy, picked_EAD, group.gold))

    def _layer_outputs(
        self,
        start: int,
        sets: Sequence[HeadSet],
        placed: Mapping[int, PlacedReplacement],
        group: Group,
        recorded: RecordedCalls,
    ) -> Iterator[torch.Tensor]:
        """The outputs R N D of layers ``start``.. under each set, set by set."""
        calls = recorded.repeated(len(sets))
        hidden = self._inputs_LPND[start, group.span].to(self.anatomy.device).repeat(len(sets), 1, 1)
        for layer in range(start, self.anatomy.shape.n_layers):
            edited_EZ = edited_columns(self.anatomy, layer, sets)
            with self._hooked(layer, edited_EZ, placed, group) if edited_EZ.any() else nullcontext():
                hidden = calls.layer[layer](self.engine.layers[layer], hidden)
            yield hidden

    def _hooked(
        self, layer: int, edited_EZ: torch.Tensor, placed: Mapping[int, PlacedReplacement], group: Group
    ) -> AbstractContextManager[None]:
        where_E11Z = edited_EZ.to(self.anatomy.device)[:, None, None]

        def edit(inputs_RNZ: torch.Tensor) -> torch.Tensor:
            clean_EPNZ = inputs_RNZ.unflatten(0, (len(where_E11Z), -1))
            return torch.where(where_E11Z, placed[layer].apply(clean_EPNZ, group.span), clean_EPNZ).flatten(0, 1)

        return edited_input(self.anatomy.output_projection(layer), edit)


def edited_columns(anatomy: Anatomy, layer: int, sets: Sequence[HeadSet]) -> torch.Tensor:
    """Boolean E x Z: the columns of o_proj's input that belong to each set's heads of this layer."""
    shape = anatomy.shape
    edited_EH = torch.tensor([[(layer, head) in heads for head in range(shape.n_heads)] for heads in sets])
    return edited_EH.repeat_interleave(shape.d_head, dim=1)


def check_sets(sets: Sequence[HeadSet], replacements: Mapping[int, Replacement], base: HeadSet) -> None:
    """Raise AssertionError for arguments of ``run_sets`` that make no sense."""
    assert sets, "no head sets to run"
    assert all(base <= heads for heads in sets), "base holds a head that is not in every set"
    missing = {layer for heads in sets for layer, _ in heads} - replacements.keys()
    assert not missing, f"no replacement for layers {sorted(missing)}"


def labels_of(sets: Sequence[HeadSet]) -> list[str]:
    """Of sets of heads, for messages: "heads 17.22, 14.19"."""
    return ["heads " + (", ".join(f"{layer}.{head}" for layer, head in sorted(heads)) or "none") for heads in sets]


@torch.inference_mode()
def next_token_probabilities(
    anatomy: Anatomy, token_ids: Sequence[int], heads: HeadSet, values: Mapping[int, torch.Tensor], end_only: bool
) -> torch.Tensor:
    """Probabilities (V) of the token after one sentence, with a set of heads replaced.

    Args:
        values: layer -> Z, what its edited heads become.
        end_only: whether they are edited at the sentence's last token alone, else at every token.
    """
    with ExitStack() as hooks:
        for layer, members in by_layer(heads).items():
            edit = _vector_edit(anatomy, members, values[layer], end_only)
            hooks.enter_context(edited_input(anatomy.output_projection(layer), edit))
        with caught_input(anatomy.final_norm) as caught:
            anatomy.decoder(input_ids=torch.tensor([list(token_ids)], device=anatomy.device), use_cache=False)
    return answer_logits(anatomy, caught[0][0, -1:])[0].softmax(-1)


def _vector_edit(anatomy: Anatomy, heads: Sequence[int], value_Z: torch.Tensor, end_only: bool) -> HookEdit:
    tokens = slice(-1, None) if end_only else slice(None)

    def edit(inputs_BTZ: torch.Tensor) -> torch.Tensor:
        edited = inputs_BTZ.clone()
        for head in heads:
            columns = anatomy.head_slice(head)
            edited[:, tokens, columns] = value_Z[columns].to(edited.dtype)
        return edited

    return edit
