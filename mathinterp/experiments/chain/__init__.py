"""The chain from shallow neurons to the prediction, prompt by prompt (paper A, section 4.4).

w is the token that the original model predicts at END, or the first scored answer token (gold); probabilities are those
of w at END. What is compared comes from passes of one batch shape. Five stages, each a kind of row:

- head: every head zeroed alone, at every position, and what that costs w. The first by fall of the probability are the
  prompt's arithmetic heads (or heads given); the very first is zeroed for deep_neuron and prediction.
- deep_neuron: Comparative Neuron Analysis, original against that head zeroed; the first by change of importance, in its
  layer and later ones. (The deep layers of experiments/mask_keep go by the model's depth; in paper A, whose first
  arithmetic head is in layer 17 of 32, both are layers 17 to 31.)
- attention: what END reads through which head from which token, to first order for the log-odds of w and for the deep
  neurons' coefficients (engine/lens/head_reads.py): the first of all heads, and every token of the arithmetic heads; of
  these also the part that FFN neurons of earlier layers put there.
- shallow_neuron: which neurons of earlier layers, at which tokens, put there what each arithmetic head moves to END
  (engine/lens/shares.py), to first order and exactly. A head of layer 0 has none: it reads embeddings.
- prediction: the likeliest tokens, original and with the head zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.engine.lens import TARGETS
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.chain.tables import TABLES
from mathinterp.experiments.options import check_options, normalized, option, read_heads, read_layers
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.experiments.chain.rows import ChainState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import Prompt, TokenizedPrompt

BLOCK = 32  # prompts in a file


@dataclass(frozen=True)
class ChainOptions:
    """What of a chain is shown."""

    operation: str = option("all", "Which operation's prompts to show, where there are several prompts.")


@dataclass(frozen=True)
class Chain(Experiment):
    """The four stages of an answer, as a table and a drawing (paper A, section 4.4).

    shallow_neuron  FFN neurons of layers before an arithmetic head's, at a token, as the head moves them to END
    attention       which heads read which tokens at END
    head            heads whose zeroing costs the answer's probability most: the arithmetic heads
    deep_neuron     neurons whose importance falls most with the first arithmetic head zeroed: in its layer or later
    prediction      the likeliest tokens, original and with that head zeroed
    Shallow and deep go by the head, here alone: the deep layers of 'maskkeep' and 'tune prune' go by the model's depth
    (17-31 of 32). In paper A they coincide, for its first arithmetic head is in layer 17 of 32.
    """

    heads: tuple[Head, ...] | None = option(
        None, "The arithmetic heads of every prompt, the one to zero first: 17.22,14.19.", parse=read_heads,
        shown="each prompt's own",
    )  # fmt: skip
    layers: tuple[int, ...] | None = option(
        None, "Layers whose heads may be arithmetic heads, for example 1-7.", parse=read_layers, shown="all"
    )
    n_heads: int = option(3, "Arithmetic heads of each prompt, where none are named.", least=1)
    top: int = option(
        10, "Deep neurons, reads, and shallow neurons of each arithmetic head that are kept per prompt.", least=1
    )
    target: str = option("predicted", "The token explained.", choices=TARGETS)

    name: ClassVar[str] = "chain"
    reads_neurons: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    show_options: ClassVar[type] = ChainOptions
    command_examples: ClassVar[Sequence[str]] = (
        "scan chain --limit 64 --layers 1-7 --out figures",
        "scan chain --prompts two_digit --limit 64 --operation add",
    )

    def __post_init__(self) -> None:
        normalized(self, heads=read_heads(self.heads), layers=read_layers(self.layers))
        check_options(self)
        if self.heads is not None and self.layers is not None:
            raise UserError("give `heads` or `layers`, not both: heads that are named need no layers")
        if self.heads == () or self.layers == ():
            raise UserError("a chain needs at least one arithmetic head")
        if self.heads is not None and len(set(self.heads)) < len(self.heads):
            raise UserError("`heads` names a head twice; name each once")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "heads": None if self.heads is None else [str(head) for head in self.heads],
            "layers": None if self.layers is None else list(self.layers),
            "n_heads": self.n_heads if self.heads is None else len(self.heads),
            "top": self.top,
            "target": self.target,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Blocks of prompts; raises UserError for a head or layer that does not exist, or operands not in the text."""
        from mathinterp.prompts.token_types import operand_spans

        for head in self.heads or ():
            shape.check_head(*head)
        for layer in self.layers or ():
            shape.check_layer(layer)
        candidates = shape.n_heads * (shape.n_layers if self.layers is None else len(self.layers))
        if self.heads is None and self.n_heads > candidates:
            raise UserError(f"`n_heads` {self.n_heads}: there are only {candidates} heads to choose from")
        for item in prompts:
            operand_spans(item.prompt)
        return [
            Shard("chain_scan", index, {"prompts": [start, min(start + BLOCK, len(prompts))]})
            for index, start in enumerate(range(0, len(prompts), BLOCK))
        ]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Prompts; each stands for a pass per head and a few tens more."""
        start, stop = shard.work["prompts"]
        return int(stop - start)

    def prepare(self, subject: Subject) -> ChainState:
        """Handles to weights, and what each token is."""
        from mathinterp.experiments.chain.rows import prepare

        return prepare(subject)

    def run(self, state: ChainState, shard: Shard) -> pa.Table:
        """All stages of the shard's prompts."""
        from mathinterp.experiments.chain.rows import block_rows

        return block_rows(self, state, slice(*shard.work["prompts"]))

    def check_shown(self, shown: ChainOptions, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for an operation that no prompt has."""
        known = sorted({prompt.operation for prompt in prompts if prompt.operation is not None})
        if shown.operation not in ("all", *known):
            raise UserError(f"`operation` '{shown.operation}': the prompts have all, {', '.join(known)}")
