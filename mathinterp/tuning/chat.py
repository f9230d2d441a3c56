"""Conversations to token ids: what the assistant writes carries loss, the end of each of its turns included.

Knows chat templates, through what they render; knows nothing about files or models.
A turn of the assistant begins where the prompt that asks for it ends, and ends with an end token: the special token
that the template writes after the content, even as the first of the next turn (GLM), else the tokenizer's own EOS after
the last turn. What a template writes behind it (the line feed of ChatML) is never generated and carries no loss.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mathinterp.errors import UserError, first_line_of

ASSISTANT = "assistant"
STAND_INS = ("XANSWERX", "YREPLYY")  # contents with no common beginning or end, to see what a template adds to one
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_FAULTS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)
NO_END = "an answer ends without an end token"
LEFT_OUT = "the chat template leaves out a part of an answer"

Turns = tuple[tuple[str, str], ...]  # role and content
Span = tuple[int, int]  # characters or tokens, from first to one after the last


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as token ids; ``answer`` are the indices of the tokens that carry loss."""

    input_ids: tuple[int, ...]
    answer: tuple[int, ...]
    remarks: tuple[str, ...]  # NO_END, LEFT_OUT


@dataclass(frozen=True)
class Frame:
    """What a template writes around the content of one turn."""

    before: str  # all that comes before the content
    after: str  # all that comes after it


def encode_chat(where: str, turns: Turns, tokenizer: PreTrainedTokenizerBase) -> EncodedChat:
    """Token ids of a conversation, and which of them the assistant writes.

    There is one BOS iff the template writes it or the tokenizer adds it. Where the template marks what the assistant
    generates ({% generation %}), its marks decide. An end token that a content already ends with is not doubled.

    Raises UserError, which begins with ``where``: no chat template, one that refuses the conversation, leaves out a
    turn, or writes a turn otherwise than it asks for it; a BOS inside a message.
    """
    return _Conversation(where, turns, tokenizer).encode()


