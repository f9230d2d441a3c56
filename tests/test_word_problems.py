"""Public files of word problems: what each record becomes, on invented records, and every mistake in a file."""

import json

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.prompts import Prompt, load_prompts, read_prompts, read_word_problems, write_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import with_counterfactuals
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level

SVAMP = {
    "ID": "mine-1",
    "Body": "A baker sold 12 loaves in the morning. He baked 40 loaves on that day",
    "Question": "How many loaves were left?",
    "Equation": "( 40.0 - 12.0 )",
    "Answer": 28.0,
    "Type": "Subtraction",
}
EQUATION = {"iIndex": 7, "sQuestion": " A cup costs $ 2.50 . What do 4 cups cost ? ", "lEquations": ["X = 2.5 * 4"]}
EQUATION |= {"lSolutions": ["10.0"], "lAlignments": [3, 5]}
GSM8K = {
    "question": "A hive has 1,500 bees. Half leave. How many stay?",
    "answer": "1500/2 = <<1500/2=750>>750\n#### 750",
}


def array(tmp_path, *records) -> str:
    path = tmp_path / "public.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return str(path)


def lines(tmp_path, *records) -> str:
    path = tmp_path / "public.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def svamp(tmp_path, **fields) -> Prompt:
    return read_word_problems("svamp", array(tmp_path, SVAMP | fields))[0]


def equation(tmp_path, text: str, **fields) -> Prompt:
    return read_word_problems("addsub", array(tmp_path, EQUATION | {"lEquations": [text]} | fields))[0]


def test_a_svamp_record_becomes_a_question_with_its_operands_in_the_order_of_the_text(tmp_path):
    assert svamp(tmp_path) == Prompt(
        prompt_id="mine-1",
        text=(
            "Question: A baker sold 12 loaves in the morning. He baked 40 loaves on that day. "
            "How many loaves were left? Answer:"
        ),
        answer="28",
        operation="sub",
        operand_a="12",
        operand_b="40",
        template="svamp",
    )


@pytest.mark.parametrize("end", [".", "!", "?"])
def test_a_body_that_ends_a_sentence_gets_no_second_point(tmp_path, end):
    text = svamp(tmp_path, Body=f"He has 40 and 12{end} ", Question=" How many? ").text
    assert text == f"Question: He has 40 and 12{end} How many? Answer:"


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("Addition", "add"), ("Subtraction", "sub"), ("Multiplication", "mul"),
        ("Common-Division", "div"), ("Common-Divison", "div"),
    ],
)  # fmt: skip
def test_the_published_types_of_svamp(tmp_path, kind, operation):
    assert svamp(tmp_path, Type=kind).operation == operation


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (28.0, "28"), (28, "28"), ("28.0", "28"), ("14696.0", "14696"), (22090603.0, "22090603"), (-3.0, "-3"),
        (11.5, "11.5"), ("9.430", "9.43"), (0.1, "0.1"), (0.6666666666666666, "0.6666666666666666"), (100, "100"),
        (1e-7, "0.0000001"), (0.0, "0"),
    ],
)  # fmt: skip
def test_answers_have_no_closing_zeros_and_no_exponent(tmp_path, value, answer):
    assert svamp(tmp_path, Answer=value).answer == answer
    assert equation(tmp_path, "x = 1 + 2", lSolutions=[value]).answer == answer


@pytest.mark.parametrize(
    ("body", "equation_text", "operands"),
    [
        ("She had 5 and got 5 more.", "( 5.0 + 5.0 )", ("5", "5")),
        ("Each of the 5 got as much as he had.", "( 5.0 + 5.0 )", (None, None)),  # one of the two is not in the text
        ("Of 9 he gave 3 away and lost 2.", "( ( 9.0 - 3.0 ) - 2.0 )", (None, None)),  # three numbers
        ("From 1,250 they took 50.", "( 1250.0 - 50.0 )", ("1,250", "50")),
        ("It cost $ 2.50 and 0.5 more.", "( 2.5 + 0.5 )", ("2.50", "0.5")),
        ("First 7 then 3 then 8.", "( 8.0 - 3.0 )", ("3", "8")),
    ],
)
def test_operands_are_those_of_the_equation_as_the_text_writes_them(tmp_path, body, equation_text, operands):
    prompt = svamp(tmp_path, Body=body, Question="How many?", Equation=equation_text)
    assert (prompt.operand_a, prompt.operand_b) == operands


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("X = 70 - 27", "sub"), ("45*3=x", "mul"), ("X=((32.0+42.0)-35.0)", "sub"), ("X=((3.0+4.0)/7.0)", "div"),
        ("(2*3)+4=x", "add"), ("1 + 2 + 3 = x", "add"),
        ("70-x=27", "mixed"), ("8=2+x", "mixed"), ("X = 0.32 = 0.21", "mixed"), ("x = 5", "mixed"),
        ("3*4=x*2", "mixed"),
    ],
)  # fmt: skip
def test_the_operation_is_the_last_step_of_a_solved_equation(tmp_path, text, operation):
    assert equation(tmp_path, text).operation == operation


