"""Training data: every form of record, loss on the responses, limits, and clear mistakes."""

import json
from pathlib import Path

import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.tuning.data import Sample, encode_examples, read_examples, within_limit
from tests.tiny import tiny_tokenizer


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


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
