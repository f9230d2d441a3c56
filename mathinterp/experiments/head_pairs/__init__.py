"""Pairs of heads ablated together: what both cost, what each costs alone, and how far the two add up.

interaction = drop(both) - drop(first) - drop(second): positive where heads stand in for each other (backup heads,
visible only when both are out), negative where they work through each other. With ``given``, every head is ablated
alone and again with the given heads out: the same question about one set of heads. Replacements as in the head scan
(method.md section 2).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.chosen_heads import check_choice, choice_parameters, chosen_heads
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.costs import Cost, on_trees
from mathinterp.experiments.head_pairs.tables import TABLES
from mathinterp.experiments.options import normalized, option, read_heads, read_layers
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.experiments.ablated import AblationState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

SETS_A_FILE = 64
MOST_PAIRS = 10_000  # more is a mistake: 142 heads


@dataclass(frozen=True)
class HeadsOut:
    """What one row's answers are computed with: heads that are out, and whether the given ones are too."""

    first: Head | None
    second: Head | None
    given: bool

    def out(self, given: Sequence[Head]) -> frozenset[Head]:
        """All heads that are out."""
        named = [head for head in (self.first, self.second) if head is not None]
        return frozenset([*named, *(given if self.given else ())])


@dataclass(frozen=True)
class ShownPairs:
    """What the summary shows."""

    top: int = option(10, "Pairs shown, of largest interaction.", least=1)


@dataclass(frozen=True)
class HeadPairs(Ablation):
    """Ablate heads two at a time: the drop of both, of each, and how far the two add up.

    interaction = drop of both - drop of the first - drop of the second. It is above 0 where one head stands in for the
    other. With --given, each head is ablated alone and with the given heads out, which shows backup heads.
    """

    heads: tuple[Head, ...] | None = option(
        None, "Heads that are paired, for example 17.22,14.19.", parse=read_heads, shown="all of the layers"
    )
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    given: tuple[Head, ...] | None = option(
        None, "Instead of pairs: every head alone, and again with these heads out.",
        parse=partial(read_heads, field="given"), shown="pairs",
    )  # fmt: skip

    name: ClassVar[str] = "head_pairs"
    runs_quantised: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    show_options: ClassVar[type] = ShownPairs
    command_examples: ClassVar[Sequence[str]] = (
        "scan head_pairs --heads 0.6,0.1,0.2,0.7 --limit 160",
        "scan head_pairs --given 0.6 --layers 0-1 --limit 160",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = read_heads(self.given, "given")
        normalized(self, heads=read_heads(self.heads), layers=read_layers(self.layers), given=given)
        check_choice(self.heads, self.layers)
        if self.given == ():
            raise UserError("`given` names no heads; name at least one, or leave it out to ablate pairs")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        given = None if self.given is None else [str(head) for head in sorted(set(self.given))]
        return {**super().parameters(), **choice_parameters(self.heads, self.layers), "given": given}

    def sets(self, shape: ModelShape) -> list[HeadsOut]:
        """Every set of heads whose answers are stored, the unchanged model left out.

        Raises UserError for a head that does not exist, fewer than two heads to pair, or far too many pairs.
        """
        given = chosen_heads(shape, self.given, None) if self.given is not None else []
        heads = [head for head in chosen_heads(shape, self.heads, self.layers) if head not in given]
        alone = [HeadsOut(head, None, False) for head in heads]
        if given:
            if not heads:
                raise UserError("no heads are left to ablate beside the given ones; name others in `heads`")
            return [HeadsOut(None, None, True), *alone, *(HeadsOut(head, None, True) for head in heads)]
        count = len(heads) * (len(heads) - 1) // 2
        if not count or count > MOST_PAIRS:
            raise UserError(
                f"{len(heads)} heads make {count:,} pairs; name 2 heads or more, and at most 142, in `heads`"
            )
        return [*alone, *(HeadsOut(first, second, False) for first, second in itertools.combinations(heads, 2))]

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, then files of 64 sets, those of the lowest layers first."""
        sets = self.sets(shape)
        pieces = [Shard("baseline", 0, cost=0.5)]
        for index, start in enumerate(range(0, len(sets), SETS_A_FILE)):
            stop = min(start + SETS_A_FILE, len(sets))
            pieces.append(Shard("head_pair_scan", index, {"sets": [start, stop]}, cost=float(stop - start)))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (set, prompt)."""
        start, stop = shard.work.get("sets", (0, 1))
        return int(stop - start) * len(prompts)

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """Each set runs from its lowest layer."""
        given = tuple(self.given or ())
        layers = sum(shape.n_layers - min(layer for layer, _ in each.out(given)) for each in self.sets(shape))
        answers = sum(len(prompt.scored) for prompt in prompts)
        rows = {shard.key: self.evaluations(shard, prompts) // len(prompts) * answers for shard in shards}
        return on_trees(self, shape, prompts, layers, len(self.sets(shape)), rows)

    def prepare(self, subject: Subject) -> AblationState:
        """Clean pass (and counterfactual pass) over all prompts."""
        from mathinterp.experiments.head_pairs.rows import prepare_pairs

        return prepare_pairs(self, subject)

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of the shard's sets."""
        from mathinterp.experiments.head_pairs.rows import baseline_of, rows_of

        if shard.table == "baseline":
            return baseline_of(state)
        return rows_of(self, state, self.sets(state.anatomy.shape)[slice(*shard.work["sets"])])
