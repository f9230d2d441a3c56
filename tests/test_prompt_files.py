"""Prompt files in and out: the contract's fields, and every mistake a user can make in one."""

import os

import pytest

from mathinterp.errors import UserError
from mathinterp.prompts import Prompt, load_prompts, prompt_set, read_prompts, write_prompts
from mathinterp.prompts.files import FIELDS

GOOD = '{"text": "3 plus 5 is", "answer": "8"}\n'


def written(tmp_path, content: str | bytes):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_only_text_and_answer_are_required(tmp_path):
    assert read_prompts(written(tmp_path, GOOD)) == [Prompt("1", "3 plus 5 is", "8")]


def test_the_default_prompt_id_is_the_line_number_blank_lines_counted(tmp_path):
    prompts = read_prompts(written(tmp_path, GOOD + "\n" + GOOD))
    assert [p.prompt_id for p in prompts] == ["1", "3"]


def test_every_field_is_read(tmp_path):
    line = (
        '{"prompt_id": "p", "text": "3+5=", "answer": 8, "operation": "add", "operand_a": 3, "operand_b": "5", '
        '"template": "t", "counterfactual": "3<5=", "separator": ""}'
    )
    expected = Prompt("p", "3+5=", "8", "add", "3", "5", "t", "3<5=", "")
    assert read_prompts(written(tmp_path, line)) == [expected]


def test_names_and_numbers_may_be_any_json_scalar_and_keep_their_text(tmp_path):
    long = "9" * 5000  # more digits than Python turns into an integer
    lines = [
        '{"prompt_id": 1.0, "text": "x", "answer": 8.50, "template": 3, "operation": 2, "operand_a": 1e3}',
        f'{{"prompt_id": true, "text": "x", "answer": {long}, "template": false, "operand_b": -0.0}}',
        '{"prompt_id": 9007199254740993, "text": "x", "answer": -0, "template": null, "operation": true}',
    ]
    assert read_prompts(written(tmp_path, "\n".join(lines))) == [
        Prompt("1.0", "x", "8.50", "2", "1e3", None, "3"),
        Prompt("true", "x", long, None, None, "-0.0", "false"),
        Prompt("9007199254740993", "x", "-0", "true"),
    ]


def test_names_that_no_file_can_have_are_not_there():
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(UserError, match="neither a prompt file that exists nor a prompt set"):
            load_prompts(name)


def test_null_means_absent(tmp_path):
    line = '{"text": "3+5=", "answer": "8", "operation": null, "separator": null}'
    assert read_prompts(written(tmp_path, line)) == [Prompt("1", "3+5=", "8")]


def test_byte_order_mark_carriage_returns_and_unicode_line_separators_do_no_harm(tmp_path):
    content = '\ufeff{"text": "a\u2028b is", "answer": "8"}\r\n{"text": "c is", "answer": "9"}\r\n'
    assert [p.text for p in read_prompts(written(tmp_path, content))] == ["a\u2028b is", "c is"]