@pytest.mark.parametrize("name", ["addsub", "singleeq", "multiarith"])
def test_a_file_of_equations(tmp_path, name):
    assert load_prompts(f"{name}:{array(tmp_path, EQUATION)}") == [
        Prompt(
            prompt_id=f"{name}-7",
            text="Question: A cup costs $ 2.50 . What do 4 cups cost ? Answer:",
            answer="10",
            operation="mul",
            operand_a="2.50",
            operand_b="4",
            template=name,
        )
    ]


@pytest.mark.parametrize(("final", "answer"), [("750", "750"), ("2,125,000", "2125000"), ("-10", "-10")])
def test_gsm8k_takes_the_final_answer_alone(tmp_path, final, answer):
    problem = GSM8K | {"answer": f"Half of it.\n#### {final}"}
    prompts = load_prompts(f"gsm8k:{lines(tmp_path, GSM8K, problem)}")
    assert [p.prompt_id for p in prompts] == ["gsm8k-1", "gsm8k-2"]
    assert prompts[0].text == "Question: A hive has 1,500 bees. Half leave. How many stay? Answer:"
    assert (prompts[1].answer, prompts[1].operation, prompts[1].operand_a) == (answer, "mixed", None)


def test_a_limit_spreads_over_the_operations(tmp_path):
    records = [SVAMP | {"ID": f"{kind}-{i}", "Type": kind} for kind in ("Addition", "Subtraction") for i in range(6)]
    prompts = load_prompts(f"svamp:{array(tmp_path, *records)}", limit=4)
    assert [p.operation for p in prompts] == ["add", "add", "sub", "sub"]


@pytest.mark.parametrize("build", [word_level, llama_like, gpt2_like])
def test_the_answer_is_a_token_of_its_own_on_every_kind_of_tokenizer(tmp_path, build):
    prompt = svamp(tmp_path)
    (item,) = tokenize_prompts([prompt], build([prompt.text] * 20))
    assert "".join(token.token for token in item.scored).strip() == "28"
    assert item.prompt.text.endswith("Answer:")


def test_word_problems_have_no_counterfactuals_even_where_they_hold_an_operator_word(tmp_path):
    prompt = svamp(tmp_path, Body="A total of 40 plus 12 loaves", Type="Addition")
    with pytest.raises(UserError) as error:
        with_counterfactuals([prompt], word_level([prompt.text, "nothing pair"]))
    assert str(error.value) == (
        "prompt 'mine-1': a word problem (svamp) has no operator to make neutral; take another set, or write this one "
        "to a file (mathinterp prompts `out`) and add the field counterfactual there"
    )


def test_a_counterfactual_written_into_the_file_is_taken(tmp_path):
    prompt = svamp(tmp_path)
    write_prompts([prompt], tmp_path / "mine.jsonl")
    record = json.loads((tmp_path / "mine.jsonl").read_text())
    record["counterfactual"] = record["text"].replace("left", "sold")
    (tmp_path / "mine.jsonl").write_text(json.dumps(record))
    prompts = read_prompts(tmp_path / "mine.jsonl")
    tokenizer = word_level([prompt.text])
    (item,) = tokenize_prompts(with_counterfactuals(prompts, tokenizer), tokenizer)
    assert sum(x != y for x, y in zip(item.input_ids, item.counterfactual_ids, strict=True)) == 1


def test_the_bundled_model_does_not_know_the_words(tmp_path):
    result = CliRunner().invoke(main, ["prompts", "--prompts", f"svamp:{array(tmp_path, SVAMP)}"])
    assert result.exit_code != 0
    message = result.stderr if result.stderr else str(result.exception)
    assert "prompt 'mine-1': the tokenizer does not know 'Question'" in message


