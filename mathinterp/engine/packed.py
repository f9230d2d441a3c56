"""The fast engine: tree-packed prompts, layers l.. replayed from cached residuals, many edits in one batch.

Ablating something in layer l changes nothing before layer l, so only layers l..L-1 run, from the cached
input of layer l; in layer l itself attention is known up to the edited heads; in the last layer only answer
positions go on. Equal to full forward passes with hooks (plain.py) up to rounding; tested in float64.

Shape legend: P pack, N tree node, R row (edit x pack), M answer slot, A answer token, E edit, D model width, Z o_proj
input width.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
import torch

from mathinterp.engine import compiling
from mathinterp.engine.batching import in_batches
from mathinterp.engine.cells import Cells
from mathinterp.engine.clean_pass import clean_pass
from mathinterp.engine.head_changes import heads_changed
from mathinterp.engine.hooks import caught_input, caught_site
from mathinterp.engine.in_flight import in_flight
from mathinterp.engine.intervention import (
    CLEAN,
    Change,
    Intervention,
    Tokens,
    Value,
    first_middle_last,
    intervention,
    label,
    no_op,
    site_of,
)
from mathinterp.engine.layer_runner import Layers
from mathinterp.engine.layers import RecordedCalls
from mathinterp.engine.parts import gather_rows
from mathinterp.engine.placement import Placement
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.replay import PackedReplay
from mathinterp.engine.scores import (
    Answers,
    ScoreBoard,
    Scores,
    answers_of,
    check_finite,
    score,
    score_logits,
    worst_noise,
)
from mathinterp.engine.tree.attention import serves
from mathinterp.engine.tree.packing import CPU_TOKENS, GPU_TOKENS, BatchShape, Group, lay_out
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from mathinterp.prompts.prompt import TokenizedPrompt


class PackedEngine:
    """Scores answer tokens under interventions, on tree-packed prompts.

    Args:
        anatomy: the model; its weights decide device and dtype.
        prompts: tokenized prompts.
        private_from: see ``tree.plant``.
        edits_per_batch: how many edits a scan asks for at once; sets how many packs, and how many of these edits, run
            together.
        max_tokens: most token rows in one batch; halved for good when memory runs out.
        pack_size: nodes a pack aimed at; None = the size of least work.
        compiled: compile layers and scoring (worth it on CUDA for long runs).
        tree_attention: attention without dense masks (tree_attention.py); None = where its kernel serves, if compiled.
        shape: of all batches, also of too few edits: engines of other prompts that have it need no new compilation.
    """

    name = "packed"

    def __init__(
        self,
        anatomy: Anatomy,
        prompts: Sequence[TokenizedPrompt],
        *,
        private_from: Sequence[int] | None = None,
        edits_per_batch: int = 16,
        max_tokens: int | None = None,
        pack_size: int | None = None,
        compiled: bool = False,
        tree_attention: bool | None = None,
        shape: BatchShape | None = None,
    ):
        self.anatomy, self.prompts = anatomy, prompts
        compiled = compiled and not anatomy.quantised
        self.device, self.dtype = anatomy.device, anatomy.dtype
        self.answers: Answers = answers_of(prompts)
        # on several cards as on one: the shape of a batch decides last bits, and the number of cards changes no row
        self.max_tokens = max_tokens or (GPU_TOKENS if self.device.type == "cuda" else CPU_TOKENS)
        fed = [prompt.fed for prompt in prompts]
        self.tree_attention = compiled and serves(anatomy, fed) if tree_attention is None else tree_attention
        layout = lay_out(
            anatomy,
            fed,
            self.answers,
            private_from=private_from,
            edits=edits_per_batch,
            max_tokens=self.max_tokens,
            pack_size=pack_size,
            dense_masks=not self.tree_attention,
            shape=shape,
        )
        self._whole_batches = shape is not None
        self.forest, self.groups, self.edits_per_batch = layout.forest, layout.groups, layout.edits_per_batch
        self.layers = Layers(anatomy, tree_attention=self.tree_attention, compiled=compiled)
        self._score_logits = score_logits
        if compiled:  # groups differ in their answers
            self._score_logits = compiling.compiled(score_logits, dynamic=True, backend=compiling.COMPILER)
        self._baseline: Scores | None = None
        together = self.edits_per_batch if self._shape_matters else None
        clean = clean_pass(self.layers, self.forest, self.groups, together, tree_attention=self.tree_attention)
        self.residual_LPND, self.calls = clean

    @property
    def _shape_matters(self) -> bool:
        """Whether the shape of a batch changes more than the very last bits of a result."""
        return self.anatomy.quantised or self.dtype not in (torch.float32, torch.float64)

    def _copies(self, needed: int) -> int:
        """Rows to fill a batch with: all of them where the batch shape matters, else those needed."""
        return self.edits_per_batch if self._shape_matters else needed

    def _residual(self, layer: int, group: Group) -> torch.Tensor:
        """Input of ``layer`` (P N D) for the packs of ``group``, on the model's device."""
        return self.residual_LPND[layer, group.span].to(self.device)

    # ---- what other passes want to know about the clean one ----

    @torch.inference_mode()
    def activations(self, site: str, layer: int, tokens: Tokens) -> torch.Tensor:
        """Clean activations of the n tokens at a site: n Z."""
        values_PNZ = torch.cat(
            [self._clean_site(site, layer, g, calls) for g, calls in zip(self.groups, self.calls, strict=True)]
        )
        return values_PNZ.flatten(0, 1)[torch.from_numpy(self._nodes(tokens)).to(self.device)]

    def _nodes(self, tokens: Tokens) -> np.ndarray:
        """Flat node index of each token."""
        places = zip(tokens.prompt_n, tokens.token_n, strict=True)
        return np.array([self.forest.node_of[p][t] for p, t in places], np.int64)

    def _clean_site(self, site: str, layer: int, group: Group, calls: RecordedCalls) -> torch.Tensor:
        anatomy = self.anatomy
        if layer == anatomy.shape.n_layers:  # what the final norm reads
            assert site == "residual"
            return self.layers.whole(layer - 1, self._residual(layer - 1, group), calls)
        hidden = self._residual(layer, group)
        if site == "residual":
            return hidden
        if site == "head":
            with caught_input(anatomy.output_projection(layer)) as caught:
                calls.attention[layer](self.layers.attention(layer), anatomy.attention_norm(layer)(hidden))
        else:
            with caught_site(anatomy, site, layer) as caught:
                calls.layer[layer](self.layers.modules[layer], hidden)
        assert len(caught) == 1, f"the {site} hook of layer {layer} fired {len(caught)} times, not once"
        return caught[0]

    def baseline(self) -> Scores:
        """Scores (1 x A) of the unedited model: a no-op edit of the last layer, in the batch shape of real edits."""
        if self._baseline is None:
            self._baseline = self._no_op(self.anatomy.shape.n_layers - 1)
        return self._baseline

    def _no_op(self, layer: int, groups: Sequence[int] | None = None) -> Scores:
        return self._run([*no_op(self.anatomy, layer)] * self._copies(1), groups).first()

    # ---- interventions ----

    def run(self, interventions: Sequence[Intervention], base: Intervention = CLEAN) -> Scores:
        """See ``choose.Runner.run``: heads or the MLP of one layer take the fast way, others that of replay.py."""
        changes = [changes[0] for changes in interventions if len(changes) == 1]
        if base or len(changes) < len(interventions) or not _at_one_place(changes):
            return self.replay.run(interventions, base)
        result = self._run(changes)
        try:
            check_finite(result, [label(changes) for changes in interventions], self.answers, self.prompts)
        except FloatingPointError:  # NaN spreads over a pack: full passes name the prompt it came from
            PlainEngine(self.anatomy, self.prompts).run(interventions)
            raise
        return result

    @cached_property
    def replay(self) -> PackedReplay:
        """The same prompts under interventions on any layers."""
        return PackedReplay(self)

    def compile_for(self, units: Sequence[Head | Mlp]) -> None:
        """Run units of one layer on the first group of packs: on a GPU that compiles all that ``run`` would."""
        (site,) = {site_of(unit) for unit in units}
        zero = Value.zero(self.anatomy, site, units[0].layer)
        self._run([intervention([unit], zero)[0] for unit in units], [0])

    def placement(self) -> Placement:
        """Packs x nodes."""
        return Placement(self.anatomy, self.forest.n_packs, self.forest.pack_size, self._nodes)

    def _run(self, changes: Sequence[Change], groups: Sequence[int] | None = None) -> Scores:
        """Scores under each change by itself, all at one place and with one value: E x A; of some groups, or of all."""
        board = ScoreBoard(len(changes), len(self.answers), self.anatomy)
        placement = self.placement()
        placement.lay_out([tuple(changes)])
        numbers = range(len(self.groups)) if groups is None else groups
        with in_flight(self.anatomy.cards, len(numbers) * -(-len(changes) // self.edits_per_batch)) as turn:
            for number in numbers:
                self._run_group(board, changes, placement, self.groups[number], self.calls[number], turn)
        return board.scores(self.answers.gold_A)

    def _run_group(
        self,
        board: ScoreBoard,
        changes: Sequence[Change],
        placement: Placement,
        group: Group,
        calls: RecordedCalls,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        rows = len(group.packs) * self.forest.pack_size
        at_once = whole = max(1, min(self.edits_per_batch, self.max_tokens // rows))

        def run(start: int, stop: int) -> None:
            nonlocal whole
            asked = changes[start:stop]
            if stop < len(changes):
                whole = len(asked)  # fewer where memory ran out
            filled = [*asked, *[asked[-1]] * (whole - len(asked))] if self._whole_batches else asked
            with turn():
                hidden = self._replay(filled, placement, group, calls)
                self._score_group(board, start, len(asked), group, hidden[: len(asked) * len(group.packs)])

        if (fitting := in_batches(len(changes), at_once, run, self.share(group))) < at_once:
            self.max_tokens = fitting * rows

    def share(self, group: Group) -> float:
        """Prompts in a group, about: its part of all packs."""
        return len(self.prompts) * len(group.packs) / self.forest.n_packs

    @torch.inference_mode()
    def _replay(
        self, changes: Sequence[Change], placement: Placement, group: Group, recorded: RecordedCalls
    ) -> torch.Tensor:
        """The layers from the changed one on: (E * P) M D at the group's answer slots, change by change."""
        layer, last = changes[0].layer, self.anatomy.shape.n_layers - 1
        calls = recorded.repeated(len(changes))
        at_answers = group.slots_PM if layer == last else None
        hidden = self._residual(layer, group)
        if at_answers is not None:
            hidden = gather_rows(hidden, at_answers)
        hidden = hidden.repeat(len(changes), 1, 1)
        if changes[0].site == "mlp":
            known = self._edited_mlp(changes, placement, group, recorded, at_answers)
        else:
            known = (self._edited_attention(changes, placement, group, recorded, at_answers),)
        hidden = self.layers.rest(layer, hidden, calls.layer[layer], *known)
        for later in range(layer + 1, last):
            hidden = self.layers.whole(later, hidden, calls)
        return hidden if layer == last else self.layers.last(hidden, calls, group.slots_PM.repeat(len(changes), 1))

    def _edited_attention(
        self,
        changes: Sequence[Change],
        placement: Placement,
        group: Group,
        calls: RecordedCalls,
        rows_PM: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention output (E * P) N D of the layer, at ``rows_PM`` alone where given."""
        clean_PNZ = self._clean_site("head", changes[0].layer, group, calls)
        return heads_changed(self.anatomy, changes, placement, group.span, clean_PNZ, rows_PM)

    def _edited_mlp(
        self,
        changes: Sequence[Change],
        placement: Placement,
        group: Group,
        calls: RecordedCalls,
        rows_PM: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Clean attention output and edited MLP output, (E * P) N D each, at ``rows_PM`` alone where given."""
        layer = changes[0].layer
        attention = self.anatomy.output_projection(layer)(self._clean_site("head", layer, group, calls))
        mlp = placement.apply(changes[0].value, self._clean_site("mlp", layer, group, calls), group.span)
        known = (attention, mlp) if rows_PM is None else (gather_rows(v, rows_PM) for v in (attention, mlp))
        return tuple(value.repeat(len(changes), 1, 1) for value in known)

    def _score_group(self, board: ScoreBoard, start: int, edits: int, group: Group, hidden_RMD: torch.Tensor) -> None:
        picked = hidden_RMD.unflatten(0, (edits, -1))[:, group.answer_packs, group.answer_slots]  # E A' D
        board.fill(start, group.answers, score(self.anatomy, picked, group.gold, self._score_logits))

    # ---- noise ----

    def noise_floor(self, baseline: Scores) -> dict[str, float]:
        """How far a no-op edit of the first, middle and last layer strays from the baseline: nats and flips.

        The first layer is tried on the first group of packs, the middle one on the middle group and the last one on the
        last group; flips are those of the pass with the largest share of them, and answers are its answers.
        """
        groups, layers = first_middle_last(len(self.groups)), first_middle_last(self.anatomy.shape.n_layers)
        passes = []
        for place in range(max(len(groups), len(layers))):
            number, layer = groups[min(place, len(groups) - 1)], layers[min(place, len(layers) - 1)]
            answers = self.groups[number].answers.cpu().numpy()
            passes.append(self._no_op(layer, [number]).at(answers).noise(baseline.at(answers)))
        return worst_noise(passes)

    # ---- what replicas compare ----

    def cells(self) -> Cells:
        """Some of the baseline, and of zeroed heads of the first and last layer on the first group of packs.

        In the shapes of the noise floor's passes: nothing is compiled for them.
        """
        heads, group = self.anatomy.shape.n_heads, self.groups[0]
        found = [self.baseline()]
        for layer in (0, self.anatomy.shape.n_layers - 1):
            zero = Value.zero(self.anatomy, "head", layer)
            changes = [Change("head", layer, (row % heads,), zero) for row in range(self._copies(1))]
            found.append(self._run(changes, [0]).at(group.answers.cpu().numpy()))
        return Cells.joined([Cells.of([s.logprob_EA, s.logit_EA], s.predicted_EA) for s in found])


def _at_one_place(changes: Sequence[Change]) -> bool:
    """Whether all are of heads, or all of the MLP, of one layer, with one value for all of its tokens."""
    first = changes[0]
    known = first.site == "mlp" or (first.site == "head" and all(isinstance(each.units, tuple) for each in changes))
    place = (first.site, first.layer, first.value)
    return known and all((each.site, each.layer, each.value) == place and each.tokens is None for each in changes)
