"""Batches in flight on several cards: bit for bit the numbers of one after another, and nothing left behind."""

import heapq
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mathinterp.engine import in_flight, packed, replay
from mathinterp.engine.attribution.circuit import circuit_metrics
from mathinterp.engine.attribution.estimate import estimate
from mathinterp.engine.attribution.methods import METHODS
from mathinterp.engine.attribution.pairs import places_of
from mathinterp.engine.in_flight import on_every, turns, turns_for
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.lens import neurons
from mathinterp.engine.lens.neurons import NeuronLens, end_activations, layer_importances, lenses_of
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.pairs import CleanPairs, ends_of
from mathinterp.engine.paths.frozen import PathEngine
from mathinterp.engine.paths.nodes import Node, Receiver
from mathinterp.engine.paths.patching import EndPatching
from mathinterp.engine.paths.receivers import ReceiverEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import Courier, layers_of, spread
from mathinterp.models.units import Head, Mlp
from tests.attribution_twin import contrasts
from tests.exact import random_prompts
from tests.neuron_twin import SEQUENCES
from tests.path_twin import random_pairs
from tests.tiny import tiny_model

CPU = torch.device("cpu")
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ROUNDS = 3  # a race need not show each time


# ---- everywhere ----


def test_every_batch_has_its_turn_and_all_are_made_before_the_first() -> None:
    made = []

    def batches() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            yield number

    seen = []
    for number in turns([CPU], batches()):
        assert made == [0, 1, 2, 3, 4]
        seen.append(number)
    assert seen == made


def makespan(batches: int, turns: int, cards: int, layers: int) -> float:
    """Of batches whose layers lie on the cards in turn: each card takes what came first, copies take a while.

    A batch begins when the one before it in its turn has ended.
    """
    waiting = {turn: list(range(turn, batches, turns)) for turn in range(turns)}
    ready = [(0.0, ahead.pop(0), turn, 0) for turn, ahead in waiting.items() if ahead]
    free, end = [0.0] * cards, 0.0
    while ready:
        since, batch, turn, layer = heapq.heappop(ready)
        end = free[layer % cards] = max(since, free[layer % cards]) + 1
        if layer + 1 < layers:
            heapq.heappush(ready, (end + 0.05, batch, turn, layer + 1))
        elif waiting[turn]:
            heapq.heappush(ready, (end, waiting[turn].pop(0), turn, 0))
    return max(free)


@pytest.mark.parametrize("layers", [4, 16, 31])
@pytest.mark.parametrize("cards", [2, 4])
def test_turns_are_more_than_cards_and_leave_few_of_them_idle(cards: int, layers: int) -> None:
    allowed, gained = range(cards + 1, 2 * cards + 2), []
    for batches in range(1, 40):
        chosen = turns_for(batches, cards)
        assert chosen in allowed
        taken = makespan(batches, chosen, cards, layers)
        assert taken <= 1.02 * min(makespan(batches, turns, cards, layers) for turns in allowed)
        gained.append(makespan(batches, cards, cards, layers) / taken)
    assert min(gained) >= 1
    assert max(gained) > 1.03


