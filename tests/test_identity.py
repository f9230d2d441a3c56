"""The run id names all that decides rows: a scan's fields are in its parameters, or here with the reason why not."""

import dataclasses
import importlib
import json
import pkgutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mathinterp.evaluation
import mathinterp.experiments
import mathinterp.tuning
from mathinterp.evaluation.evaluate import Benchmark, Origin, PromptSetEvaluation
from mathinterp.evaluation.task_files import task_file
from mathinterp.experiments.activation_patching import ActivationPatching
from mathinterp.experiments.adaptive.reuse import Reused
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.experiments.chain import Chain
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.circuit.ranking import NodeScores
from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.experiments.concepts import Concepts
from mathinterp.experiments.concepts.words import ConceptList
from mathinterp.experiments.gender_neurons import GenderNeurons
from mathinterp.experiments.head_pairs import HeadPairs
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.knockout import Knockout, Sentence
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mask_keep import MaskKeep
from mathinterp.experiments.mask_keep.ranked import RankedNeurons
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.neuron_edit import NeuronEdit
from mathinterp.experiments.neuron_graph import NeuronGraph
from mathinterp.experiments.neuron_graph.nodes import NeuronNodes, RankedNodes
from mathinterp.experiments.neurons import Neurons, OtherModel
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.experiments.paths import Paths
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.store import Store, run_id
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.data import Sample
from mathinterp.tuning.lora_sweep import LoraSweep
from mathinterp.tuning.prune import Condition, Prune
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, named
from mathinterp.tuning.sweep_neurons import SweepNeurons
from tests.small_store import open_run

ABLATION = {"ablation": "resample", "positions": "end", "scoring": "first_token", "engine": "plain"}
MEAN = {"ablation": "zero", "positions": "all", "scoring": "exact_match", "engine": "plain"}
RANKED = RankedNeurons("run", ("a",), np.arange(200).reshape(1, 200) % 3, np.arange(200).reshape(1, 200))
NODES = NeuronNodes("run", (RankedNodes("a", ((0, 1), (1, 2)), (0.5, 0.4), (0.1, 0.2)),))
RUN, REUSED = "0" * 12, Reused(0, (Shard("head_scan", 0, {"heads": [[0, 1]]}),), 1, 2, None)
MORE = replace(REUSED, shards=(Shard("head_scan", 0, {"heads": [[0, 2]]}),))
OTHER = OtherModel(ModelSpec("x"), "fingerprint", "x")
SCORES = NodeScores("atp", "run", {("head", 0): np.array([1.0, 2.0])})
ITEM = {"item_id": "1", "subset": "", "question": "1 + 1", "target": "2"}
ORIGIN = Origin("base", "base")
SAMPLES = (Sample((1, 2, 3), (2,)),)
CONFIG = SftConfig(steps=4, batch_size=2, learning_rate=1e-3)
PRUNED = Condition("pruned", kept=((1, 2),))

