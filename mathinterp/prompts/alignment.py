"""Which token is what: joint tokenization of a prompt with its answer, and the answer's scored tokens.

Knows tokenizers, through their character offsets; knows nothing about models.
Target ids are always derived in context: a tokenizer may keep the space before an answer as a token of its own
(Llama-2, SmolLM2), merge it into the first digit (GPT-J), merge digits (Llama-3), or drop white space (word-level).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.prompts.columns import MIXED, digit_classes
from mathinterp.prompts.numerals import KINDS, scored_characters
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt

if TYPE_CHECKING:  # importing transformers takes a second, and reading a store needs none
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 2000  # prompts whose encodings are in memory


@dataclass(frozen=True)
class Sentence:
    """A text and the answer that follows it, to be tokenized jointly."""

    where: str  # for messages: "prompt 'p'", or a file and its line
    text: str
    separator: str
    answer: str


@dataclass(frozen=True)
class Encoding:
    """A sentence with its answer, tokenized jointly up to the answer's last token."""

    sentence: str  # text + separator + answer
    answer_start: int  # index of the answer's first character
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]  # characters of each token; empty for a special token that was added

    def token_text(self, index: int) -> str:
        """The token as it stands in the sentence."""
        start, stop = self.spans[index]
        return self.sentence[start:stop]

    def answer_part(self, index: int) -> str:
        """The part of the token that lies in the answer; empty for tokens before it."""
        start, stop = self.spans[index]
        return self.sentence[max(start, self.answer_start) : stop]

    @property
    def first_answer_index(self) -> int:
        """Index of the token that holds the answer's first character."""
        return next(i for i, (_, stop) in enumerate(self.spans) if stop > self.answer_start)


def tokenize_prompts(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[TokenizedPrompt]:
    """Tokenize text + separator + answer jointly and mark the scored tokens (method.md section 1).

    Scored are the answer's tokens that hold a digit, the sign of a number or the point that a number begins with,
    merged with other characters or not ("$-", " -", "-."), never the space token; numerals.py says what a sign is.
    Of an answer without digits (twelve, minus twelve), all tokens that are not white space are scored.

    Where the tokenizer adds a BOS there is exactly one: a BOS that the text itself begins with is not read a second
    time. Where it adds none, a text is taken as it is. Where a prompt has a counterfactual, it is tokenized with the
    same answer and must have as many tokens and the same answer tokens.

    Raises:
        UserError: no prompts, a tokenizer without offsets, a prompt_id used twice, an empty text, an answer that shares
            a token with the text or has no scorable token, a word the tokenizer does not know, a counterfactual that
            does not align. The message names the prompt.
    """
    check_tokenizer(tokenizer)
    _check_ids(prompts)
    shared: dict[tuple[ScoredToken, ...], tuple[ScoredToken, ...]] = {}
    return [
        item
        for start in range(0, len(prompts), AT_ONCE)
        for item in _tokenized(prompts[start : start + AT_ONCE], tokenizer, shared)
    ]


def _tokenized(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    shared: dict[tuple[ScoredToken, ...], tuple[ScoredToken, ...]],
) -> list[TokenizedPrompt]:
    """``tokenize_prompts`` for some of the prompts; equal scored tokens are one object."""
    encodings = encode([(prompt, prompt.text) for prompt in prompts], tokenizer)
    paired = [(prompt, prompt.counterfactual) for prompt in prompts if prompt.counterfactual is not None]
    counterfactuals = dict(zip((prompt.prompt_id for prompt, _ in paired), encode(paired, tokenizer), strict=True))
    rivals = [replace(prompt, answer=prompt.distractor) for prompt in prompts if prompt.distractor is not None]
    distractors = dict(
        zip((p.prompt_id for p in rivals), encode([(p, p.text) for p in rivals], tokenizer), strict=True)
    )
    tokenized = []
    for prompt, encoding in zip(prompts, encodings, strict=True):
        _check_known(prompt, encoding, tokenizer)
        scored = _scored_tokens(prompt, encoding)
        scored = shared.setdefault(scored, scored)
        counterfactual = counterfactuals.get(prompt.prompt_id)
        if counterfactual is not None:
            _check_known(prompt, counterfactual, tokenizer)
            _check_aligned(prompt, encoding, counterfactual, tokenizer)
        tokenized.append(
            TokenizedPrompt(
                prompt=prompt,
                input_ids=encoding.input_ids,
                scored=scored,
                counterfactual_ids=None if counterfactual is None else counterfactual.input_ids,
                distractor=_distractor(prompt, encoding, distractors.get(prompt.prompt_id), scored),
            )
        )
    return tokenized


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise UserError unless the tokenizer says which characters each token covers."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not say which characters a token covers; "
            "save the model with a tokenizer.json (a fast tokenizer)"
        )


