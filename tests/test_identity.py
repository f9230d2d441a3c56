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
import mathinterp.scans
import mathinterp.tuning
from mathinterp.evaluation.scan import BenchmarkScan, Origin, PromptSetScan
from mathinterp.evaluation.task_files import task_file
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.scans.attention import AttentionScan
from mathinterp.scans.base import Scan
from mathinterp.scans.chain import ChainScan
from mathinterp.scans.concept_words import ConceptList
from mathinterp.scans.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.scans.concepts import ConceptScan
from mathinterp.scans.gender import GenderNeuronScan
from mathinterp.scans.heads import HeadScan
from mathinterp.scans.iterative import IterativeScan
from mathinterp.scans.knockout import KnockoutScan, Sentence
from mathinterp.scans.maskkeep import MaskKeepScan, RankedNeurons
from mathinterp.scans.mlp_probe import MlpProbe
from mathinterp.scans.mlps import MlpScan
from mathinterp.scans.neuron_edit import NeuronEditScan
from mathinterp.scans.neuron_graph import NeuronGraphScan
from mathinterp.scans.neuron_nodes import NeuronNodes, RankedNodes
from mathinterp.scans.neurons import NeuronScan, OtherModel
from mathinterp.scans.paths import PathScan
from mathinterp.store import Store, run_id
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.data import Sample
from mathinterp.tuning.layer_sweep import LayerSweep
from mathinterp.tuning.prune import Condition, PruneScan
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, named
from mathinterp.tuning.sweep_neurons import LayerSweepNeurons
from tests.small_store import open_run

ABLATION = {"ablation": "resample", "positions": "end", "scoring": "first_token", "engine": "plain"}
MEAN = {"ablation": "zero", "positions": "all", "scoring": "exact_match", "engine": "plain"}
RANKED = RankedNeurons("run", ("a",), np.arange(200).reshape(1, 200) % 3, np.arange(200).reshape(1, 200))
NODES = NeuronNodes("run", (RankedNodes("a", ((0, 1), (1, 2)), (0.5, 0.4), (0.1, 0.2)),))
OTHER = OtherModel(ModelSpec("x"), "fingerprint", "x")
ITEM = {"item_id": "1", "subset": "", "question": "1 + 1", "target": "2"}
ORIGIN = Origin("base", "base")
SAMPLES = (Sample((1, 2, 3), (2,)),)
CONFIG = SftConfig(steps=4, batch_size=2, learning_rate=1e-3)
PRUNED = Condition("pruned", kept=((1, 2),))

