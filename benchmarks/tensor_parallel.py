"""Tensor parallelism against layers dealt out over two cards, and against one card: the same head scan, each way.

    python benchmarks/tensor_parallel.py                                      # 7B shape, 5 layers x 32 heads, two GPUs
    python benchmarks/tensor_parallel.py --device cpu --shape llama-tiny --limit 20 --layers 0,2,3   # a dry run, gloo

Tensor parallelism as favourable as it can be made: no DTensor between a layer and its products, the packed engine
itself (compiled, tree attention) in two processes, each with half of the heads and of the neurons of every layer, and
one sum over both cards after attention and one after the MLP. A head that is zeroed lies on one card, whose part of the
output moves; the sum that attention needs anyway brings it to the other, so nothing is gathered. transformers' own plan
(`tp_plan="auto"`, later `DistributedConfig(tp_size=2)`) wants torchrun and puts the same sums behind DTensors and
hooks, which the engine's calls of parts of a layer do not know.

All ways score the same heads on the same prompts, each in batches of the size that its engine picks: the layer split
two at once, half as large. Each way is measured from the prepared engine to scores on the host, best of --rounds; the
rows of all ways are compared. `tokens_per_second`: tokens of the prompts times heads. Prints one JSON line last.
"""

import copy
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # also in the processes that are spawned

from benchmarks.split_model import apart
from mathinterp.engine.intervention import Change, Value
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.scores import Scores
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.loading import prepare
from mathinterp.models.random_shapes import build_random
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts

CARDS = 2
WHOLE = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


@dataclass(frozen=True)
class Work:
    """Which heads of which model, on which prompts."""

    shape: str
    device: str
    limit: int
    layers: tuple[int, ...]
    heads: int
    rounds: int
    compiled: bool

    def model(self, *cards: str) -> Any:
        """The whole model on one card, or its layers on several."""
        dtype = "bfloat16" if self.device == "cuda" else "float64"
        spec = ModelSpec(f"random:{self.shape}", dtype=dtype)
        return load(resolve(spec, self.device), cards[0], cards[1:])

    def card(self, number: int) -> str:
        """Its name; on a CPU there is one."""
        return f"cuda:{number}" if self.device == "cuda" else "cpu"


def summed(part: torch.Tensor) -> torch.Tensor:
    """The sum of all processes' parts."""
    world = dist.group.WORLD
    assert world is not None
    total: torch.Tensor = wait_tensor(all_reduce(part, "sum", world))
    return total


class RowParallel(nn.Linear):
    """A product of which each process has some of the columns that are summed over."""

    partial = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The whole product, or this process's part of it."""
        part = super().forward(values)
        return part if self.partial else summed(part)


class ParallelEngine(PackedEngine):
    """The packed engine on one of several parts of a model: changed heads move the part, which is summed afterwards."""

    def _edited_attention(self, changes: Sequence[Change], *place: Any) -> torch.Tensor:
        projection = self.anatomy.output_projection(changes[0].layer)
        assert isinstance(projection, RowParallel)
        projection.partial = True
        try:
            return summed(super()._edited_attention(changes, *place))
        finally:
            projection.partial = False