@pytest.mark.parametrize("prompts", [len(SEQUENCES), 1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_prompts_shared_out_have_the_importances_of_all_together(family: str, prompts: int) -> None:
    anatomy = Anatomy(tiny_model(family))
    runs = [end_activations(anatomy, SEQUENCES[:prompts]), end_activations(anatomy, SEQUENCES[-prompts:])]
    lens = NeuronLens(anatomy)
    scales, target_P = lens.frozen_scales(runs[0]), lens.logits(runs[0]).argmax(dim=-1)
    anatomy.cards = (CPU, CPU)
    shared = layer_importances(lenses_of(anatomy), 1, runs, scales, target_P)
    for found, run in zip(shared, runs, strict=True):
        expected = lens.layer(1, run, scales, target_P, lens.directions(1))
        for own, whole in zip(astuple(found), astuple(expected), strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-11, atol=1e-13)


# ---- on two GPUs ----


@contextmanager
def one_after_another(cards: Any, batches: int | None = None) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """In place of ``in_flight``."""
    yield nullcontext


def on_each_in_turn(cards: Any, work: Callable[[int], Any]) -> list[Any]:
    """In place of ``on_every``."""
    found = []
    for number, card in enumerate(cards):
        with torch.cuda.device(card), torch.inference_mode():
            found.append(work(number))
            torch.cuda.synchronize()
    return found


@cache
def split_model(dtype: torch.dtype) -> Anatomy:
    """Wide enough that a card is busy for a while; its layers lie on two."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=5504, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.04,
    )  # fmt: skip
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = model.eval().requires_grad_(False)
    spread(layers_of(model), [torch.device("cuda:0"), torch.device("cuda:1")])
    anatomy = Anatomy(model)
    assert len(anatomy.cards) == 2
    return anatomy


def both_ways(monkeypatch: pytest.MonkeyPatch, work: Callable[[], list[np.ndarray]]) -> None:
    """What ``work`` gives in flight, several times, is what it gives one after another; streams are as they were."""
    before = [torch.cuda.current_stream(card) for card in range(2)]
    with monkeypatch.context() as patch:
        for module in (in_flight, packed, replay):
            patch.setattr(module, "in_flight", one_after_another)
        patch.setattr(neurons, "on_every", on_each_in_turn)
        alone = work()
        again = work()
    assert any(np.ptp(values) > 0 for values in alone)
    for own, other in zip(alone, again, strict=True):
        np.testing.assert_array_equal(own, other, err_msg="one after another, twice")
    for _ in range(ROUNDS):
        for own, other in zip(work(), alone, strict=True):
            np.testing.assert_array_equal(own, other)
    assert [torch.cuda.current_stream(card) for card in range(2)] == before


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.gpu
@on_two_gpus
@DTYPES
@pytest.mark.parametrize("way", ["heads", "all", "none", "5.3.q", "5.3.v", "5.mlp", "5.mlp all"])
def test_path_rows_in_flight(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy, pairs = split_model(dtype), random_pairs(300)
    clean = CleanPairs(pairs, ends_of(anatomy, pairs.original), ends_of(anatomy, pairs.counterfactual))
    receiver, _, freeze = way.partition(" ")
    engine: PathEngine | EndPatching | ReceiverEngine
    if way == "none":
        engine = EndPatching(anatomy, clean, max_rows=200)
    elif way in ("heads", "all"):
        engine, freeze = PathEngine(anatomy, clean, max_rows=500), way
    else:
        engine = ReceiverEngine(anatomy, clean, Receiver.parse(receiver), max_rows=200)
    freeze = "none" if way == "none" else freeze or "heads"
    nodes: list[Node] = [*(Head(1, head) for head in range(16)), Mlp(1)]

    def work() -> list[np.ndarray]:
        return [column.cpu().numpy() for column in engine.patched(nodes, freeze).columns]

    both_ways(monkeypatch, work)


@pytest.mark.gpu
@on_two_gpus
@DTYPES
@pytest.mark.parametrize("layer", [0, 4, 5, 7])
def test_replaced_heads_in_flight(layer: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, and of two, which takes another way; 13 batches and more, of few and of many tokens."""
    anatomy, prompts = split_model(dtype), random_prompts(400)
    engine = PackedEngine(anatomy, prompts, max_tokens=600, edits_per_batch=4, pack_size=100)
    one = [zeroed(anatomy, [Head(layer, head)]) for head in range(16)]
    two = [zeroed(anatomy, [Head(layer, head), Mlp(max(layer - 1, 0))]) for head in range(16)]
    mlp = zeroed(anatomy, [Mlp(layer)])
    assert len(engine.groups) * len(one) // engine.edits_per_batch >= 13

    def work() -> list[np.ndarray]:
        return [np.concatenate([engine.run(each).logprob_EA for each in (one, two, [mlp] * 3)])]

    both_ways(monkeypatch, work)


@pytest.mark.gpu
@on_two_gpus
@DTYPES
@pytest.mark.parametrize("method", METHODS)
def test_attribution_in_flight(method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy, prompts = split_model(dtype), contrasts(60)
    places = places_of(anatomy, neurons=True)

    def work() -> list[np.ndarray]:
        values, _ = estimate(anatomy, prompts, places, method=method, steps=2, max_tokens=90)
        return [values[place].numpy() for place in places]

    both_ways(monkeypatch, work)


@pytest.mark.gpu
@on_two_gpus
@pytest.mark.parametrize("ablation", ["resample", "zero"])
def test_circuits_in_flight(ablation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy, prompts, rng = split_model(torch.float32), contrasts(60), np.random.default_rng(0)
    circuits = [
        {("head", layer): rng.random(16) < 0.5 for layer in range(8)} | {("mlp", 3): rng.random(1) < 0.5}
        for _ in range(12)
    ]  # fmt: skip
    both_ways(monkeypatch, lambda: [circuit_metrics(anatomy, prompts, circuits, ablation, {}, 200)])


@pytest.mark.gpu
@on_two_gpus
@DTYPES
def test_neurons_on_every_card(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy, pairs = split_model(dtype), random_pairs(101)
    runs = [end_activations(anatomy, side) for side in (pairs.original, pairs.counterfactual)]
    lenses = lenses_of(anatomy)
    scales, target_P = lenses[0].frozen_scales(runs[0]), lenses[0].logits(runs[0]).argmax(dim=-1)

    def work() -> list[np.ndarray]:
        layers = [layer_importances(lenses, layer, runs, scales, target_P) for layer in range(8)]
        return [values.cpu().numpy() for both in layers for found in both for values in astuple(found)]

    both_ways(monkeypatch, work)
    lens, (one, _) = NeuronLens(anatomy), layer_importances(lenses, 3, runs, scales, target_P)
    whole = lens.layer(3, runs[0], scales, target_P, lens.directions(3))
    for own, expected in zip(astuple(one), astuple(whole), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@on_two_gpus
def test_what_another_turn_brought_is_read_when_it_has_come() -> None:
    """Masks and rotary tables are brought once, in the stream of one turn, and read in those of all."""
    home, card = torch.device("cuda", 0), torch.device("cuda", 1)
    one, other = torch.cuda.Stream(card), torch.cuda.Stream(card)
    courier, given = Courier(card, home), torch.ones(2**20, device=home)
    with torch.cuda.stream(one):
        torch.zeros(2**20, device=card).sum()  # its memory is given to what is brought; first calls of kernels wait
        torch.cuda.synchronize(card)
        torch.cuda._sleep(2 * 10**9)  # about a second, which the copy waits for
        brought = courier._once(given)
    with torch.cuda.stream(other):
        assert courier._once(given) is brought
        read = brought.sum()
    torch.cuda.synchronize(card)
    assert read.item() == 2**20


@pytest.mark.gpu
@on_two_gpus
def test_a_fault_in_a_turn_leaves_the_streams_as_they_were() -> None:
    cards = [torch.device("cuda", number) for number in range(2)]
    before = [torch.cuda.current_stream(card) for card in cards]
    kept = []
    for where in range(3):
        try:
            for number in turns(cards, range(5)):
                assert torch.cuda.current_stream(cards[1]) not in before
                if number == where:
                    raise ValueError("a fault")
        except ValueError as error:
            kept.append(error)  # and with it the frames that it came through
        assert [torch.cuda.current_stream(card) for card in cards] == before
    assert len(kept) == 3


@pytest.mark.gpu
@on_two_gpus
def test_work_on_every_card_is_done_there_and_its_faults_are_raised() -> None:
    cards = [torch.device("cuda", number) for number in range(2)]

    def work(number: int) -> int:
        assert torch.is_inference_mode_enabled()
        return torch.cuda.current_device()

    assert on_every(cards, work) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        on_every(cards, lambda number: 1 // number)
