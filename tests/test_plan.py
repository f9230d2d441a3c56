"""The plan: parameters, FLOPs and rows against real models, bytes and times against what was measured."""

import json
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from mathinterp.cli.main import main
from mathinterp.cluster.plan import CpuSpeed, measure_cpu, plan_scan, row_bytes
from mathinterp.cluster.ray_private import machine_cores
from mathinterp.engine.tree.forest import count_nodes
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.costs import PACK_SIZE, layer_flops, parameters, replayed_layers
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.neurons import Neurons, OtherModel
from mathinterp.experiments.paths import Paths
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import load_prompts, prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import with_counterfactuals
from mathinterp.store import Store
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def seven_billion():
    """The shape and the prompts of the published measurement."""
    model = resolve(ModelSpec("random:llama-2-7b"))
    return model.shape, tokenize_prompts(prompt_set("two_digit"), model.tokenizer)


@pytest.fixture(scope="module")
def small():
    """A tiny Llama and a few prompts."""
    model = tiny_model("llama", dtype=torch.float32)
    tokenizer = tiny_tokenizer(["followed"])  # in place of "divided"
    prompts = with_counterfactuals(prompt_set("pairs", limit=24), tokenizer)
    return Anatomy(model), tokenize_prompts(prompts, tokenizer)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_parameters_are_the_models_matrices(family):
    model = tiny_model(family)
    named = {name: p for name, p in model.named_parameters() if ".wpe." not in name and ".embed_positions." not in name}
    matrices = {id(p): p.numel() for p in named.values() if p.dim() > 1}
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
    every_head = [replayed_layers(shard, shape, 0) for shard in Heads().shards(shape, []) if shard.work]
    assert sum(every_head) == 1024 * 16.5


@pytest.mark.parametrize("scan", [Heads(), Heads(layers=(1,)), Mlps()])
def test_evaluations_are_one_for_each_prompt_and_intervention(small, scan):
    anatomy, prompts = small
    plan = plan_scan(scan, anatomy.shape, prompts, "float32")
    interventions = 1 + {"heads": anatomy.shape.n_heads, "mlps": 1}[scan.name] * len(scan.layers or anatomy.layers)
    assert plan.evaluations == interventions * len(prompts)


RANKING = tuple((layer, head) for layer in (2, 1, 0) for head in range(4))
# Not planned: that the last layer runs at answer positions alone (a third of this model), and the check of the engine
# on 16 prompts (two thirds of these).
TREES = (0.65, 1.35)
ROWS = (0.85, 1.2)
COUNTED: list[tuple[Experiment, tuple[float, float]]] = [  # a scan, and torch's count of FLOPs as a part of the plan's
    (Heads(), TREES),
    (Heads(ablation="mean"), TREES),
    (Heads(layers=(1,)), TREES),
    (Mlps(), TREES),
    (Knockout(heads=RANKING, key=(), control_seeds=2), TREES),
    (Iterative(steps=2), (0.65, 1.6)),  # END rows are so few that the check weighs more
    (Iterative("zero", steps=2), TREES),
    (Paths(keep_all=True), ROWS),
    (Paths(keep_all=True, freeze="all", attribution=False), ROWS),
    (Paths(keep_all=True, freeze="none", attribution=False), ROWS),
    (Paths(keep_all=True, freeze="none", positions="all", layers=(1,)), ROWS),
    (Paths(keep_all=True, receiver="2.1.q"), (0.7, 1.4)),
    (Paths(keep_all=True, freeze="all", receiver="2.mlp"), (0.7, 1.4)),
    (Attention(keep_all=True), ROWS),
    (Attention(heads=((0, 1), (2, 3)), keep_all=True), ROWS),
    (MlpProbe(layers=(0, 2), keep_all=True), ROWS),
    (Neurons(keep="topk:7"), ROWS),
    (Neurons("head:0.1", keep="all", layers=(1, 2)), ROWS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "part"), COUNTED)
