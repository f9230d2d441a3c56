"""Training data: every form of record, loss on the responses, limits, and clear mistakes."""

import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts import load_prompts, read_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.tuning.data import Example, Sample, encode_examples, read_examples, within_limit
from mathinterp.tuning.layout import padded
from tests.json_lines import write
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level
from tests.tiny import tiny_tokenizer


def samples(count: int = 20) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    return [
        Sample(tuple(torch.randint(4, 160, (length,), generator=generator).tolist()), tuple(range(length - 3, length)))
        for length in lengths
    ]


def test_every_form_of_record(tmp_path):
    pairs = read_examples(
        write(
            tmp_path / "pairs.jsonl",
            {"prompt": "1 + 2 =", "response": "3"},
            "",
            {"prompt": "1 + 2 =\n", "response": "3"},
            {"prompt": "1+2=", "response": "3", "separator": ""},
        )
    )
    assert [(e.separator, e.where[-6:]) for e in pairs] == [(" ", "line 1"), ("", "line 3"), ("", "line 4")]
    (gsm,) = read_examples(
        write(tmp_path / "gsm.jsonl", {"question": "How many?", "answer": "2 + 1 = <<2+1=3>>3\n#### 3"})
    )
    assert gsm.prompt + gsm.separator + gsm.response == "Question: How many?\nAnswer: 2 + 1 = 3\n#### 3"
    (text,) = read_examples(write(tmp_path / "prompts.jsonl", {"text": "1 + 2 =", "answer": 3}))
    assert (text.prompt, text.separator, text.response) == ("1 + 2 =", " ", "3")
    assert len(read_examples("one_digit")) > 100