SVAMP_FIELDS = "ID, Body, Question, Equation, Answer, Type"


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        *(
            ("svamp", {key: value for key, value in SVAMP.items() if key != field}, f"the field '{field}' is missing")
            for field in SVAMP
        ),
        ("svamp", SVAMP | {"Answer": None}, f"the field 'Answer' is missing; the fields are {SVAMP_FIELDS}"),
        ("svamp", SVAMP | {"Answer": "many"}, "'Answer' must be a number, not \"many\""),
        ("svamp", SVAMP | {"Answer": True}, "'Answer' must be a number, not true"),
        ("svamp", SVAMP | {"Answer": "Infinity"}, "'Answer' must be a number, not \"Infinity\""),
        ("svamp", SVAMP | {"Answer": float("nan")}, "'Answer' must be a number, not NaN"),
        ("svamp", SVAMP | {"Answer": "1e999999999"}, "'Answer' must be a number, not \"1e999999999\""),
        ("svamp", SVAMP | {"Body": " "}, "'Body' must be text, not \" \""),
        ("svamp", SVAMP | {"ID": 5}, "'ID' must be text, not 5"),
        ("svamp", SVAMP | {"Type": "Root"}, "Type 'Root' is not known; the types are Addition, Subtraction, "),
        ("svamp", [1], f"not a JSON object with the fields {SVAMP_FIELDS}"),
        ("svamp", EQUATION, "the field 'ID' is missing"),
        ("addsub", SVAMP, "the field 'iIndex' is missing; the fields are iIndex, sQuestion, lEquations, lSolutions"),
        ("addsub", EQUATION | {"iIndex": "7"}, "'iIndex' must be a whole number, not \"7\""),
        ("addsub", EQUATION | {"lSolutions": []}, "'lSolutions' must be a list of one, not []"),
        ("addsub", EQUATION | {"lSolutions": [1, 2]}, "'lSolutions' must be a list of one, not [1, 2]"),
        ("addsub", EQUATION | {"lSolutions": ["x"]}, "'lSolutions' must be a number, not \"x\""),
        ("addsub", EQUATION | {"lEquations": [3]}, "'lEquations' must be a list of one text, not [3]"),
        ("addsub", EQUATION | {"lEquations": ["x = 3 +"]}, "the equation 'x = 3 +' cannot be read"),
        ("gsm8k", {"question": "How many?"}, "the field 'answer' is missing; the fields are question, answer"),
        ("gsm8k", GSM8K | {"answer": "750"}, "'answer' has no final answer after '####'"),
        ("gsm8k", GSM8K | {"answer": "#### some"}, "'answer' must be a number, not \"some\""),
    ],
)
def test_a_faulty_record_is_named(tmp_path, name, record, message):
    good = {"svamp": SVAMP | {"ID": "good"}, "addsub": EQUATION | {"iIndex": 1}, "gsm8k": GSM8K}[name]
    path = lines(tmp_path, good, record) if name == "gsm8k" else array(tmp_path, good, record)
    with pytest.raises(UserError) as error:
        read_word_problems(name, path)
    assert str(error.value).startswith(f"{path}, {'line' if name == 'gsm8k' else 'record'} 2: {message}")
    assert "\n" not in str(error.value)


def test_an_id_used_twice_is_named(tmp_path):
    path = array(tmp_path, SVAMP, SVAMP)
    with pytest.raises(UserError) as error:
        load_prompts(f"svamp:{path}")
    assert str(error.value) == f"{path}, record 2: the id 'mine-1' is used twice; give each problem its own"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("svamp", b"[\n{,}]", "{path}, line 2: broken JSON (Expecting property name enclosed in double quotes at col"),
        ("svamp", b"[" * 100_000, "{path}: lists or objects are nested too deep to read"),
        ("svamp", b"[" + b"9" * 5000 + b"]", "{path}: a number is too long to read; write it as text"),
        ("svamp", b"{}", "{path}: not a JSON array of records; give the file as it is published"),
        ("svamp", b"[]", "{path} holds no word problems"),
        ("svamp", b'["\xff"]', "{path}: not UTF-8; save the file as UTF-8"),
        ("gsm8k", b"\n{oh", "{path}, line 2: broken JSON ("),
        ("gsm8k", b"\n \n", "{path} holds no word problems"),
    ],
)
def test_a_faulty_file_is_named(tmp_path, name, content, message):
    path = tmp_path / "public"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_prompts(f"{name}:{path}")
    assert str(error.value).startswith(message.format(path=path))


def test_a_missing_file_and_a_missing_path_are_named(tmp_path):
    with pytest.raises(UserError) as error:
        load_prompts(f"svamp:{tmp_path / 'none.json'}")
    assert str(error.value) == f"cannot read word problems from {tmp_path / 'none.json'}: No such file or directory"
    with pytest.raises(UserError, match=r"^cannot read word problems from \.: Is a directory$"):
        load_prompts("svamp:")
