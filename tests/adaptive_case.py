"""A tiny model in float64 that answers many prompts, and the slow twin of adaptive scans: every cell, then judged.

The twin reads a full scan by the plain engine (one prompt a forward) and knows nothing of blocks, files or replicas.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import mathinterp as mi
from mathinterp.experiments import Experiment
from mathinterp.experiments.adaptive.judge import Rule, Verdicts, judge
from mathinterp.experiments.adaptive.looks import looks
from mathinterp.experiments.adaptive.order import order_of
from mathinterp.face import Run
from mathinterp.models.handle import Model
from mathinterp.prompts.alignment import tokenize_prompts
from tests.tiny import tiny_model, tiny_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twenty", "thirty"]
OPERATIONS = ("add", "sub")


@functools.cache
def model() -> Model:
    """The same object for all tests: nothing changes it."""
    return mi.wrap(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")


@functools.cache
def prompts(count: int = 96) -> tuple[dict[str, Any], ...]:
    """Sentences with the likeliest word, or two, as their answers; a fifth of them answer otherwise."""
    network, tokenizer = tiny_model("llama"), tiny_tokenizer()
    numbers = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token.isalpha())
    vocabulary = {token: number for number, token in numbers}  # get_vocab has another order in each process
    words, known = list(vocabulary), torch.tensor(list(vocabulary.values()))
    made = []
    for index in range(count):
        a, b = WORDS[index % 12], WORDS[(index // 12) % 12]
        operation = OPERATIONS[(index * 7 // 3) % 2]
        text = f"{a} {'plus' if operation == 'add' else 'minus'} {b} is"
        answer: list[str] = []
        for _ in range(1 + index % 2):
            ids = torch.tensor([tokenizer(" ".join([text, *answer]))["input_ids"]])
            likely = network(ids).logits[0, -1, known].argmax().item()
            answer.append(words[(likely + (index % 5 == 0)) % len(words)])
        fields = {"operation": operation, "counterfactual": f"{a} nothing {b} is"}
        made.append({"prompt_id": f"p{index}", "text": text, "answer": " ".join(answer), **fields})
    return tuple(made)


@dataclass(frozen=True)
class Twin:
    """Every cell of a full scan, and what the judge says of them."""

    nodes: list[tuple[int, int]]  # MLPs have head -1
    prompt_ids: list[str]  # in the scan's order
    values_NP: np.ndarray
    verdicts: Verdicts

    @property
    def cells(self) -> set[tuple[int, int, str]]:
        """(layer, head, prompt) that an undisturbed adaptive scan computes."""
        used = zip(self.nodes, self.verdicts.used_N, strict=True)
        return {(*node, prompt) for node, count in used for prompt in self.prompt_ids[:count]}


def twin(scan: Any, store: Path, asked: Sequence[dict[str, Any]]) -> Twin:
    """The full scan by the plain engine, and verdicts over it."""
    full: Experiment = replace(scan, decide=None, fdr=0.05, order_seed=0, engine="plain")
    run = mi.run(full, model(), list(asked), store=str(store), progress=False)
    rows, base = run.table(scan.node_table), run.table("baseline")
    rows["head"] = rows.get("head", pd.Series(-1, index=rows.index))
    scoring = scan.parameters()["scoring"]
    if scoring == "first_token":
        rows, base = (table[table["position"] == 0] for table in (rows, base))
    both = rows.merge(base[["prompt_id", "position", "correct"]], on=["prompt_id", "position"], suffixes=("", "_base"))
    both["lost"] = both["correct_base"].astype(int) - both["correct"].astype(int)
    by_prompt = both.groupby(["layer", "head", "prompt_id"])
    values = by_prompt["lost"].mean()
    if scoring == "exact_match":
        values = by_prompt["correct_base"].all().astype(int) - by_prompt["correct"].all().astype(int)
    units = base.groupby("prompt_id")["position"].count() if scoring == "token" else None
    read = tokenize_prompts(mi.prompts(list(asked)), model().tokenizer)
    weights = weights_of([item.prompt.prompt_id for item in read], [item.prompt.operation for item in read], units)
    order = order_of(read, weights, scan.order_seed)
    ids = [read[place].prompt.prompt_id for place in order]
    matrix = values.unstack("prompt_id")[ids]
    rule = Rule(scan.decide / 100, scan.fdr)
    ends = looks(len(read), rule)
    verdicts = judge(rule, matrix.to_numpy(float), ends, len(ends), weights[order])
    return Twin([(int(a), int(b)) for a, b in matrix.index], ids, matrix.to_numpy(float), verdicts)


def path_twin(scan: Any, store: Path, asked: Sequence[dict[str, Any]]) -> Twin:
    """The full path scan, and verdicts over its clipped effects; nodes are (layer, head), MLPs have head -1."""
    full = replace(scan.whole(), attribution=False)
    run = mi.run(full, model(), list(asked), store=str(store), progress=False)
    rows, pairs = run.table("path_scan").fillna({"head": -1}), run.table("path_pairs")
    kept = set(pairs[pairs["kept"]]["prompt_id"])
    read = [
        item for item in tokenize_prompts(mi.prompts(list(asked)), model().tokenizer) if item.prompt.prompt_id in kept
    ]
    weights = weights_of([item.prompt.prompt_id for item in read], [item.prompt.operation for item in read], None)
    order = order_of(read, weights, scan.order_seed)
    ids = [read[place].prompt.prompt_id for place in order]
    rows["loss"] = (-rows["effect"].astype(float)).clip(-1, 1)
    matrix = rows.pivot(index=["layer", "head"], columns="prompt_id", values="loss")[ids]
    rule = Rule(scan.decide / 100, scan.fdr)
    ends = looks(len(read), rule)
    verdicts = judge(rule, matrix.to_numpy(float), ends, len(ends), weights[order])
    return Twin([(int(a), int(b)) for a, b in matrix.index], ids, matrix.to_numpy(float), verdicts)


def weights_of(ids: list[str], operations: list[str], units: Any) -> np.ndarray:
    """Units of the prompt over those of its operation, spelt out."""
    own = np.array([1 if units is None else units[name] for name in ids], float)
    total = {kind: sum(own[i] for i in range(len(ids)) if operations[i] == kind) for kind in set(operations)}
    return np.array([own[i] / total[operations[i]] for i in range(len(ids))])


def cells(found: Run, table: str) -> pd.DataFrame:
    rows = found.table(table)
    rows["head"] = rows.get("head", pd.Series(-1, index=rows.index))
    return rows.sort_values(["layer", "head", "prompt_id", "position"]).reset_index(drop=True)
