"""Compiling ahead: nothing is compiled after the weights are loaded, results stay the same, and when it is not done.

The compiler is torch's counter of graphs, which runs them as they are: what matters is which ones were asked for.
"""

import dataclasses
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from mathinterp.cluster import compile_ahead as ahead
from mathinterp.cluster import replica
from mathinterp.cluster.compile_ahead import compile_ahead, reading_ahead
from mathinterp.engine import choose, compiling
from mathinterp.engine.choose import COMPILE_FROM_NODES
from mathinterp.engine.packed import PackedEngine
from mathinterp.experiments import ablated
from mathinterp.experiments.base import Experiment, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.mlps import Mlps
from mathinterp.models import catalog, gguf_files, handle
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel, files_to_load, load, resolve, stand_in
from mathinterp.models.families import FAMILIES as FAMILIES_TABLE
from mathinterp.models.random_shapes import build_random, random_config, stand_in_config
from mathinterp.models.units import Head
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import prompts_fingerprint
from tests.tiny import TINY_FAMILIES, tiny_config, tiny_tokenizer
from tests.tiny_gguf import save_tiny_gguf
from tests.toy_scan import ToyScan

LAYERS = 6  # twice those of the stand-in
FAMILIES = ["gemma2", "gpt2", "qwen3", "phi3", "gpt_neox"]  # and Llama below
MAX_TOKENS = 4096  # all packs in one group, as on a GPU all groups have one shape


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """The counter of compiled graphs; head and MLP scans compile here as on a GPU."""
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "COMPILER", counter)
    set_pays(monkeypatch, lambda *_: True)
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def set_pays(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any]) -> None:
    """Put another rule where both the job that compiles ahead and the experiment that prepares read it."""
    monkeypatch.setattr(choose, "pays_to_compile", rule)
    monkeypatch.setattr(ablated, "pays_to_compile", rule)


def save_deep(folder: Path, family: str) -> Path:
    """A random model of LAYERS layers and its tokenizer."""
    config = tiny_config(family)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = LAYERS
    if kinds:
        config.layer_types = [kinds[layer % 2] for layer in range(LAYERS)]
    build_random(config, 5, torch.device("cpu"), torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path) -> Path:
    """A random LoRA adapter for the model in ``base``."""
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def some_prompts(resolved: ResolvedModel) -> list[TokenizedPrompt]:
    operator = r"\b(sum|plus|minus|product|times|divides)\b"
    prompts = [
        dataclasses.replace(prompt, counterfactual=re.sub(operator, "nothing", prompt.text))
        for prompt in load_prompts("two_digit", limit=6)
    ]
    return list(tokenize_prompts(prompts, resolved.tokenizer))


def run_all(scan: Experiment, resolved: ResolvedModel, prompts: Sequence[TokenizedPrompt]) -> dict[str, pa.Table]:
    """Load the model and run the whole scan on it."""
    anatomy = load(resolved, "cpu").anatomy
    state = scan.prepare(Subject(anatomy, prompts, MAX_TOKENS))
    return {shard.key: scan.run(state, shard) for shard in scan.shards(anatomy.shape, prompts)}


