"""Blocks of adaptive scans in one batch shape, as on a GPU: compiled once, with the rows of shapes of their own."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mathinterp.engine import choose, compiling
from mathinterp.engine.scores import answers_of
from mathinterp.engine.tree.packing import BatchShape, lay_out
from mathinterp.experiments.adaptive.blocks import Blocks
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "COMPILER", counter)
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def shard(block: int, prompts: tuple[int, int], per_layer: float, **work: object) -> Shard:
    return Shard("head_scan", block, {"prompts": list(prompts), "per_layer": per_layer, **work})


CASES = [
    (Heads(decide=20), [
        shard(0, (0, 24), 4, heads=[[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]),
        shard(1, (24, 40), 2, heads=[[0, 1], [0, 3], [1, 1]]), shard(2, (40, 96), 1, heads=[[1, 2], [2, 0]]),
    ]),
    (Mlps(decide=20, scoring="first_token"), [
        shard(0, (0, 24), 1, layers=[0, 1]), shard(1, (24, 40), 1, layers=[0, 1]), shard(2, (40, 96), 1, layers=[1]),
    ]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [2048, 8192])  # packs that blocks fill, and larger ones
@pytest.mark.parametrize(("scan", "shards"), CASES, ids=["heads", "mlps"])
def test_blocks_of_any_size_compile_once_and_give_the_same_rows(
    scan: Heads | Mlps, shards: list[Shard], max_tokens: int, graphs: CompileCounter
) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=96), tiny_tokenizer())
    subject, order = Subject(anatomy, prompts, max_tokens), np.random.default_rng(1).permutation(len(prompts))
    own = Blocks(scan, subject, shards[0], 4, order, compiled=False)
    expected = [scan.run(own, each) for each in shards]
    assert graphs.frame_count == 0
    one = Blocks(scan, subject, shards[0], 4, order, compiled=True)
    counts, found = [], []
    for each in shards:
        found.append(scan.run(one, each))
        counts.append(graphs.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts
    for mine, theirs in zip(found, expected, strict=True):
        assert_rows(mine, theirs)


def assert_rows(mine: pa.Table, theirs: pa.Table) -> None:
    for name in mine.column_names:
        a, b = (table[name].to_numpy(zero_copy_only=False) for table in (mine, theirs))
        if name in ("logprob", "logit"):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
        else:
            assert (a == b).all(), name


def test_a_batch_takes_the_edits_that_need_fewest_batches() -> None:
    shape = BatchShape(pack_size=264, rows=48, slots=9)
    assert shape.edits_for(packs=3, wanted=32, most=32) == 16, "3 packs of 16 edits fill a batch"
    assert shape.edits_for(packs=48, wanted=1.2, most=32) == 1
    assert shape.edits_for(packs=20, wanted=2, most=32) == 2
    assert 48 % shape.edits_for(packs=7, wanted=5, most=32) == 0


@pytest.mark.slow
def test_compiling_ahead_leaves_nothing_to_compile(graphs: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "pays_to_compile", lambda *_: True)
    scan, anatomy = Heads(decide=20), Anatomy(tiny_model("llama"))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=48), tiny_tokenizer())
    assert scan.compiles(anatomy.shape, prompts, "cpu")
    scan.compile_ahead(Subject(Anatomy(tiny_model("llama", seed=4)), prompts, 2048), anatomy.shape)
    ahead = graphs.frame_count
    assert ahead > 0
    state = scan.prepare(Subject(anatomy, prompts, 2048))
    scan.run(state, shard(0, (0, 24), 4, heads=[[0, 0], [0, 1], [1, 2]]))
    scan.run(state, shard(1, (24, 48), 1, heads=[[0, 0], [1, 2]]))
    assert graphs.frame_count == ahead


@pytest.mark.parametrize("stop", [8, 30, 60, 90])
def test_packs_of_a_block_are_as_large_as_those_of_any_other(stop: int) -> None:
    anatomy = Anatomy(tiny_model("llama"))
    prompts = tokenize_prompts(load_prompts("two_digit", limit=96), tiny_tokenizer())
    some, shape = prompts[:stop], BatchShape(pack_size=264, rows=4, slots=200)
    fed = [prompt.fed for prompt in some]
    layout = lay_out(
        anatomy, fed, answers_of(some), private_from=None, edits=2, max_tokens=2048, pack_size=None, shape=shape
    )
    assert layout.forest.pack_size == 264
    assert {group.slots_PM.shape for group in layout.groups} == {(2, 200)}
