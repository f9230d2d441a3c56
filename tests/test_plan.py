"""The plan: parameters, FLOPs and rows against real models, bytes and times against what was measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mathinterp.cluster.plan import (
    PACK_SIZE,
    layer_flops,
    measure_cpu,
    parameters,
    plan_scan,
    replayed_layers,
    row_bytes,
)
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts import prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.scans.base import Shard, Subject
from mathinterp.scans.heads import HeadScan
from mathinterp.scans.mlps import MlpScan
from mathinterp.store import Store
from tests.tiny import TINY_FAMILIES, tiny_model, tiny_tokenizer
from tests.toy_scan import ToyScan


@pytest.fixture(scope="module")
def seven_billion():
    """The shape and the prompts of the published measurement."""
    model = resolve(ModelSpec("random:llama-2-7b"))
    return model.shape, tokenize_prompts(prompt_set("two_digit"), model.tokenizer)


@pytest.fixture(scope="module")
def small():
    """A tiny Llama and a few prompts."""
    model = tiny_model("llama", dtype=torch.float32)
    prompts = tokenize_prompts(prompt_set("two_digit", limit=24), tiny_tokenizer())
    return Anatomy(model), prompts


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_parameters_are_the_models_matrices(family):
    model = tiny_model(family)
    matrices = {id(p): p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".wpe." not in name}
    assert parameters(model_shape(model.config)) == sum(matrices.values())


def test_parameters_of_llama_2_7b(seven_billion):
    shape, _ = seven_billion
    norms = (2 * shape.n_layers + 1) * shape.d_model
    assert parameters(shape) + norms == 6_738_415_616  # as published


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_flops_are_what_torch_counts(family):
    model = tiny_model(family, dtype=torch.float32)
    model.set_attn_implementation("eager")
    shape, length = model_shape(model.config), 16
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(length)[None])
    expected = shape.n_layers * length * layer_flops(shape, length) + 2 * shape.d_model * shape.vocabulary * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


def test_replayed_layers(seven_billion):
    shape, _ = seven_billion
    assert replayed_layers(Shard("t", 0, {"heads": [[0, 3], [31, 0]]}), shape, 2) == 32 + 1
    assert replayed_layers(Shard("t", 0, {"layers": [30, 31]}), shape, 2) == 2 + 1
    assert replayed_layers(Shard("t", 0), shape, 4) == 4 * 16.5
    every_head = [replayed_layers(shard, shape, 0) for shard in HeadScan().shards(shape, []) if shard.work]
    assert sum(every_head) == 1024 * 16.5


@pytest.mark.parametrize("scan", [HeadScan(), HeadScan(layers=(1,)), MlpScan()])
def test_rows_and_evaluations_are_those_of_the_run(small, scan):
    anatomy, prompts = small
    plan = plan_scan(scan, anatomy.shape, prompts, "float32")
    state = scan.prepare(Subject(anatomy, prompts))
    assert plan.rows == sum(scan.run(state, shard).num_rows for shard in scan.shards(anatomy.shape, prompts))
    interventions = 1 + {"heads": anatomy.shape.n_heads, "mlps": 1}[scan.name] * len(scan.layers or anatomy.layers)
    assert plan.evaluations == interventions * len(prompts)


def test_the_published_grid(seven_billion):
    shape, prompts = seven_billion
    plan = plan_scan(HeadScan(), shape, prompts, "bfloat16", cpu_tflops=0.1)
    assert plan.evaluations == (1024 + 1) * 1600
    assert plan.nodes < plan.tokens / 1.6
    assert plan.flops < plan.plain_flops / 3
    assert 13e9 < plan.model_bytes < 14e9
    assert 17e9 < plan.peak_bytes < 20e9  # 18.5 GB measured
    assert 105 < plan.seconds["H100"] < 200  # 119 to 174 s measured
    assert plan.seconds["H100"] < plan.seconds["A100"] < plan.seconds["L4"] < plan.seconds["this CPU"]


def test_times_follow_the_dtype(small):
    anatomy, prompts = small
    half, single = (plan_scan(ToyScan(2), anatomy.shape, prompts, dtype).seconds for dtype in ("float16", "float32"))
    assert half["H100"] < single["H100"]
    assert plan_scan(ToyScan(2), anatomy.shape, prompts, "float64").seconds == {}


def test_result_bytes_are_about_those_of_a_file(small, tmp_path):
    anatomy, prompts = small
    scan = HeadScan()
    state = scan.prepare(Subject(anatomy, prompts))
    shard = next(shard for shard in scan.shards(anatomy.shape, prompts) if shard.table == "head_scan")
    rows = scan.run(state, shard)
    while rows.num_rows < 20_000:  # the footer's share is small in a file of usual size
        rows = type(rows).from_batches(rows.to_batches() * 2)
    written = Store(tmp_path).write_shard("0" * 12, "head_scan", 0, rows, {})
    assert written["bytes"] < 1.5 * rows.num_rows * row_bytes(rows.schema)


def test_a_cpu_is_measured_in_half_a_second(small):
    anatomy, _ = small
    assert 0.0001 < measure_cpu(anatomy.shape, seconds=0.05) < 100
    assert PACK_SIZE % 8 == 0
