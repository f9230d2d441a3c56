"""How long the head scan takes: ours, the ordinary way and the published way, in one run on one machine.

    python benchmarks/head_scan.py                                   # bundled model on CPU
    python benchmarks/head_scan.py --model random:llama-2-7b         # H100: the full 1,024 x 1,600 grid

Ours is measured whole, from the loaded model to rows on disk. What it compiles on a GPU it compiles before the weights
are loaded, as a replica does; these seconds and those of loading stand apart. The others are measured on the stated
numbers of heads and forwards and scaled up:

- ordinary: prompts in the set's order, padded to the longest of their batch, the model called as it comes, a hook on
  o_proj, one head a pass over all prompts;
- sorted: the same with prompts of like length together (hardly any padding) and the unembedding at answer tokens
  only, which is our own plain engine;
- published: one prompt and one head a forward.

Prints one JSON line last.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence

import click
import torch
from torch._dynamo.utils import counters

from mathinterp.cluster.compile_ahead import compile_ahead
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.experiments.base import Subject
from mathinterp.experiments.heads import Heads
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.units import Head
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
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
    scan = Heads()
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
    """Seconds a head of the ordinary way: padded batches in the set's order, a hook on one head."""
    length = max(len(prompt.fed) for prompt in prompts)
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.fed)] = torch.tensor(prompt.fed)
        mask[row, : len(prompt.fed)] = 1

    def zero_head(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        edited = args[0].clone()
        edited[..., anatomy.head_slice(0)] = 0
        return (edited,)

    @torch.inference_mode()
    def one_head(layer: int) -> None:
        with anatomy.output_projection(layer).register_forward_pre_hook(zero_head):
            for start in range(0, len(prompts), batch_size):
                batch = slice(start, start + batch_size)
                longest = int(mask[batch].sum(1).max())
                inputs = ids[batch, :longest].to(device), mask[batch, :longest].to(device)
                logits = anatomy.model(input_ids=inputs[0], attention_mask=inputs[1], use_cache=False).logits
                places = [
                    (row, token.index - 1, token.token_id)
                    for row, prompt in enumerate(prompts[batch])
                    for token in prompt.scored
                ]
                row, column, gold = torch.tensor(places, device=device).T
                answers = logits[row, column].float()
                torch.stack([answers.log_softmax(-1).gather(1, gold[:, None])[:, 0], answers.argmax(-1)]).cpu()

    return seconds_per_head(anatomy, device, heads, one_head)


def time_sorted(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, heads: int, batch_size: int
) -> float:
    """Seconds a head of our plain engine: like lengths together, answer tokens alone through the unembedding."""
    engine = PlainEngine(anatomy, prompts, batch_size=batch_size)
    return seconds_per_head(anatomy, device, heads, lambda layer: run_one(engine, layer))


def seconds_per_head(anatomy: Anatomy, device: str, heads: int, one_head: Callable[[int], None]) -> float:
    """The mean over ``heads`` heads in layers spread over the model, after one pass to warm up."""
    one_head(0)
    start = synchronize(device)
    for index in range(heads):
        one_head(index * anatomy.shape.n_layers // heads)
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
    engine.run([zeroed(engine.anatomy, [Head(layer, 0)])])


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="two_digit", show_default=True)
@click.option("--limit", type=int, default=None)
@click.option("--ordinary-heads", default=4, show_default=True, help="Heads measured of the ordinary and sorted ways.")
@click.option("--ordinary-batch", default=None, type=int, help="Prompts a batch of these ways; default 64, GPU 512.")
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
    started = time.perf_counter()
    compiled = compile_ahead(Heads(), resolved, prompts, device, max_tokens)
    ahead_ended = synchronize(device)
    anatomy = load(resolved, device).anatomy
    loaded = synchronize(device)
    shape = anatomy.shape
    heads = shape.n_layers * shape.n_heads
    tokens = sum(len(prompt.fed) for prompt in prompts)
    print(f"{resolved.label} {resolved.dtype} on {device}: {heads} heads x {len(prompts)} prompts, {tokens} tokens")
    print(f"before: {compiled or 'nothing to compile'}, {loaded - ahead_ended:.1f} s to load")

    batch = ordinary_batch or (512 if device == "cuda" else 64)
    ordinary = time_ordinary(anatomy, prompts, device, ordinary_heads, batch)
    by_length = time_sorted(anatomy, prompts, device, ordinary_heads, batch)
    published = time_published(anatomy, prompts, device, published_forwards)
    graphs = counters["stats"]["unique_graphs"]
    ours = time_ours(anatomy, prompts, device, max_tokens)
    graphs_late = counters["stats"]["unique_graphs"] - graphs
    figures = {
        "ours_s": round(ours["seconds"], 2),
        "ours_prepare_s": round(ours["prepare_seconds"], 2),
        "ours_compile_ahead_s": round(ahead_ended - started, 2),  # before loading, not in ours_s
        "graphs_compiled_in_ours": graphs_late,  # 0: all were compiled ahead
        "load_s": round(loaded - ahead_ended, 2),
        "ordinary_s": round(ordinary * heads, 1),
        "sorted_s": round(by_length * heads, 1),
        "heads_measured": ordinary_heads,
        "batch": batch,
        "published_s": round(published * heads * len(prompts), 1),
        "published_forwards_measured": published_forwards,
        "ordinary_over_ours": round(ordinary * heads / ours["seconds"], 2),
        "sorted_over_ours": round(by_length * heads / ours["seconds"], 2),
        "published_over_ours": round(published * heads * len(prompts) / ours["seconds"], 1),
        "rows": ours["rows"],
    }
    if device == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