def part_of(whole: Any, rank: int, device: torch.device) -> Any:
    """A model with this process's share of every layer's heads and neurons."""
    assert whole.config.model_type in ("llama", "mistral"), "names of other families are not known here"
    config = copy.deepcopy(whole.config)
    config.head_dim = whole.config.hidden_size // whole.config.num_attention_heads
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert getattr(config, size) % CARDS == 0
        setattr(config, size, getattr(config, size) // CARDS)
    part = build_random(config, 0, device, whole.dtype)
    for name, parameter in part.named_parameters():
        values = whole.get_parameter(name).data
        axis = WHOLE.get(name.split(".")[-2])
        parameter.data = values if axis is None else values.chunk(CARDS, axis)[rank].clone()
    for name, module in part.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.__class__ = RowParallel
    return prepare(part, "part")


def scored(work: Work, engine: PackedEngine, change: Callable[[int, int], Change]) -> Scores:
    """Scores of all heads, layer by layer."""
    return Scores.together(
        [engine.run([(change(layer, head),) for head in range(work.heads)]) for layer in work.layers]
    )


def timed(work: Work, run: Callable[[], Scores], before: Callable[[], None] = lambda: None) -> tuple[float, Scores]:
    """Seconds of the best round, and the scores; the first time, whatever is compiled late is compiled."""
    seconds, scores = [], run()
    for _ in range(work.rounds):
        before()
        started = time.perf_counter()
        scores = run()
        seconds.append(time.perf_counter() - started)
    return min(seconds), scores


def engine_of(work: Work, anatomy: Anatomy, prompts: Any, kind: type[PackedEngine] = PackedEngine) -> PackedEngine:
    """Prepared: compiled on a GPU, clean pass done."""
    return kind(anatomy, prompts, edits_per_batch=work.heads, compiled=work.compiled)


def rows_per_batch(engine: PackedEngine) -> int:
    """Tree nodes in a full batch, all edits counted."""
    rows = len(engine.groups[0].packs) * engine.forest.pack_size
    return rows * max(1, min(engine.edits_per_batch, engine.max_tokens // rows))


def in_one_process(work: Work, cards: int) -> tuple[float, Scores, dict[str, Any]]:
    """One card, or layers dealt out over several."""
    model = work.model(*map(work.card, range(cards)))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=work.limit), model.tokenizer)
    engine = engine_of(work, model.anatomy, prompts)
    zero = {layer: Value.zero(model.anatomy, "head", layer) for layer in work.layers}
    seconds, scores = timed(work, lambda: scored(work, engine, lambda at, h: Change("head", at, (h,), zero[at])))
    about = {
        "tokens": sum(len(prompt.fed) for prompt in prompts),
        "rows_per_batch": rows_per_batch(engine),
        "noise": engine.noise_floor(engine.baseline()),
    }
    return seconds, scores, about


def in_parallel(work: Work, rank: int, port: int) -> tuple[float, Scores, dict[str, Any]]:
    """One of the processes of the tensor-parallel way."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device(work.card(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=CARDS, timeout=timedelta(minutes=5))
    whole = work.model(str(device))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=work.limit), whole.tokenizer)
    anatomy = Anatomy(part_of(whole.model, rank, device))
    del whole
    engine = engine_of(work, anatomy, prompts, ParallelEngine)
    zero = {layer: Value.zero(anatomy, "head", layer) for layer in work.layers}
    each = anatomy.shape.n_heads

    def change(layer: int, head: int) -> Change:
        here = (head % each,) if head // each == rank else ()
        return Change("head", layer, here, zero[layer])

    seconds, scores = timed(work, lambda: scored(work, engine, change), dist.barrier)
    rows = rows_per_batch(engine)
    total = work.heads * len(engine.forest.token_ids_PN) * engine.forest.pack_size
    layers = sum(anatomy.shape.n_layers - 1 - layer for layer in work.layers)  # the last one's rows are few
    alone = time_of_a_sum(rows, anatomy)
    about = {"rows_per_batch": rows, "sum_seconds": alone, "sums_share": 2 * layers * total / rows * alone / seconds}
    dist.destroy_process_group()
    return seconds, scores, about


def time_of_a_sum(rows: int, anatomy: Anatomy) -> float:
    """Seconds that summing hidden states of so many rows over the processes takes, alone."""
    part = torch.zeros(rows, anatomy.shape.d_model, dtype=anatomy.dtype, device=anatomy.device)
    for count in (3, 20):
        started = time.perf_counter()
        for _ in range(count):
            summed(part)
        if part.is_cuda:
            torch.cuda.synchronize(part.device)
        seconds = (time.perf_counter() - started) / count
    return seconds


def elsewhere(function: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Any]:
    """What the function gives, called in fresh processes with each of these arguments, all at once."""
    with ProcessPoolExecutor(len(arguments), get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *each) for each in arguments]]


def measure(work: Work) -> dict[str, Any]:
    """Every way's pace and how far its rows are from those of one card."""
    [(seconds, expected, about)] = elsewhere(in_one_process, (work, 1))
    tokens = about["tokens"] * len(work.layers) * work.heads
    found: dict[str, Any] = {"one_card_seconds": seconds, "one_card": about}
    if work.device == "cuda":
        [(found["split_seconds"], scores, found["split"])] = elsewhere(in_one_process, (work, CARDS))
        found["split_apart"] = apart(scores, expected)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = elsewhere(in_parallel, *((work, rank, port) for rank in range(CARDS)))
    found["parallel_seconds"] = max(seconds for seconds, _, _ in parts)
    found["parallel"], found["parallel_apart"] = parts[0][2], apart(parts[0][1], expected)
    found["tokens_per_second"] = {
        way: tokens / found[f"{way}_seconds"] for way in ("one_card", "split", "parallel") if f"{way}_seconds" in found
    }
    found["parallel_of_one_card"] = found["one_card_seconds"] / found["parallel_seconds"]
    if "split_seconds" in found:
        found["split_of_one_card"] = found["one_card_seconds"] / found["split_seconds"]
        found["parallel_of_split"] = found["split_seconds"] / found["parallel_seconds"]
    return found


@click.command()
@click.option("--shape", default="llama-2-7b", show_default=True, help="A shape of 'mathinterp models', Llama's kind.")
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--limit", default=200, show_default=True, help="Prompts of the set two_digit.")
@click.option("--layers", default="0,8,16,24,31", show_default=True)
@click.option("--heads", default=None, type=int, help="The first so many of each layer; default: all.")
@click.option("--rounds", default=2, show_default=True)
@click.option("--compile/--no-compile", "compiled", default=None, help="Default: on GPUs.")
def main(
    shape: str, device: str, limit: int, layers: str, heads: int | None, rounds: int, compiled: bool | None
) -> None:
    """Measure, and say what came out."""
    if device == "cuda" and torch.cuda.device_count() < CARDS:
        sys.exit(f"this needs two GPUs, and {torch.cuda.device_count()} can be seen here: nothing was measured")
    chosen = tuple(int(layer) for layer in layers.split(","))
    asked = resolve(ModelSpec(f"random:{shape}"), device).shape.n_heads if heads is None else heads
    compiled = device == "cuda" if compiled is None else compiled
    found = measure(Work(shape, device, limit, chosen, asked, rounds, compiled))
    for way, pace in found["tokens_per_second"].items():
        print(f"{way}: {pace:,.0f} tokens/s")
    print(f"sums over the cards, alone: {found['parallel']['sums_share']:.2f} of the time of tensor parallelism")
    print(f"rows of tensor parallelism against one card's: {found['parallel_apart']}")
    work = {"shape": shape, "prompts": limit, "layers": chosen, "heads": asked}
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    print(json.dumps({"gpu": gpu, **work, **found}))


if __name__ == "__main__":
    main()
