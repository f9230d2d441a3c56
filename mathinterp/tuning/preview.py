"""What training data come to before anything trains: their budget, and the first sample token by token.

Knows samples and tokenizers; knows nothing about models, files or printing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mathinterp.models.catalog import ResolvedModel
from mathinterp.tuning.data import Sample, TokenBudget
from mathinterp.tuning.readable import read_examples_for


@dataclass(frozen=True)
class Source:
    """The samples of one file or set, those over the limit left out."""

    name: str
    samples: Sequence[Sample]
    budget: TokenBudget


def read_source(model: ResolvedModel, name: str, seed: int, limit: int) -> Source:
    """Read a source and tokenize it for a model; raises UserError as read_examples_for does."""
    samples, budget = read_examples_for(model, name, seed, limit)
    return Source(name, samples, budget)


def preview(source: Source, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Plain JSON: the budget's figures, ``end_tokens`` (special tokens with loss -> how often), ``first_sample``."""
    return {
        "name": source.name,
        **asdict(source.budget),
        "end_tokens": end_tokens(source.samples, tokenizer),
        "first_sample": token_rows(source.samples[0], tokenizer),
    }


def token_rows(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """One row per token of a sample, with the vocabulary's own spelling and whether it carries loss."""
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    trained = set(sample.answer)
    return [
        {"index": index, "token_id": token_id, "token": token, "trained": index in trained}
        for index, (token_id, token) in enumerate(zip(sample.input_ids, tokens, strict=True))
    ]


def end_tokens(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """How often each special token carries loss."""
    special = set(tokenizer.all_special_ids)
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = Counter(sample.input_ids[i] for sample in samples for i in sample.answer)
    ids = [token_id for token_id in found if token_id in special]
    return {str(tokenizer.convert_ids_to_tokens(token_id)): found[token_id] for token_id in ids}
