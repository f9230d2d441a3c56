"""Conversations as training data, under chat templates of every kind: what is read, and what carries loss."""

import pytest
from tokenizers import AddedToken, processors

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.tuning.chat import LEFT_OUT, NO_END
from mathinterp.tuning.data import Example, encode_examples, within_limit
from tests.prompt_tokenizers import gpt2_like

ROLES = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|bos|>"]
TEXTS = ["user\n1 + 1 =", "assistant\n2 apples", "system\nYou add. think Q: A:"] * 20

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "<|bos|>" + CHATML
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
TRIMMING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + GLM
DROPS_SYSTEM = GLM.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_BEFORE_THE_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
THINKING = (  # as Qwen3's: earlier turns lose their thoughts, the last gets an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content.split('</think>')[-1] %}"
    "{% if m.role == 'assistant' and loop.last %}{% if '</think>' in m.content %}{{ m.content }}"
    "{% else %}<think>\n\n</think>\n\n{{ c }}{% endif %}{% else %}{{ c }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS_WITH_A_THOUGHT = GLM.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>\n{% endif %}")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

ONE = (("user", "1 + 1 ="), ("assistant", "2"))
TWO = (*ONE, ("user", "2 + 2 ="), ("assistant", "4"))
WITH_SYSTEM = (("system", "You add."), *ONE)


def tokenizer(template: str | None, *, adds_bos: bool = False):
    found = gpt2_like(TEXTS, 330)
    found.add_tokens([AddedToken(token, special=True) for token in ROLES], special_tokens=True)
    if adds_bos:
        found.bos_token = "<|bos|>"
        found.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", found.convert_tokens_to_ids("<|bos|>"))]
        )
    found.chat_template = template
    return found


def encoded(template: str, turns, **kind):
    found = tokenizer(template, **kind)
    (sample,) = encode_examples([Example("chat, line 1", messages=turns)], found)
    return found, sample


def trained(template: str, turns, **kind) -> list[str]:
    """Runs of text with loss, special tokens spelled out."""
    found, sample = encoded(template, turns, **kind)
    runs: list[list[int]] = []
    for before, index in zip((None, *sample.answer), sample.answer, strict=False):
        if before is None or index != before + 1:
            runs.append([])
        runs[-1].append(sample.input_ids[index])
    return [found.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "turns", "runs"),
    [
        (CHATML, ONE, ["2<|im_end|>"]),  # the line feed behind it is never generated
        (CHATML, TWO, ["2<|im_end|>", "4<|im_end|>"]),
        (CHATML, WITH_SYSTEM, ["2<|im_end|>"]),
        (CHATML, (*ONE, ("user", "3")), ["2<|im_end|>"]),  # a last turn of the user's
        (CHATML, (("assistant", "2"), *TWO), ["2<|im_end|>", "2<|im_end|>", "4<|im_end|>"]),  # none asks for the first
        (WITH_BOS, TWO, ["2<|im_end|>", "4<|im_end|>"]),
        (GLM, ONE, ["2<|endoftext|>"]),
        (GLM, TWO, ["2<|user|>", "4<|endoftext|>"]),  # the mark of the next turn ends this one
        (GLM, WITH_SYSTEM, ["2<|endoftext|>"]),
        (PHI3, TWO, ["2<|end|>", "4<|end|>\n<|endoftext|>"]),
        (TRIMMING, (("user", " 1 + 1 = "), ("assistant", " 2 \n")), ["2<|im_end|>"]),
        (MARKED, TWO, ["2<|im_end|>", "4<|im_end|>"]),
        (MARKED_BEFORE_THE_END, TWO, ["2<|im_end|>", "4<|im_end|>"]),
        (THINKING, TWO, ["2<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
        (THINKING, (ONE[0], ("assistant", "<think>\nadd\n</think>\n\n2")), ["<think>\nadd\n</think>\n\n2<|im_end|>"]),
        (PLAIN, ONE, [" 2\n<|endoftext|>"]),
    ],
)
def test_what_the_assistant_writes_is_trained_and_the_end_of_its_turns_too(template, turns, runs):
    assert trained(template, turns) == runs


@pytest.mark.parametrize("template", [CHATML, GLM, PHI3, MARKED])
@pytest.mark.parametrize("end", ["<|endoftext|>", "{own}", "{own}\n", "<|endoftext|><|endoftext|>"])
def test_an_end_token_that_a_content_ends_with_is_not_doubled(template, end):
    own = {CHATML: "<|im_end|>", GLM: "<|user|>", PHI3: "<|end|>", MARKED: "<|im_end|>"}[template]
    end = end.format(own=own)
    turns = (ONE[0], ("assistant", f"2{end}"), *TWO[2:])
    assert trained(template, turns) == trained(template, TWO)


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, GLM, MARKED])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_conversation_is_read_as_a_scan_reads_its_text(template, adds_bos):
    """One BOS iff the template writes it or the tokenizer adds it, and the ids of plain transformers beside it."""
    found, sample = encoded(template, TWO, adds_bos=adds_bos)
    messages = [{"role": role, "content": content} for role, content in TWO]
    plain = found.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    bos = found.convert_tokens_to_ids("<|bos|>")
    own = [bos] if adds_bos and template != WITH_BOS else []
    end = [found.eos_token_id] if template == GLM else []
    assert list(sample.input_ids) == [*own, *plain, *end]
    assert sample.input_ids.count(bos) == (adds_bos or template == WITH_BOS)
    asked = found.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    (scan,) = tokenize_prompts([Prompt("p", asked, "4", separator="")], found)
    assert sample.input_ids[: len(scan.input_ids)] == scan.input_ids
    assert scan.scored[0].index in sample.answer
    assert scan.end not in sample.answer


def test_mistakes_are_named():
    cases = [
        (None, ONE, "messages need a chat template"),
        (NO_SYSTEM, WITH_SYSTEM, r"the chat template refuses the conversation \(System role not supported\)"),
        (DROPS_SYSTEM, WITH_SYSTEM, "leaves out turn 1, of the role 'system'"),
        ("{{ messages[0].nothing.more }}", ONE, "the chat template refuses the conversation"),
        ("{% for", ONE, "the chat template refuses the conversation"),
        (ASKS_WITH_A_THOUGHT, ONE, "turn 2 has no place"),
        (CHATML, (ONE[0], ("assistant", "<|im_end|>")), "turn 2 of the assistant is empty"),
    ]
    for template, turns, message in cases:
        with pytest.raises(UserError, match=r"^chat, line 1: .*" + message) as error:
            encoded(template, turns)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"turn 1 holds the BOS '<\|bos\|>'"):
        encoded(CHATML, (("user", "<|bos|>1"), ONE[1]), adds_bos=True)


def test_what_a_template_leaves_open_or_out_is_said():
    assert encoded(CHATML, TWO)[1].remarks == ()
    assert encoded(PLAIN, TWO)[1].remarks == (NO_END,)
    thought = (ONE[0], ("assistant", "<think>one</think>2"), *TWO[2:])
    _, sample = encoded(THINKING, thought)
    assert sample.remarks == (LEFT_OUT,)
    _, budget = within_limit([sample], 500)
    assert f"in 1 samples {LEFT_OUT}" in budget.line()