def encode(sentences: Sequence[tuple[Prompt, str]], tokenizer: "PreTrainedTokenizerBase") -> list[Encoding]:
    """Tokenize (prompt, text) pairs, each text followed by its prompt's separator and answer.

    Raises UserError for an empty text, and where the answer's first character shares a token with what is before it.
    """
    return encode_sentences(
        [Sentence(_name(prompt), text, prompt.separator, prompt.answer) for prompt, text in sentences], tokenizer
    )


def encode_sentences(sentences: Sequence[Sentence], tokenizer: "PreTrainedTokenizerBase") -> list[Encoding]:
    """Tokenize each sentence jointly: the one place where what scans read, and what training reads, becomes tokens.

    Raises UserError, which begins with the sentence's ``where``, as ``encode`` does.
    """
    if not sentences:
        return []
    texts = without_bos([sentence.text for sentence in sentences], tokenizer)
    for sentence, text in zip(sentences, texts, strict=True):
        if not text.strip():
            raise UserError(f"{sentence.where}: the text is empty")
    joined = [text + s.separator + s.answer for s, text in zip(sentences, texts, strict=True)]
    batch = tokenizer(joined, return_offsets_mapping=True, return_attention_mask=False, return_token_type_ids=False)
    encodings = []
    for i, sentence in enumerate(sentences):
        answer_start = len(texts[i]) + len(sentence.separator)
        encoding = _cut(joined[i], answer_start, batch["input_ids"][i], batch["offset_mapping"][i], sentence)
        _check_boundary(sentence, encoding)
        encodings.append(encoding)
    return encodings


