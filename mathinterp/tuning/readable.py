"""Training data that one model can read: every token with an embedding and a position, one set of rotary frequencies.

Knows models that were looked at but not loaded; nothing is cut or dropped beyond the limit, which data.py counts.
"""

from collections.abc import Sequence

from mathinterp.errors import UserError
from mathinterp.models.catalog import ResolvedModel
from mathinterp.models.reading import check_embedded, check_length
from mathinterp.tuning.data import Example, Sample, TokenBudget, encode_examples, read_examples, within_limit


def read_examples_for(model: ResolvedModel, name: str, seed: int, limit: int) -> tuple[list[Sample], TokenBudget]:
    """The samples of a file or prompt set of at most ``limit`` tokens, and what they come to.

    Raises UserError as the functions of data.py do, and, naming the example, for one that the model cannot read.
    """
    examples = read_examples(name, seed)
    samples = encode_examples(examples, model.tokenizer)
    within = [(example, sample) for example, sample in zip(examples, samples, strict=True)
              if len(sample.input_ids) <= limit]  # fmt: skip
    for example, sample in within:
        check_embedded(example.where, sample.input_ids, model)
        check_length(example.where, len(sample.input_ids), model)
    _check_one_kind(within, model)
    return within_limit(samples, limit)


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
