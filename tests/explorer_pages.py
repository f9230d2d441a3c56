"""Pages for the tests of the explorer: small stores, odd text, and a large grid of made-up cells."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.experiments.grid import ANSWERS, CHANGED, Attention, Grid, Quantity
from mathinterp.experiments.results import Shown as Table
from mathinterp.experiments.results import Summary
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.report.contents import files
from mathinterp.report.runs import Found, Shown
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.text import one_line
from tests.small_store import FINGERPRINT, NO_NOISE, fill, open_run, scores

ODD = "</script><img src=x onerror=alert(1)>\u2028\u2029\x00 שלום עולם \u202e 🧮 {{ 7*7 }} ${x} `'\" &amp; ]]> -- "
ODD_COMMAND = shlex.join(["mathinterp", "scan", "heads", "--prompts", one_line(ODD)])
MANY = (ODD * (100_000 // len(ODD) + 1))[:100_000]


def answered(number: int, operation: str, text: str, tokens: tuple[str, ...] = ("1", "2")) -> TokenizedPrompt:
    """A prompt whose answer has these tokens, numbered 40, 41 and on."""
    scored = tuple(ScoredToken(i, 3 + i, 40 + i, token, "digit", None) for i, token in enumerate(tokens))
    given = Prompt(f"p{number}", text, "".join(tokens), operation, "15", "12", "template")
    return TokenizedPrompt(given, tuple(range(3 + len(tokens))), scored)


PROMPTS = [answered(i, ("add", "sub", "mul")[i % 3], f"{i} plus {i + 1} equals") for i in range(9)]
HEADS = [(layer, head) for layer in range(2) for head in range(3)]


def scored_rows(rng: np.random.Generator, right: float, **place: int) -> list[dict[str, Any]]:
    """Both tokens of every prompt, right with a chance; wrong ones predict token 77 or the other answer token."""
    rows = []
    for item in PROMPTS:
        for token in item.scored:
            hit = bool(rng.random() < right)
            predicted = token.token_id if hit else int(rng.choice([77, 81 - token.token_id]))
            rows.append({"prompt_id": item.prompt.prompt_id, "position": token.position, "correct": hit,
                         "logprob": float(-rng.gamma(1.0)), "predicted_id": predicted, **place})  # fmt: skip
    return rows


def head_store(folder: Path, seed: int = 0, **changes: Any) -> tuple[Store, str]:
    """A finished head scan of six heads on nine prompts of two answer tokens."""
    rng, store = np.random.default_rng(seed), Store(folder)
    heads = [row for layer, head in HEADS for row in scored_rows(rng, 0.6, layer=layer, head=head)]
    return store, fill(store, PROMPTS, scored_rows(rng, 0.9), heads, **changes)


def with_attention(store: Store, left: tuple[int, int]) -> str:
    """An attention scan of the same model and prompts, without head ``left``; its run."""
    run = open_run(store, ["attention_scan/00000"], scan="attention", parameters={"keep_all": True})
    rows = [
        {"layer": layer, "head": head, "prompt_id": item.prompt.prompt_id, "token_type": kind, "mean": mass,
         "mass": mass, "tokens": 1, "argmax": kind == "bos"}
        for layer, head in HEADS if (layer, head) != left
        for i, item in enumerate(PROMPTS)
        for kind, mass in (("bos", 0.5 + i / 20), ("operator", 0.5 - i / 20))
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, catalog().tables["attention_scan"].schema)
    store.write_shard(run.run_id, "attention_scan", 0, table, {})
    assert run.finish() == []
    return run.run_id


def adaptive_store(folder: Path) -> tuple[Store, str]:
    """An adaptive head scan: every head has three prompts, 0.0 and 1.2 all nine; a tenth prompt has no row."""
    store, rng = Store(folder), np.random.default_rng(3)
    whole, first = ((0, 0), (1, 2)), ("p0", "p1", "p2")
    heads = [
        row for place in HEADS for row in scored_rows(rng, 0.6, layer=place[0], head=place[1])
        if place in whole or row["prompt_id"] in first
    ]  # fmt: skip
    shards, fingerprint = ["baseline/00000", "head_scan/00000", "decisions/00000"], "feedbeef00000001"
    asked = {"scoring": "token", "decide": 5.0, "fdr": 0.05, "order_seed": 0}
    run = open_run(store, shards, parameters=asked, prompts_fingerprint=fingerprint)
    store.write_prompts(fingerprint, [*PROMPTS, answered(9, "add", "9 plus 10 equals")])
    decided = [
        {"node": "head", "layer": layer, "head": head, "threshold": 0.05,
         "decision": {0: "above", 1: "not above"}.get(head, "open"), "exact": (layer, head) == (0, 0),
         "prompts_used": 9 if (layer, head) in whole else 3, "prompts_run": 3, "cells": 10, "e_above": 1.0,
         "e_below": 1.0, "estimate": 0.25, "low": 0.125, "high": 0.5}
        for layer, head in HEADS[:-1]
    ]  # fmt: skip
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", scored_rows(rng, 0.9)), {})
    store.write_shard(run.run_id, "head_scan", 0, scores("head_scan", heads), {})
    decisions = pa.Table.from_pylist(decided, catalog().tables["decisions"].schema)
    store.write_shard(run.run_id, "decisions", 0, decisions, {})
    run.note({"noise_floor": NO_NOISE})
    assert run.finish() == []
    return store, run.run_id


def path_store(folder: Path, effect: str = "logit") -> tuple[Store, str]:
    """A path scan of four heads and two MLPs on eight of nine pairs; one cell has no row."""
    store, rng = Store(folder), np.random.default_rng(4)
    pairs = [replace(item, prompt=replace(item.prompt, counterfactual=f"{i} nothing {i + 1} equals"))
             for i, item in enumerate(PROMPTS)]  # fmt: skip
    run = open_run(
        store, ["path_pairs/00000", "path_scan/00000"], scan="paths", parameters={"effect": effect, "freeze": "heads"}
    )
    store.write_prompts(FINGERPRINT, pairs)
    about = [
        {"prompt_id": f"p{i}", "correct": i != 8, "kept": i != 8, "logit_original": 4.0, "logit_counterfactual": 2.0,
         "logprob_original": -0.25, "logprob_counterfactual": -2.0, "predicted_id": 40 if i else 77}
        for i in range(9)
    ]  # fmt: skip
    cells = [
        {"node": "mlp" if head is None else "head", "layer": layer, "head": head, "prompt_id": f"p{i}",
         "logit_original": 4.0, "logit_patched": 4 + 4 * value, "effect": value, "logprob_change": 3 * value}
        for layer in (0, 1) for head in (0, 1, None) for i in range(8)
        for value in [float(rng.normal(-0.05, 0.2))] if (layer, head, i) != (1, None, 3)
    ]  # fmt: skip
    for table, rows in (("path_pairs", about), ("path_scan", cells)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, catalog().tables[table].schema), {})
    run.note({"noise_floor": 0.0})
    assert run.finish() == []
    return store, run.run_id


def odd_store(folder: Path) -> Store:
    """Odd text wherever a store has text: sentences, tokens, operations, names; one finished run, one failed."""
    prompts = [answered(i, ODD[:40] if i else "add", MANY if i == 0 else ODD, ("<b>", ODD[:20])) for i in range(4)]
    rows = [
        {"prompt_id": item.prompt.prompt_id, "position": token.position, "predicted_id": token.token_id}
        for item in prompts for token in item.scored
    ]  # fmt: skip
    heads = [{**row, "layer": 0, "head": h, "correct": False, "predicted_id": 41} for h in (0, 1) for row in rows]
    store = Store(folder)
    run = fill(store, prompts, rows, heads, model=ODD)
    record = folder / "runs" / f"{run}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "prompts": MANY, "command": ODD_COMMAND}))
    failed = open_run(store, ["head_scan/00000"], model=f"failed {ODD}", model_fingerprint="weights-9")
    failed.finish(errors={"head_scan/00000": f"ValueError: {ODD}"})
    return store


def made_up_grid(heads: int, prompts: int, seed: int = 0) -> Grid:
    """Cells as a scan of a large model has them: a tenth of the heads break much, the others little."""
    rng = np.random.default_rng(seed)
    chance = np.where(rng.random(heads) < 0.1, rng.random(heads), 0.02)[:, None]
    before = rng.random(prompts) < 0.9
    broken = before & (rng.random((heads, prompts)) < chance)
    mended = ~before & (rng.random((heads, prompts)) < 0.03)
    cells = (before * 1 + ((before & ~broken) | mended) * 2).astype(np.uint8)
    changed = broken | mended | (rng.random(cells.shape) < 0.02)
    cells |= np.where(changed, CHANGED, 0).astype(np.uint8)
    change = rng.normal(0, 0.3, cells.shape) - broken * rng.gamma(2.0, 3.0, cells.shape)
    listed = [
        {"prompt_id": f"p{i}", "text": f"The sum of {i} and {prompts - i} is", "answer": str(prompts),
         "operation": ("add", "sub", "mul", "div")[i * 4 // prompts], "predicted": str(prompts)}
        for i in range(prompts)
    ]  # fmt: skip
    side = 32
    types = ["bos", "equals", "operand_a", "operand_b", "operator", "other"]
    mass = rng.dirichlet(np.ones(6), (min(heads, 200), prompts)).astype(np.float32)
    attention = Attention("feedbeef0000", types, np.arange(len(mass)), mass, heads - len(mass))
    return Grid(
        word="head", layers=np.arange(heads) // side, heads=np.arange(heads) % side, prompts=listed, cells=cells,
        outcomes=ANSWERS, quantities=[Quantity("change of log-probability", "nats", change.astype(np.float32))],
        answers=[str(i) for i in range(3000)], after=rng.integers(0, 3000, int(changed.sum())), attention=attention,
    )  # fmt: skip


def made_up_run(summary: Summary, grid: Grid | None = None, **changes: Any) -> Shown:
    """A finished run of no store."""
    run = {
        "run_id": "0123456789ab", "scan": "heads", "model": "large", "prompts": "two_digit", "dtype": "bfloat16",
        "status": "finished", "shards_done": 1, "shards": 1, "started_at": "2026-01-01T00:00:00", "errors": "{}",
        "model_fingerprint": "a" * 16, "prompts_fingerprint": "b" * 16, "notes": {}, "parameters": {},
        "code_version": "0.1.0", "result_format": 1,
        **changes,
    }  # fmt: skip
    return Shown(run, run, summary, {}, grid)


def made_up_page(folder: Path, grid: Grid) -> Path:
    """The page of one run that has this grid; its index.html."""
    shown = made_up_run(Summary([Table("Rows", [{"a": 1}])]), grid)
    for name, content in files(Store(folder / "none"), Found([shown])):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder / "index.html"
