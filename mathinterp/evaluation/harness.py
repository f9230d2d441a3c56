"""The adapter to EleutherAI's lm-evaluation-harness: a loaded model and a block of items in, one answer an item out.

Knows the harness's Task and HFLM; knows nothing about files, shards or stores. The harness builds the contexts (with
the worked examples), batches, decodes greedily or sums log-likelihoods; scoring of numbers is ours (numbers.py).
Checked against plain forward passes, one prompt at a time, in tests/test_harness.py.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from mathinterp.engine.batching import free_memory
from mathinterp.errors import UserError
from mathinterp.evaluation.numbers import final_number, same_number
from mathinterp.evaluation.task_files import Document, TaskFile
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.masks import keep_masks_finite

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

INSTALL = "pip install 'lm-eval>=0.4.13' (or the extra mathinterp[evaluation])"
MOST_ITEMS = 64  # in one batch
LOGIT_BYTES = {"cuda": 4e9, "cpu": 1e9}  # what the logits of one batch may take: bytes, by device
CACHE_BYTES = {"cuda": 16e9, "cpu": 2e9}  # what keys and values of one batch may take while text is generated


@dataclass(frozen=True)
class Answer:
    """What a model answered to one item."""

    correct: bool
    response: str  # the text it wrote; under multiple choice the letter of the likeliest choice
    predicted: str | None  # the number or letter read from it
    target: str
    logprob: float | None  # of the right choice, nats; None where text is generated
    truncated: bool  # whether the context was cut on the left to fit the model


def require_harness() -> None:
    """Raise UserError unless lm-evaluation-harness is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"benchmarks need the package lm-eval: {INSTALL}")


class Harness:
    """A model inside the harness. Items never leave memory, so nothing is downloaded and no data set is cached."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        require_harness()
        os.environ["HF_DATASETS_OFFLINE"] = "1"  # before the import below reads it
        for name in ("lm-eval", "lm_eval"):
            logging.getLogger(name).setLevel(logging.ERROR)
        from lm_eval.models.huggingface import HFLM

        plain_greedy(model, tokenizer)
        self.lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype="float32")
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        shape = model_shape(model.config)
        self._positions = shape.positions
        if model.dtype == torch.float64:  # the harness pads on the left, where a row sees nothing
            anatomy = Anatomy(model)
            for layer in range(shape.n_layers):
                keep_masks_finite(anatomy.attention(layer))
        self._cached_bytes = 2 * shape.n_layers * shape.n_groups * shape.d_head * model.dtype.itemsize  # a token's

    def answer(self, task: TaskFile, items: Sequence[Document], examples: Sequence[Document]) -> list[Answer]:
        """The model's answers to ``items``, each after the same worked ``examples`` (none: asked directly).

        A batch that does not fit in memory is halved; raises torch.OutOfMemoryError if a single item does not fit.
        """
        built = self.build(task, items, examples)
        contexts = [built.fewshot_context(item, len(examples)) for item in items]
        lengths = [len(self.lm.tok_encode(context)) for context in contexts]
        room = self.lm.max_length - (0 if task.multiple_choice else task.config["generation_kwargs"]["max_gen_toks"])
        if room < 1:
            raise UserError(f"{task.title} needs more than the {self.lm.max_length} tokens that the model can read")
        batch = self.batch_size(min(max(lengths), room), task)
        while True:
            self.lm.batch_size_per_gpu = batch
            try:
                samples = self._evaluate(built)
                break
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
            free_memory()
            batch = max(1, batch // 2)
            built = self.build(task, items, examples)
        read = _read_choice if task.multiple_choice else _read_number
        return [
            read(sample, item, task, truncated=length > room)
            for sample, item, length in zip(samples, items, lengths, strict=True)
        ]

    def build(self, task: TaskFile, items: Sequence[Document], examples: Sequence[Document]) -> "ConfigurableTask":
        """The harness's task over exactly these items and examples."""
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask

        config = {
            **task.config,
            "custom_dataset": lambda **_: {"test": Dataset.from_list(list(items))},
            "test_split": "test",
            "num_fewshot": len(examples),
            "fewshot_config": {"sampler": "first_n", "samples": list(examples)},
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        if not task.multiple_choice:
            config["process_results"] = lambda item, responses: {"acc": _right_number(responses[0], item["target"])}
        return ConfigurableTask(config=deepcopy(config))  # the harness adds to what it is given

    def batch_size(self, longest: int, task: TaskFile) -> int:
        """Items in one batch: as many as the memory for logits allows, for generated text that for keys and values.

        Text is generated from the last token's logits alone. One item where padding would change what others give: see
        ``positions.Positions.kind``.
        """
        device = self.lm.device.type
        if task.multiple_choice:
            tokens = LOGIT_BYTES[device] / (8 * self._vocabulary)  # a logit and its log-softmax
        else:
            longest += task.config["generation_kwargs"]["max_gen_toks"]
            tokens = CACHE_BYTES[device] / self._cached_bytes
        if self._positions.kind(longest) != 0:
            return 1
        return max(1, min(MOST_ITEMS, int(tokens / longest)))

    def _evaluate(self, built: "ConfigurableTask") -> list[dict[str, Any]]:
        """One sample an item, in the items' order."""
        from lm_eval.evaluator import evaluate

        name = built.config.task
        results: Any = evaluate(self.lm, {"tasks": {name: built}, "groups": {}}, bootstrap_iters=0, log_samples=True)
        return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


def plain_greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Decode by the largest logit alone: a checkpoint's own sampling, penalties and length limits are set aside."""
    found = getattr(model, "generation_config", None)
    ends = getattr(found, "eos_token_id", None)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=tokenizer.pad_token_id,
    )


def _right_number(response: str, target: str) -> bool:
    return same_number(final_number(response), Decimal(target))


def _read_number(sample: dict[str, Any], item: Document, task: TaskFile, truncated: bool) -> Answer:
    response = sample["resps"][0][0]
    number = final_number(response)
    predicted = None if number is None else f"{number:f}"
    assert bool(sample["acc"]) == _right_number(response, item["target"])
    return Answer(bool(sample["acc"]), response, predicted, item["target"], None, truncated)


def _read_choice(sample: dict[str, Any], item: Document, task: TaskFile, truncated: bool) -> Answer:
    letters = task.config["doc_to_choice"]
    logprobs = [logprob for ((logprob, _),) in sample["resps"]]
    letter = letters[max(range(len(letters)), key=logprobs.__getitem__)]
    assert bool(sample["acc"]) == (letter == item["target"])
    return Answer(
        bool(sample["acc"]), letter, letter, item["target"], logprobs[letters.index(item["target"])], truncated
    )
