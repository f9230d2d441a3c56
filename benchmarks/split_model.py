"""A model whose layers lie on two cards against one card: the same rows, and how much of two replicas' pace is kept.

    python benchmarks/split_model.py                                             # 7B shape, 1,024 heads x 1,600 prompts
    python benchmarks/split_model.py --shape llama-2-70b --layers 20,60 --heads 8 --limit 200    # two cards of 141 GB
    python benchmarks/split_scans.py                                                             # the other experiments

The first compares three ways to scan heads of a model that fits one card: one card; two replicas, each a process with
a card and half of the heads, started together; one model on both cards. Target: the last at 0.85 of the second's pace.
The second scans a model that fits no card, and compares its pace in FLOP/s with that of the 7B shape on the same two
cards, measured first. Target: 0.85. Models have random weights; each way is measured from the prepared engine
(compiled, clean pass done) to scores on the host, best of --rounds.

Needs two GPUs and says so where there are fewer. Prints one JSON line last.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click
import numpy as np
import torch

from mathinterp.engine.scores import Scores
from mathinterp.experiments.ablated import AblationState
from mathinterp.experiments.base import Subject
from mathinterp.experiments.heads import Heads
from mathinterp.models.card_memory import check_fits
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.units import Head
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts

Result = TypeVar("Result")

SMALL = "llama-2-7b"
TARGET = 0.85


class Scan:
    """Heads of chosen layers of a random model on some cards, ready to be timed.

    Args:
        half: 0 or 1: every scan is prepared whole, and of this one half of the layers are timed, which cost the same.
    """

    def __init__(self, shape: str, limit: int, layers: Sequence[int], heads: int, cards: int, half: int | None = None):
        spec = ModelSpec(f"random:{shape}", dtype="bfloat16")
        further_cards = [f"cuda:{card}" for card in range(1, cards)]
        self.model = load(resolve(spec, "cuda"), "cuda:0", further_cards)
        self.prompts = tokenize_prompts(load_prompts("two_digit", limit=limit), self.model.tokenizer)
        self.layers, self.heads = list(layers), heads
        self.scan = Heads(heads=tuple(Head(layer, head) for layer in self.layers for head in range(heads)))
        started = time.perf_counter()
        state = self.scan.prepare(Subject(self.model.anatomy, self.prompts))
        assert isinstance(state, AblationState)
        self.state, self.prepare_seconds = state, time.perf_counter() - started
        if half is not None:
            self.layers = [layer for n, layer in enumerate(sorted(self.layers)) if (n + n // 2) % 2 == half]
        self.scores(sorted({self.layers[0], self.layers[len(self.layers) // 2], self.layers[-1]}))  # compiled late

    def scores(self, layers: Sequence[int] | None = None) -> Scores:
        """Of all heads of the layers, one after another; None: of all that were chosen."""
        from mathinterp.engine.intervention import intervention
        from mathinterp.experiments.ablated import value_of

        found = []
        for layer in self.layers if layers is None else layers:
            value = value_of(self.scan, self.state, "head", layer)
            found.append(self.state.engine.run([intervention([Head(layer, h)], value) for h in range(self.heads)]))
        return Scores.together(found)

    def flops(self) -> float:
        """Of the heads alone, as ``plan`` counts them."""
        shards = self.scan.shards(self.model.anatomy.shape, self.prompts)
        cost = self.scan.cost(self.model.anatomy.shape, self.prompts, shards)
        assert cost is not None
        return cost.flops

    def noise(self) -> dict[str, float]:
        """How far this engine strays from itself."""
        noise: dict[str, float] = self.state.notes["noise_floor"]
        return {**noise, "packing_deviation": self.state.notes["packing_deviation"]}


def best_of(rounds: int, work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of the shortest round, and what the last one gave."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        given = work()
        best = min(best, time.perf_counter() - started)
    return best, given


def replica(card: int, make: Callable[[], Any], rounds: int, barrier: Any, told: Any) -> None:
    """One of two replicas: prepares, waits for the other before each round, tells when the round began and ended."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible()[card]
    scan = make()
    for number in range(rounds):
        barrier.wait()
        started = time.time()
        scan.scores()
        told.put((number, started, time.time()))


def two_replicas(makes: Sequence[Callable[[], Any]], rounds: int) -> float:
    """Seconds of the best round of two processes, each with a card and what it makes there; its ``scores`` is timed."""
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=replica, args=(card, make, rounds, barrier, told)) for card, make in enumerate(makes)
    ]
    for worker in workers:
        worker.start()
    ended = [told.get(timeout=1800) for _ in range(2 * rounds)]
    for worker in workers:
        worker.join()
    spans = []
    for number in range(rounds):
        of_round = [(start, stop) for which, start, stop in ended if which == number]
        spans.append(max(stop for _, stop in of_round) - min(start for start, _ in of_round))
    return float(min(spans))


