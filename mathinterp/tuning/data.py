"""Training data: files to token ids, with loss on the answers alone.

Knows four forms of records and tokenizers; knows nothing about models or loops. A file holds records of one form,
JSON lines in UTF-8, blank lines skipped:

    {"prompt": ..., "response": ...}            optional "separator"; default a space, none if white space is there
    {"messages": [{"role": ..., "content": ...}, ...]}      loss on every assistant message; needs a chat template
    {"question": ..., "answer": ...}            GSM8K as published: the whole reasoning trains, calculator notes removed
    {"text": ..., "answer": ...}                the project's prompt files

Names of prompt sets ("signed_two_digit_train") and "gsm8k:PATH" (the final number alone) work too. T counts tokens.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.prompts import PROMPT_SETS, WORD_PROBLEMS, load_prompts
from mathinterp.prompts.json_lines import json_lines

CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
SEPARATOR = " "


@dataclass(frozen=True)
class Example:
    """One prompt and the response to learn, or a conversation."""

    where: str  # file and line, for messages
    prompt: str = ""
    separator: str = ""
    response: str = ""
    messages: tuple[tuple[str, str], ...] = ()  # (role, content); empty: prompt and response count


@dataclass(frozen=True)
class Sample:
    """One example as token ids; ``answer`` are the indices of the tokens that carry loss, none of them the first."""

    input_ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class TokenBudget:
    """What a set of samples comes to, known before anything trains."""

    samples: int
    left_out: int  # longer than the limit
    limit: int
    shortest: int
    median: int
    longest: int
    tokens: int  # of one pass over the samples, padding not counted
    answer_tokens: int

    def line(self) -> str:
        """For people."""
        cut = f"; {self.left_out} longer than {self.limit} tokens left out" if self.left_out else ""
        return (
            f"{self.samples:,} samples of {self.shortest} to {self.longest} tokens (median {self.median}){cut}; "
            f"an epoch is {self.tokens:,} tokens, {self.answer_tokens:,} of them with loss"
        )


def read_examples(name: str, seed: int = 0) -> list[Example]:
    """The examples of a file, of a prompt set, or of "gsm8k:PATH" and the like.

    Raises UserError, naming file and line, for a missing or empty file, broken JSON, a missing, empty or unfit field,
    and a record of another form than the first.
    """
    kind, colon, _ = name.partition(":")
    if name in PROMPT_SETS or (colon and kind in WORD_PROBLEMS):
        return _of_prompts(name, seed)
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"--data '{name}' is neither a file that exists nor a prompt set; see 'mathinterp prompts --list'"
        )
    records = json_lines(path, "samples", '; write {"prompt": ..., "response": ...}')
    if not records:
        raise UserError(f"{name} holds no training data; write one JSON object with prompt and response a line")
    form = _form(records[0][1], f"{path}, line {records[0][0]}")
    if form == "text":
        return _of_prompts(name, seed)
    return [FORMS[form](record, f"{path}, line {number}") for number, record in records]


def encode_examples(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Tokenize prompt, separator and response jointly; loss on the response's tokens and the end token.

    The separator's own token, where there is one, carries loss too. Conversations go through the tokenizer's chat
    template, which ends a turn in its own way.
    Raises UserError, naming the example, for a response that shares a token with its prompt, a word that the tokenizer
    does not know, and for conversations without a chat template.
    """
    texts = [example for example in examples if not example.messages]
    encoded = iter(_encode_texts(texts, tokenizer))
    return [_encode_chat(example, tokenizer) if example.messages else next(encoded) for example in examples]


def within_limit(samples: Sequence[Sample], limit: int) -> tuple[list[Sample], TokenBudget]:
    """The samples of at most ``limit`` tokens, and what they come to; raises UserError if there are none."""
    kept = [sample for sample in samples if len(sample.input_ids) <= limit]
    if not kept:
        shortest = min(len(sample.input_ids) for sample in samples)
        raise UserError(
            f"all {len(samples)} samples are longer than {limit} tokens (the shortest: {shortest}); raise --max-tokens"
        )
    lengths = [len(sample.input_ids) for sample in kept]
    budget = TokenBudget(
        samples=len(kept),
        left_out=len(samples) - len(kept),
        limit=limit,
        shortest=min(lengths),
        median=int(median(lengths)),
        longest=max(lengths),
        tokens=sum(lengths),
        answer_tokens=sum(len(sample.answer) for sample in kept),
    )
    return kept, budget


