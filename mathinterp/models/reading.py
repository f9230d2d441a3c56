"""Prompts as one model reads them: its tokenizer's tokens, each with a position and an embedding.

Everything here is known before a weight is loaded. What a tokenizer knows beyond the model (tokens that were added and
the model not resized) and a text beyond a table of positions would fail, or on a GPU break the process, in the first
forward pass.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mathinterp.errors import UserError
from mathinterp.models.resolved import ResolvedModel
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.mib import fitting
from mathinterp.prompts.passages import LONGEST, encode_passages, read_passages
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt


def read_prompts(
    prompts: Sequence[Prompt], model: ResolvedModel, tokens_read: Callable[[TokenizedPrompt], int] | None = None
) -> list[TokenizedPrompt]:
    """``tokenize_prompts`` for one model, checked; without rows of MIB that do not fit its tokenizer.

    Args:
        tokens_read: how many tokens a prompt makes the model read at once; None: all that are needed to score it.
    Raises:
        UserError: as ``tokenize_prompts``, for a prompt longer than the model's positions, and for a token without an
            embedding. The message names the prompt.
    """
    tokenized = tokenize_prompts(fitting(prompts, model.tokenizer), model.tokenizer)
    for item in tokenized:
        where = f"prompt '{item.prompt.prompt_id}'"
        for ids in (item.input_ids, item.counterfactual_ids or ()):
            check_embedded(where, ids, model)
        check_length(where, len(item.fed) if tokens_read is None else tokens_read(item), model)
    return tokenized


def model_passages(text: Path | None, model: ResolvedModel) -> tuple[tuple[int, ...], ...]:
    """Token ids of a text's passages, each short enough for the model; see ``read_passages``."""
    longest = min(LONGEST, model.shape.positions.limit or LONGEST)
    passages = encode_passages(read_passages(text), model.tokenizer, longest)
    for passage in passages:
        check_embedded(str(text or "the bundled text"), passage, model)
    return passages


def check_readable(where: str, ids: Sequence[int], model: ResolvedModel) -> None:
    """Raise UserError, naming ``where``, for tokens that the model cannot read: too many, or one that it lacks."""
    check_embedded(where, ids, model)
    check_length(where, len(ids), model)


def check_length(where: str, length: int, model: ResolvedModel) -> None:
    """Raise UserError for more tokens than the model has positions, or was made to tell apart by rotation."""
    limit = model.shape.positions.limit
    if limit is not None and length > limit:
        raise UserError(
            f"{where} makes {length} tokens to read at once, and the model '{model.label}' has only {limit} positions;"
            " shorten it, or take a model that reads longer texts"
        )


def check_embedded(where: str, ids: Sequence[int], model: ResolvedModel) -> None:
    """Raise UserError for a token id beyond the model's embedding."""
    rows = model.shape.vocabulary
    beyond = next((token for token in ids if token >= rows), None)
    if beyond is not None:
        name = model.tokenizer.convert_ids_to_tokens(beyond)
        raise UserError(
            f"{where} has the token {name!r} with id {beyond}, and the model '{model.label}' has embeddings for ids up"
            f" to {rows - 1} only: its tokenizer has more tokens than the model; give the tokenizer that belongs to it"
        )
