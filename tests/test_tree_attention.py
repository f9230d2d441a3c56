"""Attention over packed trees without dense masks: the same numbers as with them, and used only where it holds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mathinterp.engine import compiling
from mathinterp.engine.intervention import Tokens, Value, intervention, zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.tree import attention as tree_attention
from mathinterp.engine.tree.attention import BLOCK, blockwise, dispatches, serves, trees_of
from mathinterp.engine.tree.forest import Forest, plant
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from tests.exact import EXACT, PROMPTS, assert_same
from tests.tiny import TINY_FAMILIES, tiny_model

# A soft-cap and eager attention; windows that prompts feel; eager attention of its own.
NOT_SERVED = ("gemma2", "mistral-window", "gemma3", "falcon", "falcon-new", "falcon-sequential")


def long_forest(pack_size: int, seed: int = 0) -> Forest:
    """Sequences of up to 60 tokens over three ids: paths longer than a chunk, blocks that begin deep in a tree."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(1, 4, size=45)
    cuts = rng.integers(1, 45, size=60)
    return plant([(*stem[:cut], *rng.integers(1, 4, size=rng.integers(1, 15))) for cut in cuts], pack_size=pack_size)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forest: Forest, scaling: float) -> torch.Tensor:
    """The slow twin: every query against every key, masked by ancestry."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    allowed = torch.from_numpy(np.stack([forest.ancestors(pack) for pack in range(forest.n_packs)])).to(query.device)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_heads(forest: Forest, heads: int, groups: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values as models give them: R N H Z in memory, seen as R H N Z."""
    generator = torch.Generator().manual_seed(seed)
    shape = (forest.n_packs, forest.pack_size)
    return [
        torch.randn(*shape, n, width, generator=generator, dtype=torch.float64).transpose(1, 2)
        for n in (heads, groups, groups)
    ]


@pytest.mark.parametrize("pack_size", [70, 130, 200, 800])
def test_subtree_ends_say_what_the_mask_says(pack_size: int) -> None:
    forest = long_forest(pack_size)
    node = np.arange(forest.pack_size)
    for pack in range(forest.n_packs):
        ends = forest.subtree_ends(pack)
        seen = (node[None, :] <= node[:, None]) & (node[:, None] < ends[None, :])
        np.testing.assert_array_equal(seen, forest.ancestors(pack))


def test_a_path_holds_all_that_its_block_sees_before_itself() -> None:
    forest = long_forest(200)
    _, paths = trees_of(forest, np.arange(forest.n_packs), torch.device("cpu"))
    for pack in range(forest.n_packs):
        for block, start in enumerate(range(0, forest.pack_size, BLOCK)):
            before = forest.ancestors(pack)[start : start + BLOCK, :start].any(axis=0)
            assert set(np.flatnonzero(before)) <= set(paths[pack, block].tolist())
            first = np.flatnonzero(forest.ancestors(pack)[start, :start])
            np.testing.assert_array_equal([n for n in paths[pack, block].tolist() if n >= 0], first)


@pytest.mark.parametrize(("pack_size", "heads", "groups", "width"), [(70, 2, 2, 16), (200, 4, 2, 8), (800, 3, 1, 24)])
def test_blocks_and_paths_give_what_a_dense_mask_gives(pack_size: int, heads: int, groups: int, width: int) -> None:
    forest = long_forest(pack_size)
    query, key, value = random_heads(forest, heads, groups, width)
    trees = trees_of(forest, np.arange(forest.n_packs), torch.device("cpu"))
    found = blockwise(query, key, value, *trees, 0.3)
    np.testing.assert_allclose(found, dense(query, key, value, forest, 0.3), **EXACT)


@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name not in NOT_SERVED])
def test_the_engine_gives_the_same_scores_with_it(family: str) -> None:
    anatomy = Anatomy(tiny_model(family))
    if family == "gptj" and not dispatches(anatomy):
        pytest.skip("GPT-J of this transformers picks its attention by class")
    assert dispatches(anatomy)
    engines = [PackedEngine(anatomy, PROMPTS, tree_attention=tree, pack_size=150) for tree in (True, False)]
    assert_same(*(engine.baseline() for engine in engines))
    for layer in range(anatomy.shape.n_layers):
        zero = Value.zero(anatomy, "head", layer)
        heads = [intervention([Head(layer, head)], zero) for head in range(anatomy.shape.n_heads)]
        for site, changes in (("head", heads), ("mlp", [zeroed(anatomy, [Mlp(layer)])])):
            assert_same(*(engine.run(changes) for engine in engines))
            tokens = Tokens(np.arange(5), np.full(5, 3))
            values = [engine.activations(site, layer, tokens) for engine in engines]
            np.testing.assert_allclose(values[0], values[1], **EXACT)
    sets = [zeroed(anatomy, [Head(0, 0)]), zeroed(anatomy, [Head(0, 0), Head(1, 1)])]
    assert_same(*(engine.replay.run(sets) for engine in engines))


