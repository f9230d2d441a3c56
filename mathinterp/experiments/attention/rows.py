"""How an attention scan's rows are computed: END's row of each head's attention matrix, summed by token type.

Shape legend: P prompt, B prompts of a batch, T position, L chosen layer, H head, K token type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.attention_rows import eager_deviation, end_attention
from mathinterp.engine.pairs import Batch, batches_of
from mathinterp.experiments.answered import kept_prompts
from mathinterp.experiments.attention.tables import ATTENTION_SCAN
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.prompts.token_types import TOKEN_TYPES, TypedTokens, type_names, typed_tokens

BOS = TOKEN_TYPES.index("bos")
PADDING = -1  # in place of a type


@dataclass
class AttentionState:
    """What a replica keeps between shards: P kept prompts, L chosen layers, H heads, K token types."""

    layers: list[int]
    types: tuple[str, ...]  # K
    names: pa.Array  # P prompt ids
    mass_PLHK: np.ndarray  # total weight on each type
    top_PLH: np.ndarray  # index of the type that holds the largest weight outside BOS
    tokens_PK: np.ndarray  # tokens of each type
    notes: dict[str, Any]


def prepare(subject: Subject, layers: list[int], keep_all: bool, scheme: str = "arithmetic") -> AttentionState:
    """The choice of prompts, and one eager pass over them; its rows are summed by type at once."""
    anatomy = subject.anatomy
    assert subject.tokenizer is not None, "token types need the tokenizer"
    prompts, counts = kept_prompts(subject, keep_all)
    kinds, typed = type_names(prompts, scheme), typed_tokens(prompts, subject.tokenizer, scheme)
    shape = (len(prompts), len(layers), anatomy.shape.n_heads)
    mass_PLHK = np.empty((*shape, len(kinds)), np.float64)
    top_PLH = np.empty(shape, np.int16)
    tokens_PK = np.array([[item.types.count(kind) for kind in kinds] for item in typed], np.int16)
    deviation = None
    for batch in batches_of([p.input_ids[: p.end + 1] for p in prompts], anatomy, subject.max_tokens):
        if deviation is None:
            deviation = eager_deviation(anatomy, batch)
        rows = batch.rows.cpu().numpy()
        mass, top = by_type(end_attention(anatomy, batch, layers), _type_numbers(typed, batch, kinds), len(kinds))
        mass_PLHK[rows], top_PLH[rows] = mass.cpu().numpy(), top.cpu().numpy()
    notes = {
        **counts,
        "eager_deviation": deviation,
        "weight_sum_deviation": float(np.abs(mass_PLHK.sum(-1) - 1).max()),
    }
    names = pa.array([item.prompt.prompt_id for item in prompts])
    return AttentionState(layers, kinds, names, mass_PLHK, top_PLH, tokens_PK, notes)


def _type_numbers(typed: Sequence[TypedTokens], batch: Batch, types: Sequence[str]) -> torch.Tensor:
    """B T: index into ``types`` of each token, PADDING after END."""
    number = {kind: index for index, kind in enumerate(types)}
    numbers = torch.full(batch.token_ids.shape, PADDING)
    for row, index in enumerate(batch.rows.tolist()):
        kinds = [number[kind] for kind in typed[index].types]
        numbers[row, : len(kinds)] = torch.tensor(kinds)
    return numbers.to(batch.token_ids.device)


def by_type(
    weights_BLHT: torch.Tensor, types_BT: torch.Tensor, kinds: int = len(TOKEN_TYPES)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Total weight on each type, B L H K, and the type that holds the largest weight outside BOS, B L H."""
    numbers_K = torch.arange(kinds, device=types_BT.device)
    is_type_BTK = (types_BT[..., None] == numbers_K).to(weights_BLHT.dtype)
    mass_BLHK = torch.einsum("blht,btk->blhk", weights_BLHT, is_type_BTK)
    counted_BT = (types_BT != BOS) & (types_BT != PADDING)
    best_BLH = weights_BLHT.masked_fill(~counted_BT[:, None, None], -1).argmax(dim=-1)
    top_BLH = types_BT[:, None, None].expand_as(weights_BLHT).gather(-1, best_BLH[..., None])[..., 0]
    return mass_BLHK, top_BLH


def head_rows(state: AttentionState, layer: int, head: int) -> pa.Table:
    """Rows of one head: per prompt and kind of token its attention at END (a share of 1), P x K rows."""
    place = state.layers.index(layer)
    mass_PK, top_P = state.mass_PLHK[:, place, head], state.top_PLH[:, place, head]
    prompts, kinds = mass_PK.shape
    tokens = state.tokens_PK.ravel()
    mean = mass_PK.ravel() / np.maximum(tokens, 1)
    columns: dict[str, Any] = {
        "layer": np.full(prompts * kinds, layer),
        "head": np.full(prompts * kinds, head),
        "prompt_id": state.names.take(pa.array(np.repeat(np.arange(prompts), kinds))),
        "token_type": pa.array(state.types).take(pa.array(np.tile(np.arange(kinds), prompts))),
        "mean": pa.array(mean.astype(np.float32), mask=tokens == 0),
        "mass": mass_PK.ravel().astype(np.float32),
        "tokens": tokens,
        "argmax": (top_P[:, None] == np.arange(kinds)).ravel(),
    }
    return cast_table(ATTENTION_SCAN, columns)
