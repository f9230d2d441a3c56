"""MLP probing against a hand-written version with plain hooks, in float64, on every tiny family; views and command."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import PreTrainedModel

from mathinterp.cli.main import main
from mathinterp.engine.lens.mlp_vectors import mlp_vectors
from mathinterp.engine.pairs import batches_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.mlp_probe.rows import target_ids
from mathinterp.experiments.mlp_probe.summary import summarize
from mathinterp.experiments.mlp_probe.tables import MEASURES, TARGETS
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts import Prompt, TokenizedPrompt, prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.token_types import typed_tokens
from mathinterp.report.page import draw
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.charts import table_of
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level
from tests.small_store import FINGERPRINT, open_run, prompt
from tests.statistics_twin import student_interval
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model, tiny_tokenizer

LAYERS = 3
STORED = {"rtol": 1e-6, "atol": 1e-7}  # rows are float32
# Else model.layers.
BLOCKS = {
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    **dict.fromkeys(("gpt2", "gptj", "falcon"), "transformer.h"),
}

Row = tuple[float, float, float]  # mlp_in, mlp_out, difference


@cache
def tiny_prompts() -> list[TokenizedPrompt]:
    """Sentences of 6 to 13 tokens; a difference below zero, whose answer starts with a sign, is among them."""
    negative = Prompt("negative", "12 - 37 =", "-25", operation="sub", operand_a="12", operand_b="37")
    return tokenize_prompts([*prompt_set("pairs", limit=12, seed=2), negative], tiny_tokenizer())


# ---- the twin: one prompt a pass, one hook a vector ----


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    blocks = model.get_submodule(BLOCKS.get(model.config.model_type, "model.layers"))
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def end_vectors(model: PreTrainedModel, ids: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Per layer, at the last token: the layer's output, the MLP's input, and what it adds to the residual stream."""
    found: list[dict[str, np.ndarray]] = [{} for _ in range(LAYERS)]
    handles = []

    def last(value: Any) -> np.ndarray:
        return (value[0] if isinstance(value, tuple) else value)[0, -1].numpy().copy()

    for layer, block in enumerate(blocks_of(model)):

        def see_read(_: nn.Module, args: Any, found: dict = found[layer]) -> None:
            found["read"] = last(args[0])

        def see_added(_: nn.Module, args: Any, output: Any, found: dict = found[layer]) -> None:
            found["added"] = last(output) * getattr(model.config, "residual_multiplier", 1.0)

        def see_output(_: nn.Module, args: Any, output: Any, found: dict = found[layer]) -> None:
            found["output"] = last(output)

        adds = getattr(block, "post_feedforward_layernorm", block.mlp)
        handles += [
            block.mlp.register_forward_pre_hook(see_read),
            adds.register_forward_hook(see_added),
            block.register_forward_hook(see_output),
        ]
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def final_gain(model: PreTrainedModel) -> np.ndarray:
    name = {
        "gpt_neox": "gpt_neox.final_layer_norm",
        "opt": "model.decoder.final_layer_norm",
        **dict.fromkeys(("gpt2", "gptj", "falcon"), "transformer.ln_f"),
    }
    gain = model.get_submodule(name.get(model.config.model_type, "model.norm")).weight.numpy()
    return gain + 1 if model.config.model_type.startswith("gemma") else gain  # Gemma's norms multiply by 1 + weight


def hand_rows(
    model: PreTrainedModel, item: TokenizedPrompt, vectors: str, fold_norm: bool
) -> dict[tuple[int, str], Row]:
    digit = tiny_tokenizer().convert_tokens_to_ids
    answer = item.prompt.answer.lstrip("-")
    unembedding = model.get_output_embeddings().weight.numpy()
    rows = {}
    for layer, found in enumerate(end_vectors(model, item.input_ids[: item.end + 1])):
        before, after = found["output"] - found["added"], found["output"]
        if vectors == "written":
            before, after = found["read"], found["added"]
        for target, text in zip("abc", (item.prompt.operand_a, item.prompt.operand_b, answer), strict=True):
            towards = unembedding[digit(text[0])] * (final_gain(model) if fold_norm else 1)
            rows[layer, target] = (cosine(before, towards), cosine(after, towards), cosine(after - before, towards))
    return rows


