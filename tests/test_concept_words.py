"""Concept lists, own files and their mistakes, and which tokens of three tokenizers spell which concept."""

from pathlib import Path

import pytest

from mathinterp.errors import UserError
from mathinterp.experiments.concepts.rows import match_vocabulary
from mathinterp.experiments.concepts.words import ConceptList, read_concepts, token_texts
from tests.prompt_tokenizers import gpt2_like, llama_like
from tests.tiny import VOCABULARY, tiny_tokenizer

# ---- concepts and tokens ----


def test_the_default_concepts_are_those_of_the_paper() -> None:
    found = read_concepts()
    names = set(found.names)
    assert {*"0123456789", "zero", "twenty", "ninety", "hundred", "thousand", "first", "II", "XX", "²", "plus"} <= names
    assert "I" not in names
    assert found.label == "default"
    assert found.numbers(["times", "equals", "equal", "−", "-", "zwei", "三", "I", "teapots", ""]) == [
        found.names.index("times"), found.names.index("equal"), found.names.index("equal"), found.names.index("-"),
        found.names.index("-"), found.names.index("zwei"), found.names.index("三"), None, None, None,
    ]  # fmt: skip


def test_small_letters_are_found_in_any_case_and_capitals_as_written() -> None:
    listed = ConceptList("test", (("two", "twice"), ("II",), ("V", "five")))
    texts = ["two", " Two", "TWICE", "▁two", "II", "ii", "Ii", "v", "V", "FIVE", None]
    assert listed.numbers(texts) == [0, 0, 0, 0, 1, None, None, None, 2, 2, None]


def test_tokens_of_three_tokenizers() -> None:
    listed = ConceptList("test", (("two",), ("2",), ("plus",)))
    tokenizer = llama_like(["two plus 2"])
    vocabulary = len(tokenizer) + 3  # rows of the unembedding without a token
    texts = token_texts(tokenizer, vocabulary)
    assert texts[tokenizer.convert_tokens_to_ids("<0x32>")] is None  # the byte of "2" is no word
    assert texts[tokenizer.bos_token_id] is None
    assert texts[-3:] == [None] * 3
    found = match_vocabulary(listed, tokenizer, vocabulary)
    spelled = {tokenizer.convert_ids_to_tokens(i): int(n) for i, n in enumerate(found.concept_V[:-3]) if n >= 0}
    assert spelled == {"▁two": 0, "2": 1, "▁plus": 2}
    assert (found.tokens, found.concepts) == (3, 3)
    assert found.shown[-1] == f'"<{vocabulary - 1}>"'

    bytes_level = gpt2_like(["two plus two plus 2"] * 20)
    found = match_vocabulary(listed, bytes_level, len(bytes_level))
    spelled = {bytes_level.convert_ids_to_tokens(i): int(n) for i, n in enumerate(found.concept_V) if n >= 0}
    assert {"two": 0, "Ġtwo": 0, "Ġplus": 2, "2": 1}.items() <= spelled.items()
    with pytest.raises(UserError, match="none of the 1 concepts of 'test' is a token of the model"):
        match_vocabulary(ConceptList("test", (("teapot",),)), tiny_tokenizer(), VOCABULARY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"broken JSON \(.* at column 2\)"),
        ('["two"]', "not a JSON object; write"),
        ('{"a": "two"}', "category 'a' must be a list of concepts, not a text"),
        ('{"a": [2]}', "category 'a': 2 is neither a spelling nor a list of spellings"),
        ('{"a": [[]]}', r"\[\] is neither a spelling"),
        ('{"a": [["two", null]]}', "null] is neither a spelling"),
        ('{"a": [" two"]}', "' two' is empty or has white space around it"),
        ('{"a": [""]}', "'' is empty"),
        ('{"a": ["two"], "b": [["deux", "two"]]}', "'two' stands in category 'a' and again in 'b'"),
        ('{"a": ["two"], "a": ["three"]}', "the field 'a' is given twice"),
        ('{"a": []}', "has no concepts"),
        (b"\xff", "not UTF-8; save the file as UTF-8"),
        (None, "cannot read concepts"),
    ],
)
def test_broken_concept_files(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as raised:
        read_concepts(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
