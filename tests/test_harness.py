"""Answers of lm-evaluation-harness and of our own decoding against plain forward passes, one at a time, no cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.evaluation import harness
from mathinterp.evaluation.greedy import GreedyDecoder
from mathinterp.evaluation.harness import Harness, require_harness
from mathinterp.evaluation.items import read_examples, read_items
from mathinterp.evaluation.numbers import final_number, starts_with_answer
from mathinterp.evaluation.task_files import own_examples, task_file
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import Prompt, load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from tests.harness_twin import WORD_ITEMS, decode_by_hand, small
from tests.small_benchmarks import write_benchmarks
from tests.tiny import tiny_model, tiny_tokenizer

# ---- the harness against plain forward passes ----


def by_hand(model: Any, ids: list[int], start: int) -> float:
    """Log-probability of ids[start:] after ids[:start], one forward pass."""
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))


CHOICE_ITEMS = [
    {"question": question, "choices": choices, "target": target, "subset": "x", "item_id": question}
    for question, choices, target in [
        ("What is 3 plus 4", ["7", "8", "9", "0", "1"], "A"),
        ("What is the sum of 1 and 2 and 3 and 4 plus 5 minus 6", ["1", "2", "3", "4", "5 plus 6"], "D"),
        ("two", ["3", "2", "1", "0", "9"], "B"),
    ]
]


@pytest.mark.slow
def test_log_likelihoods_are_those_of_plain_passes(anatomy: Anatomy) -> None:
    task, tokenizer = task_file("commonsense_qa"), tiny_tokenizer("ABCDE")
    tested = Harness(anatomy.model, tokenizer)
    examples = own_examples(task)[:2]
    answers = tested.answer(task, CHOICE_ITEMS, examples)
    shots = "".join(f"{task.text(example)} {example['target']}\n\n" for example in examples)
    for item, answer in zip(CHOICE_ITEMS, answers, strict=True):
        context = tokenizer(shots + task.text(item))["input_ids"]
        letters = [tokenizer(f"{shots}{task.text(item)} {letter}")["input_ids"] for letter in "ABCDE"]
        logprobs = [by_hand(anatomy.model, ids, len(context)) for ids in letters]
        assert answer.logprob == pytest.approx(logprobs["ABCDE".index(item["target"])], abs=2e-5)
        likeliest = "ABCDE"[max(range(5), key=logprobs.__getitem__)]
        assert (answer.response, answer.correct) == (likeliest, likeliest == item["target"])
        assert not answer.truncated


@pytest.mark.slow
def test_generated_text_is_that_of_greedy_decoding_by_hand(anatomy: Anatomy) -> None:
    task, tokenizer = small(task_file("svamp")), tiny_tokenizer()
    anatomy.model.generation_config.repetition_penalty = 5.0  # as some chat models have it: no greedy decoding
    tested = Harness(anatomy.model, tokenizer)
    for examples in ([], own_examples(task)[:1]):
        shots = "".join(f"{task.text(example)} {example['target']}\n\n" for example in examples)
        answers = tested.answer(task, WORD_ITEMS, examples)
        assert tested.lm.batch_size_per_gpu >= 3  # so that contexts of unlike length share a batch
        for item, answer in zip(WORD_ITEMS, answers, strict=True):
            ids = tokenizer(shots + task.text(item))["input_ids"]
            written = decode_by_hand(anatomy.model, ids, 8)
            assert answer.response == tokenizer.decode(written, skip_special_tokens=True).split("Question:")[0]
            number = final_number(answer.response)
            assert answer.predicted == (None if number is None else str(number))
            assert answer.correct == (number == 7)


def test_scoring_stops_and_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    task, tested = small(task_file("svamp")), Harness(tiny_model("llama"), tiny_tokenizer())
    replies = ["3 + 4 = 7\n#### 7", "#### 8", "no idea"]
    monkeypatch.setattr(tested.lm, "generate_until", lambda requests: replies[: len(requests)])
    found = tested.answer(task, WORD_ITEMS, [])
    assert [(a.correct, a.predicted, a.truncated) for a in found] == [
        (True, "7", False),
        (False, "8", False),
        (False, None, False),
    ]
    request = tested.build(task, WORD_ITEMS, own_examples(task)[:1])
    request.build_all_requests(rank=0, world_size=1)
    assert request.instances[0].args[1]["until"] == ["Question:"]
    assert request.instances[0].args[0] == (
        f"{task.text(own_examples(task)[0])} {own_examples(task)[0]['target']}\n\nQuestion: What is 3 plus 4 ?\nAnswer:"
    )
    long = {**WORD_ITEMS[0], "question": "plus " * 520}
    assert [a.truncated for a in tested.answer(task, [long, WORD_ITEMS[0]], [])] == [True, False]
    with pytest.raises(UserError, match="more than the 512 tokens"):
        tested.answer(small(task, new=512), WORD_ITEMS, [])


def test_mmlu_contexts_name_the_subject(tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    task = task_file("mmlu")
    items, examples = read_items(task, str(data)), read_examples(task, str(data), "train", 5, 0)
    built = Harness(tiny_model("llama"), tiny_tokenizer()).build(task, items[6:7], examples["us_history"])
    context = built.fewshot_context(items[6], 5)
    assert context.startswith(
        "The following are multiple choice questions (with answers) about us history.\n\n"
        "dev year 0?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\ndev year 1?"
    )
    assert context.endswith("Answer: A\n\ntest year 0?\nA. w\nB. x\nC. y\nD. z\nAnswer:")


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    task, tested = task_file("commonsense_qa"), Harness(tiny_model("llama"), tiny_tokenizer("ABCDE"))
    whole = tested.answer(task, CHOICE_ITEMS, [])
    call, sizes = tested.lm._model_call, []

    def small_memory(inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(len(inputs))
        if len(inputs) > 1:
            raise torch.OutOfMemoryError
        return call(inputs, **options)

    monkeypatch.setattr(tested.lm, "_model_call", small_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    halved = tested.answer(task, CHOICE_ITEMS, [])
    assert sizes[0] > 1
    assert sizes[-1] == 1
    assert [a.response for a in halved] == [a.response for a in whole]
    assert [a.logprob for a in halved] == pytest.approx([a.logprob for a in whole], abs=1e-5)


def test_without_the_harness_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lm-eval>=0\.4\.13'"):
        require_harness()


# ---- prompt sets by greedy decoding ----


def test_prompt_sets_are_decoded_as_by_hand(anatomy: Anatomy) -> None:
    tokenizer = tiny_tokenizer()
    prompts = tokenize_prompts(load_prompts("two_digit", limit=4), tokenizer)
    decoder = GreedyDecoder(anatomy.model, tokenizer)
    for prompt, answer in zip(prompts, decoder.answer(prompts), strict=True):
        context = list(prompt.input_ids[: prompt.end + 1])  # this tokenizer has no token for the separator
        assert decoder.context(prompt) == context
        longest = max(len(p.prompt.answer) for p in prompts) + 3
        written = decode_by_hand(anatomy.model, context, longest)
        assert answer.response == decoder.text(written)
        assert answer.correct == starts_with_answer(answer.response, prompt.prompt.answer)


def test_the_separator_is_written_by_the_model_and_run_on_numbers_are_wrong() -> None:
    found = resolve(ModelSpec("random:llama-tiny"))  # a tokenizer with a token for the space
    prompt = tokenize_prompts([Prompt("a", "3 plus 5 is", "8")], found.tokenizer)[0]
    decoder = GreedyDecoder(tiny_model("llama"), found.tokenizer)
    assert len(decoder.context(prompt)) <= prompt.end + 1
    assert found.tokenizer.decode(decoder.context(prompt), skip_special_tokens=True) == "3 plus 5 is"
    again = tokenize_prompts([Prompt("a", f"{found.tokenizer.bos_token}3 plus 5 is", "8")], found.tokenizer)[0]
    assert decoder.context(again) == decoder.context(prompt), "one BOS, whether the text holds it or not"
    words = GreedyDecoder(tiny_model("llama"), tiny_tokenizer())
    ids = [words.tokenizer.convert_tokens_to_ids(word) for word in ("4", "7", "</s>", "1")]
    assert words.text(ids) == "47"


@pytest.mark.bundled
def test_the_bundled_model_answers_as_teacher_forcing_says() -> None:
    loaded = load(ModelSpec("bundled"), "cpu")
    prompts = tokenize_prompts(load_prompts("three_digit", limit=24), loaded.tokenizer)
    baseline = PlainEngine(loaded.anatomy, prompts)
    scores = baseline.baseline()
    forced = [bool(scores.correct_EA[0][baseline.answers.prompt_A == i].all()) for i in range(len(prompts))]
    answers = GreedyDecoder(loaded.model, loaded.tokenizer).answer(prompts)
    # Its tokenizer has no space token, so greedy decoding can differ only by running on after the last digit.
    assert 0 < sum(forced) < len(prompts)
    for right, prompt, answer in zip(forced, prompts, answers, strict=True):
        assert answer.correct <= right
        if right and not answer.correct:
            assert answer.response.startswith(prompt.prompt.answer)