def without_bos(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The texts without a BOS that they begin with, where the tokenizer adds one of its own."""
    if not adds_bos(tokenizer):
        return list(texts)
    written = re.compile(rf"(?:\s*{re.escape(str(tokenizer.bos_token))})+")
    return [text[found.end() :] if (found := written.match(text)) else text for text in texts]


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer begins every text with its BOS."""
    return tokenizer.bos_token_id is not None and tokenizer("0")["input_ids"][0] == tokenizer.bos_token_id


def _name(prompt: Prompt) -> str:
    return f"prompt '{prompt.prompt_id}'"


def _cut(
    sentence: str, answer_start: int, ids: Sequence[int], spans: Sequence[tuple[int, int]], named: Sentence
) -> Encoding:
    """Leave out what a tokenizer adds after the answer (an EOS)."""
    of_answer = [i for i, (start, stop) in enumerate(spans) if stop > max(start, answer_start)]
    if not of_answer:
        raise UserError(
            f"{named.where}: the answer {named.answer!r} has no token that can be scored; "
            "write an answer that the tokenizer does not drop"
        )
    end = of_answer[-1] + 1
    return Encoding(sentence, answer_start, tuple(ids[:end]), tuple((start, stop) for start, stop in spans[:end]))


def _check_boundary(named: Sentence, encoding: Encoding) -> None:
    index = encoding.first_answer_index
    start = encoding.spans[index][0]
    shared = encoding.sentence[start : encoding.answer_start]
    if shared.strip():
        raise UserError(
            f"{named.where}: the answer {named.answer!r} begins inside the token "
            f"{encoding.token_text(index)!r}, which also holds {shared!r} of the text; "
            f"set the field separator (it is {named.separator!r}) so that the answer begins a token, for example ' '"
        )


def _check_ids(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise UserError("there are no prompts to tokenize")
    seen = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise UserError(f"prompt_id '{prompt.prompt_id}' is used twice; give each prompt its own")
        seen.add(prompt.prompt_id)


def unknown_words(encoding: Encoding, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Parts of the sentence that the tokenizer can only read as its unknown token."""
    if tokenizer.unk_token_id is None:
        return []
    unknown = [encoding.token_text(i) for i, token in enumerate(encoding.input_ids) if token == tokenizer.unk_token_id]
    # GPT-2's unknown token is also its BOS and EOS, which a text may well hold as such
    return [text for text in unknown if text and text != tokenizer.unk_token]


def _check_known(prompt: Prompt, encoding: Encoding, tokenizer: "PreTrainedTokenizerBase") -> None:
    unknown = unknown_words(encoding, tokenizer)
    if unknown:
        raise UserError(
            f"prompt '{prompt.prompt_id}': the tokenizer does not know {unknown[0]!r}; "
            "use other words, or a model whose tokenizer knows them"
        )


def _scored_tokens(prompt: Prompt, encoding: Encoding) -> tuple[ScoredToken, ...]:
    marks = scored_characters(prompt.answer)
    kinds = {i: _kind(encoding, i, marks) for i in range(encoding.first_answer_index, len(encoding.input_ids))}
    scored = [i for i, kind in kinds.items() if kind is not None]
    if not scored:
        raise UserError(
            f"prompt '{prompt.prompt_id}': the answer {prompt.answer!r} has no token that can be scored; "
            "write an answer with a digit or a word"
        )
    assert scored[0] > 0, f"prompt '{prompt.prompt_id}': no token before the answer"
    return tuple(
        ScoredToken(
            position=position,
            index=i,
            token_id=encoding.input_ids[i],
            token=encoding.token_text(i),
            kind=str(kinds[i]),
            carry_class=_carry_class(prompt, encoding, i),
        )
        for position, i in enumerate(scored)
    )


def _kind(encoding: Encoding, index: int, marks: dict[int, str] | None) -> str | None:
    """ "digit", "sign", "point" or "text" for a scored token, None for one that is not scored."""
    part = encoding.answer_part(index)
    if not part.strip():
        return None
    if marks is None:
        return "text"
    start = max(encoding.spans[index][0], encoding.answer_start) - encoding.answer_start
    found = {marks[i] for i in range(start, start + len(part)) if i in marks}
    return next((kind for kind in KINDS if kind in found), None)


def _distractor(
    prompt: Prompt, encoding: Encoding, rival: Encoding | None, scored: Sequence[ScoredToken]
) -> ScoredToken | None:
    """The distractor's token where it first differs from the answer; raises UserError if that is no scored token."""
    if rival is None:
        return None
    pairs = enumerate(zip(encoding.input_ids, rival.input_ids, strict=False))
    index = next((i for i, (gold, other) in pairs if gold != other), None)
    against = next((token for token in scored if token.index == index), None)
    if index is None or against is None:
        raise UserError(
            f"prompt '{prompt.prompt_id}': the distractor {prompt.distractor!r} differs from the answer"
            f" {prompt.answer!r} in no token that is scored; give another wrong answer"
        )
    return ScoredToken(
        position=-1 - against.position, index=index, token_id=rival.input_ids[index], token=rival.token_text(index),
        kind="distractor", carry_class=None,
    )  # fmt: skip


def _carry_class(prompt: Prompt, encoding: Encoding, index: int) -> str | None:
    """The common class of the columns a token covers, "mixed" if they differ, None for a sign or unknown columns."""
    classes = digit_classes(prompt.operation, prompt.operand_a, prompt.operand_b, prompt.answer)
    if classes is None:
        return None
    start, stop = encoding.spans[index]
    first_digit = encoding.answer_start + len(prompt.answer) - len(classes)
    covered = set(classes[max(start - first_digit, 0) : max(stop - first_digit, 0)])
    if not covered:
        return None
    return covered.pop() if len(covered) == 1 else MIXED


def same_alignment(reference: Encoding, counterfactual: Encoding) -> bool:
    """Whether positions correspond: as many tokens, and the same answer tokens at the same indices."""
    start = reference.first_answer_index
    return (
        len(reference.input_ids) == len(counterfactual.input_ids)
        and start == counterfactual.first_answer_index
        and reference.input_ids[start:] == counterfactual.input_ids[start:]
    )


def _check_aligned(
    prompt: Prompt, reference: Encoding, counterfactual: Encoding, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    if same_alignment(reference, counterfactual):
        return
    raise UserError(
        f"prompt '{prompt.prompt_id}': the counterfactual does not align: {len(reference.input_ids)} tokens "
        f"{tokens_of(reference, tokenizer)} against {len(counterfactual.input_ids)} tokens "
        f"{tokens_of(counterfactual, tokenizer)}; write a counterfactual with as many tokens as the text, for"
        " example by replacing words with others of as many tokens"
    )


def tokens_of(encoding: Encoding, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The vocabulary entries of a sentence, for messages."""
    return list(tokenizer.convert_ids_to_tokens(list(encoding.input_ids)))


def prompts_fingerprint(tokenized: Sequence[TokenizedPrompt]) -> str:
    """16 hex digits that identify the prompts, all their fields, and their token ids, in this order."""
    digest = hashlib.sha256()
    for item in tokenized:
        digest.update(json.dumps(item.as_fields(), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def token_columns(tokenized: Sequence[TokenizedPrompt]) -> dict[str, list[Any]]:
    """The columns of the ``answer_tokens`` table: prompt_id, position, token_id, token, kind, carry_class."""
    names = ("position", "token_id", "token", "kind", "carry_class")
    ids = [item.prompt.prompt_id for item in tokenized for _ in item.scored]
    return {"prompt_id": ids} | {
        name: [getattr(token, name) for item in tokenized for token in item.scored] for name in names
    }
