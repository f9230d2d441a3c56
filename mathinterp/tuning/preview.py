"""Training data that one model can read, and what they come to before anything trains: budget, first sample.

Every token has an embedding and a position, and all samples one set of rotary frequencies. Knows models that were
looked at but not loaded; nothing is cut or dropped beyond the limit, which data.py counts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.models.catalog import ResolvedModel
from mathinterp.models.reading import check_readable
from mathinterp.tuning.data import Example, Sample, TokenBudget, encode_examples, read_examples, within_limit


@dataclass(frozen=True)
class Source:
    """The samples of one file or set, those over the limit left out."""

    name: str
    samples: Sequence[Sample]
    budget: TokenBudget


def read_source(model: ResolvedModel, name: str, seed: int, limit: int) -> Source:
    """The samples of a file or prompt set of at most ``limit`` tokens, and what they come to.

    Raises UserError as the functions of data.py do, and, naming the example, for one that the model cannot read.
    """
    examples = read_examples(name, seed)
    samples = encode_examples(examples, model.tokenizer)
    within = [(example, sample) for example, sample in zip(examples, samples, strict=True)
              if len(sample.input_ids) <= limit]  # fmt: skip
    for example, sample in within:
        check_readable(example.where, sample.input_ids, model)
    _check_one_kind(within, model)
    return Source(name, *within_limit(samples, limit))


def _check_one_kind(within: Sequence[tuple[Example, Sample]], model: ResolvedModel) -> None:
    """Samples of a batch share a pass, and so the rotary frequencies of the longest."""
    positions = model.shape.positions
    beyond = next((pair for pair in within if positions.kind(len(pair[1].input_ids)) != 0), None)
    if beyond is not None:
        example, sample = beyond
        raise UserError(
            f"{example.where} has {len(sample.input_ids)} tokens, and beyond {positions.alike_up_to} the model"
            f" '{model.label}' reads every position otherwise, also in shorter samples of its batch; give `max_tokens`"
            f" {positions.alike_up_to}"
        )


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
