"""Knock-out: ablate the first k heads of a ranking together, against as many random heads (paper B section 4.1).

Rankings: "effect", the one given; "random", heads drawn from all others; "random_layer", drawn so that each layer has
as many as the first k have there. No random head is a key head or is knocked out at any k of the ranking. The random
ones once for each of a few seeds. One row per (ranking, seed, k, prompt, scored token); k = 0 is the baseline. Each
point of a curve is one full pass over the prompts. Also here: the five likeliest next tokens of chosen sentences for
every k (paper B, Figure 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.ablation import ABLATIONS, Ablation
from mathinterp.experiments.base import Context, Shard, Subject
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.columns import SHARED_TABLES
from mathinterp.experiments.controls import layer_matched_heads, random_heads
from mathinterp.experiments.knockout.tables import TABLES
from mathinterp.experiments.options import normalized, option, read_counts, read_heads
from mathinterp.experiments.table import Table
from mathinterp.gates import MOST_DRAWS
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.experiments.ablated import AblationState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.models.catalog import ResolvedModel
    from mathinterp.prompts.prompt import TokenizedPrompt

DEFAULT_KS = (1, 2, 4, 8, 16, 32, 64)
CONTROLS = {"random": random_heads, "random_layer": layer_matched_heads}
ITERATIVE = "mathinterp scan iterative `steps` N finds a ranking"


@dataclass(frozen=True)
class Sentence:
    """A sentence whose next token is shown, and its token ids."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Knockout(Ablation):
    """Knock out the first k heads of a ranking together, and as many random heads: accuracy against k.

    Random heads are never heads of the ranking that are knocked out, nor key heads (effect below -5 %) of the run that
    ranks, nor any of those named; "random_layer" has as many in each layer as the first k, but takes heads of other
    layers where a layer has too few left. The ranking may come from other prompts than those of this run: so it is
    seen whether the heads hold there too.
    Sentences shown under mean ablation take the mean over all prompts.
    """

    ablation: str = option(
        "mean",
        "mean over the counterfactual prompts; zero; resample from the paired counterfactual; or dataset_mean, the mean"
        " over all prompts themselves, which needs no counterfactuals.",
        choices=ABLATIONS,
    )
    heads: tuple[Head, ...] | None = option(
        None, "The ranking, most important head first: 17.22,14.19,...", parse=read_heads
    )
    rank_from: str | None = option(
        None,
        "Take the ranking from a finished run: a head scan, a path scan, or iterative masking.",
        flag="from", former=("rank-from",), metavar="RUN_ID",
    )  # fmt: skip
    rank_operation: str = option("all", "Rank by this operation alone.")
    ks: tuple[int, ...] | None = option(
        None, "Numbers of heads.", parse=read_counts, shown="0,1,2,4,...,64 up to half of all heads"
    )
    control_seeds: int = option(5, "Draws of random heads, and as many layer-matched ones.", least=0, most=MOST_DRAWS)
    show: tuple[str, ...] = option(
        (),
        "Also show this sentence's five likeliest next tokens for every k; may be given again.",
        metavar="SENTENCE",
    )
    key: tuple[Head, ...] | None = None  # heads that no control may hold; None: all that are named
    sentences: tuple[Sentence, ...] = ()  # those to show, tokenized
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, compare=False, repr=False)  # names their tokens

    name: ClassVar[str] = "knockout"
    runs_quantised: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = {**SHARED_TABLES, **TABLES}
    own_command: ClassVar[bool] = True
    retired: ClassVar[Mapping[str, str]] = dict.fromkeys(("iterative", "rank_by", "layers"), ITERATIVE)
    command_examples: ClassVar[Sequence[str]] = (
        "scan knockout --heads 0.6,0.1,0.2,0.7 --ablation zero",
        "scan knockout --limit 400 --from RUN_ID",
        'scan knockout --from RUN_ID --prompts pairs --show "3 plus 5 is"',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, heads=read_heads(self.heads), key=read_heads(self.key, "key"), ks=read_counts(self.ks))
        self._check_ranking()
        if self.ks is not None and (not any(self.ks) or min(self.ks) < 0):
            raise UserError("the numbers of heads to knock out must be 0 or more, and one of them more than 0")
        if self.heads is not None and self.ks is not None and max(self.ks) > len(self.heads):
            raise UserError(f"cannot knock out {max(self.ks)} heads: the ranking has {len(self.heads)}")
        if (self.show or self.sentences) and self.ablation == "resample":
            raise UserError("sentences to show have no counterfactual to resample from; use mean or zero ablation")

    def _check_ranking(self) -> None:
        if (self.heads is None) == (self.rank_from is None):
            raise UserError(
                "give the heads' ranking in one way: `heads` 5.1,3.2,... or `rank_from` RUN_ID (from 'scan heads');"
                " or find one with 'scan iterative'"
            )
        if self.rank_from is None and self.rank_operation != "all":
            raise UserError("`rank_operation` belongs to `rank_from`")
        if self.heads is None:
            return
        if not self.heads:
            raise UserError("no heads to knock out: name them, most important first, or a run that ranks them")
        if len(set(self.heads)) < len(self.heads):
            twice = next(head for i, head in enumerate(self.heads) if head in self.heads[:i])
            raise UserError(f"head {twice} is twice in the ranking; name each head once")

    def bind(self, context: Context) -> Self:
        """With the ranking and key heads of the run that ranks, and the sentences tokenized."""
        bound = self
        if self.rank_from is not None:
            from mathinterp.experiments.finished_run import key_heads_from, ranking_from

            asked = (context.store, self.rank_from, self.rank_operation)
            heads, key = ranking_from(*asked), key_heads_from(*asked)
            bound = replace(bound, heads=heads, key=key, rank_from=None, rank_operation="all")
        if self.show:
            sentences = tuple(_tokenized(text, context.model) for text in dict.fromkeys(self.show))
            bound = replace(bound, show=(), sentences=sentences, tokenizer=context.model.tokenizer)
        return bound

    @property
    def ranking(self) -> tuple[Head, ...]:
        """The heads, most important first."""
        assert self.heads is not None, "the ranking of a run is known after bind"
        return self.heads

    @property
    def key_heads(self) -> frozenset[Head]:
        """Heads that no control may hold, beside those knocked out."""
        return frozenset(self.ranking if self.key is None else self.key)

    def chosen_ks(self, shape: ModelShape) -> list[int]:
        """The numbers of heads above 0, ascending.

        Raises UserError for a head that does not exist, and where fewer than k heads are left for a control of k.
        """
        for layer, head in (*self.ranking, *self.key_heads):
            shape.check_head(layer, head)
        if self.ks is None:
            fitting = [k for k in DEFAULT_KS if k <= min(len(self.ranking), self._left(shape, k))]
            return fitting or self._checked([1], shape)
        return self._checked(sorted(set(self.ks) - {0}), shape)

    def _left(self, shape: ModelShape, most: int) -> int:
        """How many heads controls can be drawn from: neither key heads nor among the first ``most``."""
        return _count(shape) - len({*(self.key_heads if self.control_seeds else ()), *self.ranking[:most]})

    def _checked(self, ks: list[int], shape: ModelShape) -> list[int]:
        left = self._left(shape, ks[-1])
        if self.control_seeds and left < ks[-1]:
            raise UserError(
                f"{_count(shape) - left} of {_count(shape)} heads are knocked out or key heads, which leaves {left} for"
                f" random controls of {ks[-1]}; give smaller `ks`, name fewer heads, or `control_seeds` 0 for none"
            )
        return ks

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; of the ranking, the heads that are used."""
        return {
            **super().parameters(),
            "ranking": [str(head) for head in self.ranking[: max(self.ks or DEFAULT_KS)]],
            "key_heads": [str(head) for head in sorted(self.key_heads)],
            "ks": None if self.ks is None else sorted(set(self.ks) - {0}),
            "seeds": self.control_seeds,
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
        draws = [(kind, seed, ks) for kind in CONTROLS for seed in range(self.control_seeds)]
        return [("effect", 0, ks), *draws]

    def heads_of(self, shape: ModelShape, ranking: str, seed: int, k: int) -> list[Head]:
        """The heads that are out at one point of a curve."""
        out = self.ranking[:k]
        if ranking == "effect":
            return list(out)
        never = {*self.key_heads, *self.ranking[: self.chosen_ks(shape)[-1]]}
        return CONTROLS[ranking](chosen_heads(shape, None, None), out, seed, never)

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (point of the curve, prompt)."""
        return {"baseline": 1, "knockout_scan": len(shard.work.get("ks", []))}.get(shard.table, 0) * len(prompts)

    def prepare(self, subject: Subject) -> AblationState:
        """Clean pass (and counterfactual pass) over all prompts."""
        from mathinterp.experiments.knockout.rows import prepare_sets

        return prepare_sets(self, subject)

    def notes(self, state: AblationState) -> dict[str, Any]:
        """Engine, packing and noise floor; how far passes without a head out stray from the engine's baseline."""
        from mathinterp.experiments.knockout.rows import notes

        return notes(state)

    def run(self, state: AblationState, shard: Shard) -> pa.Table:
        """Rows of one curve, or of one of the small tables."""
        from mathinterp.experiments.knockout.rows import curve_rows, example_rows, head_rows, unedited_rows

        if shard.table == "baseline":
            return unedited_rows(self, state)
        if shard.table == "knockout_heads":
            return head_rows(self, state.anatomy.shape)
        if shard.table == "knockout_examples":
            return example_rows(self, state)
        return curve_rows(self, state, shard)


def _tokenized(text: str, model: ResolvedModel) -> Sentence:
    from mathinterp.models.reading import check_readable

    ids = tuple(model.tokenizer(text)["input_ids"])
    if not text.strip() or model.tokenizer.unk_token_id in ids:
        raise UserError(f"`show` {text!r} has no words, or some that the model's tokenizer does not know")
    check_readable(f"`show` {text!r}", ids, model)
    return Sentence(text, ids)


def _count(shape: ModelShape) -> int:
    return shape.n_layers * shape.n_heads