class _Conversation:
    """One conversation under one tokenizer's template."""

    def __init__(self, where: str, turns: Turns, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise UserError(f"{where}: messages need a chat template, and the model's tokenizer has none")
        self.where, self.turns, self.tokenizer = where, turns, tokenizer
        self.specials = _special_tokens(tokenizer)
        self.special = "(?:" + "|".join(re.escape(token) for token in self.specials) + ")" if self.specials else "(?!)"
        self._check_bos()
        self.turns = tuple(
            (role, self._open_ended(index, content) if role == ASSISTANT else content)
            for index, (role, content) in enumerate(turns)
        )

    def encode(self) -> EncodedChat:
        text = self.render(self.turns)
        self._check_whole(text)
        ids, spans = _tokens(text, self.tokenizer)
        answer: list[int] = []
        remarks: list[str] = []
        for index, (start, content_end) in self._places(text, spans).items():
            end, closed = self._end(index, text, content_end)
            answer += _covered(text, spans, start, end)
            if not closed and not text[end:].strip() and self.tokenizer.eos_token_id is not None:
                kept = 1 + max((i for i, (_, stop) in enumerate(spans) if stop <= end), default=-1)
                ids, answer = [*ids[:kept], self.tokenizer.eos_token_id], [*answer, kept]
            elif not closed:
                remarks.append(NO_END)
            if self.turns[index][1].strip() not in text[start:end]:
                remarks.append(LEFT_OUT)
        return EncodedChat(tuple(ids), tuple(i for i in answer if i > 0), tuple(dict.fromkeys(remarks)))

    def render(self, turns: Turns, *, ask: bool = False) -> str:
        """The text of a conversation; ``ask``: with the prompt for the assistant's next turn."""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except TEMPLATE_FAULTS as error:
            reason = first_line_of(error)
            raise UserError(f"{self.where}: the chat template refuses the conversation ({reason})") from error
        assert isinstance(text, str)
        return text

    def _open_ended(self, index: int, content: str) -> str:
        """The content without the end token that the template, or the end of training text, gives it anyway."""
        ends = [self.tokenizer.eos_token, self._mark_after(index)]
        while found := next((end for end in ends if end and content.rstrip().endswith(end)), None):
            content = content.rstrip().removesuffix(found)
        if not content.strip():
            raise UserError(f"{self.where}: turn {index + 1} of the assistant is empty")
        return content

    def _mark_after(self, index: int) -> str | None:
        """The special token that the template writes right after the content of a turn."""
        found = re.match(rf"\s*({self.special})", self._frame(index).after)
        return None if found is None else found[1]

    def _frame(self, index: int) -> Frame:
        role = self.turns[index][0]
        one, other = (self.render((*self.turns[:index], (role, word), *self.turns[index + 1 :])) for word in STAND_INS)
        start = one.find(STAND_INS[0])
        if start < 0 or other[:start] != one[:start]:
            raise self._no_place(index)
        return Frame(one[:start], one[start + len(STAND_INS[0]) :])

    def _places(self, text: str, spans: Sequence[Span]) -> dict[int, Span]:
        """For each turn of the assistant: where what it writes begins, and where its content ends, as characters."""
        own = [index for index, (role, _) in enumerate(self.turns) if role == ASSISTANT]
        if GENERATION.search(self.tokenizer.get_chat_template()):
            marked = self._marked(spans)
            if len(marked) == len(own):
                return dict(zip(own, marked, strict=True))
        return {index: self._place(index, text) for index in own}

    def _place(self, index: int, text: str) -> Span:
        frame = self._frame(index)
        asked = self._asked(index)
        start = frame.before if asked is None else asked
        if not text.startswith(start) or not text.endswith(frame.after):
            raise self._no_place(index)
        return len(start), len(text) - len(frame.after)

    def _asked(self, index: int) -> str | None:
        """What the model reads when it is asked for the turn; None where the template cannot ask (a first turn)."""
        try:
            return self.render(self.turns[:index], ask=True)
        except UserError:
            return None

    def _marked(self, spans: Sequence[Span]) -> list[Span]:
        """Runs of characters that the template marks as generated."""
        messages = [{"role": role, "content": content} for role, content in self.turns]
        encoded: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = encoded["assistant_masks"]
        offset = len(spans) - len(mask)  # a BOS that the tokenizer adds
        runs: list[Span] = []
        for i, generated in enumerate(mask):
            start, stop = spans[i + offset]
            if generated and i and mask[i - 1]:
                runs[-1] = runs[-1][0], stop
            elif generated:
                runs.append((start, stop))
        return runs

    def _end(self, index: int, text: str, content_end: int) -> tuple[int, bool]:
        """Where the turn ends, and whether with an end token."""
        eos = self.tokenizer.eos_token
        inside = re.search(rf"{self.special}\s*$", text[:content_end])
        if inside and self.turns[index][1].strip() in text[: inside.start()]:  # marked as generated by the template
            return inside.start() + len(inside[0].rstrip()), True
        following = re.match(rf"(?:\s*{self.special})+", text[content_end:])
        if following:
            run = following[0]
            stop = run.index(eos) + len(eos) if eos and eos in run else _first_end(self.special, run)
            return content_end + stop, True
        upto = self.render(self.turns[: index + 1])
        boundary = len(upto) if text.startswith(upto) and len(upto) >= content_end else content_end
        closing = re.search(rf"{self.special}\s*$", text[content_end:boundary])
        if closing:
            return content_end + closing.start() + len(closing[0].rstrip()), True
        of_next = re.match(rf"\s*{self.special}", text[boundary:])
        return (boundary, False) if of_next is None else (boundary + of_next.end(), True)

    def _check_bos(self) -> None:
        bos = self.tokenizer.bos_token
        if bos is None or bos == self.tokenizer.eos_token:
            return
        for number, (_, content) in enumerate(self.turns, start=1):
            if bos in content:
                raise UserError(f"{self.where}: turn {number} holds the BOS {bos!r}, which the template or the "
                                "tokenizer writes; leave it out")  # fmt: skip

    def _check_whole(self, text: str) -> None:
        for number, (role, content) in enumerate(self.turns, start=1):
            if role != ASSISTANT and content.strip() not in text:
                raise UserError(
                    f"{self.where}: the chat template leaves out turn {number}, of the role '{role}'; leave it out of "
                    "the data, or give the model a template that writes it"
                )

    def _no_place(self, index: int) -> UserError:
        return UserError(
            f"{self.where}: the chat template rewrites earlier turns, so turn {index + 1} has no place: the text of "
            "the conversation does not begin with the prompt that asks for it"
        )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)


def _first_end(special: str, run: str) -> int:
    found = re.match(rf"\s*{special}", run)
    assert found is not None, "the run begins with a special token"
    return found.end()


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    """Ids and spans; a text that begins with the BOS is read as it stands, any other as every text is."""
    bos = tokenizer.bos_token
    written = bos is not None and text.lstrip().startswith(bos)
    batch = tokenizer(text, add_special_tokens=not written, return_offsets_mapping=True)
    ids, spans = list(batch["input_ids"]), [(start, stop) for start, stop in batch["offset_mapping"]]
    while spans and spans[-1][0] == spans[-1][1]:  # an EOS that the tokenizer adds
        ids.pop()
        spans.pop()
    return ids, spans


def _covered(text: str, spans: Sequence[Span], start: int, end: int) -> list[int]:
    """The tokens from ``start`` to ``end``; one that begins before ``start`` only if it holds just space there."""
    return [
        i
        for i, (first, stop) in enumerate(spans)
        if stop > max(first, start) and first < end and not text[first:start].strip()
    ]
