"""Mask and keep: rows against models with weights set to zero, random controls, deep layers, mistakes of the scan."""

import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from mathinterp.cluster.replica import check_rows
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.mask_keep import MaskKeep
from mathinterp.experiments.mask_keep.ranked import RankedNeurons, random_neurons
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.depth import deep_layers
from mathinterp.prompts.prompt import TokenizedPrompt
from tests.exact import random_prompts
from tests.made_prompts import PROMPTS as MADE
from tests.tiny import of_neurons, tiny_config, tiny_model

FEW = random_prompts(4)
SHAPE = model_shape(tiny_config("llama"))  # 3 layers of 40 neurons


def ranked(prompts: Sequence[TokenizedPrompt], places: int, layers: tuple[int, ...] = (0, 1, 2)) -> RankedNeurons:
    """Neurons of each prompt's own, drawn once over the layers."""
    rng = np.random.default_rng(3)
    every = np.array([(layer, neuron) for layer in layers for neuron in range(40)])
    drawn = np.stack([rng.permutation(every)[:places] for _ in prompts])
    return RankedNeurons("source", tuple(p.prompt.prompt_id for p in prompts), drawn[..., 0], drawn[..., 1])


def rows_of(scan: MaskKeep, model: Anatomy, prompts: Sequence[TokenizedPrompt]) -> dict[str, pa.Table]:
    """Every shard's rows, by table; no Ray, no store."""
    state = scan.prepare(Subject(model, prompts))
    found: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(model.shape, prompts):
        found.setdefault(shard.table, []).append(scan.run(state, shard))
        check_rows(found[shard.table][-1], scan.tables[shard.table].schema, shard.key)
    return {table: pa.concat_tables(parts) for table, parts in found.items()}


# ---- rows against weights set to zero, one prompt a forward pass ----


@contextmanager
def without(model: Anatomy, neurons: set[tuple[int, int]]):
    """Within the block the neurons' columns of down_proj are zero."""
    saved = [model.value_vectors(layer).clone() for layer in range(3)]
    with torch.no_grad():
        for layer, neuron in neurons:
            model.value_vectors(layer)[neuron] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            for layer in range(3):
                model.value_vectors(layer).copy_(saved[layer])


@of_neurons
def test_rows_are_those_of_a_model_without_the_neurons(anatomy: Anatomy) -> None:
    scan = MaskKeep("source", neurons=ranked(FEW, 12), ks=(12, 5), control_seeds=1, deep_layers=(1, 2))
    found = rows_of(scan, anatomy, FEW)
    chosen: dict[tuple, list[tuple[int, int]]] = {}
    for row in found["maskkeep_neurons"].to_pylist():
        chosen.setdefault((row["ranking"], row["prompt_id"]), []).append((row["layer"], row["neuron"]))
    deep = {(layer, neuron) for layer in (1, 2) for neuron in range(40)}
    rows = {
        (r["mode"], r["ranking"], r["k"], r["prompt_id"], r["position"]): r for r in found["maskkeep_scan"].to_pylist()
    }
    rows |= {("", "", 0, r["prompt_id"], r["position"]): r for r in found["baseline"].to_pylist()}
    points = [("", "", 0), *((m, r, k) for m in ("mask", "keep") for r in ("top", "random") for k in (5, 12))]
    assert len(rows) == len(points) * sum(len(prompt.scored) for prompt in FEW)
    moved = 0
    for mode, ranking, k in points:
        for prompt in FEW:
            first = set(chosen[ranking, prompt.prompt.prompt_id][:k]) if ranking else set()
            with without(anatomy, deep - first if mode == "keep" else first):
                logits = anatomy.model(torch.tensor([prompt.fed])).logits[0]
            for token in prompt.scored:
                at = logits[token.index - 1]
                row = rows[mode, ranking, k, prompt.prompt.prompt_id, token.position]
                assert row["logprob"] == pytest.approx(float(at.log_softmax(0)[token.token_id]), rel=1e-5, abs=1e-6)
                assert row["logit"] == pytest.approx(float(at[token.token_id]), rel=1e-5, abs=1e-6)
                assert row["predicted_id"] == int(at.argmax())
                assert row["correct"] == (row["predicted_id"] == token.token_id)
                clean = rows["", "", 0, prompt.prompt.prompt_id, token.position]
                moved += abs(row["logprob"] - clean["logprob"]) > 1e-4
    assert moved > 0.9 * (len(rows) - len(found["baseline"])), "most masks did nothing: the test shows nothing"
    assert not any(anatomy.down_projection(layer)._forward_pre_hooks for layer in range(3))


