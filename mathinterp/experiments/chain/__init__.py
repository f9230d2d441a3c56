"""The chain from shallow neurons to the prediction, prompt by prompt (paper A, section 4.4).

w is the token that the original model predicts at END, or the first scored answer token (gold); probabilities are those
of w at END. What is compared comes from passes of one batch shape. Five stages, each a kind of row:

- head: every head zeroed alone, at every position, and what that costs w. The first by fall of the probability are the
  prompt's arithmetic heads (or heads given); the very first is zeroed for deep_neuron and prediction.
- deep_neuron: Comparative Neuron Analysis, original against that head zeroed; the first by change of importance, in its
  layer and later ones. (The deep layers of scans/maskkeep.py go by the model's depth; in paper A, whose first
  arithmetic head is in layer 17 of 32, both are layers 17 to 31.)
- attention: what END reads through which head from which token, to first order for the log-odds of w and for the deep
  neurons' coefficients (forward/head_reads.py): the first of all heads, and every token of the arithmetic heads; of
  these also the part that FFN neurons of earlier layers put there.
- shallow_neuron: which neurons of earlier layers, at which tokens, put there what each arithmetic head moves to END
  (forward/neuron_shares.py), to first order and exactly. A head of layer 0 has none: it reads embeddings.
- prediction: the likeliest tokens, original and with the head zeroed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from mathinterp.engine.lens.head_reads import HeadReader
from mathinterp.engine.lens.neurons import TARGETS, NeuronLens
from mathinterp.engine.lens.top_tokens import TopTokens
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.chain.stages import Comparison, HeadFalls, Reading, head_falls
from mathinterp.experiments.chain.tables import CHAIN_SCAN, TABLES
from mathinterp.experiments.controls import Head
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TypedTokens, operand_spans, typed_tokens

BLOCK = 32  # prompts in a file


@dataclass
class ChainState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    typed: Sequence[TypedTokens]
    lens: NeuronLens
    reader: HeadReader
    tokens: TopTokens


@dataclass(frozen=True)
class Chain(Experiment):
    """Each prompt's chain.

    heads: the arithmetic heads of every prompt, the one to zero first; None: each prompt's own.
    layers: layers whose heads may be arithmetic heads; None = all.
    n_heads: arithmetic heads of a prompt, where ``heads`` is None.
    top: rows of a prompt: deep neurons; reads; shallow neurons of each arithmetic head.
    target: the token w, "predicted" or "gold".
    """

    heads: tuple[Head, ...] | None = None
    layers: tuple[int, ...] | None = None
    n_heads: int = 3
    top: int = 10
    target: str = "predicted"

    name: ClassVar[str] = "chain"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UserError(f"--target '{self.target}' is not known; take one of {', '.join(TARGETS)}")
        if self.heads is not None and self.layers is not None:
            raise UserError("give --heads or --layers, not both: heads that are named need no layers")
        if self.n_heads < 1 or self.top < 1 or self.heads == () or self.layers == ():
            raise UserError("a chain needs at least one arithmetic head and one neuron")
        if self.heads is not None and len(set(self.heads)) < len(self.heads):
            raise UserError("--heads names a head twice; name each once")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "heads": None if self.heads is None else [f"{layer}.{head}" for layer, head in self.heads],
            "layers": None if self.layers is None else sorted(set(self.layers)),
            "n_heads": self.n_heads if self.heads is None else len(self.heads),
            "top": self.top,
            "target": self.target,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Blocks of prompts; raises UserError for a head or layer that does not exist, or operands not in the text."""
        for layer, head in self.heads or ():
            shape.check_head(layer, head)
        for layer in self.layers or ():
            shape.check_layer(layer)
        candidates = shape.n_heads * (shape.n_layers if self.layers is None else len(set(self.layers)))
        if self.heads is None and self.n_heads > candidates:
            raise UserError(f"--n-heads {self.n_heads}: there are only {candidates} heads to choose from")
        for item in prompts:
            operand_spans(item.prompt)
        return [
            Shard("chain_scan", index, {"prompts": [start, min(start + BLOCK, len(prompts))]})
            for index, start in enumerate(range(0, len(prompts), BLOCK))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Prompts; each stands for a pass a head and a few tens more."""
        start, stop = shard.work["prompts"]
        return int(stop - start)

    def prepare(self, subject: Subject) -> ChainState:
        """Handles to weights, and what each token is."""
        assert subject.tokenizer is not None, "a chain names tokens"
        anatomy, prompts = subject.anatomy, subject.prompts
        typed, tokens = typed_tokens(prompts, subject.tokenizer), TopTokens(anatomy, subject.tokenizer)
        return ChainState(anatomy, prompts, typed, NeuronLens(anatomy), HeadReader(anatomy), tokens)

    def run(self, state: ChainState, shard: Shard) -> pa.Table:
        """All stages of the shard's prompts."""
        block = slice(*shard.work["prompts"])
        prompts, typed = state.prompts[block], state.typed[block]
        target_P = state.lens.targets(prompts, self.target)
        falls = head_falls(state.anatomy, prompts, target_P)
        arithmetic = [self._arithmetic(falls, row) for row in range(len(prompts))]
        comparison = Comparison.of(state.lens, state.tokens, prompts, [heads[0] for heads in arithmetic], target_P)
        deep = comparison.deep_neurons(self.top)
        reads = Reading(state.reader, state.tokens, prompts, typed, arithmetic, self.top, target_P).rows(deep)
        predicted = comparison.prediction(state.tokens.tokenizer)
        rows = []
        for row, prompt in enumerate(prompts):
            stages = [*falls.rows(row, arithmetic[row]), *deep[row], *reads[row], *predicted[row]]
            same = {"prompt_id": prompt.prompt.prompt_id, "operation": prompt.prompt.operation}
            rows += [{**same, **stage} for stage in stages]
        return pa.Table.from_pylist(rows, CHAIN_SCAN)

    def _arithmetic(self, falls: HeadFalls, row: int) -> list[Head]:
        """The prompt's arithmetic heads, the one to zero first."""
        if self.heads is not None:
            return list(self.heads)
        ranked = [falls.heads[place] for place in falls.order(row)]
        return [head for head in ranked if self.layers is None or head[0] in self.layers][: self.n_heads]