# A scan, and for each of its fields another value.
CASES: list[tuple[Experiment, dict[str, Any]]] = [
    (
        ActivationPatching(),
        {"sites": ("mlp",), "directions": ("noising",), "layers": (0,), "keep_all": True, "engine": "plain"},
    ),
    (Attribution(), {"method": "relp", "neurons": True, "positions": "end"}),
    (Attribution(method="eap-ig-inputs"), {"steps": 7}),
    (
        Circuit(circuit="run", scores=SCORES),
        {"scores": NodeScores("atp", "run", {("head", 0): np.array([1.0, 3.0])}), "level": "neuron",
         "ablation": "zero"},
    ),
    (
        Circuit(("run",), scores=SCORES),
        {"scores": NodeScores("atp", "run2", SCORES.scores)},
    ),
    (Mask(), {"steps": 7, "learning_rate": 0.2, "budget": 0.5, "penalty": 2.0, "batch": 3, "mask_seed": 1}),
    (Heads(), {**ABLATION, "heads": ((0, 1),), "layers": (0,), "decide": 5}),
    (Heads(decide=5), {"decide": 6, "fdr": 0.1, "order_seed": 1}),
    (Heads(reuse=RUN, reused=REUSED), {"reuse": "1" * 12, "reused": MORE}),
    (Mlps(), {**ABLATION, "layers": (0,), "decide": 5}),
    (Mlps(decide=5), {"decide": 6, "fdr": 0.1, "order_seed": 1}),
    (Mlps(reuse=RUN, reused=REUSED), {"reuse": "1" * 12, "reused": MORE}),
    (HeadPairs(), {**ABLATION, "heads": ((0, 1), (1, 1)), "layers": (0,), "given": ((0, 1),)}),
    (
        Knockout(heads=((0, 1), (1, 1))),
        {**MEAN, "heads": ((1, 1), (0, 1)), "ks": (1,), "control_seeds": 2, "key": ((2, 0),),
         "sentences": (Sentence("1 + 1 =", (1, 2)),)},
    ),
    (Iterative(), {**MEAN, "steps": 3, "rank_by": "logprob", "layers": (0,)}),
    (
        Paths(),
        {"freeze": "all", "effect": "logprob", "denominator": "paper", "keep_all": True,
         "layers": (0,), "receiver": "1.1.q", "attribution": False, "decide": 5},
    ),
    (Paths(decide=5), {"decide": 6, "fdr": 0.1, "order_seed": 1}),
    (Paths(reuse=RUN, reused=REUSED), {"reuse": "1" * 12, "reused": MORE}),
    (Paths(freeze="none"), {"positions": "all"}),
    (Attention(), {"heads": ((0, 1),), "layers": (0,), "keep_all": True, "types": "words"}),
    (
        OperandMap(),
        {"maps": 5, "every_map": True, "shuffles": 1, "sample": 9, "ks": (3,), "ablation": "zero", "deep_layers": (1,),
         "layers": (0,), "map_seed": 1},
    ),
    (MlpProbe(), {"vectors": "written", "fold_norm": True, "layers": (0,), "keep_all": True}),
    (
        Neurons("head:0.1"),
        {"against": "head:0.2", "target": "gold", "rank": "abs", "keep": "topk:3", "layers": (0,)},
    ),
    (Neurons("head:0.1"), {"against": "input", "keep": "all"}),
    (Neurons("model:x", other=OTHER), {"other": replace(OTHER, fingerprint="another"), "against": "adapter:x"}),
    (
        MaskKeep("run", neurons=RANKED),
        {"neurons_from": "other", "neurons": replace(RANKED, neuron_PR=RANKED.neuron_PR[:, ::-1]), "ks": (5,),
         "control_seeds": 2, "deep_layers": (1,)},
    ),
    (GenderNeurons(), {}),
    (NeuronEdit(((0, 1),)), {"neurons": ((0, 2),), "seeds": 2, "passages": ((1, 2, 3),)}),
    (
        NeuronGraph("run", nodes=NODES),
        {"neurons_from": "other", "by": "operation",
         "nodes": replace(NODES, graphs=(replace(NODES.graphs[0], neurons=((0, 1), (1, 3))),)),
         "top": 2, "measure": "signed", "edges": "top:5", "ks": (2,), "control_seeds": 2},
    ),
    (
        Concepts(),
        {"concepts": ConceptList("numbers", (("one",),)), "top": 3, "layers": (0,), "attention_layers": (1,),
         "into": "all", "sign": "both", "count": "tokens"},
    ),
    (
        ConceptZeroing((NeuronSet(1, ((0, 1),)),), "run"),
        {"sets": (NeuronSet(1, ((0, 2),)),), "source": "other", "seeds": 2, "scoring": "exact_match"},
    ),
    (Chain(), {"heads": ((0, 1),), "layers": (0,), "n_heads": 2, "top": 3, "target": "gold"}),
    (
        Benchmark(task_file("svamp"), (ITEM,), {}, 0, "own", 0, None, ORIGIN),
        {"task": task_file("addsub"), "items": (ITEM, ITEM), "examples": {"": [ITEM]}, "fewshot": 1, "limit": 1,
         "ends": (5,)},
    ),
    (
        Benchmark(task_file("gsm8k"), (ITEM,), {"": [ITEM]}, 1, "train", 0, None, ORIGIN),
        {"source": "own", "seed": 1},
    ),
    (PromptSetEvaluation("two_digit", None, 0, "digest", ORIGIN),
     {"label": "other", "limit": 1, "seed": 1, "items": "other", "ends": (5,)}),
    (
        Prune((PRUNED,), (1,)),
        {"conditions": (replace(PRUNED, kept=((1, 3),)),), "deep": (0, 1)},
    ),
    (
        LoraSweep(SAMPLES, SAMPLES, CONFIG, "folder"),
        {"samples": (Sample((1, 2, 4), (2,)),), "validation": (Sample((1, 2, 4), (2,)),),
         "config": replace(CONFIG, steps=5), "rates": (1e-2,), "layers": (0,), "rank": 2, "alpha": 3},
    ),
    (
        SweepNeurons("run", ((0, 1e-3),), "folder"),
        {"sweep": "other", "trials": ((1, 1e-3),), "top": 3, "target": "gold"},
    ),
]  # fmt: skip

