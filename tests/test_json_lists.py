"""JSON lists of known texts, against the json module."""

import json
import random

import numpy as np
import torch

from mathinterp.experiments.json_lists import in_lists, json_lists


def test_lists_are_those_of_the_json_module() -> None:
    """Of 0 to 4 texts, the difficult ones among them; an empty list is null."""
    texts = ["two", 'a "quoted" one', "back\\slash", "", ", ", "[", "]", "▁drei", "\n"]
    draw = random.Random(0)
    rows = [[draw.randrange(len(texts)) for _ in range(draw.randrange(5))] for _ in range(200)]
    found = json_lists(
        in_lists([json.dumps(text, ensure_ascii=False) for text in texts]),
        torch.tensor([number for row in rows for number in row]),
        np.array([len(row) for row in rows]),
    )
    assert {len(row) for row in rows} == {0, 1, 2, 3, 4}
    assert found.to_pylist() == [
        json.dumps([texts[number] for number in row], ensure_ascii=False) if row else None for row in rows
    ]


def test_no_list_at_all() -> None:
    found = json_lists(in_lists(['"one"']), torch.tensor([], dtype=torch.int64), np.zeros(3, int))
    assert found.to_pylist() == [None] * 3
