"""Small stores for the tests of store/: prompts, a run and its rows from plain Python values."""

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.store import Run, Store
from mathinterp.store.catalog import catalog

FINGERPRINT = "feedbeef00000000"
NO_NOISE = {"max_logprob_deviation": 0.0, "max_logit_deviation": 0.0, "flipped_predictions": 0, "answers": 1}


def prompt(
    prompt_id: str,
    operation: str | None = "add",
    carry: Sequence[str | None] = ("memorize",),
    operand_b: str | None = "12",
) -> TokenizedPrompt:
    """A prompt with one scored digit token per entry of ``carry``."""
    scored = tuple(ScoredToken(i, 3 + i, 40 + i, str(i), "digit", carry_class) for i, carry_class in enumerate(carry))
    text = Prompt(prompt_id, f"text of {prompt_id}", "1" * len(carry), operation, "15", operand_b, "template")
    return TokenizedPrompt(text, tuple(range(3 + len(carry))), scored)


def scores(table: str, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows of baseline, head_scan or mlp_scan; columns not given get a constant."""
    defaults = {"position": 0, "correct": True, "logprob": -0.5, "logit": 1.5, "predicted_id": 7}
    return pa.Table.from_pylist([{**defaults, **row} for row in rows], catalog().tables[table].schema)


def open_run(store: Store, shards: Sequence[str] = ("baseline/00000", "head_scan/00000"), **changes: Any) -> Run:
    """A run of scan "heads" on model "m"; keyword arguments replace those of Store.open_run."""
    asked: dict[str, Any] = {
        "scan": "heads",
        "model": "m",
        "model_fingerprint": "weights-1",
        "prompts": "two-digit",
        "prompts_fingerprint": FINGERPRINT,
        "dtype": "float32",
        "parameters": {"scoring": "token"},
        "code_version": "0.1.0",
        "shards": list(shards),
    }
    return store.open_run(**{**asked, **changes})


def fill(
    store: Store,
    prompts: Sequence[TokenizedPrompt],
    baseline: Sequence[dict[str, Any]],
    heads: Sequence[dict[str, Any]] = (),
    mlps: Sequence[dict[str, Any]] = (),
    scoring: str = "token",
    **changes: Any,
) -> str:
    """A finished run with these rows; returns its id."""
    tables = {"baseline": baseline, "head_scan": heads, "mlp_scan": mlps}
    shards = [f"{table}/00000" for table, rows in tables.items() if rows]
    run = open_run(store, shards, **{"parameters": {"scoring": scoring}, **changes})
    store.write_prompts(changes.get("prompts_fingerprint", FINGERPRINT), prompts)
    for table, rows in tables.items():
        if rows:
            store.write_shard(run.run_id, table, 0, scores(table, rows), {"scan": "heads"})
    run.note({"noise_floor": NO_NOISE})
    assert run.finish() == []
    return run.run_id


def head_rows(count: int = 3, head: int = 0) -> pa.Table:
    """``count`` rows of head_scan for head 1.``head``."""
    return scores("head_scan", [{"layer": 1, "head": head, "prompt_id": str(i)} for i in range(count)])


def write_head(store: Store, run: str, index: int = 0, count: int = 3) -> dict[str, Any]:
    """Write shard ``index`` of head_scan; returns its receipt."""
    return store.write_shard(run, "head_scan", index, head_rows(count, head=index), {"scan": "heads"})


def drive(url: str, shards: list[str], seconds: float) -> None:
    """One driver that writes all shards of one run again and again."""
    store = Store(url)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run = open_run(store, shards)
        for index in range(len(shards)):
            write_head(store, run.run_id, index, count=2000)
        assert run.finish() == []
