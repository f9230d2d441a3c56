"""How long the head scan takes: ours, the ordinary way and the published way, in one run on one machine.

    python benchmarks/head_scan.py                                   # bundled model on CPU
    python benchmarks/head_scan.py --model random:llama-2-7b         # H100: the full 1,024 x 1,600 grid

Ours is measured whole, from the loaded model to rows on disk. The ordinary way (padded batches, one head a pass over
all prompts, hooks) and the published way (one prompt and one head a forward) are measured on the stated numbers of
heads and forwards and scaled up. Prints one JSON line last.
"""

import json
import tempfile
import time
from collections.abc import Sequence

import click
import torch

from mathinterp.forward.edits import Edit, Replacement
from mathinterp.forward.plain import PlainEngine
from mathinterp.forward.replay import PackedEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.scans.base import Subject
from mathinterp.scans.heads import HeadScan
from mathinterp.store import Store


def synchronize(device: str) -> float:
    """Wait for the device; the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_ours(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, max_tokens: int | None
) -> dict[str, float]:
    """The whole grid from the loaded model to files in a store: seconds, and what the engine chose."""
    scan = HeadScan()
    shards = scan.shards(anatomy.shape, prompts)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        run = store.open_run(
            scan=scan.name, model="benchmark", model_fingerprint="benchmark", prompts="benchmark",
            prompts_fingerprint=prompts_fingerprint(prompts), dtype=str(anatomy.dtype), parameters=scan.parameters(),
            code_version="benchmark", shards=[shard.key for shard in shards],
        )  # fmt: skip
        start = synchronize(device)
        state = scan.prepare(Subject(anatomy, prompts, max_tokens))
        prepared = synchronize(device)
        rows = 0
        for shard in shards:
            table = scan.run(state, shard)
            store.write_shard(run.run_id, shard.table, shard.index, table, {})
            rows += table.num_rows
        seconds = synchronize(device) - start
    print(f"engine: {state.notes}")
    assert isinstance(state.engine, PackedEngine)
    return {"seconds": seconds, "prepare_seconds": prepared - start, "rows": rows}


def time_ordinary(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, heads: int, batch_size: int
) -> float:
    """Seconds a head of the ordinary way: padded batches of full forwards, a hook on one head."""
    engine = PlainEngine(anatomy, prompts, batch_size=batch_size)
    layers = [i * anatomy.shape.n_layers // heads for i in range(heads)]
    run_one(engine, 0)  # warm-up
    start = synchronize(device)
    for layer in layers:
        run_one(engine, layer)
    return (synchronize(device) - start) / heads


def time_published(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, forwards: int) -> float:
    """Seconds a forward of the published way: one prompt, one head."""
    engines = [PlainEngine(anatomy, [prompt], batch_size=1) for prompt in prompts[:: max(1, len(prompts) // forwards)]]
    run_one(engines[0], 0)
    start = synchronize(device)
    for engine in engines:
        run_one(engine, 0)
    return (synchronize(device) - start) / len(engines)


def run_one(engine: PlainEngine, layer: int) -> None:
    """Zero head 0 of ``layer`` on all prompts of the engine."""
    engine.run_edits(layer, [Edit.heads_of(layer, [0])], Replacement.zero(engine.anatomy, "head", layer))


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="two_digit", show_default=True)
@click.option("--limit", type=int, default=None)
@click.option("--ordinary-heads", default=4, show_default=True, help="Heads measured of the ordinary way.")
@click.option(
    "--ordinary-batch", default=None, type=int, help="Prompts a batch of the ordinary way; default 64, GPU 512."
)
@click.option("--published-forwards", default=64, show_default=True, help="Forwards measured of the published way.")
@click.option("--max-tokens", default=None, type=int, help="Token rows in one batch of ours.")
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, prompt_name: str, limit: int | None, ordinary_heads: int, ordinary_batch: int | None,
    published_forwards: int, max_tokens: int | None, threads: int | None,
) -> None:  # fmt: skip
    """Time the head scan three ways."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = tokenize_prompts(load_prompts(prompt_name, limit=limit), resolved.tokenizer)
    anatomy = load(resolved, device).anatomy
    shape = anatomy.shape
    heads = shape.n_layers * shape.n_heads
    tokens = sum(len(prompt.fed) for prompt in prompts)
    print(f"{resolved.label} {resolved.dtype} on {device}: {heads} heads x {len(prompts)} prompts, {tokens} tokens")

    batch = ordinary_batch or (512 if device == "cuda" else 64)
    ordinary = time_ordinary(anatomy, prompts, device, ordinary_heads, batch)
    published = time_published(anatomy, prompts, device, published_forwards)
    ours = time_ours(anatomy, prompts, device, max_tokens)
    figures = {
        "ours_s": round(ours["seconds"], 2),
        "ours_prepare_s": round(ours["prepare_seconds"], 2),
        "ordinary_s": round(ordinary * heads, 1),
        "ordinary_heads_measured": ordinary_heads,
        "published_s": round(published * heads * len(prompts), 1),
        "published_forwards_measured": published_forwards,
        "ordinary_over_ours": round(ordinary * heads / ours["seconds"], 2),
        "published_over_ours": round(published * heads * len(prompts) / ours["seconds"], 1),
        "rows": ours["rows"],
    }
    if device == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