def test_batches_and_replicas_change_no_number() -> None:
    model, scan = Anatomy(tiny_model("llama")), MaskKeep("source", neurons=ranked(MADE, 9), ks=(4, 9), control_seeds=2)
    found = rows_of(scan, model, MADE)
    state = scan.prepare(Subject(model, MADE, max_tokens=20))  # two or three prompts a batch
    shard = scan.shards(model.shape, MADE)[-1]
    other = scan.run(state, shard)  # the last shard first, as a second replica would
    last = found["maskkeep_scan"].slice(found["maskkeep_scan"].num_rows - other.num_rows)
    assert last.drop_columns(["logprob", "logit"]).equals(other.drop_columns(["logprob", "logit"]))
    np.testing.assert_allclose(last["logprob"], other["logprob"], rtol=1e-6)
    assert scan.notes(state) == {"engine": "plain", "deep_layers": [2], "noise_floor": 0.0}


# ---- which neurons, which layers, which run ----


def test_random_neurons_keep_each_places_layer_and_are_never_the_prompts_own() -> None:
    top = ranked(MADE, 30)
    draws = [random_neurons(top.layer_PR, top.neuron_PR, 40, seed) for seed in range(30)]
    for drawn_PR in draws:
        for layers, own, drawn in zip(top.layer_PR, top.neuron_PR, drawn_PR, strict=True):
            named = set(zip(layers.tolist(), drawn.tolist(), strict=True))
            assert len(named) == 30
            assert not named & set(zip(layers.tolist(), own.tolist(), strict=True))
    np.testing.assert_array_equal(random_neurons(top.layer_PR, top.neuron_PR, 40, 7), draws[7])
    assert len({drawn_PR.tobytes() for drawn_PR in draws}) == 30
    assert not np.array_equal(draws[0][0], draws[0][1]), "two prompts have the same draw"
    first = top.layer_PR[0] == top.layer_PR[0, 0]
    others = set(range(40)) - set(top.neuron_PR[0, first].tolist())
    assert {int(drawn_PR[0, 0]) for drawn_PR in draws} <= others
    assert len({int(drawn_PR[0, 0]) for drawn_PR in draws}) > 12, "the first place is drawn from a few neurons only"


def test_deep_layers_are_those_of_the_paper_in_proportion() -> None:
    assert {n: deep_layers(n)[0] for n in (32, 30, 28, 16, 8, 3, 1)} == {
        32: 17,
        30: 16,
        28: 15,
        16: 9,
        8: 4,
        3: 2,
        1: 0,
    }
    scan = MaskKeep("source", neurons=ranked(MADE, 9), ks=(9,))
    assert scan.deep(SHAPE) == [2]
    assert replace(scan, deep_layers=(2, 0)).deep(SHAPE) == [0, 2]


def test_the_run_depends_on_the_neurons_and_only_on_those_used() -> None:
    neurons = ranked(MADE, 9)
    scan = MaskKeep("source", neurons=neurons, ks=(9,))
    swapped = replace(neurons, neuron_PR=neurons.neuron_PR[:, ::-1], layer_PR=neurons.layer_PR[:, ::-1])
    assert MaskKeep("source", neurons=swapped, ks=(9,)).parameters() != scan.parameters()
    assert MaskKeep("source", neurons=ranked(MADE, 9), ks=(9,)).parameters() == scan.parameters()
    assert len(json.dumps(scan.parameters())) < 300, "the neurons themselves are no parameter"
    layer_PR, neuron_PR = neurons.of([MADE[4], MADE[1]])
    np.testing.assert_array_equal(neuron_PR, neurons.neuron_PR[[4, 1]])
    np.testing.assert_array_equal(layer_PR, neurons.layer_PR[[4, 1]])


def test_mistakes_of_the_scan() -> None:
    with pytest.raises(UserError, match="ranks 9 neurons of each prompt, k = 10 asked"):
        MaskKeep("source", neurons=ranked(MADE, 9), ks=(10,)).shards(SHAPE, MADE)
    with pytest.raises(UserError, match="write numbers from 1 on"):
        MaskKeep("source", neurons=ranked(MADE, 9), ks=(0,))
    with pytest.raises(UserError, match="ranked no neurons for prompt 'p1'"):
        MaskKeep("source", neurons=ranked(MADE[:1], 9), ks=(9,)).shards(SHAPE, MADE)
    with pytest.raises(UserError, match="layer 3 does not exist"):
        MaskKeep("source", neurons=ranked(MADE, 9), ks=(9,), deep_layers=(3,)).shards(SHAPE, MADE)
    crowded = MaskKeep("source", neurons=ranked(MADE, 21, layers=(1,)), ks=(21,))
    with pytest.raises(UserError, match="has 21 of the 40 neurons of layer 1 among its first"):
        crowded.shards(SHAPE, MADE)
    replace(crowded, control_seeds=0).shards(SHAPE, MADE)
