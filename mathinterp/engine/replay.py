"""Interventions on any layers, many a batch, each from the lowest layer in which it differs from what is cached.

``Replay`` is what the tree-packed prompts (``PackedReplay``) and END rows (end_rows.py) have in common: batches, hooks,
cached layer inputs. ``PlainEngine`` is the slow, obvious twin of both.

Shape legend: E intervention, R row of a group (pack or prompt), T place, M answer slot, A answer token, L layer,
D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from mathinterp.engine.batching import in_batches
from mathinterp.engine.in_flight import in_flight
from mathinterp.engine.intervention import CLEAN, Intervention, Tokens, differing_layers, label
from mathinterp.engine.parts import gather_rows
from mathinterp.engine.placement import Placement, hooked
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Answers, ScoreBoard, Scores, check_finite, score
from mathinterp.engine.tree.packing import Group
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.engine.layers import RecordedCalls
    from mathinterp.engine.packed import PackedEngine

Rows = TypeVar("Rows")  # a group of rows that run together


class Replay(ABC, Generic[Rows]):
    """Runs interventions on groups of rows whose layer inputs are cached.

    Args:
        inputs_LRTD: every layer's input in the clean pass, in whatever order ``index`` gives.
        most: most rows times places in one batch; halved for good when memory runs out.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        prompts: Sequence[TokenizedPrompt],
        answers: Answers,
        groups: Sequence[Rows],
        inputs_LRTD: torch.Tensor,
        most: int,
    ):
        self.anatomy, self.prompts, self.answers, self.groups = anatomy, prompts, answers, groups
        self.most = most
        self._clean_LRTD = self._inputs_LRTD = inputs_LRTD
        self._base = CLEAN  # whose layer inputs are cached

    @torch.inference_mode()
    def run(self, interventions: Sequence[Intervention], base: Intervention = CLEAN) -> Scores:
        """See ``choose.Runner.run``."""
        assert interventions, "no interventions to run"
        placement = self._placement()
        self._cache_inputs(base, placement)
        starts = [self._start(changes) for changes in interventions]
        order = sorted(range(len(starts)), key=starts.__getitem__)  # those of one start run together
        board = ScoreBoard(len(interventions), len(self.answers), self.anatomy)
        ordered = [interventions[row] for row in order]
        placement.lay_out(ordered)
        batches = sum(-(-len(ordered) // self._at_once(group)) for group in self.groups)
        with in_flight(self.anatomy.cards, batches) as turn:
            for group in self.groups:
                self._run_group(board, ordered, placement, group, turn)
        scores = board.scores(self.answers.gold_A).of(np.argsort(order))
        try:
            check_finite(scores, [label(changes) for changes in interventions], self.answers, self.prompts)
        except FloatingPointError:
            self._name_prompt(interventions)
            raise
        return scores

    def _start(self, changes: Intervention) -> int:
        """The first layer that must run: the lowest that differs from the cached base, at most the last."""
        return min([*differing_layers(changes, self._base), self.anatomy.shape.n_layers - 1])

    def _cache_inputs(self, base: Intervention, placement: Placement) -> None:
        """Every layer's input under ``base``, in one pass over all rows; the clean ones stay."""
        self._base, self._inputs_LRTD = CLEAN, self._clean_LRTD
        if not base:
            return
        start, inputs = self._start(base), self._clean_LRTD.clone()
        for group in self.groups:
            self._fill(inputs, start, base, placement, group)
        self._base, self._inputs_LRTD = base, inputs

    def _fill(self, inputs: torch.Tensor, start: int, base: Intervention, placement: Placement, group: Rows) -> None:
        """Inputs of the layers after ``start`` under ``base``."""
        outputs = self._outputs(start, [base], placement, group)
        for layer, hidden in zip(range(start + 1, len(inputs)), outputs, strict=False):
            inputs[layer, self._index(group)] = hidden.to(inputs.device)

    def _run_group(
        self,
        board: ScoreBoard,
        interventions: Sequence[Intervention],
        placement: Placement,
        group: Rows,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        def run(start: int, stop: int) -> None:
            batch = interventions[start:stop]
            with turn():
                for hidden in self._outputs(min(map(self._start, batch)), batch, placement, group):
                    last = hidden
                answers, gold, picked_EAD = self._picked(last, len(batch), group)
                board.fill(start, answers, score(self.anatomy, picked_EAD, gold))

        at_once = self._at_once(group)
        if (fitting := in_batches(len(interventions), at_once, run, self._prompts_in(group))) < at_once:
            self.most = fitting * self._size(group)

    def _at_once(self, group: Rows) -> int:
        """How many interventions a batch of the group holds."""
        return max(1, self.most // self._size(group))

    def _name_prompt(self, interventions: Sequence[Intervention]) -> None:
        """Raise FloatingPointError with the right prompt, where NaN spreads from one to another."""

    @abstractmethod
    def _placement(self) -> Placement: ...

    @abstractmethod
    def _index(self, group: Rows) -> Any:
        """The group's rows among all."""

    @abstractmethod
    def _size(self, group: Rows) -> int:
        """Rows times places of the group."""

    @abstractmethod
    def _prompts_in(self, group: Rows) -> float:
        """How many prompts the group holds, about."""

    @abstractmethod
    def _outputs(
        self, start: int, interventions: Sequence[Intervention], placement: Placement, group: Rows
    ) -> Iterator[torch.Tensor]:
        """The outputs of layers ``start``.. under each intervention, one copy of the group's rows after another."""

    @abstractmethod
    def _picked(self, last: torch.Tensor, count: int, group: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The group's answer tokens, their gold tokens, and the last layer's output at them: E A D."""


PackedRows = tuple[Group, "RecordedCalls"]


class PackedReplay(Replay[PackedRows]):
    """On the packs, recorded calls and cached layer inputs of a PackedEngine (which stays as it is).

    The last layer runs at every node, unlike the engine's own passes, so that hooks see it as they see others.
    """

    name = "packed"

    def __init__(self, engine: PackedEngine):
        self.engine = engine
        groups = list(zip(engine.groups, engine.calls, strict=True))
        super().__init__(
            engine.anatomy, engine.prompts, engine.answers, groups, engine.residual_LPND, engine.max_tokens
        )

    def baseline(self) -> Scores:
        """The engine's own."""
        return self.engine.baseline()

    def activations(self, site: str, layer: int, tokens: Tokens) -> torch.Tensor:
        """The engine's own."""
        return self.engine.activations(site, layer, tokens)

    def _placement(self) -> Placement:
        return self.engine.placement()

    def _index(self, group: PackedRows) -> slice:
        return group[0].span

    def _size(self, group: PackedRows) -> int:
        return len(group[0].packs) * self.engine.forest.pack_size

    def _prompts_in(self, group: PackedRows) -> float:
        return self.engine.share(group[0])

    def _outputs(
        self,
        start: int,
        interventions: Sequence[Intervention],
        placement: Placement,
        group: PackedRows,
    ) -> Iterator[torch.Tensor]:
        packs, recorded = group
        calls = recorded.repeated(len(interventions))
        hidden = self._inputs_LRTD[start, packs.span].to(self.anatomy.device).repeat(len(interventions), 1, 1)
        for layer in range(start, self.anatomy.shape.n_layers):
            with hooked(placement, interventions, packs.span, [layer]):
                hidden = calls.layer[layer](self.engine.layers.modules[layer], hidden)
            yield hidden

    def _picked(
        self, last: torch.Tensor, count: int, group: PackedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packs, _ = group
        last_RMD = gather_rows(last, packs.slots_PM.repeat(count, 1))
        picked_EAD = last_RMD.unflatten(0, (count, -1))[:, packs.answer_packs, packs.answer_slots]
        return packs.answers, packs.gold, picked_EAD

    def _name_prompt(self, interventions: Sequence[Intervention]) -> None:
        PlainEngine(self.anatomy, self.prompts).run(interventions)
