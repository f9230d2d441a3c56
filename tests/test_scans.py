"""Head and MLP scans against a hand-written twin: one prompt a forward pass, plain hooks, means by hand, in float64."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from mathinterp.engine.intervention import Tokens
from mathinterp.engine.packed import PackedEngine
from mathinterp.errors import UserError
from mathinterp.experiments.ablation import Ablation
from mathinterp.experiments.base import Shard
from mathinterp.experiments.chosen_heads import FEWEST_HEADS
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.models.anatomy import model_shape
from tests.ablation_twin import (
    D_HEAD,
    N_HEADS,
    N_LAYERS,
    STORED,
    Rows,
    assert_rows,
    rows_of,
    rows_where,
    run_all,
    subject,
    tiny_model,
    twin_rows,
)
from tests.made_prompts import PROMPTS
from tests.tiny import tiny_config

FAMILIES = ["llama", "mistral-window", "gpt2"]  # grouped queries; a window; biases and Conv1D


# ---- the twin ----


# ---- the scans ----


def far_apart(a: Rows, b: Rows) -> bool:
    return max(abs(a[key][1] - b[key][1]) for key in a) > 1e-3


CASES = [(a, p) for a in ("zero", "mean", "resample") for p in ("all", "end")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize(("ablation", "positions"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_scan_equals_its_twin(family: str, ablation: str, positions: str, engine: str) -> None:
    model = tiny_model(family)
    heads = ((0, 1), (0, 2), (1, 3), (2, 0), (2, 3))
    tables = run_all(Heads(ablation, positions, engine=engine, heads=heads), subject(model))
    baseline = rows_where(tables["baseline"])
    for layer, head in heads:
        found = rows_where(tables["head_scan"], layer=layer, head=head)
        assert_rows(found, twin_rows(family, "head", layer, head, ablation, positions))
        assert far_apart(found, baseline), "the ablation changed nothing: the test shows nothing"
    assert tables["head_scan"].num_rows == len(heads) * len(baseline)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize(("ablation", "positions"), CASES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_mlp_scan_equals_its_twin(family: str, ablation: str, positions: str, engine: str) -> None:
    model = tiny_model(family)
    tables = run_all(Mlps(ablation, positions, engine=engine), subject(model))
    baseline = rows_where(tables["baseline"])
    for layer in range(N_LAYERS):
        found = rows_where(tables["mlp_scan"], layer=layer)
        assert_rows(found, twin_rows(family, "mlp", layer, None, ablation, positions))
        assert far_apart(found, baseline), "the ablation changed nothing: the test shows nothing"
    assert tables["mlp_scan"].num_rows == N_LAYERS * len(baseline)


@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_baseline_is_the_model_without_edits(family: str, engine: str) -> None:
    model = tiny_model(family)
    expected: Rows = {}
    for prompt in PROMPTS:
        expected |= rows_of(model(torch.tensor([prompt.fed])).logits[0], prompt)
    for scan in (Heads("resample", engine=engine), Mlps(engine=engine)):
        table = scan.run(scan.prepare(subject(model)), Shard("baseline", 0))
        assert table.schema.equals(scan.tables["baseline"].schema)
        assert_rows(rows_where(table), expected)


@pytest.mark.parametrize("positions", ["all", "end"])
def test_every_head_of_the_model_is_scanned(positions: str) -> None:
    table = run_all(Heads("resample", positions), subject(tiny_model("llama")))["head_scan"]
    keys = [(r["layer"], r["head"], r["prompt_id"], r["position"]) for r in table.to_pylist()]
    answers = [(p.prompt.prompt_id, t.position) for p in PROMPTS for t in p.scored]
    assert len(keys) == len(set(keys))
    assert set(keys) == {(layer, head, *a) for layer in range(N_LAYERS) for head in range(N_HEADS) for a in answers}


@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("positions", ["all", "end"])
@pytest.mark.parametrize("scan_class", [Heads, Mlps])
def test_resample_from_the_prompt_itself_changes_nothing(
    scan_class: type[Ablation], positions: str, engine: str
) -> None:
    own = [replace(p, counterfactual_ids=p.input_ids) for p in PROMPTS]
    scan = scan_class("resample", positions, engine=engine)
    tables = run_all(scan, subject(tiny_model("llama"), own))
    baseline = rows_where(tables.pop("baseline"))
    (table,) = tables.values()
    for r in table.to_pylist():
        expected = baseline[r["prompt_id"], r["position"]]
        assert (r["correct"], r["predicted_id"]) == (expected[0], expected[3])
        np.testing.assert_allclose((r["logprob"], r["logit"]), expected[1:3], **STORED)


@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("positions", ["all", "end"])
def test_prompts_of_one_text_keep_their_own_counterfactuals(positions: str, engine: str) -> None:
    """same-1 and same-2 differ in X_c alone; that their values are right is shown by the twins."""
    tables = run_all(Heads("resample", positions, engine=engine, layers=(1,)), subject(tiny_model("llama")))
    rows = rows_where(tables["head_scan"], head=0)
    baseline = rows_where(tables["baseline"])
    for position in (0, 1):
        assert abs(rows["same-1", position][1] - rows["same-2", position][1]) > 1e-6
        assert baseline["same-1", position] == pytest.approx(baseline["same-2", position], abs=1e-6)


# ---- cutting the work ----

SHAPES = [(32, 32), (30, 9), (28, 16), (40, 40), (8, 8), (3, 4), (24, 25), (2, 71), (1, 1)]


@pytest.mark.parametrize(("layers", "heads"), SHAPES)
def test_files_cover_every_head_once_and_depend_on_the_shape_alone(layers: int, heads: int) -> None:
    shape = replace(model_shape(tiny_config("llama")), n_layers=layers, n_heads=heads)
    shards = Heads().shards(shape, PROMPTS)
    assert shards == Heads("mean").shards(shape, PROMPTS[:1])
    assert [s.key for s in shards if s.table == "baseline"] == ["baseline/00000"]
    files = [shard.work["heads"] for shard in shards if shard.table == "head_scan"]
    assert [s.index for s in shards if s.table == "head_scan"] == list(range(len(files)))
    assert sorted(map(tuple, chain.from_iterable(files))) == [(i, j) for i in range(layers) for j in range(heads)]
    assert all(len(file) >= FEWEST_HEADS for file in files[:-1])
    assert FEWEST_HEADS >= 16
    dear = [shard.cost for shard in shards if shard.table == "head_scan"]
    assert sum(dear) == heads * layers * (layers + 1) / 2


@pytest.mark.parametrize("layers", [1, 4, 5, 32])
def test_mlp_files_cover_every_layer_once(layers: int) -> None:
    shape = replace(model_shape(tiny_config("llama")), n_layers=layers)
    shards = [s for s in Mlps().shards(shape, PROMPTS) if s.table == "mlp_scan"]
    assert list(chain.from_iterable(s.work["layers"] for s in shards)) == list(range(layers))


def test_heads_that_do_not_exist_or_are_named_twice_over() -> None:
    shape = model_shape(tiny_config("llama"))
    with pytest.raises(UserError, match=r"head 1\.4 does not exist"):
        Heads(heads=((1, 4),)).shards(shape, PROMPTS)
    with pytest.raises(UserError, match="layer 3 does not exist"):
        Mlps(layers=(3,)).shards(shape, PROMPTS)
    with pytest.raises(UserError, match="`heads` and `layers`"):
        Heads(heads=((1, 1),), layers=(0,))
    for empty in (lambda: Heads(heads=()), lambda: Heads(layers=()), lambda: Mlps(layers=())):
        with pytest.raises(UserError, match=r"(heads|layers) are chosen|to ablate"):
            empty()


# ---- parameters ----


@pytest.mark.parametrize(
    ("ablation", "positions", "scoring", "expected"),
    [
        ("zero", None, None, ("all", "token")),
        ("mean", None, None, ("end", "first_token")),
        ("resample", None, None, ("end", "first_token")),
        ("zero", "end", None, ("end", "first_token")),
        ("mean", "all", None, ("all", "token")),
        ("mean", None, "token", ("end", "token")),
        ("zero", None, "exact_match", ("all", "exact_match")),
    ],
)
def test_defaults(ablation: str, positions: str | None, scoring: str | None, expected: tuple[str, str]) -> None:
    for scan in (Heads(ablation, positions, scoring), Mlps(ablation, positions, scoring)):
        parameters = scan.parameters()
        assert (parameters["positions"], parameters["scoring"]) == expected
        assert scan.needs_counterfactuals == (ablation != "zero")


@pytest.mark.parametrize("wrong", [{"ablation": "one"}, {"positions": "start"}, {"scoring": "bleu"}])
def test_unknown_parameters(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=f"`{next(iter(wrong))}` '.*' is not known"):
        Heads(**wrong)


@pytest.mark.slow
def test_notes_say_how_many_prompts_a_mean_is_over() -> None:
    on = subject(tiny_model("llama"))
    notes = [scan.notes(scan.prepare(on)) for scan in (Heads("mean"), Heads("mean", "all"), Heads("zero"))]
    assert notes[0]["prompts_per_mean"] == {"fewest": 2, "most": 6}
    assert notes[1]["prompts_per_mean"] == {"fewest": len(PROMPTS), "most": len(PROMPTS)}
    assert "prompts_per_mean" not in notes[2]
    assert notes[0]["engine"] == "packed"
    assert notes[0]["noise_floor"]["max_logprob_deviation"] < 1e-9


# ---- what goes wrong while running ----


@pytest.mark.parametrize("engine", ["packed", "plain"])
def test_nan_in_a_heads_output_names_layer_head_and_prompt(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Heads("resample", engine=engine)
    state = scan.prepare(subject(tiny_model("llama")))
    clean = state.counterfactual.activations

    def with_nan(site: str, layer: int, tokens: Tokens) -> torch.Tensor:
        values = clean(site, layer, tokens).clone()
        values[3, D_HEAD : 2 * D_HEAD] = torch.nan
        return values

    monkeypatch.setattr(state.counterfactual, "activations", with_nan)
    with pytest.raises(FloatingPointError, match=r"head 2\.1 edited: log-probability of prompt p3 is nan"):
        scan.run(state, Shard("head_scan", 0, {"heads": [[2, 0], [2, 1], [2, 2]]}))
    scan.run(state, Shard("head_scan", 0, {"heads": [[2, 0], [2, 2]]}))  # the others are whole


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 3])
def test_out_of_memory_halves_the_batch_and_changes_no_row(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = run_all(Heads("resample"), subject(model, max_tokens=100_000))
    sizes: list[int] = []
    failures = 0
    replay = PackedEngine._replay

    def limited(self: PackedEngine, changes: list, *args: object) -> torch.Tensor:
        nonlocal failures
        if len(changes) > most:
            failures += 1
            raise torch.cuda.OutOfMemoryError("simulated")
        sizes.append(len(changes))
        return replay(self, changes, *args)

    monkeypatch.setattr(PackedEngine, "_replay", limited)
    found = run_all(Heads("resample"), subject(model, max_tokens=100_000))
    assert failures > 0
    assert max(sizes) <= most
    for table in ("baseline", "head_scan"):
        assert found[table].drop(["logprob", "logit"]).equals(expected[table].drop(["logprob", "logit"]))
        for column in ("logprob", "logit"):
            np.testing.assert_allclose(found[table][column], expected[table][column], **STORED)


def test_out_of_memory_with_a_single_edit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Heads()
    state = scan.prepare(subject(tiny_model("llama")))

    def never(*args: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("simulated")

    monkeypatch.setattr(PackedEngine, "_replay", never)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        scan.run(state, Shard("head_scan", 0, {"heads": [[0, 0], [0, 1]]}))