def visible() -> list[str]:
    """The cards of this process, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(card) for card in range(torch.cuda.device_count())]


def apart(one: Scores, other: Scores) -> dict[str, float]:
    """The largest differences of two ways' scores, and predictions that differ."""
    return {
        "logprob": float(np.abs(one.logprob_EA - other.logprob_EA).max()),
        "logit": float(np.abs(one.logit_EA - other.logit_EA).max()),
        "predictions": int((one.predicted_EA != other.predicted_EA).sum()),
        "answers": int(one.predicted_EA.size),
    }


def compare(shape: str, limit: int, layers: Sequence[int], heads: int, rounds: int) -> dict[str, Any]:
    """One card, two replicas, two cards."""
    one = Scan(shape, limit, layers, heads, cards=1)
    seconds, expected = best_of(rounds, one.scores)
    found: dict[str, Any] = {"one_card_seconds": seconds, "one_card_noise": one.noise()}
    flops = one.flops()
    del one
    torch.cuda.empty_cache()
    split = Scan(shape, limit, layers, heads, cards=2)
    seconds, scores = best_of(rounds, split.scores)
    found |= {"split_seconds": seconds, "split_noise": split.noise(), "engine": split.state.notes["engine"]}
    found["apart"] = apart(scores, expected)
    print(json.dumps(found), flush=True)
    del split
    torch.cuda.empty_cache()
    halves = [partial(Scan, shape, limit, layers, heads, cards=1, half=half) for half in range(2)]
    found["two_replicas_seconds"] = two_replicas(halves, rounds)
    found["flops_per_second"] = flops / found["split_seconds"]
    found["of_two_replicas"] = found["two_replicas_seconds"] / found["split_seconds"]
    floor = max(found[f"{way}_noise"]["max_logprob_deviation"] for way in ("one_card", "split"))
    found["within_noise"] = found["apart"]["logprob"] <= 2 * floor  # each may stray by its own
    return found


def large(shape: str, limit: int, layers: Sequence[int], heads: int, rounds: int) -> dict[str, Any]:
    """A model that needs both cards, against the FLOP/s of the 7B shape on them."""
    check_fits(resolve(ModelSpec(f"random:{shape}", dtype="bfloat16"), "cuda"), 2, smallest_card())
    small = Scan(SMALL, limit, [10, 24], heads, cards=2)
    rate = small.flops() / best_of(rounds, small.scores)[0]
    del small
    torch.cuda.empty_cache()
    split = Scan(shape, limit, layers, heads, cards=2)
    (seconds, _), flops = best_of(rounds, split.scores), split.flops()
    whole = Heads()
    shape_of = split.model.anatomy.shape
    cost = whole.cost(shape_of, split.prompts, whole.shards(shape_of, split.prompts))
    assert cost is not None
    return {
        "seconds": seconds,
        "flops": flops,
        "flops_per_second": flops / seconds,
        "small_flops_per_second": rate,
        "predicted_seconds": flops / rate,
        "of_predicted": flops / seconds / rate,
        "noise": split.noise(),
        "full_grid_heads": shape_of.n_layers * shape_of.n_heads,
        "full_grid_seconds": cost.flops * seconds / flops,
    }


def smallest_card() -> int:
    """Bytes of the smaller of the two cards."""
    return min(torch.cuda.get_device_properties(card).total_memory for card in range(2))


@click.command()
@click.option("--shape", default=SMALL, show_default=True, help="A shape of 'mathinterp models'.")
@click.option("--limit", default=1600, show_default=True, help="Prompts of the set two_digit.")
@click.option("--layers", default=None, help="For example 20,60; default: all.")
@click.option("--heads", default=None, type=int, help="The first so many of each layer; default: all.")
@click.option("--rounds", default=2, show_default=True)
def main(shape: str, limit: int, layers: str | None, heads: int | None, rounds: int) -> None:
    """Measure, and say what came out."""
    if torch.cuda.device_count() < 2:
        sys.exit(f"this needs two GPUs, and {torch.cuda.device_count()} can be seen here: nothing was measured")
    sizes = resolve(ModelSpec(f"random:{shape}", dtype="bfloat16"), "cuda").shape
    chosen = list(range(sizes.n_layers)) if layers is None else [int(layer) for layer in layers.split(",")]
    asked = sizes.n_heads if heads is None else heads
    fits = shape == SMALL
    found = (compare if fits else large)(shape, limit, chosen, asked, rounds)
    name = "of_two_replicas" if fits else "of_predicted"
    print(f"{shape} on two cards: {found[name]:.3f} {name.replace('_', ' ')} (target {TARGET})")
    if fits:
        print(f"rows: {found['apart']}; within noise: {found['within_noise']}; noise {found['split_noise']}")
    work = {"shape": shape, "prompts": limit, "layers": len(chosen), "heads": asked}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), **work, **found}))


if __name__ == "__main__":
    main()