def scan_rows(scan: MlpProbe, anatomy: Anatomy, max_tokens: int = 70) -> dict[tuple[int, str, str], Row]:
    prompts = tiny_prompts()
    state = scan.prepare(Subject(anatomy, prompts, max_tokens, tiny_tokenizer()))
    rows = {}
    for shard in scan.shards(anatomy.shape, prompts):
        table = scan.run(state, shard)
        assert table.schema == scan.tables[shard.table].schema
        for row in table.to_pylist():
            key = (row["layer"], row["prompt_id"], row["target"])
            assert key not in rows
            rows[key] = tuple(row[name] for name in MEASURES)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in anatomy.model.modules())
    return rows


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    if request.param == "gemma2":  # its eager attention sums the softmax in float32
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    return Anatomy(tiny_model(request.param))


@pytest.mark.parametrize(("vectors", "fold_norm"), [("residual", False), ("residual", True), ("written", False)])
def test_rows_by_hand(anatomy: Anatomy, vectors: str, fold_norm: bool) -> None:
    rows = scan_rows(MlpProbe(vectors, fold_norm, keep_all=True), anatomy)
    assert len(rows) == LAYERS * len(tiny_prompts()) * len(TARGETS)
    for item in tiny_prompts():
        for (layer, target), expected in hand_rows(anatomy.model, item, vectors, fold_norm).items():
            np.testing.assert_allclose(rows[layer, item.prompt.prompt_id, target], expected, **STORED)


def test_vectors_are_exact_and_sum_to_the_layers_output(anatomy: Anatomy) -> None:
    """In float64, before anything is stored: r + F is the layer's output, one prompt at a time or padded."""
    items = tiny_prompts()
    batches = list(batches_of([item.input_ids[: item.end + 1] for item in items], anatomy, max_tokens=70))
    assert any(batch.ends.min() + 1 < batch.token_ids.shape[1] for batch in batches), (
        "nothing was padded: the test shows nothing"
    )
    for batch in batches:
        found = mlp_vectors(anatomy, batch)
        for row, index in enumerate(batch.rows.tolist()):
            for layer, hand in enumerate(end_vectors(anatomy.model, items[index].input_ids[: items[index].end + 1])):
                for name, expected in (
                    ("before_BLD", hand["output"] - hand["added"]),
                    ("read_BLD", hand["read"]),
                    ("written_BLD", hand["added"]),
                ):
                    np.testing.assert_allclose(getattr(found, name)[row, layer], expected, rtol=1e-9, atol=1e-10)


def test_parallel_blocks_keep_their_attention_in_the_residual() -> None:
    """r_l = x_{l-1} + A_l although the MLP reads x_{l-1}: the difference between before and input is attention."""
    anatomy = Anatomy(tiny_model("gptj"))
    ids = tiny_prompts()[0].input_ids[: tiny_prompts()[0].end + 1]
    with torch.no_grad():
        inputs = anatomy.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    found = mlp_vectors(anatomy, next(batches_of([ids], anatomy)))
    for layer in range(LAYERS):
        normed = anatomy.mlp_norm(layer)(inputs[layer][0, -1])
        torch.testing.assert_close(found.read_BLD[0, layer], normed)
        assert (found.before_BLD[0, layer] - inputs[layer][0, -1]).abs().max() > 0.01


def test_a_family_that_adds_something_else_is_refused() -> None:
    anatomy = Anatomy(tiny_model("gemma2"))
    anatomy.family = replace(anatomy.family, mlp_post_norm=None)
    batch = next(batches_of([item.input_ids for item in tiny_prompts()], anatomy))
    with pytest.raises(AssertionError, match="'gemma2': residual stream \\+ MLP is not the output of layer 0"):
        mlp_vectors(anatomy, batch)


def test_half_precision_is_summed_in_float32() -> None:
    rounded = Anatomy(tiny_model("llama", dtype=torch.bfloat16))
    assert mlp_vectors(rounded, next(batches_of([(1, 20, 30)], rounded))).before_BLD.dtype == torch.float32
    exact, half = (scan_rows(MlpProbe(keep_all=True), anatomy) for anatomy in (Anatomy(tiny_model("llama")), rounded))
    differences = [np.abs(np.subtract(half[key], exact[key])).max() for key in exact]
    assert 0 < np.median(differences) < 0.01