def test_loss_is_on_the_response_and_the_end_token(tmp_path):
    tokenizer = tiny_tokenizer()
    examples = read_examples(write(tmp_path / "a.jsonl", {"prompt": "1 5 plus 3 7 is", "response": "5 2"}))
    (sample,) = encode_examples(examples, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    assert tokens == ["<s>", "1", "5", "plus", "3", "7", "is", "5", "2", "</s>"]
    assert [tokens[i] for i in sample.answer] == ["5", "2", "</s>"]


TEXTS = ["1 plus 2 is 3", "12 + 30 = 42", "The answer: -5", "Q: What is 3? A:", "3-5=-2"]
TOKENIZERS = {
    "bundled": lambda: resolve(ModelSpec("bundled")).tokenizer,
    "tiny": tiny_tokenizer,
    "word level": lambda: word_level(TEXTS),
    "word level, no BOS": lambda: word_level(TEXTS, adds_bos=False),
    "word level, adds an EOS": lambda: word_level(TEXTS, adds_eos=True),
    "Llama's kind": lambda: llama_like(TEXTS),
    "GPT-2's kind": lambda: gpt2_like(TEXTS * 20, 300),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_training_reads_a_sentence_as_scans_do(kind):
    """The ids up to the end token are those of a scan's prompt, whatever BOS and EOS the text itself holds."""
    tokenizer = TOKENIZERS[kind]()
    bos = tokenizer.bos_token if tokenizer("3").input_ids[0] == tokenizer.bos_token_id else ""
    plain = [("1 plus 2 is", " ", "3"), ("12 + 30 =", " ", "42"), ("3-5=", "", "-2"), ("Q: What is 3? A:", " ", "3")]
    plain = [each for each in plain if kind != "GPT-2's kind" or each[1]]
    for text, separator, answer in plain:
        (scan,) = tokenize_prompts([Prompt("p", text, answer, separator=separator)], tokenizer)
        for before, after in (("", ""), (bos, ""), (bos + bos, tokenizer.eos_token), ("", tokenizer.eos_token + "\n")):
            (sample,) = encode_examples([Example("line 1", before + text, separator, answer + after)], tokenizer)
            assert sample.input_ids == (*scan.input_ids, tokenizer.eos_token_id), (before, after)
            assert sample.input_ids.count(tokenizer.eos_token_id) == 1
            assert sample.answer[-1] == len(scan.input_ids)
            assert {token.index for token in scan.scored} <= set(sample.answer)
            assert all(index > scan.end - 1 for index in sample.answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["signed_two_digit_test", "two_digit_words", "rationals"])
def test_training_reads_whole_sets_as_scans_do(name):
    tokenizer = resolve(ModelSpec("bundled")).tokenizer
    scans = tokenize_prompts(load_prompts(name), tokenizer)
    samples = encode_examples(read_examples(name), tokenizer)
    assert [sample.input_ids[:-1] for sample in samples] == [scan.input_ids for scan in scans]
    assert {sample.input_ids[-1] for sample in samples} == {tokenizer.eos_token_id}


def test_gsm8k_and_prompt_files_are_read_as_scans_read_them(tmp_path):
    tokenizer = llama_like(["Question: How many? Answer: 2 + 1 = 3 #### 3"])
    name = write(tmp_path / "p.jsonl", {"text": "<s>2 + 1 =", "answer": 3, "template": 7})
    (sample,) = encode_examples(read_examples(name), tokenizer)
    assert sample.input_ids[:-1] == tokenize_prompts(read_prompts(name), tokenizer)[0].input_ids
    record = {"question": "How many?", "answer": "2 + 1 = <<2+1=3>>3\n#### 3"}
    (sample,) = encode_examples(read_examples(write(tmp_path / "g.jsonl", record)), tokenizer)
    sentence = "Question: How many?\nAnswer: 2 + 1 = 3\n#### 3"
    assert list(sample.input_ids) == [*tokenizer(sentence).input_ids, tokenizer.eos_token_id]


def test_a_separator_that_merges_with_the_prompt_is_read_and_not_trained():
    tokenizer = gpt2_like(["Answer:\n5", "Answer:\n7"] * 40, 300)
    (sample,) = encode_examples([Example("line 1", "Answer:", "\n", "5")], tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    trained = [tokens[i] for i in sample.answer]
    assert trained[-2:] == ["5", "<|endoftext|>"]
    assert not any(":" in token for token in trained)


def test_a_bos_in_the_middle_and_a_response_that_is_an_eos_alone_are_refused():
    for example, message in (
        (Example("f, line 3", "1 plus 2 is", " ", "<s>3"), "f, line 3: the BOS '<s>' stands in the middle"),
        (Example("f, line 4", "1 plus 2 is", " ", "</s>"), "f, line 4: the response is empty but for its end token"),
        (Example("f, line 5", "<s>", " ", "3"), "f, line 5: the text is empty"),
    ):
        with pytest.raises(UserError, match=message):
            encode_examples([example], word_level(TEXTS))


def test_padding_that_is_the_end_token_leaves_the_real_one_trained():
    tokenizer = gpt2_like(TEXTS * 20, 300)  # no pad token: rows are filled with the EOS
    assert tokenizer.pad_token_id is None
    examples = [Example("1", "1 plus 2 is", " ", "3"), Example("2", "12 + 30 =", " ", "42 and 3 and 5")]
    data = encode_examples(examples, tokenizer)
    batch = padded(data, tokenizer.eos_token_id)
    assert batch["labels"].tolist().count(tokenizer.eos_token_id) == 2
    assert len(batch["labels"]) == sum(len(sample.answer) for sample in data)


def test_without_an_end_token_the_data_say_so():
    tokenizer = word_level(TEXTS)
    tokenizer.eos_token = None
    kept, budget = within_limit(encode_examples([Example("1", "1 plus 2 is", " ", "3")], tokenizer), 99)
    assert kept[0].input_ids == tuple(tokenizer("1 plus 2 is 3").input_ids)
    assert "in 1 samples an answer ends without an end token" in budget.line()


def test_a_sentence_has_one_end_token_where_the_tokenizer_adds_it():
    tokenizer = word_level(TEXTS, adds_eos=True)
    (sample,) = encode_examples([Example("p", "1 plus 2 is", " ", "3")], tokenizer)
    assert list(sample.input_ids) == tokenizer("1 plus 2 is 3").input_ids
    assert (sample.input_ids[-1], len(sample.answer)) == (2, 2)


def test_what_a_tokenizer_file_says_of_truncation_and_padding_changes_no_sentence():
    """The tokenizers library keeps both in tokenizer.json; scans never read them."""
    tokenizer, prompts = word_level(TEXTS), [Prompt("p", "12 + 30 =", "42"), Prompt("q", "1 plus 2 is", "3")]
    scans = tokenize_prompts(prompts, word_level(TEXTS))
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    examples = [Example(p.prompt_id, p.text, p.separator, p.answer) for p in prompts]
    assert [one.input_ids[:-1] for one in encode_examples(examples, tokenizer)] == [scan.input_ids for scan in scans]


def test_an_empty_system_message_is_a_message(tmp_path):
    turns = [{"role": "system", "content": ""}, {"role": "assistant", "content": "1"}]
    assert len(read_examples(write(tmp_path / "c.jsonl", {"messages": turns}))) == 1
    turns[1]["content"] = ""
    with pytest.raises(UserError, match="line 1: 'content' is empty"):
        read_examples(write(tmp_path / "c.jsonl", {"messages": turns}))


def test_numbers_in_training_data_keep_their_text(tmp_path):
    lines = ['{"prompt": "1 + 2 =", "response": 3.0, "separator": null}', '{"prompt": "1 + 2 =", "response": 1e3}']
    assert [example.response for example in read_examples(write(tmp_path / "a.jsonl", *lines))] == ["3.0", "1e3"]
    (chat,) = read_examples(write(tmp_path / "c.jsonl", '{"messages": [{"role": "assistant", "content": 7.50}]}'))
    assert chat.messages == (("assistant", "7.50"),)


def test_files_that_cannot_be_read_are_one_line_with_their_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    for content, message in (
        ('{"prompt": "1", "response": "2"}\n'.encode("utf-16"), "line 1: not UTF-8"),
        (b'{"prompt": "1", "response": "2"}\r\n\r\n{"prompt": "\xff"}', "line 3: not UTF-8"),
        (b"", "holds no training data"),
        (b"\r\n \n", "holds no training data"),
    ):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_examples(str(bad))
    bad.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "response": "2"}\r\n')
    assert len(read_examples(str(bad))) == 1
    with pytest.raises(UserError, match="is a folder; give a file"):
        read_examples(str(tmp_path))
    for name in ("x" * 5000, str(tmp_path / "none")):
        with pytest.raises(UserError, match="neither a file that exists nor a prompt set"):
            read_examples(name)


def test_conversations_train_every_answer_of_the_assistant(tmp_path):
    tokenizer = tiny_tokenizer()
    turns = [("user", "1 plus 2"), ("assistant", "3"), ("user", "2 plus 2"), ("assistant", "4")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    examples = read_examples(write(tmp_path / "chat.jsonl", record))
    with pytest.raises(UserError, match="line 1: messages need a chat template"):
        encode_examples(examples, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q : ' if m.role == 'user' else 'A : ' }}{{ m.content }}"
        "{% if m.role == 'assistant' %} ; {% else %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A : {% endif %}"
    )
    (sample,) = encode_examples(examples, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    assert [tokens[i] for i in sample.answer] == ["3", ";", "4", ";", "</s>"]
    assert sample.remarks == ("an answer ends without an end token",), "the first: the template ends it in plain text"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no training data"),
        ([{"prompt": "1", "response": "2"}, {"prompt": "1"}], "line 2: the field 'response' is missing"),
        ([{"question": "1"}], "line 1: the field 'answer' is missing"),
        ([{"text": "1"}], "line 1: the field 'answer' is missing"),
        ([{"prompt": "1", "response": " "}], "line 1: 'response' is empty"),
        ([{"prompt": "1", "response": [2]}], "line 1: 'response' must be text or a number, not \\[2\\]"),
        ([{"prompt": "1", "response": None}], "line 1: the field 'response' is missing"),
        ([{"prompt": 1, "response": 2}], "line 1: 'prompt' must be text, not 1"),
        (['{"prompt": "1", "response": NaN}'], "line 1: NaN is no JSON"),
        (['{"prompt": "1", "prompt": "2", "response": "3"}'], "line 1: the field 'prompt' is given twice"),
        (['{"prompt": "1", "response": "\\ud800"}'], "line 1: 'response' holds half of a surrogate pair"),
        ([{"prompt": "1", "response": "2"}, "[" * 100_000], "line 2: lists or objects are nested too deep"),
        ([{"messages": [{"role": "assistant", "content": "1", "weight": 0}]}], "line 1: turn 1 has the field 'weight'"),
        ([{"prompt": "1", "response": "2"}, "{"], "line 2: broken JSON"),
        ([{"sentence": "1"}], "line 1: no field tells"),
        ([{"messages": [{"role": "user", "content": "1"}]}], "line 1: 'messages' has no message of the assistant"),
    ],
)
def test_faulty_files(tmp_path, records, message):
    with pytest.raises(UserError, match=message):
        read_examples(write(tmp_path / "data.jsonl", *records))


def test_words_that_the_tokenizer_does_not_know(tmp_path):
    examples = read_examples(write(tmp_path / "a.jsonl", {"prompt": "1 plus 2 is", "response": "zebra"}))
    with pytest.raises(UserError, match="line 1: the tokenizer does not know 'zebra'"):
        encode_examples(examples, tiny_tokenizer())


def test_samples_over_the_limit_are_left_out_and_counted():
    kept, budget = within_limit(samples(), 9)
    assert 0 < len(kept) < 20
    assert (budget.samples, budget.left_out, budget.longest) == (len(kept), 20 - len(kept), 9)
    assert budget.tokens == sum(len(sample.input_ids) for sample in kept)
    assert budget.answer_tokens == 3 * len(kept)
    assert f"{budget.left_out} longer than 9 tokens left out" in budget.line()
    with pytest.raises(UserError, match="all 20 samples are longer"):
        within_limit(samples(), 2)