def test_rows_are_those_of_the_run_and_flops_what_torch_counts(small, scan, part, monkeypatch):
    """Every kind of scan, run whole, in packs and batches as small for the tiny model as they are for a large one."""
    monkeypatch.setattr("mathinterp.experiments.costs.PACK_SIZE", 64)
    monkeypatch.setattr("mathinterp.engine.pairs.CPU_TOKENS", 40)
    # neurons' sums over the vocabulary are planned as terms, apart
    monkeypatch.setattr(
        "mathinterp.engine.lens.neurons.neuron_increases", lambda _, amounts, __: torch.zeros_like(amounts)
    )
    anatomy, prompts = small
    plan = plan_scan(scan, anatomy.shape, prompts, "float32")
    subject = Subject(anatomy, prompts, tokenizer=tiny_tokenizer(["followed"]))
    with FlopCounterMode(display=False) as counter:
        state = scan.prepare(subject)
        rows = sum(scan.run(state, shard).num_rows for shard in scan.shards(anatomy.shape, prompts))
    assert plan.rows == rows
    assert part[0] < counter.get_total_flops() / plan.flops < part[1]


def test_nodes_are_private_where_an_edit_needs_them(small):
    """Mean ablation edits END for each prompt alone; under zero ablation prompts share all they can."""
    anatomy, prompts = small
    twins = [replace(item, prompt=replace(item.prompt, prompt_id=f"{item.prompt.prompt_id}-again")) for item in prompts]
    both = [*prompts, *twins]
    shared, private = (plan_scan(Heads(ablation=kind), anatomy.shape, both, "float32") for kind in ("zero", "mean"))
    assert shared.nodes == plan_scan(Heads(), anatomy.shape, prompts, "float32").nodes
    before_end = count_nodes([item.fed[: item.end] for item in both])
    assert private.nodes == before_end + sum(len(item.fed) - item.end for item in both) > shared.nodes
    assert private.cache_bytes >= shared.cache_bytes
    assert private.flops > shared.flops


def test_neurons_are_counted_in_terms_of_their_sums(seven_billion):
    shape, prompts = seven_billion
    plan = plan_scan(Neurons(), shape, prompts, "bfloat16", cpu=CpuSpeed(0.1, 0.001))
    assert plan.terms == 352_256 * 1600 * 32_000
    assert 3 < plan.seconds["H100"] < 10
    assert plan.seconds["this CPU"] == pytest.approx(plan.terms / 1e9 + plan.flops / 0.1e12)


def test_a_compared_model_is_held_beside_the_original(seven_billion):
    shape, prompts = seven_billion
    other = OtherModel(ModelSpec("random:llama-2-7b"), "fingerprint", "another")
    scan = Neurons("model:another", other=other)
    alone, heads, both = (
        plan_scan(each, shape, prompts, "bfloat16") for each in (Neurons(), Neurons("head:0.1"), scan)
    )
    assert alone.models == heads.models == 1
    assert both.models == 2
    assert both.model_bytes == 2 * alone.model_bytes == 2 * 2 * parameters(shape)
    assert both.peak_bytes - heads.peak_bytes == alone.model_bytes, "the same two passes, and one model more"


