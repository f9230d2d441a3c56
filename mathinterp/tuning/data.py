"""Training data: files to token ids, with loss on the answers alone.

Knows four forms of records and tokenizers; knows nothing about models or loops. A file holds records of one form,
JSON lines in UTF-8, blank lines skipped:

    {"prompt": ..., "response": ...}            optional "separator"; default a space, none if white space is there
    {"messages": [{"role": ..., "content": ...}, ...]}      loss on every assistant message; needs a chat template
    {"question": ..., "answer": ...}            GSM8K as published: the whole reasoning trains, calculator notes removed
    {"text": ..., "answer": ...}                the project's prompt files

Names of prompt sets ("signed_two_digit_train") and "gsm8k:PATH" (the final number alone) work too. Numbers as response,
answer or content are taken as they are written. Every text becomes tokens where the prompts of scans do
(prompts/alignment.py): one BOS where the tokenizer adds it, one EOS after the answer, whatever a text already holds.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from mathinterp.errors import UserError
from mathinterp.gates import shortened
from mathinterp.prompts import PROMPT_SETS, WORD_PROBLEMS, load_prompts
from mathinterp.prompts.alignment import Encoding, Sentence, adds_bos, check_tokenizer, encode_sentences, unknown_words
from mathinterp.prompts.json_lines import NumberText, check_characters, exists, json_lines, scalar_text, shown
from mathinterp.tuning.chat import ASSISTANT, NO_END, encode_chat

CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")
SEPARATOR = " "
LOOKED_AT = 1000  # samples whose mean length stands for that of all that are drawn
NUMERIC = ("response", "answer", "content")  # may be JSON numbers, of which the text is kept
UNTRAINED = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "thinking", "weight")


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
    remarks: tuple[str, ...] = ()  # what a reader of the data should know: NO_END, LEFT_OUT


class FreshSamples(Sequence[Sample]):
    """Samples drawn when they are read, each from its index alone, so many that training sees none of them twice."""

    def __init__(
        self, draw: Callable[[int], Example], tokenizer: PreTrainedTokenizerBase, count: int, fingerprint: str
    ) -> None:
        """``draw``: index -> example; it and ``count`` are what ``fingerprint`` stands for in the run id."""
        self._draw, self._tokenizer, self._count, self.fingerprint = draw, tokenizer, count, fingerprint
        some = self.read(range(min(count, LOOKED_AT)))
        self.mean_length = sum(len(sample.input_ids) for sample in some) / len(some)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """These samples, tokenized together."""
        return encode_examples([self._draw(index) for index in indices], self._tokenizer)


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
    remarks: dict[str, int] = field(default_factory=dict)  # remark -> samples

    def line(self) -> str:
        """For people."""
        cut = f"; {self.left_out} longer than {self.limit} tokens left out" if self.left_out else ""
        remarks = "".join(f"; in {count:,} samples {remark}" for remark, count in self.remarks.items())
        return (
            f"{self.samples:,} samples of {self.shortest} to {self.longest} tokens (median {self.median}){cut}; "
            f"an epoch is {self.tokens:,} tokens, {self.answer_tokens:,} of them with loss{remarks}"
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
    if exists(path) and path.is_dir():
        raise UserError(f"`data` '{name}' is a folder; give a file of JSON lines")
    if not exists(path):
        raise UserError(
            f"`data` '{shortened(name)}' is neither a file that exists nor a prompt set; see"
            " 'mathinterp prompts `list`'"
        )
    form = '; write {"prompt": ..., "response": ...}'
    records = json_lines(path, "samples", form, parse_float=NumberText, parse_int=NumberText)
    if not records:
        raise UserError(f"{name} holds no training data; write one JSON object with prompt and response a line")
    form = _form(records[0][1], f"{path}, line {records[0][0]}")
    if form == "text":
        return _of_prompts(name, seed)
    return [FORMS[form](record, f"{path}, line {number}") for number, record in records]


def encode_examples(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Tokenize prompt, separator and response jointly; loss on the response's tokens and the end token.

    The ids up to the end token are those of ``tokenize_prompts`` for the same sentence. The separator's own token,
    where there is one, carries loss too. Conversations go through the tokenizer's chat template, see chat.py.
    Raises UserError, naming the example, for a response that shares a token with its prompt, a word that the tokenizer
    does not know, a BOS in the middle, and conversations that the chat template does not take.
    """
    check_tokenizer(tokenizer)
    texts = [example for example in examples if not example.messages]
    encoded = iter(_encode_texts(texts, tokenizer))
    return [_encode_chat(example, tokenizer) if example.messages else next(encoded) for example in examples]


def within_limit(samples: Sequence[Sample], limit: int) -> tuple[list[Sample], TokenBudget]:
    """The samples of at most ``limit`` tokens, and what they come to; raises UserError if there are none."""
    kept = [sample for sample in samples if len(sample.input_ids) <= limit]
    if not kept:
        shortest = min(len(sample.input_ids) for sample in samples)
        raise UserError(
            f"all {len(samples)} samples are longer than {limit} tokens (the shortest: {shortest}); raise `max_tokens`"
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
        remarks=dict(Counter(remark for sample in kept for remark in sample.remarks)),
    )
    return kept, budget