# ---- nothing is left to compile ----


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_model_compiles_nothing_and_answers_the_same(
    family: str, graphs: CompileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(ModelSpec(str(save_deep(tmp_path / "model", family)), dtype="bfloat16"))
    prompts, scan = some_prompts(resolved), Heads(layers=(0, 2, LAYERS - 1))
    notes = compile_ahead(scan, resolved, prompts, "cpu", MAX_TOKENS)
    assert notes.keys() == {"compile_ahead_seconds"}
    assert graphs.frame_count == 5  # attention and the rest of a layer, of the last one at answers alone; scores
    tables = run_all(scan, resolved, prompts)
    assert graphs.frame_count == 5
    set_pays(monkeypatch, lambda *_: False)
    assert tables == run_all(scan, resolved, prompts)  # bitwise


@pytest.mark.slow
def test_many_batch_shapes_stay_compiled(graphs: CompileCounter, tmp_path: Path) -> None:
    """torch gives up, with a warning alone, after eight graphs of a function unless told otherwise."""
    resolved = resolve(ModelSpec(str(save_deep(tmp_path / "model", "llama")), dtype="float32"))
    anatomy, prompts = load(resolved, "cpu").anatomy, some_prompts(resolved)
    found = []
    for size in range(6):
        engine = PackedEngine(
            anatomy, prompts, pack_size=200 + 8 * size, edits_per_batch=size + 1, max_tokens=10_000, compiled=True
        )
        before = graphs.frame_count
        engine.compile_for([Head(0, 0)] * (size + 1))
        found.append(graphs.frame_count - before)
    assert all(count >= 4 for count in found), found


@pytest.mark.slow
def test_other_scans_and_an_adapter_compile_nothing_either_and_the_stand_in_is_gone(
    graphs: CompileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[weakref.ref[torch.Tensor]] = []

    def watched(*arguments: Any) -> Anatomy:
        anatomy = stand_in(*arguments)
        weights.extend(weakref.ref(weight) for weight in anatomy.model.parameters())
        return anatomy

    monkeypatch.setattr(ahead, "stand_in", watched)
    base = save_deep(tmp_path / "model", "llama")
    resolved = resolve(ModelSpec(str(base), str(save_adapter(tmp_path / "adapter", base)), "float32"))
    prompts = some_prompts(resolved)
    scan: Experiment
    for scan in (Heads("resample", heads=((5, 1), (4, 0), (4, 3))), Mlps()):
        compile_ahead(scan, resolved, prompts, "cpu", MAX_TOKENS)
        before = graphs.frame_count
        run_all(scan, resolved, prompts)
        assert graphs.frame_count == before
    assert weights
    assert [weight() for weight in weights] == [None] * len(weights)
    # The count would show a difference: weights that want gradients are another thing to compile for.
    anatomy = load(resolved, "cpu").anatomy
    anatomy.model.requires_grad_(True)
    scan.prepare(Subject(anatomy, prompts, MAX_TOKENS))
    assert graphs.frame_count > before


# ---- the stand-in ----


def layers_of(anatomy: Anatomy, layers: Sequence[int]) -> list[object]:
    """All that a compiled layer may depend on, apart from the weights' values."""
    found: list[object] = [
        torch.get_default_dtype(),
        anatomy.model.config._attn_implementation,
        anatomy.shape.vocabulary,
    ]
    for module in (*(anatomy.layers[layer] for layer in layers), anatomy.final_norm, anatomy.unembedding):
        for name, part in module.named_modules():
            assert not part._forward_hooks
            assert not part._forward_pre_hooks
            found.append((name, type(part), part.training, sorted(part.__dict__.keys() - {"layer_idx"})))
        for name, weight in module.named_parameters():
            found.append((name, type(weight), weight.dtype, weight.shape, weight.stride(), weight.requires_grad))
    return found


@pytest.mark.parametrize("source", [*TINY_FAMILIES, "adapter", "gguf", "large gguf", "random"])
def test_the_stand_ins_layers_are_like_the_loaded_models(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec("random:llama-tiny", dtype="bfloat16")
    if source != "random":
        family = source if source in TINY_FAMILIES else "llama"
        name = save_tiny_gguf(tmp_path / "tiny.gguf") if "gguf" in source else save_deep(tmp_path / "model", family)
        adapter = str(save_adapter(tmp_path / "adapter", name)) if source == "adapter" else None
        spec = ModelSpec(str(name), adapter, "bfloat16")
    if source == "large gguf":
        monkeypatch.setattr(gguf_files, "_KEPT_PARAMETERS", 0)
    resolved = resolve(spec)
    before = resolved.config.to_dict()
    small = stand_in(resolved, "cpu")
    assert resolved.config.to_dict() == before
    whole = load(resolved, "cpu").anatomy
    lists = [getattr(resolved.config, name, None) for name in ("layer_types", "no_rope_layers")]
    kinds = list(zip(*filter(None, lists), strict=False)) or [()] * whole.shape.n_layers
    between = [kinds.index(kind, 1) for kind in dict.fromkeys(kinds[1:-1])]
    chosen = [0, *between, whole.shape.n_layers - 1]
    assert layers_of(small, range(small.shape.n_layers)) == layers_of(whole, chosen)


def test_the_stand_in_has_every_kind_of_layer() -> None:
    gemma = random_config("gemma-2-9b")
    kinds = list(gemma.layer_types)
    small = stand_in_config(gemma)
    assert small.layer_types == [kinds[0], kinds[1], kinds[2], kinds[-1]]
    assert set(kinds) == {*kinds[1:3]}
    assert small.num_hidden_layers == 4
    assert (gemma.num_hidden_layers, gemma.layer_types) == (42, kinds)
    assert stand_in_config(random_config("gpt-j-6b")).n_layer == 3
    for layers in (1, 2, 3):  # nothing to leave out
        config = tiny_config("qwen3")
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
        assert stand_in_config(config).to_dict() == config.to_dict()


# ---- when it is done ----


def test_it_is_done_where_the_scan_compiles() -> None:
    shape = resolve(ModelSpec("random:llama-2-7b")).shape
    prompts = some_prompts(resolve(ModelSpec("random:llama-tiny")))
    tokens = sum(len(prompt.fed) for prompt in prompts)
    for scan, edits in ((Heads(), 1024), (Heads("mean", layers=(3, 4)), 64), (Mlps(), 32)):
        enough = COMPILE_FROM_NODES // (tokens * edits) + 1
        assert scan.compiles(shape, prompts * enough, "cuda")
        assert not scan.compiles(shape, prompts * (enough - 1), "cuda")
        assert not scan.compiles(shape, prompts * enough, "cpu")
        assert not dataclasses.replace(scan, engine="plain").compiles(shape, prompts * enough, "cuda")
        no_tree = dataclasses.replace(FAMILIES_TABLE["llama"], tree_mask=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES_TABLE, "llama", no_tree)
            assert not scan.compiles(shape, prompts * enough, "cuda")
    assert not Iterative(steps=2).compiles(shape, prompts * enough, "cuda")
    assert not ToyScan().compiles(shape, prompts * enough, "cuda")


def test_the_rule_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    set_pays(monkeypatch, lambda *arguments: bool(asked.append(arguments)))
    resolved = resolve(ModelSpec("random:llama-tiny"))
    anatomy, prompts = load(resolved, "cpu").anatomy, some_prompts(resolved)
    for scan in (Heads(), Heads(heads=((0, 1), (2, 0))), Mlps(layers=(2,))):
        scan.compiles(resolved.shape, prompts, "cpu")
        scan.prepare(Subject(anatomy, prompts))
        assert asked[-1] == asked[-2]


def test_where_nothing_compiles_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "stand_in", lambda *_: pytest.fail("built"))
    resolved = resolve(ModelSpec("random:llama-tiny"))
    assert compile_ahead(Heads(), resolved, some_prompts(resolved), "cpu") == {}


@pytest.mark.slow
def test_reasons_to_leave_it_are_noted(graphs: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(ModelSpec("random:llama-tiny"))
    prompts = some_prompts(resolved)
    own_code = dataclasses.replace(resolved, spec=dataclasses.replace(resolved.spec, trust_remote_code=True))
    assert compile_ahead(Heads(), own_code, prompts, "cpu") == {"compile_ahead_skipped": "the model runs its own code"}

    def full(*_: Any) -> Anatomy:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(ahead, "stand_in", full)
    assert compile_ahead(Heads(), resolved, prompts, "cpu") == {"compile_ahead_skipped": "out of GPU memory"}

    def astray(*_: Any) -> Anatomy:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ahead, "stand_in", astray)
    assert compile_ahead(Heads(), resolved, prompts, "cpu") == {"compile_ahead_skipped": "RuntimeError: no kernel"}
    assert graphs.frame_count == 0


@pytest.mark.slow
def test_a_replica_compiles_before_it_loads_and_notes_the_seconds(
    graphs: CompileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(ModelSpec("random:llama-tiny", dtype="bfloat16"))
    prompts, counts = tuple(some_prompts(resolved)), []

    def counted(*arguments: Any) -> LoadedModel:
        counts.append(graphs.frame_count)
        return load(*arguments)

    monkeypatch.setattr(catalog, "load", counted)
    job = replica.ReplicaJob(
        Mlps(), handle.NamedSource(resolved.spec), prompts, resolved.fingerprint, prompts_fingerprint(prompts),
        str(tmp_path), "run", "cpu", torch.get_num_threads(),
    )  # fmt: skip
    notes = replica.Replica(job).load()
    assert counts == [graphs.frame_count]
    assert counts[0] >= 3
    assert notes["compile_ahead_seconds"] > 0
    assert notes["prepare_seconds"] > 0
    assert notes["engine"] == "packed"
    set_pays(monkeypatch, lambda *_: False)
    assert not any(name.startswith("compile") for name in replica.Replica(job).load())


# ---- reading meanwhile ----


def test_files_are_read_while_the_block_runs(tmp_path: Path) -> None:
    pipes = [tmp_path / "first", tmp_path / "second"]  # who writes to a pipe knows that all was read
    for pipe in pipes:
        os.mkfifo(pipe)
    writing = [threading.Thread(target=pipe.write_bytes, args=(bytes(2**20),), daemon=True) for pipe in pipes]
    with reading_ahead(pipes):
        for thread in writing:  # a mebibyte is beyond what a pipe holds: the writer waits until it is read
            thread.start()
            thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in writing), "not all was read"


def test_files_beyond_half_the_memory_or_not_there_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: opened.append(path))
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=19))
    with reading_ahead([tmp_path / "file"]):
        pass
    with reading_ahead([tmp_path / "nowhere"]):
        pass
    assert opened == []


def test_the_files_are_those_that_loading_reads(tmp_path: Path) -> None:
    folder = save_deep(tmp_path / "model", "llama")
    assert files_to_load(resolve(ModelSpec(str(folder)))) == [folder / "model.safetensors"]
    gguf_file = save_tiny_gguf(tmp_path / "tiny.gguf")
    assert files_to_load(resolve(ModelSpec(str(gguf_file)))) == [gguf_file]
    assert files_to_load(resolve(ModelSpec("random:llama-tiny"))) == []