def test_some_layers_have_the_rows_of_the_whole_scan() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    everything = scan_rows(MlpProbe(keep_all=True), anatomy)
    some = scan_rows(MlpProbe(layers=(2, 0, 2), keep_all=True), anatomy, max_tokens=13)
    assert {layer for layer, _, _ in some} == {0, 2}
    for key, row in some.items():
        assert row == pytest.approx(everything[key], rel=1e-6)


def test_prompts_answered_wrongly_are_left_out() -> None:
    anatomy, prompts = Anatomy(tiny_model("llama")), tiny_prompts()[::2]
    item = prompts[3]
    predicted = int(anatomy.model(torch.tensor([item.input_ids[: item.end + 1]])).logits[0, -1].argmax())
    told = replace(item, scored=(replace(item.scored[0], token_id=predicted), *item.scored[1:]))
    given = [*prompts[:3], told, *prompts[4:]]
    state = MlpProbe().prepare(Subject(anatomy, given, 70, tiny_tokenizer()))
    everything = MlpProbe(keep_all=True).prepare(Subject(anatomy, given, 70, tiny_tokenizer()))
    assert state.names.to_pylist() == [told.prompt.prompt_id]
    assert MlpProbe().notes(state) == {"prompts": len(given), "answered_rightly": 1, "prompts_kept": 1}
    np.testing.assert_allclose(state.cosine_PLCM, everything.cosine_PLCM[3:4], **STORED)
    with pytest.raises(UserError, match="`keep_all`"):
        MlpProbe().prepare(Subject(anatomy, prompts[:3], 70, tiny_tokenizer()))


# ---- targets ----


@pytest.mark.parametrize(
    ("build", "fields", "expected"),
    [
        (word_level, {}, ["1", "3", "5"]),
        (llama_like, {}, ["1", "3", "5"]),
        (gpt2_like, {}, ["15", "Ġ37", "Ġ52"]),  # in context: not "37" and "52" by themselves
        (word_level, {"text": "-15 + 37 =", "operand_a": "-15", "answer": "-22"}, ["1", "3", "2"]),
        (
            word_level,
            {"text": "Twelve plus thirty-four is", "operand_a": "twelve", "operand_b": "thirty-four", "answer": "six"},
            ["Twelve", "thirty", "six"],
        ),
    ],
)
def test_targets_in_context(build, fields, expected):
    item = Prompt(
        **{"prompt_id": "p", "text": "15 + 37 =", "answer": "52", "operand_a": "15", "operand_b": "37"} | fields
    )
    tokenizer = build([f"{item.text} {item.answer}"] * 20)
    prompts = tokenize_prompts([item], tokenizer)
    ids = target_ids(prompts, typed_tokens(prompts, tokenizer))
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist()) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vectors": "both"}, "`vectors` 'both' is not known; take one of residual, written"),
        ({"layers": ()}, "no MLPs to probe"),
        ({"layers": (3,)}, "layer 3 does not exist"),
    ],
)
def test_mistakes_are_named(fields, message) -> None:
    with pytest.raises(UserError, match=message):
        MlpProbe(**fields).shards(Anatomy(tiny_model("llama")).shape, tiny_prompts())


def test_prompts_without_operands_are_refused_among_others() -> None:
    shape = Anatomy(tiny_model("llama")).shape
    both = TokenizedPrompt(Prompt("both", "3 + 5 =", "8", operand_a="3", operand_b="5"), (1,), ())
    for fields in ({}, {"operand_a": "3"}):
        odd = TokenizedPrompt(Prompt("odd", "3 + 5 =", "8", **fields), (1,), ())
        with pytest.raises(UserError, match="'odd': probing compares with both operands"):
            MlpProbe().shards(shape, [both, odd])


# ---- views and the command ----