# Fields that change no row, and why.
ELSEWHERE = {
    "Knockout.tokenizer": "makes token ids of sentences, which are parameters",
    "Iterative.known": "steps that are in the store already",
    "Benchmark.origin": "what the model was made from, which its fingerprint settles",
    "PromptSetEvaluation.origin": "as in Benchmark",
    "LoraSweep.folder": "where adapters go",
    "LoraSweep.base": "what adapters name as their base; the base is the model fingerprint",
    "SweepNeurons.folder": "where the sweep of that run id left its adapters",
}

# Fields that bind replaces by others before there is a run id.
BOUND = {
    "Knockout.rank_from": "becomes heads and key",
    "Knockout.rank_operation": "becomes heads and key",
    "Knockout.show": "becomes sentences",
    "Circuit.rank_from": "becomes scores, with their source",
    "Circuit.circuit": "becomes scores",
}


def names(case: tuple[Experiment, dict[str, Any]]) -> str:
    return f"{type(case[0]).__name__} {', '.join(case[1])}"


def canonical(scan: Experiment) -> str:
    """What the run id hashes of a scan."""
    return json.dumps([scan.name, scan.parameters()], sort_keys=True, allow_nan=False)


def all_scans(base: type = Experiment) -> set[type]:
    """Every scan of the package that can be run."""
    for package in (mathinterp.experiments, mathinterp.evaluation, mathinterp.tuning):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    below = {kind for child in base.__subclasses__() for kind in {child, *all_scans(child)}}
    return {kind for kind in below if kind.__module__.startswith("mathinterp.") and "name" in vars(kind)}


def test_every_field_of_every_scan_is_looked_at():
    fields = {f"{kind.__name__}.{field.name}" for kind in all_scans() for field in dataclasses.fields(kind)}
    changed = {f"{type(scan).__name__}.{name}" for scan, others in CASES for name in others}
    assert changed.isdisjoint(ELSEWHERE)
    assert changed | set(ELSEWHERE) | set(BOUND) == fields


@pytest.mark.parametrize("case", CASES, ids=names)
def test_every_field_that_decides_rows_changes_the_run_id(case):
    scan, others = case
    seen = {canonical(scan): "as it was"}
    for name, value in others.items():
        changed = canonical(replace(scan, **{name: value}))
        assert changed not in seen, f"{name} and {seen[changed]} give one run id"
        seen[changed] = name


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_changes_no_row_leaves_the_run_id(name):
    kind, field = name.split(".")
    scan = next(scan for scan, _ in CASES if type(scan).__name__ == kind)
    other = {"tokenizer": object(), "known": ((0, 0),), "origin": Origin("x", "full")}.get(field, "other")
    assert canonical(replace(scan, **{field: other})) == canonical(scan)


def test_the_dtype_the_model_and_the_prompts_are_part_of_every_run_id(tmp_path):
    store = Store(tmp_path)
    changes = [{}, {"dtype": "bfloat16"}, {"model_fingerprint": "w"}, {"prompts_fingerprint": "p"}, {"scan": "mlps"}]
    assert len({open_run(store, **change).run_id for change in changes}) == len(changes)
    labels = [
        {"model": "another name"},
        {"prompts": "another name"},
        {"code_version": "9"},
        {"versions": {"torch": "9"}},
    ]
    assert len({open_run(store, **change).run_id for change in [{}, *labels]}) == 1


def test_run_ids_of_earlier_versions_are_kept():
    """As given by version 0.1.0: a store of it is resumed, not computed anew."""
    known = {
        "heads": (Heads(), "182b55debb16"),
        "evaluate": (PromptSetEvaluation("two_digit", 4, 0, "digest", ORIGIN), "bd59e75c00fd"),
        "svamp": (Benchmark(task_file("svamp"), (ITEM,), {}, 0, "own", 0, None, ORIGIN), "ca23e92a731e"),
    }
    for scan, expected in known.values():
        assert run_id(scan.name, {**scan.parameters(), "dtype": "float32"}, "model", "prompts") == expected


def test_the_steps_that_a_stored_row_of_a_tuning_stands_for_are_part_of_its_run_id():
    resolved = resolve(ModelSpec("random:llama-tiny"))

    def tuned(**changes: Any) -> str:
        config = replace(CONFIG, **changes)
        job = LoraJob(2, 4, "attention", (0,))
        tuning = Tuning(job, resolved.spec, resolved.fingerprint, SAMPLES, (), config, "data", "results")
        return named(tuning, resolved).run_id

    assert tuned(log_every=10) == tuned()  # the default, as before it was looked at
    assert tuned(micro_batch=1, cache=True, recompute=True) == tuned()  # these change the order of sums alone
    different = [{}, {"log_every": 5}, {"checkpoint_every": 7}, {"steps": 5}, {"seed": 1}, {"learning_rate": 1.0}]
    assert len({tuned(**change) for change in different}) == len(different)
