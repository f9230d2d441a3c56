"""Greedy decoding of prompt sets: what the model really writes after a prompt, against the prompt's answer.

Knows tokenized prompts and a model; needs no harness. Prompts of one length make a batch, so nothing is padded. Unlike
teacher forcing, an answer counts only if the model also writes the separator itself and stops after the last digit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.engine.batching import in_batches
from mathinterp.evaluation.harness import Answer, plain_greedy
from mathinterp.evaluation.numbers import starts_with_answer
from mathinterp.models.positions import positions_of
from mathinterp.prompts.alignment import without_bos
from mathinterp.prompts.prompt import TokenizedPrompt

SPARE_TOKENS = 3  # beside one a character of the answer: the separator, a sign, and one to see that the number ends
MOST_PROMPTS = {"cuda": 512, "cpu": 64}  # in one batch, by device


def new_tokens(prompt: TokenizedPrompt) -> int:
    """How many tokens a prompt's answer may take; what is written beyond them does not count."""
    return len(prompt.prompt.answer) + SPARE_TOKENS


class GreedyDecoder:
    """A model that answers prompts by greedy decoding."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        plain_greedy(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        ends: Any = model.generation_config.eos_token_id
        # What follows an end is padding, as long as the batch's longest answer: it must not be read.
        self._last = {*tokenizer.all_special_ids, *(ends if isinstance(ends, list) else [ends])}
        self._limit = positions_of(model.config).limit
        # A word-level tokenizer reads "4 7" and "47" alike, and its tokens must be put together without spaces.
        self._spaceless = tokenizer("4 7")["input_ids"] == tokenizer("47")["input_ids"]

    def answer(self, prompts: Sequence[TokenizedPrompt]) -> list[Answer]:
        """The model's answers, in the prompts' order; raises torch.OutOfMemoryError if a single prompt does not fit."""
        contexts = [self.context(prompt) for prompt in prompts]
        most = max(new_tokens(prompt) for prompt in prompts)
        by_length: dict[int, list[int]] = {}
        for index, context in enumerate(contexts):
            by_length.setdefault(len(context), []).append(index)
        responses: dict[int, str] = {}
        for length, members in by_length.items():
            room = most if self._limit is None else min(most, self._limit + 1 - length)  # the last is not read again
            written = self._decode([contexts[index] for index in members], room)
            responses |= dict(zip(members, written, strict=True))
        answers = []
        for index, prompt in enumerate(prompts):
            right = starts_with_answer(responses[index], prompt.prompt.answer)
            said = " ".join(responses[index].split())
            answers.append(Answer(right, responses[index], said or None, prompt.prompt.answer, None, truncated=False))
        return answers

    def context(self, prompt: TokenizedPrompt) -> list[int]:
        """The tokens of the text alone; where the tokenizer merges its end with the separator, all up to END."""
        ids = self.tokenizer(without_bos([prompt.prompt.text], self.tokenizer)[0])["input_ids"]
        if self.tokenizer.eos_token_id is not None and ids[-1:] == [self.tokenizer.eos_token_id]:
            ids = ids[:-1]  # added by the tokenizer
        joint = list(prompt.input_ids[: prompt.end + 1])
        return ids if joint[: len(ids)] == ids else joint

    @torch.inference_mode()
    def _decode(self, contexts: Sequence[list[int]], new_tokens: int) -> list[str]:
        """The text that follows each of the contexts, all of one length."""
        generate: Any = self.model.generate
        written: list[str] = []

        def run(start: int, stop: int) -> None:
            batch_BT = torch.tensor(contexts[start:stop], device=self.model.device)
            ones_BT = torch.ones_like(batch_BT)
            found_BT = generate(input_ids=batch_BT, attention_mask=ones_BT, max_new_tokens=new_tokens, use_cache=True)
            written.extend(self.text(row) for row in found_BT[:, batch_BT.shape[1] :].tolist())

        in_batches(len(contexts), MOST_PROMPTS[self.model.device.type], run)
        return written

    def text(self, ids: Sequence[int]) -> str:
        """What the tokens say, up to the end token."""
        kept: list[int] = []
        for token in ids:
            if token in self._last:
                break
            kept.append(token)
        if self._spaceless:
            return "".join(self.tokenizer.convert_ids_to_tokens(kept))
        text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
