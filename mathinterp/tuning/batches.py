"""Sentences to arrays: joint tokenization, and labels on the answer alone.

Knows tokenizers and padding; knows nothing about models or about how the sentences were drawn.
Shapes: B samples, T tokens, A answer tokens.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from mathinterp.prompts.prompt import Prompt
from mathinterp.tuning.examples import Mixture, draw_example

IGNORED = -100  # the label that cross_entropy leaves out
WIDTH_MULTIPLE = 8


@dataclass(frozen=True)
class Encoded:
    """One sentence with its answer, tokenized jointly."""

    input_ids: list[int]  # BOS? + text + separator + answer + end token?
    answer_start: int  # index of the first token after the text, the separator's own token included
    scored_start: int  # index of the first token of the answer itself
    answer_end: int  # one past the last answer token; the end token, where there is one, stands here


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Tokenize text + separator + answer jointly and find the answer's tokens by their offsets (method.md sec. 1).

    Raises ValueError for an answer that merges into the prompt's last token: it cannot be predicted.
    """
    texts = [prompt.text + prompt.separator + prompt.answer for prompt in prompts]
    encodings = tokenizer(texts).encodings  # not the backend's own, which may cut and pad as tokenizer.json says
    assert encodings is not None, "offsets need a tokenizer of the tokenizers library"
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = []
    for prompt, text, encoding in zip(prompts, texts, encodings, strict=True):
        last = encoding.char_to_token(len(text) - 1)
        ids = encoding.ids if last is None else encoding.ids[: last + 1]  # without an EOS that the tokenizer adds
        answer_start = encoding.char_to_token(len(prompt.text))
        scored_start = encoding.char_to_token(len(prompt.text) + len(prompt.separator))
        if answer_start is None:  # white space that the tokenizer drops
            answer_start = scored_start
        if scored_start is None or answer_start == encoding.char_to_token(len(prompt.text) - 1):
            raise ValueError(f"the answer of {prompt.text!r} merges into the prompt's last token")
        encoded.append(Encoded(ids + end, answer_start, scored_start, len(ids)))
    return encoded


def to_arrays(
    encoded: Sequence[Encoded], pad_id: int, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``input_ids_BT``, ``labels_BT`` for training, ``scored_BT`` (true on the answer's own tokens).

    Padding is on the right, where causal attention never looks, so no attention mask is needed. T is ``width``
    unless a sentence is longer: then the next multiple of 8. Labels are not shifted: the model does that.
    """
    longest = max(len(sample.input_ids) for sample in encoded)
    width = max(width, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    ids_BT = [sample.input_ids + [pad_id] * (width - len(sample.input_ids)) for sample in encoded]
    input_ids_BT = torch.tensor(ids_BT, dtype=torch.long)
    start_B1, scored_B1, end_B1, length_B1 = (
        torch.tensor(values)[:, None]
        for values in (
            [sample.answer_start for sample in encoded],
            [sample.scored_start for sample in encoded],
            [sample.answer_end for sample in encoded],
            [len(sample.input_ids) for sample in encoded],
        )
    )
    index_T = torch.arange(width)
    trained_BT = (index_T >= start_B1) & (index_T < length_B1)
    scored_BT = (index_T >= scored_B1) & (index_T < end_B1)
    return input_ids_BT, input_ids_BT.masked_fill(~trained_BT, IGNORED), scored_BT


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills a row on the right; a causal model without labels there never sees it, so any token would do."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in candidates if token_id is not None)


class FreshBatches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batch number ``step`` of this worker: new samples drawn from (seed, step, rank) alone.

    A resumed run therefore sees the batches that an undisturbed one sees.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mixture: Mixture, batch_size: int, *, seed: int, rank: int = 0
    ) -> None:
        self.tokenizer, self.mixture, self.batch_size, self.seed, self.rank = tokenizer, mixture, batch_size, seed, rank
        self.pad_id = padding_id(tokenizer)
        rng = random.Random("width")
        sample = encode([draw_example(rng, mixture) for _ in range(4000)], tokenizer)
        self.width = -(-max(len(one.input_ids) for one in sample) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids_BT`` and ``labels_BT``; T is the same for every step but for a rare longer sentence."""
        rng = random.Random(f"{self.seed}/{step}/{self.rank}")
        prompts = [draw_example(rng, self.mixture) for _ in range(self.batch_size)]
        input_ids_BT, labels_BT, _ = to_arrays(encode(prompts, self.tokenizer), self.pad_id, self.width)
        return input_ids_BT, labels_BT


def stream(batches: FreshBatches, first: int, last: int, processes: int, pin: bool) -> DataLoader[Any]:
    """The batches of steps ``first`` to ``last`` - 1 in order, made ahead by ``processes`` background processes."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=range(first, last),
        num_workers=processes,
        prefetch_factor=4 if processes else None,
        worker_init_fn=_start_loader_process,
        pin_memory=pin,
    )


def _start_loader_process(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizers' thread pool does not survive a fork
    torch.set_num_threads(1)
