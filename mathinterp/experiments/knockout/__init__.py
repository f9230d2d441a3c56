"""Knock-out: ablate the first k heads of a ranking together, against as many random heads (paper B section 4.1).

Rankings: "effect", the one given; "random", heads drawn from all others; "random_layer", drawn so that each layer has
as many as the first k have there. No random head is a key head or is knocked out at any k of the ranking. The random
ones once for each of a few seeds. One row per (ranking, seed, k, prompt, scored token); k = 0 is the baseline. Each
point of a curve is one full pass over the prompts. Also here: the five likeliest next tokens of chosen sentences for
every k (paper B, Figure 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.engine.edits import Replacement
from mathinterp.engine.head_sets import NO_HEADS, HeadSets, head_sets, next_token_probabilities
from mathinterp.errors import UserError
from mathinterp.experiments.ablated import AblationState, prepare, replacement, score_rows
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.columns import BASELINE, SHARED_TABLES
from mathinterp.experiments.controls import layer_matched_heads, random_heads
from mathinterp.experiments.costs import Cost
from mathinterp.experiments.knockout.tables import KNOCKOUT_EXAMPLES, KNOCKOUT_HEADS, KNOCKOUT_SCAN, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.units import Head
from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_KS = (1, 2, 4, 8, 16, 32, 64)
CONTROLS = {"random": random_heads, "random_layer": layer_matched_heads}
SHOWN_TOKENS = 5


@dataclass
class KnockoutState:
    """What a replica keeps between shards."""

    ablation: AblationState
    runner: HeadSets
    replacements: dict[int, Replacement]  # layer -> what its heads become; filled as layers are asked for


@dataclass(frozen=True)
class Sentence:
    """A sentence whose next token is shown, and its token ids."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Knockout(Ablation):
    """Knock out the first k heads of ``ranking``; see Ablation for the rest (here mean ablation is the default).

    ranking: heads, most important first; at least as many as the largest k.
    key: heads that no control may hold, beside those knocked out: the key heads of the run that ranked them.
    ks: numbers of heads; None = 1, 2, 4, ... 64, as far as the ranking goes and as many heads are left for controls.
    seeds: random draws of each kind, seeds 0, 1, ...
    sentences: shown with their likeliest next tokens. Under mean ablation they take the mean over all prompts.
    tokenizer: names those tokens; changes no number.
    """

    ablation: str = "mean"
    ranking: tuple[Head, ...] = ()
    key: tuple[Head, ...] = ()
    ks: tuple[int, ...] | None = None
    seeds: int = 5
    sentences: tuple[Sentence, ...] = ()
    tokenizer: "PreTrainedTokenizerBase | None" = field(default=None, compare=False, repr=False)

    name: ClassVar[str] = "knockout"
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ranking:
            raise UserError("no heads to knock out: name them, most important first, or a run that ranks them")
        if len(set(self.ranking)) < len(self.ranking):
            twice = next(head for i, head in enumerate(self.ranking) if head in self.ranking[:i])
            raise UserError(f"head {twice[0]}.{twice[1]} is twice in the ranking; name each head once")
        if self.ks is not None and (not any(self.ks) or min(self.ks) < 0):
            raise UserError("the numbers of heads to knock out must be 0 or more, and one of them more than 0")
        if self.ks is not None and max(self.ks) > len(self.ranking):
            raise UserError(f"cannot knock out {max(self.ks)} heads: the ranking has {len(self.ranking)}")
        if self.seeds < 0:
            raise UserError(f"{self.seeds} random draws cannot be made; give 0 or more")
        if self.sentences and self.ablation == "resample":
            raise UserError("sentences to show have no counterfactual to resample from; use mean or zero ablation")

    @property
    def _longest(self) -> int:
        return max(self.ks or DEFAULT_KS)

    def chosen_ks(self, shape: ModelShape) -> list[int]:
        """The numbers of heads above 0, ascending.

        Raises UserError for a head that does not exist, and where fewer than k heads are left for a control of k.
        """
        for layer, head in (*self.ranking, *self.key):
            shape.check_head(layer, head)
        if self.ks is None:
            fitting = [k for k in DEFAULT_KS if k <= min(len(self.ranking), self._left(shape, k))]
            return fitting or self._checked([1], shape)
        return self._checked(sorted(set(self.ks) - {0}), shape)

    def _left(self, shape: ModelShape, most: int) -> int:
        """How many heads controls can be drawn from: neither key heads nor among the first ``most``."""
        return _count(shape) - len({*(self.key if self.seeds else ()), *self.ranking[:most]})

    def _checked(self, ks: list[int], shape: ModelShape) -> list[int]:
        left = self._left(shape, ks[-1])
        if self.seeds and left < ks[-1]:
            raise UserError(
                f"{_count(shape) - left} of {_count(shape)} heads are knocked out or key heads, which leaves {left} for"
                f" random controls of {ks[-1]}; give smaller --ks, name fewer heads, or --control-seeds 0 for none"
            )
        return ks

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; of the ranking, the heads that are used."""
        return {
            **super().parameters(),
            "ranking": [f"{layer}.{head}" for layer, head in self.ranking[: self._longest]],
            "key_heads": [f"{layer}.{head}" for layer, head in sorted(set(self.key))],
            "ks": None if self.ks is None else sorted(set(self.ks) - {0}),
            "seeds": self.seeds,
            "sentences": [[sentence.text, list(sentence.token_ids)] for sentence in self.sentences],
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The baseline, the heads of every point, one file for each curve, and the shown sentences."""
        curves = self.curves(shape)
        pieces = [Shard("baseline", 0, cost=0.5), Shard("knockout_heads", 0, cost=0.1)]
        for index, (ranking, seed, ks) in enumerate(curves):
            work = {"ranking": ranking, "seed": seed, "ks": ks}
            pieces.append(Shard("knockout_scan", index, work, cost=float(len(ks))))
        if self.sentences:
            pieces.append(Shard("knockout_examples", 0, cost=0.5))
        return pieces

    def curves(self, shape: ModelShape) -> list[tuple[str, int, list[int]]]:
        """Ranking, seed and numbers of heads of each curve."""
        ks = self.chosen_ks(shape)
        draws = [(kind, seed, ks) for kind in CONTROLS for seed in range(self.seeds)]
        return [("effect", 0, ks), *draws]

    def heads_of(self, shape: ModelShape, ranking: str, seed: int, k: int) -> list[Head]:
        """The heads that are out at one point of a curve."""
        out = self.ranking[:k]
        if ranking == "effect":
            return list(out)
        never = {*self.key, *self.ranking[: self.chosen_ks(shape)[-1]]}
        return CONTROLS[ranking](chosen_heads(shape, None, None), out, seed, never)

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (point of the curve, prompt)."""
        return {"baseline": 1, "knockout_scan": len(shard.work.get("ks", []))}.get(shard.table, 0) * len(prompts)

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.knockout.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> KnockoutState:
        """Clean pass (and counterfactual pass) over all prompts."""
        points = len(self.chosen_ks(subject.anatomy.shape))
        ablation = prepare(self, subject, edits_per_batch=points, edits_in_all=0)
        return KnockoutState(ablation, head_sets(ablation.engine), {})

    def notes(self, state: KnockoutState) -> dict[str, Any]:
        """Engine, packing and noise floor; how far passes without a head out stray from the engine's baseline."""
        unedited = state.runner.run_sets([NO_HEADS], {})
        deviation = unedited.difference(state.ablation.engine.baseline())
        return {**state.ablation.notes, "no_head_deviation": deviation}

    def run(self, state: KnockoutState, shard: Shard) -> pa.Table:
        """Rows of one curve, or of one of the small tables."""
        shape = state.ablation.anatomy.shape
        if shard.table == "baseline":
            unedited = state.runner.run_sets([NO_HEADS] * len(self.chosen_ks(shape)), {})  # the curves' batch shape
            return score_rows(state.ablation, unedited.first(), BASELINE, {})
        if shard.table == "knockout_heads":
            return self._heads_table(shape)
        if shard.table == "knockout_examples":
            return self._examples(state)
        ranking, seed, ks = shard.work["ranking"], shard.work["seed"], shard.work["ks"]
        sets = [frozenset(self.heads_of(shape, ranking, seed, k)) for k in ks]
        layers = {layer for heads in sets for layer, _ in heads}
        scores = state.runner.run_sets(sets, replacements_of(self, state, layers))
        ids: dict[str, Any] = {"ranking": [ranking] * len(ks), "seed": [seed] * len(ks), "k": ks}
        return score_rows(state.ablation, scores, KNOCKOUT_SCAN, ids)

    def _heads_table(self, shape: ModelShape) -> pa.Table:
        rows = [
            {"ranking": ranking, "seed": seed, "k": k, "place": place, "layer": layer, "head": head}
            for ranking, seed, ks in self.curves(shape)
            for k in ks
            for place, (layer, head) in enumerate(self.heads_of(shape, ranking, seed, k), start=1)
        ]
        return pa.Table.from_pylist(rows, KNOCKOUT_HEADS)

    def _examples(self, state: KnockoutState) -> pa.Table:
        """The likeliest next tokens of each sentence, for k = 0 and every other k."""
        assert self.tokenizer is not None, "sentences need a tokenizer to name their next tokens"
        anatomy, end_only = state.ablation.anatomy, self.edited_positions == "end"
        ks = [0, *self.chosen_ks(anatomy.shape)]
        layers = {layer for layer, _ in self.ranking[: ks[-1]]}
        replaced = replacements_of(self, state, layers)
        values = {layer: r.values if r.everywhere else r.values.mean(dim=0) for layer, r in replaced.items()}
        rows = []
        for sentence in self.sentences:
            for k in ks:
                heads = frozenset(self.ranking[:k])
                found = next_token_probabilities(anatomy, sentence.token_ids, heads, values, end_only)
                top = found.topk(min(SHOWN_TOKENS, len(found)))
                for rank, (probability, token_id) in enumerate(zip(*map(list, top), strict=True), start=1):
                    token = self.tokenizer.decode([int(token_id)])
                    row = {"sentence": sentence.text, "k": k, "rank": rank, "token_id": int(token_id), "token": token}
                    rows.append({**row, "probability": float(probability)})
        return pa.Table.from_pylist(rows, KNOCKOUT_EXAMPLES)


def replacements_of(scan: Ablation, state: "KnockoutState", layers: set[int]) -> dict[int, Replacement]:
    """Layer -> what its heads become under ``scan``; computed once a replica."""
    for layer in layers - state.replacements.keys():
        state.replacements[layer] = replacement(scan, state.ablation, "head", layer)
    return {layer: state.replacements[layer] for layer in sorted(layers)}


def _count(shape: ModelShape) -> int:
    return shape.n_layers * shape.n_heads