@pytest.mark.parametrize("name", ["two_digit", "one_digit_equals", "two_digit_words"])
def test_written_files_come_back_unchanged(tmp_path, name):
    prompts = prompt_set(name, limit=50)
    write_prompts(prompts, tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.jsonl") == prompts
    assert os.listdir(tmp_path) == ["p.jsonl"]


def test_load_prompts_reads_files_and_limits_them(tmp_path):
    prompts = prompt_set("two_digit")
    write_prompts(prompts, tmp_path / "p.jsonl")
    assert load_prompts(tmp_path / "p.jsonl") == prompts
    assert load_prompts(str(tmp_path / "p.jsonl"), limit=32) == prompt_set("two_digit", limit=32)


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = written(tmp_path, GOOD)
    broken = [Prompt("1", "3 plus 5 is", "8"), Prompt("2", "x", {"not": "text"}.keys())]  # json cannot write this
    with pytest.raises(TypeError):
        write_prompts(broken, path)
    assert path.read_text() == GOOD
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_a_folder_that_is_missing_cannot_be_written_to(tmp_path):
    path = tmp_path / "no" / "p.jsonl"
    with pytest.raises(UserError) as error:
        write_prompts([Prompt("1", "x", "1")], path)
    assert str(error.value) == f"cannot write prompts to {path}: No such file or directory"


FIELD_LIST = ", ".join(FIELDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD + '{"text": "x", \n',
            "{path}, line 2: broken JSON (Expecting property name enclosed in double quotes at",
        ),
        (GOOD + '["x", "8"]', '{path}, line 2: not a JSON object; write {{"text": ..., "answer": ...}}'),
        (GOOD + '{"answer": "8"}', "{path}, line 2: the field 'text' is missing"),
        (GOOD + '{"text": "x"}', "{path}, line 2: the field 'answer' is missing"),
        ('{"text": "x", "answer": null}', "{path}, line 1: the field 'answer' is missing"),
        ('{"text": "x", "answer": ""}', "{path}, line 1: 'answer' is empty"),
        ('{"text": "x", "answer": " "}', "{path}, line 1: 'answer' is empty"),
        ('{"text": "", "answer": "8"}', "{path}, line 1: 'text' is empty"),
        ('{"text": 5, "answer": "8"}', "{path}, line 1: 'text' must be text, not 5"),
        ('{"text": "x", "answer": true}', "{path}, line 1: 'answer' must be text or a number, not true"),
        ('{"text": "x", "answer": ["8"]}', "{path}, line 1: 'answer' must be text or a number, not [\"8\"]"),
        ('{"text": "x", "answer": [8.50]}', "{path}, line 1: 'answer' must be text or a number, not [8.50]"),
        ('{"text": "x", "answer": NaN}', "{path}, line 1: NaN is no JSON; write a number or text"),
        ('{"text": "x", "answer": -Infinity}', "{path}, line 1: -Infinity is no JSON; write a number or text"),
        (
            '{"text": "x", "answer": "8", "prompt_id": {"a": 3}}',
            "{path}, line 1: 'prompt_id' must be text, a number, true or false, not {{\"a\": 3}}",
        ),
        (GOOD + "[" * 100_000, "{path}, line 2: lists or objects are nested too deep to read"),
        ('{"text": "x", "answer": "8", "separator": 0}', "{path}, line 1: 'separator' must be text, not 0"),
        (
            '{"text": "x", "answer": "8", "anwser": "8"}',
            f"{{path}}, line 1: unknown field 'anwser'; the fields are {FIELD_LIST}",
        ),
        ('{"text": "x", "text": "y", "answer": "8"}', "{path}, line 1: the field 'text' is given twice"),
        (
            '{"text": "x", "answer": "\\ud800"}',
            "{path}, line 1: 'answer' holds half of a surrogate pair, which is no character",
        ),
        (
            '{"prompt_id": "2", "text": "x", "answer": "8"}\n' + GOOD,
            "{path}, line 2: prompt_id '2' is already that of line 1; give each prompt its own",
        ),
        (
            '{"prompt_id": 7, "text": "x", "answer": 8}\n{"prompt_id": "7", "text": "x", "answer": 8}\n',
            "{path}, line 2: prompt_id '7' is already that of line 1; give each prompt its own",
        ),
        (GOOD.encode("utf-16"), "{path}, line 1: not UTF-8; save the file as UTF-8"),
        ("", "{path} holds no prompts; write one JSON object with text and answer per line"),
        ("\n \n", "{path} holds no prompts; write one JSON object with text and answer per line"),
        (
            GOOD.encode() + b'{"text": "\xff", "answer": "8"}',
            "{path}, line 2: not UTF-8; save the file as UTF-8",
        ),
    ],
)
def test_faulty_files_are_named_with_their_line(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(UserError) as error:
        read_prompts(tmp_path / "none.jsonl")
    assert str(error.value) == f"cannot read prompts from {tmp_path / 'none.jsonl'}: No such file or directory"
    with pytest.raises(UserError) as error:
        load_prompts(tmp_path)
    assert str(error.value) == f"cannot read prompts from {tmp_path}: Is a directory"


def test_an_operation_named_all_is_refused(tmp_path) -> None:
    """Results call the mean over operations 'all'; an operation of that name would be mixed up with it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "1 + 1 =", "answer": 2, "operation": "all"}\n')
    with pytest.raises(UserError, match=r"line 1: operation 'all' stands for the mean"):
        read_prompts(path)