def data_fingerprint(samples: Sequence[Sample]) -> str:
    """16 hex digits that identify the token ids, what carries loss, and the order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.input_ids, sample.answer]).encode() + b"\n")
    return digest.hexdigest()[:16]


def _form(record: dict[str, Any], where: str) -> str:
    """Which form a file's first record has: the field that only that form has."""
    for field in ("messages", "question", "text", "prompt", "response"):
        if field in record:
            return "prompt" if field == "response" else field
    raise UserError(
        f"{where}: no field tells what this is; the forms are prompt and response, messages, question and answer, "
        "text and answer"
    )


def _text(record: dict[str, Any], field: str, where: str, *, empty: bool = False) -> str:
    if field not in record:
        raise UserError(f"{where}: the field '{field}' is missing")
    value = record[field]
    if not isinstance(value, str):
        raise UserError(f"{where}: '{field}' must be text, not {json.dumps(value)[:80]}")
    if not empty and not value.strip():
        raise UserError(f"{where}: '{field}' is empty")
    return value


def _pair(record: dict[str, Any], where: str) -> Example:
    prompt, response = _text(record, "prompt", where), _text(record, "response", where)
    if "separator" in record:
        separator = _text(record, "separator", where, empty=True)
    else:
        separator = "" if prompt[-1].isspace() or response[0].isspace() else SEPARATOR
    return Example(where, prompt, separator, response)


def _gsm8k(record: dict[str, Any], where: str) -> Example:
    question, answer = _text(record, "question", where), _text(record, "answer", where)
    return Example(where, f"Question: {question.strip()}\nAnswer:", SEPARATOR, CALCULATOR_NOTE.sub("", answer).strip())


def _chat(record: dict[str, Any], where: str) -> Example:
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: 'messages' must be a list of objects with role and content")
    turns = tuple((_text(turn, "role", where), _text(turn, "content", where)) for turn in messages)
    if not any(role == "assistant" for role, _ in turns):
        raise UserError(f"{where}: 'messages' has no message of the assistant to learn")
    return Example(where, messages=turns)


FORMS = {"prompt": _pair, "question": _gsm8k, "messages": _chat}


def _of_prompts(name: str, seed: int) -> list[Example]:
    return [
        Example(f"{name}, prompt '{prompt.prompt_id}'", prompt.text, prompt.separator, prompt.answer)
        for prompt in load_prompts(name, seed=seed)
    ]


def _encode_texts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    if not examples:
        return []
    sentences = [example.prompt + example.separator + example.response for example in examples]
    batch = tokenizer(sentences, return_offsets_mapping=True, return_attention_mask=False, return_token_type_ids=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    samples: list[Sample] = []
    for example, sentence, ids, spans in zip(
        examples, sentences, batch["input_ids"], batch["offset_mapping"], strict=True
    ):
        ids = ids[:-1] if end and ids[-1:] == end and spans[-1][0] == spans[-1][1] else ids  # it adds one itself
        start = len(example.prompt)
        answer = [i for i in range(len(ids)) if spans[i][1] > max(start, spans[i][0])]
        if not answer or spans[answer[0]][0] < start:
            raise UserError(
                f"{example.where}: the response {example.response[:40]!r} shares a token with its prompt; "
                "set the field separator so that it begins a token, for example ' '"
            )
        unknown = [sentence[slice(*spans[i])] for i in range(len(ids)) if ids[i] == tokenizer.unk_token_id]
        unknown = [word for word in unknown if word and word != tokenizer.unk_token]  # GPT-2's is its end token too
        if unknown:
            raise UserError(f"{example.where}: the tokenizer does not know {unknown[0]!r}; use words that it knows")
        samples.append(Sample((*ids, *end), (*answer, *([len(ids)] if end else []))))
    return samples


def _encode_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """A turn of the assistant is what the conversation gains beyond the prompt that asks for it."""
    if tokenizer.chat_template is None:
        raise UserError(f"{example.where}: messages need a chat template, and the model's tokenizer has none")
    turns = [{"role": role, "content": content} for role, content in example.messages]
    whole = _templated(tokenizer, turns, ask=False)
    answer: list[int] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _templated(tokenizer, turns[:index], ask=True)
        upto = _templated(tokenizer, turns[: index + 1], ask=False)
        if upto[: len(before)] != before or whole[: len(upto)] != upto:
            raise UserError(
                f"{example.where}: the chat template rewrites earlier turns, so turn {index + 1} has no place"
            )
        answer += range(max(1, len(before)), len(upto))
    return Sample(tuple(whole), tuple(answer))


def _templated(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, ask: bool) -> list[int]:
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
