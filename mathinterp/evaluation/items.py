"""The items of a benchmark and its worked examples, from local copies of the public files or from the hub.

Knows where they are and how few or many are wanted; the formats themselves are in formats.py. Knows nothing about
tokenizers, models or the harness.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError, first_line_of
from mathinterp.evaluation.formats import (
    commonsense_row,
    mmlu_folder,
    mmlu_row,
    records,
    text_of,
    word_problem_file,
    word_problem_row,
    worked_problem,
)
from mathinterp.evaluation.task_files import Document, TaskFile, own_examples
from mathinterp.prompts.json_lines import exists
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.spread import even_spread

Examples = dict[str, list[Document]]  # subset -> its worked examples; "" stands for every subset


def read_items(task: TaskFile, data_dir: str | None) -> list[Document]:
    """All items of a task, in the published order.

    Args:
        data_dir: folder of local copies, laid out as the task files say (svamp/SVAMP.json); None: from the hub.
    Raises:
        UserError: a missing file or one that is not as published, naming file and place; a task that the hub has not.
    """
    return _published(task, data_dir, worked=False)


def read_examples(task: TaskFile, data_dir: str | None, source: str, count: int, seed: int) -> Examples:
    """``count`` worked examples for every subset.

    ``own``: the first of those written for this project. ``train``: drawn with ``seed`` from the published training
    file, or, for MMLU, the first dev questions of the subject. Raises UserError if there are too few.
    """
    if count == 0:
        return {}
    pool = own_examples(task) if source == "own" else _published(task, data_dir, worked=True)
    if task.by_subject:
        pools = _by_subject(pool)
    else:
        drawn = source == "train" and len(pool) >= count
        pools = {"": random.Random(seed).sample(pool, count) if drawn else pool}
    for subset, members in pools.items():
        if len(members) < count:
            where = f" of {subset}" if subset else ""
            raise UserError(
                f"{task.title}{where} has {len(members)} '{source}' examples: `fewshot` {count} is too many"
            )
    return {subset: members[:count] for subset, members in pools.items()}


def refuse_leaks(task: TaskFile, items: Sequence[Document], examples: Examples) -> None:
    """Raise UserError if a worked example is an item that it stands before, case, spaces and punctuation aside.

    Two questions of one wording and other choices are two questions. MMLU's examples stand before their own subject
    only (one dev question is published again as a test question of another).
    """
    asked = {(item["subset"] if task.by_subject else "", _plain(item)): item["item_id"] for item in items}
    for subset, example in ((subset, example) for subset, members in examples.items() for example in members):
        if (found := asked.get((subset, _plain(example)))) is not None:
            raise UserError(
                f"{task.title}: the worked example {example['item_id']} is test item '{found}' itself; take other"
                " examples (`examples` own, or another `seed`)"
            )


def chosen_items(task: TaskFile, items: Sequence[Document], limit: int | None) -> tuple[list[Document], list[Prompt]]:
    """At most ``limit`` items, spread evenly over the subsets, and for each the prompt that is stored for it."""
    prompts = [
        Prompt(item["item_id"], task.text(item), item["target"], operation=item["subset"], template=task.name)
        for item in items
    ]
    chosen = even_spread(prompts, limit)
    by_id = {item["item_id"]: item for item in items}
    return [by_id[prompt.prompt_id] for prompt in chosen], chosen


def _plain(document: Document) -> str:
    return re.sub(r"\W+", "", " ".join([document["question"], *document.get("choices", [])])).lower()


def _by_subject(documents: Sequence[Document]) -> Examples:
    pools: Examples = {}
    for document in documents:
        pools.setdefault(document["subject"], []).append(document)
    return pools


def _published(task: TaskFile, data_dir: str | None, worked: bool) -> list[Document]:
    """The items, or, ``worked``, the training examples."""
    if data_dir is None:
        return _from_hub(task, task.metadata.get("hub_train" if worked else "hub"), worked)
    return _from_files(task, Path(data_dir).expanduser(), task.metadata["train" if worked else "file"], worked)


def _from_files(task: TaskFile, folder: Path, place: str, worked: bool) -> list[Document]:
    path = folder / place
    if not exists(path):
        hint = ", or give `examples` own" if worked and not task.by_subject else ""
        raise UserError(f"{task.title} needs '{path}', which is not there: put the published {place} there{hint}")
    if task.by_subject:
        return mmlu_folder(path)
    if task.multiple_choice:
        return [commonsense_row(row, where) for row, where in records(path)]
    if worked:
        return [worked_problem(row, where, number) for number, (row, where) in enumerate(records(path), start=1)]
    return word_problem_file(task.name, path)


def _from_hub(task: TaskFile, place: dict[str, Any] | None, worked: bool) -> list[Document]:
    """The rows of a hub data set, all splits one after the other; ``datasets`` keeps them in the user's own cache."""
    if place is None:
        raise UserError(f"no copy of {task.title} on the hub is known; give `data_dir` with {task.metadata['file']}")
    from datasets import load_dataset

    documents: list[Document] = []
    numbers: dict[str, int] = {}  # rows so far, by subject where there are some
    for split in place["splits"]:
        try:
            rows = load_dataset(place["path"], place.get("name"), split=split)
        except Exception as error:  # the client has no common base for offline, missing and gated data sets
            reason = first_line_of(error)
            raise UserError(f"{task.title} could not be had from the hub ({reason}); give `data_dir`") from error
        for row in rows:
            where = f"{place['path']}, {split}"
            subject = text_of(row, "subject", where) if task.by_subject else ""
            numbers[subject] = numbers.get(subject, 0) + 1
            documents.append(_hub_row(task, dict(row), f"{where}, row {len(documents) + 1}", numbers[subject], worked))
    return documents


def _hub_row(task: TaskFile, row: dict[str, Any], where: str, number: int, worked: bool) -> Document:
    if task.by_subject:
        columns = [row.get("question"), *row.get("choices", []), row.get("answer")]
        return mmlu_row(row["subject"], number, columns, where)
    if task.multiple_choice:
        pairs = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
        choices = [{"label": label, "text": text} for label, text in pairs]
        return commonsense_row({**row, "question": {"stem": row.get("question"), "choices": choices}}, where)
    if worked:
        return worked_problem(row, where, number)
    return word_problem_row(task.name, row, where, number)
