"""The project's task files: what each benchmark asks, in what form, with how many worked examples.

Knows the YAML files in tasks/ and how an item becomes text; knows nothing about where items lie or about models.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mathinterp.evaluation.numbers import RULES

if TYPE_CHECKING:
    import jinja2

TASKS = files("mathinterp.evaluation") / "tasks"
ORDER = ("gsm8k", "svamp", "addsub", "singleeq", "multiarith", "mmlu", "commonsense_qa")  # as in paper B's table
ALIASES = {"csqa": "commonsense_qa", "commonsenseqa": "commonsense_qa"}
EXAMPLE_SOURCES = ("own", "train")

Document = dict[str, Any]  # an item or a worked example: item_id, subset, question, target, and choices or subject


@dataclass(frozen=True)
class TaskFile:
    """One task file, read."""

    name: str
    config: dict[str, Any]  # lm-evaluation-harness's, without metadata
    metadata: dict[str, Any]

    @property
    def title(self) -> str:
        """The benchmark's name for people."""
        title: str = self.metadata["title"]
        return title

    @property
    def multiple_choice(self) -> bool:
        """Whether an item is answered by log-likelihood; else by greedy decoding."""
        return bool(self.config["output_type"] == "multiple_choice")

    @property
    def by_subject(self) -> bool:
        """Whether every subject has worked examples of its own (MMLU)."""
        return "subject" in self.config.get("description", "")

    @property
    def fewshot(self) -> int:
        """Worked examples before an item, unless the user says otherwise."""
        fewshot: int = self.config["num_fewshot"]
        return fewshot

    @property
    def version(self) -> str:
        """12 hex digits of everything that decides what the model reads and how it is scored."""
        return digest([self.config, RULES])

    def text(self, document: Document) -> str:
        """What the model reads of an item, without examples."""
        return _template(self.config["doc_to_text"]).render(document)


@cache
def _template(text: str) -> "jinja2.Template":
    import jinja2

    template: jinja2.Template = jinja2.Template(text, undefined=jinja2.StrictUndefined)
    return template


@cache
def task_file(name: str) -> TaskFile:
    """The task of that name (one of ORDER)."""
    import yaml  # 40 ms that no command's help waits for

    config = yaml.safe_load((TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    metadata = config.pop("metadata")
    return TaskFile(name, config, metadata)


def own_examples(task: TaskFile) -> list[Document]:
    """The worked examples that come with the project for this kind of task; MMLU has none."""
    assert not task.by_subject, f"{task.title} has worked examples of its own for every subject"
    name = "commonsense_questions" if task.multiple_choice else "word_problems"
    lines = (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"item_id": f"own-{number}", **json.loads(line)} for number, line in enumerate(lines, start=1)]


def digest(value: Any) -> str:
    """12 hex digits of plain JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]
