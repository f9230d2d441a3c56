"""Evaluation as a scan: a shard is a block of items, answered by one replica; one row an item (method.md section 6).

Knows tasks, documents and shards; knows nothing about files or stores. Items and worked examples travel with the scan,
so replicas read no data files.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.evaluation.evaluate.tables import EVALUATIONS, TABLES
from mathinterp.evaluation.numbers import RULES
from mathinterp.evaluation.task_files import Document, TaskFile, digest
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from mathinterp.evaluation.greedy import GreedyDecoder
    from mathinterp.evaluation.harness import Answer, Harness
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

BLOCK = 64  # items of a shard whose answers are generated
CHOICE_BLOCK = 256  # items of a shard of log-likelihoods
SET_BLOCK = 512  # prompts of a prompt set
TABLE = "evaluations"


@dataclass(frozen=True)
class Origin:
    """What an evaluated model was made from; not part of the run's identity, which the model's fingerprint settles."""

    base_fingerprint: str  # its own for a base model
    method: str  # base, precise, full, lora, or adapter where nothing is known


class _Evaluation(Experiment):
    """What both kinds share: a shard is some of the items, or of the prompts."""

    tables: ClassVar[Mapping[str, Table]] = TABLES
    on_command_line: ClassVar[bool] = False

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Items."""
        return int(shard.work["stop"] - shard.work["start"])


@dataclass(frozen=True)
class Benchmark(_Evaluation):
    """A benchmark through lm-evaluation-harness.

    ``items`` are the documents asked, in the order of the run's prompts; ``examples`` the worked ones before an item,
    by subset ("": before all).
    """

    task: TaskFile
    items: tuple[Document, ...]
    examples: dict[str, list[Document]]
    fewshot: int
    source: str  # of the examples: own or train
    seed: int  # of their draw
    limit: int | None
    origin: Origin
    ends: tuple[int, ...] | None = None  # of answers, where the checkpoint's generation_config.json has its own

    name: ClassVar[str] = "evaluate"
    packages: ClassVar[tuple[str, ...]] = ("lm-eval",)

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; ``setting`` says what differs from the task file's defaults."""
        drawn = self.fewshot > 0 and self.source == "train" and not self.task.by_subject
        differs = {
            "limit": self.limit is not None and self.limit,
            "fewshot": self.fewshot != self.task.fewshot and str(self.fewshot),
            "examples": self.fewshot > 0 and self.source != self.task.metadata["examples"] and self.source,
            "seed": drawn and self.seed,
        }
        return {
            "task": self.task.name,
            "version": self.task.version,
            "fewshot": self.fewshot,
            "examples": digest(self.examples),
            "items": digest(self.items),
            "limit": self.limit,
            "setting": _setting(differs),
            **_ends(None if self.task.multiple_choice else self.ends),  # a choice is not written out
        }

    def tokens_read(self, prompt: TokenizedPrompt) -> int:
        """None for sure: the harness cuts long contexts on the left, and rows say so (``truncated``)."""
        return 0

    @property
    def reads_together(self) -> bool:
        """The harness's own batches hold other texts: see ``Harness.batch_size``."""
        return False

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Blocks of items, in order."""
        return _blocks(len(self.items), CHOICE_BLOCK if self.task.multiple_choice else BLOCK)

    def prepare(self, subject: Subject) -> Harness:
        """Put the model into the harness."""
        from mathinterp.evaluation.harness import Harness

        assert subject.tokenizer is not None, "the harness needs the tokenizer"
        return Harness(subject.anatomy.model, subject.tokenizer)

    def run(self, state: Harness, shard: Shard) -> pa.Table:
        """Rows of the shard's items."""
        items = self.items[shard.work["start"] : shard.work["stop"]]
        answers: list[Answer] = []
        for pool, members in groupby(items, self._pool):  # items that share their worked examples
            answers += state.answer(self.task, list(members), self.examples.get(pool, []))
        return _rows(self.task.name, [(item["subset"], item["item_id"]) for item in items], answers)

    def notes(self, state: Harness) -> dict[str, Any]:
        """What the model was made from, and the harness's version."""
        return {**asdict(self.origin), "lm_eval": importlib.metadata.version("lm-eval")}

    def _pool(self, item: Document) -> str:
        return item["subset"] if item["subset"] in self.examples else ""


@dataclass(frozen=True)
class PromptSetEvaluation(_Evaluation):
    """A prompt set by greedy decoding, asked without worked examples."""

    label: str  # the set's name
    limit: int | None
    seed: int  # of the set's operands
    items: str  # digest of the prompts as text, alike for all tokenizers
    origin: Origin
    ends: tuple[int, ...] | None = None  # as in Benchmark

    name: ClassVar[str] = "evaluate"

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row; the prompts themselves are in the run's prompts_fingerprint."""
        differs = {"limit": self.limit is not None and self.limit, "seed": self.seed}
        return {
            "task": self.label,
            "version": f"greedy-{RULES}",
            "fewshot": 0,
            "examples": None,
            "items": self.items,
            "limit": self.limit,
            "setting": _setting(differs),
            **_ends(self.ends),
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Blocks of prompts."""
        return _blocks(len(prompts), SET_BLOCK)

    def tokens_read(self, prompt: TokenizedPrompt) -> int:
        """The text, and all that may be written but for the last token."""
        from mathinterp.evaluation.greedy import new_tokens

        return prompt.end + new_tokens(prompt)

    def prepare(self, subject: Subject) -> tuple[GreedyDecoder, Sequence[TokenizedPrompt]]:
        """The decoder, and the prompts that shards point into."""
        from mathinterp.evaluation.greedy import GreedyDecoder

        assert subject.tokenizer is not None, "decoding needs the tokenizer"
        return GreedyDecoder(subject.anatomy.model, subject.tokenizer), subject.prompts

    def run(self, state: tuple[GreedyDecoder, Sequence[TokenizedPrompt]], shard: Shard) -> pa.Table:
        """Rows of the shard's prompts."""
        decoder, prompts = state
        block = prompts[shard.work["start"] : shard.work["stop"]]
        ids = [(item.prompt.operation or self.label, item.prompt.prompt_id) for item in block]
        return _rows(self.label, ids, decoder.answer(block))

    def notes(self, state: tuple[GreedyDecoder, Sequence[TokenizedPrompt]]) -> dict[str, Any]:
        """What the model was made from."""
        return asdict(self.origin)


def _ends(ends: tuple[int, ...] | None) -> dict[str, list[int]]:
    """The parameter that a generation_config.json adds; none where it changes nothing, as before it was looked at."""
    return {} if ends is None else {"ends": list(ends)}


def _setting(differs: Mapping[str, object]) -> str:
    """Options that are not at their defaults, for tables."""
    return " ".join(f"{name}={value}" for name, value in differs.items() if value)


def _blocks(count: int, most: int) -> list[Shard]:
    starts = range(0, count, most)
    works = [{"start": start, "stop": min(start + most, count)} for start in starts]
    return [Shard(TABLE, i, work, cost=float(work["stop"] - work["start"])) for i, work in enumerate(works)]


def _rows(task: str, names: Sequence[tuple[str, str]], answers: Sequence[Answer]) -> pa.Table:
    rows = [
        {"task": task, "subset": subset, "item_id": item, **asdict(answer)}
        for (subset, item), answer in zip(names, answers, strict=True)
    ]
    return pa.Table.from_pylist(rows, EVALUATIONS)
