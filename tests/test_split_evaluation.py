"""Evaluations of a model whose layers lie on two cards: the answers of one card.

Without GPUs the cards are those of two_cards.py, where any operation that mixes two fails.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from mathinterp.evaluation import greedy, harness
from mathinterp.evaluation.evaluate import Benchmark, PromptSetEvaluation
from mathinterp.evaluation.greedy import GreedyDecoder
from mathinterp.evaluation.harness import Answer, Harness
from mathinterp.evaluation.task_files import Document, TaskFile, own_examples, task_file
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.models.split import layers_of, spread
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from tests.harness_twin import WORD_ITEMS, small
from tests.test_harness import CHOICE_ITEMS
from tests.tiny import tiny_model, tiny_tokenizer
from tests.two_cards import KIND, on_cards

Split = Callable[[PreTrainedModel], AbstractContextManager[PreTrainedModel]]  # within it the model lies on two cards


@contextmanager
def on_gpus(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    spread(layers_of(model.to("cuda:0")), [torch.device("cuda:0"), torch.device("cuda:1")])
    yield model


@pytest.fixture(params=["stand-ins", pytest.param("GPUs", marks=pytest.mark.gpu)])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Split:
    if request.param == "GPUs":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        return on_gpus
    for sizes, of_cpu in (
        (greedy.MOST_PROMPTS, greedy.MOST_PROMPTS["cpu"]),
        (harness.LOGIT_BYTES, harness.LOGIT_BYTES["cpu"]),
        (harness.CACHE_BYTES, harness.CACHE_BYTES["cpu"]),
    ):
        monkeypatch.setitem(sizes, KIND, of_cpu)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # the harness's, which changes no dtype
    return on_cards


def home_of(split: Split) -> str:
    return "cuda:0" if split is on_gpus else "cpu"


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert replace(own, logprob=None) == replace(other, logprob=None)
        assert own.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=2e-5))


def test_evaluations_say_that_they_run_so() -> None:
    assert Benchmark.runs_split
    assert PromptSetEvaluation.runs_split


@pytest.mark.bundled
@pytest.mark.slow
def test_prompt_sets(split: Split) -> None:
    loaded = load(ModelSpec("bundled", dtype="float32"), home_of(split))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=70), loaded.tokenizer)
    whole = GreedyDecoder(loaded.model, loaded.tokenizer).answer(prompts)
    assert sum(answer.correct for answer in whole) > 60
    with split(loaded.model) as model:
        assert len(Anatomy(model).cards) == 2
        same(GreedyDecoder(model, loaded.tokenizer).answer(prompts), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "items", "words"),
    [(task_file("commonsense_qa"), CHOICE_ITEMS, "ABCDE"), (small(task_file("svamp")), WORD_ITEMS, "")],
    ids=["choices", "word problems"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_benchmarks(family: str, task: TaskFile, items: list[Document], words: str, split: Split) -> None:
    tokenizer, examples = tiny_tokenizer(words), own_examples(task)[:2]
    made = tiny_model(family, dtype=torch.float32).to(home_of(split))
    whole = Harness(made, tokenizer).answer(task, items, examples)
    with split(made) as model:
        assert len(Anatomy(model).cards) == 2
        same(Harness(model, tokenizer).answer(task, items, examples), whole)