@pytest.mark.slow
def test_a_plan_names_the_compared_model(tmp_path):
    model, other = (save_tiny(tmp_path / f"tiny-{seed}", "llama", seed) for seed in (0, 1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "3 plus 4 is", "answer": "7"}\n')
    words = ["plan", "neurons", "--model", model, "--against", f"model:{other}", "--prompts", prompts]
    shown = CliRunner().invoke(main, [str(word) for word in words])
    assert shown.exit_code == 0, shown.output
    assert "parameters, compared with another of as many" in " ".join(shown.stdout.split())


@pytest.mark.slow
def test_a_soft_cap_costs_an_exponential_a_term():
    model = resolve(ModelSpec("random:gemma-2-9b"))
    prompts = tokenize_prompts(prompt_set("two_digit", limit=16), model.tokenizer)
    capped = plan_scan(Neurons(), model.shape, prompts, "bfloat16")
    plain = plan_scan(Neurons(), replace(model.shape, logit_softcap=None), prompts, "bfloat16")
    assert capped.terms == plain.terms
    assert capped.seconds["H100"] > 10 * plain.seconds["H100"]


@pytest.mark.slow
def test_path_patching_of_the_published_size(seven_billion):
    model = resolve(ModelSpec("random:llama-2-7b"))
    pairs = tokenize_prompts(with_counterfactuals(prompt_set("pairs"), model.tokenizer), model.tokenizer)
    heads, direct = (
        plan_scan(Paths(freeze=f), model.shape, pairs, "bfloat16").seconds["H100"] for f in ("heads", "all")
    )
    assert 11 < heads < 16  # 13.7 s measured
    assert direct < heads / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads", "mlps", "attention", "probe", "paths", "knockout", "iterative", "neurons"])
def test_every_scan_is_planned_with_its_own_options(tmp_path, name):
    words = ["plan", name, "--limit", "8", "--json", "--store", tmp_path / "store"]
    words += ["--heads", "0.6,0.1,0.2,0.7", "--ks", "1,4"] if name == "knockout" else []
    words += {"paths": ["--freeze", "all"], "neurons": ["--keep", "topk:3"], "probe": ["--keep-all"]}.get(name, [])
    planned = CliRunner().invoke(main, [str(word) for word in words])
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.stdout)
    assert found["scan"] == name
    assert found["rows"] > 0
    assert {row["device"] for row in found["devices"]} == {"H100", "A100", "L40S", "L4", "this CPU"}
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_plan_ends_in_the_command_it_plans():
    words = ["plan", "knockout", "--limit", "8", "--heads", "0.6,0.1", "--show", "3 plus 5 is", "--show", "3 plus 4 is"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    line = "mathinterp scan knockout --heads 0.6,0.1 --show '3 plus 5 is' --show '3 plus 4 is' --limit 8"
    assert line in shown.stdout, shown.stdout
    wrong = CliRunner().invoke(main, ["plan", "knockout", "--heads", "0.9"])
    assert (wrong.exit_code, "head 0.9 does not exist" in wrong.stderr) == (2, True)


def test_the_published_grid(seven_billion):
    shape, prompts = seven_billion
    plan = plan_scan(Heads(), shape, prompts, "bfloat16", cpu=CpuSpeed(0.1, 0.001))
    assert plan.evaluations == (1024 + 1) * 1600
    assert plan.nodes < plan.tokens / 1.6
    assert plan.flops < plan.plain_flops / 3
    assert 13e9 < plan.model_bytes < 14e9
    assert 17e9 < plan.peak_bytes < 20e9  # 18.5 GB measured
    assert 105 < plan.seconds["H100"] < 200  # 119 to 174 s measured
    assert plan.seconds["H100"] < plan.seconds["A100"] < plan.seconds["L4"] < plan.seconds["this CPU"]


def test_times_follow_the_dtype(small):
    anatomy, prompts = small
    half, single = (plan_scan(Mlps(), anatomy.shape, prompts, dtype).seconds for dtype in ("float16", "float32"))
    assert half["H100"] < single["H100"]
    assert plan_scan(Mlps(), anatomy.shape, prompts, "float64").seconds == {}


def test_result_bytes_are_about_those_of_a_file(small, tmp_path):
    anatomy, prompts = small
    scan = Heads()
    state = scan.prepare(Subject(anatomy, prompts))
    shard = next(shard for shard in scan.shards(anatomy.shape, prompts) if shard.table == "head_scan")
    rows = scan.run(state, shard)
    while rows.num_rows < 20_000:  # the footer's share is small in a file of usual size
        rows = type(rows).from_batches(rows.to_batches() * 2)
    written = Store(tmp_path).write_shard("0" * 12, "head_scan", 0, rows, {})
    assert written["bytes"] < 1.5 * rows.num_rows * row_bytes(rows.schema)


def test_a_cpu_is_measured_in_half_a_second(small):
    anatomy, _ = small
    measured = measure_cpu(anatomy.shape, seconds=0.05)
    assert 0.0001 < measured.tflops < 100
    assert 1e-6 < measured.terms < 10
    assert PACK_SIZE % 8 == 0


@pytest.mark.alone
@pytest.mark.bundled
def test_the_time_on_this_cpu_is_within_a_factor_of_two_of_what_a_thread_takes():
    """Of so many prompts that the engine's check and first passes, which no plan counts, take little."""
    loaded, scan = load(ModelSpec("bundled", dtype="float32"), "cpu"), Heads(layers="2,5")
    prompts = tokenize_prompts(load_prompts("two_digit", limit=200), loaded.tokenizer)
    shape, threads, ratios = loaded.anatomy.shape, torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            plan = plan_scan(scan, shape, prompts, "float32", cpu=measure_cpu(shape))
            started = time.perf_counter()
            state = scan.prepare(Subject(loaded.anatomy, prompts, tokenizer=loaded.tokenizer))
            for shard in scan.shards(shape, prompts):
                scan.run(state, shard)
            ratios.append(plan.seconds["this CPU"] * machine_cores() / (time.perf_counter() - started))
    finally:
        torch.set_num_threads(threads)
    assert 0.5 < sorted(ratios)[1] < 2