def test_the_model_itself_keeps_its_attention() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    before = anatomy.model(torch.tensor([PROMPTS[0].fed])).logits
    own = [anatomy.attention(layer) for layer in range(anatomy.shape.n_layers)]
    engine = PackedEngine(anatomy, PROMPTS, tree_attention=True)
    engine.baseline()
    assert [anatomy.attention(layer) for layer in range(anatomy.shape.n_layers)] == own
    assert all(module.config._attn_implementation == "sdpa" for module in own)
    assert engine.layers.modules[0].self_attn.config._attn_implementation == tree_attention.NAME
    assert torch.equal(anatomy.model(torch.tensor([PROMPTS[0].fed])).logits, before)


@pytest.mark.slow
def test_it_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "COMPILER", counter)
    anatomy = Anatomy(tiny_model("llama"))
    torch._dynamo.reset()
    compiled = PackedEngine(anatomy, PROMPTS, tree_attention=True, compiled=True, pack_size=300, max_tokens=10_000)
    zero = Value.zero(anatomy, "head", 0)
    heads = [intervention([Head(0, head)], zero) for head in range(anatomy.shape.n_heads)]
    found = compiled.run(heads)
    assert counter.frame_count == 5  # attention and the rest of a layer, of the last one at answers alone; scores
    assert_same(found, PackedEngine(anatomy, PROMPTS).run(heads))


def test_prompts_edited_apart_keep_nodes_of_their_own() -> None:
    """Replacements that differ between prompts: private nodes, several roots in a pack."""
    anatomy = Anatomy(tiny_model("llama"))
    ends = np.array([prompt.end for prompt in PROMPTS])
    for private_from in (ends.tolist(), [0] * len(PROMPTS)):
        engines = [
            PackedEngine(anatomy, PROMPTS, private_from=private_from, tree_attention=tree) for tree in (True, False)
        ]
        values = torch.randn(len(PROMPTS), 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        value = Value(values, Tokens(np.arange(len(PROMPTS)), ends))
        heads = [intervention([Head(1, head)], value) for head in range(anatomy.shape.n_heads)]
        assert_same(*(engine.run(heads) for engine in engines))


def test_what_it_does_not_compute_is_refused() -> None:
    module, query = torch.nn.Module(), torch.zeros(1, 1, 3, 8)
    trees = (torch.zeros(1, 3), torch.zeros(1, 1, 16))
    for name, value in (("softcap", 30.0), ("position_bias", query), ("s_aux", query), ("dropout", 0.1)):
        with pytest.raises(AssertionError, match="tree attention knows no"):
            tree_attention._forward(module, query, query, query, trees, **{name: value})


def test_it_serves_only_what_it_computes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def on_gpu(family: str, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
        anatomy = Anatomy(tiny_model(family))
        return SimpleNamespace(
            dtype=dtype, device=torch.device("cuda"), family=anatomy.family, shape=anatomy.shape,
            attention=anatomy.attention,
        )  # fmt: skip

    short, long = [(1,) * 3], [(1,) * 200]
    assert serves(on_gpu("llama"), long)
    assert serves(on_gpu("mistral-window"), short)
    assert not serves(on_gpu("mistral-window"), long), "the window would be felt"
    assert not serves(on_gpu("gemma2"), short), "a soft-cap"
    assert not serves(on_gpu("llama", torch.float32), long)
    assert not serves(Anatomy(tiny_model("llama").bfloat16()), long), "on a CPU"
    with monkeypatch.context() as older:
        older.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not serves(on_gpu("llama"), long), "an older card"
    with monkeypatch.context() as narrower:
        narrower.setattr(tree_attention, "MOST_WIDTH", 4)
        assert not serves(on_gpu("llama"), long), "heads too wide"
    monkeypatch.setattr(tree_attention.importlib.util, "find_spec", lambda name: None)
    assert not serves(on_gpu("llama"), long), "no Triton"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("pack_size", "heads", "groups", "width"), [(70, 2, 2, 64), (200, 4, 2, 128), (800, 3, 1, 80)])
def test_the_kernel_gives_what_its_reference_gives(
    dtype: torch.dtype, close: float, pack_size: int, heads: int, groups: int, width: int
) -> None:
    forest = long_forest(pack_size)
    query, key, value = (x.to("cuda", dtype) for x in random_heads(forest, heads, groups, width))
    trees = trees_of(forest, np.arange(forest.n_packs), torch.device("cuda"))
    found = tree_attention.tree_attention(query, key, value, *trees, 0.1).double()
    exact = blockwise(query.double(), key.double(), value.double(), *trees, 0.1)
    assert (found - exact).abs().max() < close