def data_fingerprint(samples: Sequence[Sample]) -> str:
    """16 hex digits that identify the token ids, what carries loss, and the order; or how fresh samples are drawn."""
    if isinstance(samples, FreshSamples):
        return samples.fingerprint
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.input_ids, sample.answer]).encode() + b"\n")
    return digest.hexdigest()[:16]


def _form(record: dict[str, Any], where: str) -> str:
    """Which form a file's first record has: the field that only that form has."""
    for name in ("messages", "question", "text", "prompt", "response"):
        if name in record:
            return "prompt" if name == "response" else name
    raise UserError(
        f"{where}: no field tells what this is; the forms are prompt and response, messages, question and answer, "
        "text and answer"
    )


def _text(record: dict[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    if record.get(name) is None:
        raise UserError(f"{where}: the field '{name}' is missing")
    text = scalar_text(record[name], numbers=name in NUMERIC)
    if text is None:
        also = " or a number" if name in NUMERIC else ""
        raise UserError(f"{where}: '{name}' must be text{also}, not {shown(record[name])}")
    if not empty and not text.strip():
        raise UserError(f"{where}: '{name}' is empty")
    check_characters(text, where, name)
    return text


def _pair(record: dict[str, Any], where: str) -> Example:
    prompt, response = _text(record, "prompt", where), _text(record, "response", where)
    if record.get("separator") is not None:
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
    for number, turn in enumerate(messages, start=1):
        if unfit := [name for name in UNTRAINED if turn.get(name) is not None]:
            raise UserError(
                f"{where}: turn {number} has the field '{unfit[0]}', which is not trained; leave it out, or write it "
                "into the content"
            )
    turns = tuple(
        (role := _text(turn, "role", where), _text(turn, "content", where, empty=role != ASSISTANT))
        for turn in messages
    )
    if not any(role == ASSISTANT for role, _ in turns):
        raise UserError(f"{where}: 'messages' has no message of the assistant to learn")
    return Example(where, messages=turns)


FORMS = {"prompt": _pair, "question": _gsm8k, "messages": _chat}


def _of_prompts(name: str, seed: int) -> list[Example]:
    return [
        Example(f"{name}, prompt '{prompt.prompt_id}'", prompt.text, prompt.separator, prompt.answer)
        for prompt in load_prompts(name, seed=seed)
    ]


def _encode_texts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    sentences = [
        Sentence(example.where, example.prompt, example.separator, _without_eos(example, tokenizer))
        for example in examples
    ]
    encodings = encode_sentences(sentences, tokenizer)
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    remarks = () if end else (NO_END,)
    one_bos = adds_bos(tokenizer) and tokenizer.bos_token_id != tokenizer.eos_token_id
    samples: list[Sample] = []
    for sentence, encoding in zip(sentences, encodings, strict=True):
        _check_known(sentence.where, encoding, tokenizer)
        if one_bos:
            _check_bos(sentence.where, encoding, tokenizer)
        answer = _answer(encoding, encoding.answer_start - len(sentence.separator))
        if answer[0] == 0:
            raise UserError(f"{sentence.where}: no token stands before the response; write a longer prompt")
        ids = encoding.input_ids
        samples.append(Sample((*ids, *end), (*answer, *([len(ids)] if end else [])), remarks))
    return samples


def _answer(encoding: Encoding, start: int) -> list[int]:
    """The tokens from character ``start`` on; one that begins before it only if it holds nothing but space there."""
    return [
        i
        for i, (first, stop) in enumerate(encoding.spans)
        if stop > max(first, start) and not encoding.sentence[first:start].strip()
    ]


def _without_eos(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The response without the EOS that it ends with, as text from a chat template does: training adds its own."""
    if tokenizer.eos_token is None:
        return example.response
    response = re.sub(rf"(?:{re.escape(str(tokenizer.eos_token))}\s*)+$", "", example.response)
    if not response.strip():
        raise UserError(f"{example.where}: the response is empty but for its end token")
    return response


def _check_known(where: str, encoding: Encoding, tokenizer: PreTrainedTokenizerBase) -> None:
    if unknown := unknown_words(encoding, tokenizer):
        raise UserError(f"{where}: the tokenizer does not know {unknown[0]!r}; use words that it knows")


def _check_bos(where: str, encoding: Encoding, tokenizer: PreTrainedTokenizerBase) -> None:
    """A BOS in the middle is read as the beginning of another text only behind an EOS."""
    pairs = zip(encoding.input_ids, encoding.input_ids[1:], strict=False)
    if any(token == tokenizer.bos_token_id and before != tokenizer.eos_token_id for before, token in pairs):
        raise UserError(f"{where}: the BOS {tokenizer.bos_token!r} stands in the middle of the text; leave it out")


def _encode_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> Sample:
    encoded = encode_chat(example.where, example.messages, tokenizer)
    return Sample(encoded.input_ids, encoded.answer, encoded.remarks)
