"""How a chain's rows are computed, a block of prompts at a time: its stages, one after another (stages.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from mathinterp.engine.lens.head_reads import HeadReader
from mathinterp.engine.lens.neurons import NeuronLens
from mathinterp.engine.lens.top_tokens import TopTokens
from mathinterp.experiments.base import Subject
from mathinterp.experiments.chain import Chain
from mathinterp.experiments.chain.stages import Comparison, HeadFalls, Reading, head_falls
from mathinterp.experiments.chain.tables import CHAIN_SCAN
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TypedTokens, typed_tokens


@dataclass
class ChainState:
    """What a replica keeps between shards."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    typed: Sequence[TypedTokens]
    lens: NeuronLens
    reader: HeadReader
    tokens: TopTokens


def prepare(subject: Subject) -> ChainState:
    """Handles to weights, and what each token is."""
    assert subject.tokenizer is not None, "a chain names tokens"
    anatomy, prompts = subject.anatomy, subject.prompts
    typed, tokens = typed_tokens(prompts, subject.tokenizer), TopTokens(anatomy, subject.tokenizer)
    return ChainState(anatomy, prompts, typed, NeuronLens(anatomy), HeadReader(anatomy), tokens)


def block_rows(scan: Chain, state: ChainState, block: slice) -> pa.Table:
    """All stages of a block of prompts."""
    prompts, typed = state.prompts[block], state.typed[block]
    target_P = state.lens.targets(prompts, scan.target)
    falls = head_falls(state.anatomy, prompts, target_P)
    arithmetic = [_arithmetic(scan, falls, row) for row in range(len(prompts))]
    comparison = Comparison.of(state.lens, state.tokens, prompts, [heads[0] for heads in arithmetic], target_P)
    deep = comparison.deep_neurons(scan.top)
    reads = Reading(state.reader, state.tokens, prompts, typed, arithmetic, scan.top, target_P).rows(deep)
    predicted = comparison.prediction(state.tokens.tokenizer)
    rows = []
    for row, prompt in enumerate(prompts):
        stages = [*falls.rows(row, arithmetic[row]), *deep[row], *reads[row], *predicted[row]]
        same = {"prompt_id": prompt.prompt.prompt_id, "operation": prompt.prompt.operation}
        rows += [{**same, **stage} for stage in stages]
    return pa.Table.from_pylist(rows, CHAIN_SCAN)


def _arithmetic(scan: Chain, falls: HeadFalls, row: int) -> list[Head]:
    """The prompt's arithmetic heads, the one to zero first."""
    if scan.heads is not None:
        return list(scan.heads)
    ranked = [falls.heads[place] for place in falls.order(row)]
    return [head for head in ranked if scan.layers is None or head.layer in scan.layers][: scan.n_heads]
