"""Evaluation by hand, beside the harness."""

from dataclasses import replace
from typing import Any

import torch

from mathinterp.evaluation.task_files import TaskFile


def decode_by_hand(model: Any, ids: list[int], new: int) -> list[int]:
    """The largest logit again and again, the whole sequence read anew each time."""
    ids = list(ids)
    start = len(ids)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 2:  # </s>
            break
    return ids[start:]


def small(task: TaskFile, new: int = 8, **changes: Any) -> TaskFile:
    """The task, with responses of at most ``new`` tokens."""
    settings = {**task.config["generation_kwargs"], "max_gen_toks": new}
    return replace(task, config={**task.config, "generation_kwargs": settings, **changes})


WORD_ITEMS = [
    {"question": question, "target": "7", "subset": "add", "item_id": question}
    for question in ("What is 3 plus 4 ?", "What is the sum of 1 and 2 and 3 and 4 plus 5 minus 6 times 7 ?", "two ?")
]