@pytest.mark.slow
def test_views_and_the_layer_where_the_answer_overtakes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["mlp_probe/00000"], scan="probe", parameters={})
    store.write_prompts(FINGERPRINT, [prompt("a"), prompt("b"), prompt("c", "sub")])
    out = {  # (prompt, layer) -> cosines with a, b, c
        ("a", 0): (0.5, 0.1, 0.0), ("b", 0): (0.3, 0.1, 0.2), ("c", 0): (0.0, 0.1, 0.9),
        ("a", 1): (0.1, 0.1, 0.4), ("b", 1): (0.1, 0.1, 0.2), ("c", 1): (0.0, 0.3, 0.2),
        ("a", 2): (0.0, 0.0, 0.6), ("b", 2): (0.0, 0.0, 0.9), ("c", 2): (0.0, 0.7, 0.6),
    }  # fmt: skip
    rows = [
        {"layer": layer, "prompt_id": name, "target": target, "mlp_in": 0.25, "mlp_out": value, "difference": -value}
        for (name, layer), values in out.items()
        for target, value in zip("abc", values, strict=True)
    ]
    table = pa.Table.from_pylist(rows, catalog().tables["mlp_probe"].schema)
    store.write_shard(run.run_id, "mlp_probe", 0, table, {})
    run.finish()
    curve = {(r["operation"], r["layer"], r["target"]): r for r in store.rows("SELECT * FROM mlp_probe_curve")}
    add = curve["add", 0, "a"]
    half = student_interval(0.0, (0.1**2 + 0.1**2) / 1 / 2, 2)[1]
    assert (add["n"], add["mlp_out"], add["mlp_in"], add["difference"]) == pytest.approx((2, 0.4, 0.25, -0.4))
    assert (add["mlp_out_low"], add["mlp_out_high"]) == pytest.approx((0.4 - half, 0.4 + half))
    assert (add["difference_low"], add["difference_high"]) == pytest.approx((-0.4 - half, -0.4 + half))
    assert (add["mlp_in_low"], add["mlp_in_high"]) == pytest.approx((0.25, 0.25))
    assert curve["all", 0, "a"]["mlp_out"] == pytest.approx((0.4 + 0.0) / 2)  # operations weigh alike
    assert curve["all", 0, "a"]["mlp_out_low"] is None  # a single prompt has no variance
    paper = {(r["operation"], r["layer"]): r for r in store.rows("SELECT * FROM paper_b_mlp_probe")}
    assert [paper["add", layer]["leader"] for layer in range(3)] == ["a", "c", "c"]
    assert [paper["add", layer]["settled"] for layer in range(3)] == [False, True, True]
    assert [paper["sub", layer]["leader"] for layer in range(3)] == ["c", "b", "b"]
    assert paper["add", 2]["out_c"] == pytest.approx(0.75)
    assert paper["add", 2]["difference_c"] == pytest.approx(-0.75)
    found = summarize(Results(store, run.run_id)).data
    assert found["overtakes"] == {"all": 0, "add": 1, "sub": None}  # all: .2 .1 .5, .05 .2 .25, 0 .35 .675
    assert "add from layer 1, sub never" in found["verdict"]


@pytest.mark.ray
def test_command_prints_the_curve(tmp_path: Path) -> None:
    folder, store = save_tiny(tmp_path / "llama", "llama"), tmp_path / "store"
    command = ["scan", "probe", "--model", folder, "--store", store, "--limit", "8", "--keep-all", "--replicas", "1"]
    shown = CliRunner().invoke(main, [str(word) for word in command])
    assert shown.exit_code == 0, shown.output
    assert "Mean cosine with operand A, operand B and answer C" in shown.stdout
    assert "paper_b_mlp_probe" in shown.stdout
    found = json.loads(CliRunner().invoke(main, [str(word) for word in (*command, "--json")]).stdout)
    assert (found["shards_done"], found["shards_reused"]) == (0, 1)
    assert [row["layer"] for row in found["curve"]] == [0, 1, 2]
    assert set(found["overtakes"]) == {"all", "add", "sub", "mul", "div"}
    assert Store(store).rows("SELECT count(*) AS n FROM mlp_probe") == [{"n": 3 * 8 * 3}]
    lines = table_of(draw(Store(store), found["run_id"]), "mlp_out").query("operation == 'all' and target == 'C'")
    np.testing.assert_allclose(lines["mlp_out"], [row["out_c"] for row in found["curve"]], rtol=1e-3)
    wrong = CliRunner().invoke(main, [*[str(word) for word in command], "--vectors", "none"])
    assert wrong.exit_code == 2
    assert "Invalid value for '--vectors': 'none' is not one of" in wrong.stderr