# A scan, and for each of its fields another value.
CASES: list[tuple[Scan, dict[str, Any]]] = [
    (HeadScan(), {**ABLATION, "heads": ((0, 1),), "layers": (0,)}),
    (MlpScan(), {**ABLATION, "layers": (0,)}),
    (
        KnockoutScan(ranking=((0, 1), (1, 1))),
        {**MEAN, "ranking": ((1, 1), (0, 1)), "ks": (1,), "seeds": 2, "key": ((2, 0),),
         "sentences": (Sentence("1 + 1 =", (1, 2)),)},
    ),
    (IterativeScan(), {**MEAN, "steps": 3, "rank_by": "logprob", "layers": (0,)}),
    (
        PathScan(),
        {"freeze": "all", "effect": "logprob", "denominator": "paper", "keep_all": True,
         "layers": (0,), "receiver": "1.1.q", "attribution": False},
    ),
    (PathScan(freeze="none"), {"positions": "all"}),
    (AttentionScan(), {"heads": ((0, 1),), "layers": (0,), "keep_all": True}),
    (MlpProbe(), {"vectors": "written", "fold_norm": True, "layers": (0,), "keep_all": True}),
    (
        NeuronScan("head", ((0, 1),)),
        {"against": "input", "heads": ((0, 2),), "target": "gold", "rank": "abs", "top": 3, "keep_all": True,
         "layers": (0,)},
    ),
    (NeuronScan("model", other=OTHER), {"other": replace(OTHER, fingerprint="another"), "against": "adapter"}),
    (
        MaskKeepScan(RANKED),
        {"neurons": replace(RANKED, neuron_PR=RANKED.neuron_PR[:, ::-1]), "ks": (5,), "seeds": 2, "deep_layers": (1,)},
    ),
    (GenderNeuronScan(), {}),
    (NeuronEditScan(((0, 1),)), {"neurons": ((0, 2),), "seeds": 2, "passages": ((1, 2, 3),)}),
    (
        NeuronGraphScan(NODES),
        {"nodes": replace(NODES, graphs=(replace(NODES.graphs[0], neurons=((0, 1), (1, 3))),)), "by": "operation",
         "top": 2, "measure": "signed", "strongest": 5, "above": 0.5, "ks": (2,), "seeds": 2},
    ),
    (
        ConceptScan(),
        {"concepts": ConceptList("numbers", (("one",),)), "top": 3, "layers": (0,), "attention_layers": (1,),
         "into": "all", "sign": "both", "count": "tokens"},
    ),
    (
        ConceptZeroing((NeuronSet(1, ((0, 1),)),), "run"),
        {"sets": (NeuronSet(1, ((0, 2),)),), "source": "other", "seeds": 2, "scoring": "exact_match"},
    ),
    (ChainScan(), {"heads": ((0, 1),), "layers": (0,), "n_heads": 2, "top": 3, "target": "gold"}),
    (
        BenchmarkScan(task_file("svamp"), (ITEM,), {}, 0, "own", 0, None, ORIGIN),
        {"task": task_file("addsub"), "items": (ITEM, ITEM), "examples": {"": [ITEM]}, "fewshot": 1, "limit": 1,
         "ends": (5,)},
    ),
    (
        BenchmarkScan(task_file("gsm8k"), (ITEM,), {"": [ITEM]}, 1, "train", 0, None, ORIGIN),
        {"source": "own", "seed": 1},
    ),
    (PromptSetScan("two_digit", None, 0, "digest", ORIGIN),
     {"label": "other", "limit": 1, "seed": 1, "items": "other", "ends": (5,)}),
    (
        PruneScan((PRUNED,), (1,)),
        {"conditions": (replace(PRUNED, kept=((1, 3),)),), "deep": (0, 1)},
    ),
    (
        LayerSweep(SAMPLES, SAMPLES, CONFIG, "folder"),
        {"samples": (Sample((1, 2, 4), (2,)),), "validation": (Sample((1, 2, 4), (2,)),),
         "config": replace(CONFIG, steps=5), "rates": (1e-2,), "layers": (0,), "rank": 2, "alpha": 3},
    ),
    (
        LayerSweepNeurons("run", ((0, 1e-3),), "folder"),
        {"sweep": "other", "trials": ((1, 1e-3),), "top": 3, "target": "gold"},
    ),
]  # fmt: skip

# Fields that change no row, and why.
ELSEWHERE = {
    "KnockoutScan.tokenizer": "makes token ids of sentences, which are parameters",
    "IterativeScan.known": "steps that are in the store already",
    "BenchmarkScan.origin": "what the model was made from, which its fingerprint settles",
    "PromptSetScan.origin": "as in BenchmarkScan",
    "LayerSweep.folder": "where adapters go",
    "LayerSweep.base": "what adapters name as their base; the base is the model fingerprint",
    "LayerSweepNeurons.folder": "where the sweep of that run id left its adapters",
}


def names(case: tuple[Scan, dict[str, Any]]) -> str:
    return f"{type(case[0]).__name__} {', '.join(case[1])}"


def canonical(scan: Scan) -> str:
    """What the run id hashes of a scan."""
    return json.dumps([scan.name, scan.parameters()], sort_keys=True, allow_nan=False)


def all_scans(base: type = Scan) -> set[type]:
    """Every scan of the package that can be run."""
    for package in (mathinterp.scans, mathinterp.evaluation, mathinterp.tuning):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    below = {kind for child in base.__subclasses__() for kind in {child, *all_scans(child)}}
    return {kind for kind in below if kind.__module__.startswith("mathinterp.") and "name" in vars(kind)}


def test_every_field_of_every_scan_is_looked_at():
    fields = {f"{kind.__name__}.{field.name}" for kind in all_scans() for field in dataclasses.fields(kind)}
    changed = {f"{type(scan).__name__}.{name}" for scan, others in CASES for name in others}
    assert changed.isdisjoint(ELSEWHERE)
    assert changed | set(ELSEWHERE) == fields


@pytest.mark.parametrize("case", CASES, ids=names)
def test_every_field_that_decides_rows_changes_the_run_id(case):
    scan, others = case
    seen = {canonical(scan): "as it was"}
    for name, value in others.items():
        together = {"heads": (), "other": None} if name == "against" and value == "input" else {}
        changed = canonical(replace(scan, **{**together, name: value}))
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
        "heads": (HeadScan(), "182b55debb16"),
        "evaluate": (PromptSetScan("two_digit", 4, 0, "digest", ORIGIN), "bd59e75c00fd"),
        "svamp": (BenchmarkScan(task_file("svamp"), (ITEM,), {}, 0, "own", 0, None, ORIGIN), "ca23e92a731e"),
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
