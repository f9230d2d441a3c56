"""Activation patching: rows against hooks by hand, one prompt alone in float64; the views by hand; the command."""

import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from scipy import stats

from mathinterp.cli.main import main
from mathinterp.cluster.replica import check_rows
from mathinterp.errors import UserError
from mathinterp.experiments import Subject
from mathinterp.experiments.activation_patching import ActivationPatching
from mathinterp.experiments.activation_patching.tables import DIRECTIONS, SITES, TABLES
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import first_digit
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.token_types import typed_tokens
from mathinterp.store import Store
from tests.small_store import open_run, prompt
from tests.tiny import TINY_FAMILIES, tiny_config, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = tokenize_prompts(
    [
        Prompt(f"p{i}", text, answer, operation, a, b, counterfactual=other)
        for i, (text, other, answer, operation, a, b) in enumerate(
            [
                ("3 plus 5 is", "3 nothing 5 is", "8", "add", "3", "5"),
                ("The sum of 24 and 17 is", "The result of 24 and 17 is", "41", "add", "24", "17"),
                ("3 minus 15 is equal to", "3 less 15 is equal to", "-12", "sub", "3", "15"),
                ("Q: What is 71 times 2? A:", "Q: What is 71 more 2? A:", "142", "mul", "71", "2"),
                ("48 / 4 =", "48 | 4 =", "12", "div", "48", "4"),
                ("5 + 5 =", "5 < 5 =", "10", "add", "5", "5"),
            ]
        )
    ],
    TOKENIZER,
)  # of several lengths; one answer has its first digit behind a sign


def rows_of(scan: ActivationPatching, anatomy: Anatomy) -> dict[str, pa.Table]:
    state = scan.prepare(Subject(anatomy, PROMPTS, tokenizer=TOKENIZER))
    assert scan.notes(state)["noise_floor"] < 1e-9
    found: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(anatomy.shape, PROMPTS):
        table = scan.run(state, shard)
        check_rows(table, TABLES[shard.table].schema, shard.key)
        found.setdefault(shard.table, []).append(table)
    return {name: pa.concat_tables(parts) for name, parts in found.items()}


# ---- the slow twin: transformers' own forward, hooks of torch, one sentence alone ----


def outputs(anatomy: Anatomy, site: str, layer: int, edit: Callable[[torch.Tensor], torch.Tensor]):
    """Registers ``edit`` (T D -> T D) on what is patched."""
    block = anatomy.model.get_submodule(anatomy.family.decoder).get_submodule(f"{anatomy.family.layers}.{layer}")
    if site == "residual":
        return block.register_forward_pre_hook(lambda _, args: (edit(args[0][0])[None], *args[1:]))
    path = anatomy.family.mlp
    if site == "attention":
        path = f"{anatomy.family.attention}.{anatomy.family.output_projection}"

    def hook(_: torch.nn.Module, args: object, output: object) -> object:
        if isinstance(output, tuple):
            return (edit(output[0][0])[None], *output[1:])
        assert isinstance(output, torch.Tensor)
        return edit(output[0])[None]

    return block.get_submodule(path).register_forward_hook(hook)


def slow(anatomy: Anatomy, site: str, layer: int, direction: str, pair: int, token: int) -> tuple[float, float, int]:
    item = PROMPTS[pair]
    scored = first_digit(item)
    assert item.counterfactual_ids is not None
    original, other = (torch.tensor([ids[: scored.index]]) for ids in (item.input_ids, item.counterfactual_ids))
    runs, source = (other, original) if direction == "denoising" else (original, other)
    seen: list[torch.Tensor] = []
    handle = outputs(anatomy, site, layer, lambda clean: seen.append(clean.clone()) or clean.clone())
    anatomy.model(source)
    handle.remove()

    def patch(clean_TD: torch.Tensor) -> torch.Tensor:
        clean_TD = clean_TD.clone()
        clean_TD[token] = seen[0][token]
        return clean_TD

    handle = outputs(anatomy, site, layer, patch)
    logits_V = anatomy.model(runs).logits[0, -1]
    handle.remove()
    return float(logits_V[scored.token_id]), float(logits_V.log_softmax(0)[scored.token_id]), int(logits_V.argmax())


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_rows_are_those_of_one_sentence_alone(family: str) -> None:
    anatomy = Anatomy(tiny_model(family))
    rows = rows_of(ActivationPatching(layers="0,2", keep_all=True), anatomy)["patching_scan"].to_pylist()
    lengths = {item.prompt.prompt_id: first_digit(item).index for item in PROMPTS}
    assert len(rows) == len(SITES) * len(DIRECTIONS) * 2 * sum(lengths.values())
    names = [item.prompt.prompt_id for item in PROMPTS]
    for row in rows[::11]:
        pair = names.index(row["prompt_id"])
        place = (row["site"], row["layer"], row["direction"], pair, row["token"])
        logit, logprob, predicted = slow(anatomy, *place)
        assert (row["logit"], row["logprob"]) == pytest.approx((logit, logprob), rel=1e-6, abs=1e-6), place
        assert row["predicted_id"] == predicted
        assert row["at_end"] == (row["token"] == lengths[row["prompt_id"]] - 1)


@pytest.mark.slow
def test_both_engines_agree_and_pairs_bound_the_rows() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    packed, plain = (rows_of(ActivationPatching(keep_all=True, engine=name), anatomy) for name in ("packed", "plain"))
    for name in ("patching_scan", "patching_pairs"):
        fast, expected = (side[name].to_pandas() for side in (packed, plain))
        for column in fast.columns:
            if fast[column].dtype == np.float32:
                np.testing.assert_allclose(fast[column], expected[column], rtol=1e-6, atol=1e-6)
            else:
                assert (fast[column] == expected[column]).all()
    pairs = packed["patching_pairs"].to_pandas().set_index("prompt_id")
    rows = packed["patching_scan"].to_pandas()
    first = rows[(rows["token"] == 0) & (rows["direction"] == "noising")]  # BOS is the same in both sentences
    np.testing.assert_allclose(first["logprob"], pairs.loc[first["prompt_id"], "logprob_original"], rtol=1e-6)
    types = dict(zip(pairs.index, typed_tokens(PROMPTS, TOKENIZER), strict=True))
    for row in rows.itertuples():
        own = types[row.prompt_id].types  # up to the token before the answer; a sign may stand before its first digit
        assert row.token_type == (own[row.token] if row.token < len(own) else "other")


def test_only_pairs_answered_rightly_are_kept() -> None:
    with pytest.raises(UserError, match="answers none of the 6 prompts right"):
        rows_of(ActivationPatching(), Anatomy(tiny_model("llama")))


def test_choices() -> None:
    shape = model_shape(tiny_config("llama"))
    scan = ActivationPatching(sites="mlp,residual", directions=["noising"], layers=(2, 0))
    assert scan.parameters()["sites"] == ["residual", "mlp"]
    shards = scan.shards(shape, PROMPTS)
    assert [(s.key, s.work.get("site"), s.work.get("layers")) for s in shards] == [
        ("patching_pairs/00000", None, None),
        ("patching_scan/00000", "residual", [0, 2]),
        ("patching_scan/00001", "mlp", [0, 2]),
    ]
    cost = scan.cost(shape, PROMPTS, shards)
    assert {shard.key: scan.evaluations(shard, PROMPTS) for shard in shards} == cost.rows
    for fields, message in (
        ({"sites": "heads"}, "`sites` 'heads' is not known; take some of residual,attention,mlp"),
        ({"directions": ""}, "`directions` '' is not known"),
        ({"layers": ()}, "no layers to patch"),
    ):
        with pytest.raises(UserError, match=message):
            ActivationPatching(**fields)
    with pytest.raises(UserError, match="layer 3 does not exist"):
        ActivationPatching(layers=[3]).shards(shape, PROMPTS)


# ---- the views ----


def test_effects_are_ratios_of_means_with_intervals_over_pairs(tmp_path) -> None:
    """Numbers by numpy and scipy; the fraction's interval by its definition: all r with change - r gap within t."""
    rng = np.random.default_rng(0)
    operations = {"add": 9, "sub": 5}
    names = [(f"{operation}{i}", operation) for operation, count in operations.items() for i in range(count)]
    original, gap = rng.normal(-1, 0.3, len(names)), rng.normal(8, 2, len(names))
    patched = original - gap + 0.4 * gap + rng.normal(0, 1, (2, len(names)))  # two operand tokens of each pair
    store = Store(tmp_path)
    run = open_run(store, ["patching_pairs/00000", "patching_scan/00000"], scan="activation_patching")
    store.write_prompts("feedbeef00000000", [prompt(name, operation) for name, operation in names])
    pairs = [
        {"prompt_id": name, "correct": True, "kept": True, "logit_original": 0.0, "logit_counterfactual": -1.0,
         "logprob_original": original[i], "logprob_counterfactual": original[i] - gap[i]}
        for i, (name, _) in enumerate(names)
    ]  # fmt: skip
    scan = [
        {"site": "mlp", "layer": 1, "direction": "denoising", "prompt_id": name, "token": t, "token_type": "operand_a",
         "at_end": False, "logit": -1.0, "logprob": patched[t, i], "predicted_id": 0}
        for i, (name, _) in enumerate(names) for t in (0, 1)
    ]  # fmt: skip
    for table, rows in (("patching_pairs", pairs), ("patching_scan", scan)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, TABLES[table].schema), {})
    found = {row["operation"]: row for row in store.rows("SELECT * FROM patching_effects WHERE measure = 'logprob'")}
    change = np.float32(patched).mean(axis=0) - np.float32(original - gap)
    own = np.array([operation == "add" for _, operation in names])
    add = found["add"]
    assert (add["n"], add["tokens"]) == (9, 2)
    assert add["change"] == pytest.approx(change[own].mean(), rel=1e-5)
    low, high = stats.t.interval(0.95, 8, change[own].mean(), stats.sem(change[own]))
    assert (add["change_low"], add["change_high"]) == pytest.approx((low, high), rel=1e-5)
    assert add["fraction"] == pytest.approx(change[own].mean() / gap[own].mean(), rel=1e-5)
    for bound in (add["fraction_low"], add["fraction_high"]):  # at its ends the t statistic is at the quantile
        rest = change[own] - bound * gap[own]
        assert abs(rest.mean() / stats.sem(rest)) == pytest.approx(stats.t.ppf(0.975, 8), rel=2e-3)
    assert add["fraction_low"] < add["fraction"] < add["fraction_high"]
    means = [change[own].mean(), change[~own].mean()]
    assert found["all"]["change"] == pytest.approx(np.mean(means), rel=1e-5)
    spread = np.sqrt(stats.sem(change[own]) ** 2 + stats.sem(change[~own]) ** 2) / 2
    high = np.mean(means) + stats.t.ppf(0.975, 4) * spread  # of the smallest operation, which has 5 pairs
    assert (found["all"]["change_high"], found["all"]["pairs"]) == (pytest.approx(high, rel=1e-5), 5)
    logit = store.rows("SELECT fraction, change FROM patching_effects WHERE measure = 'logit' AND operation = 'add'")
    assert logit == [{"fraction": 0.0, "change": 0.0}]


def test_a_gap_that_is_not_sure_has_no_interval(tmp_path) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["patching_pairs/00000", "patching_scan/00000"], scan="activation_patching")
    store.write_prompts("feedbeef00000000", [prompt(name, "add") for name in "ab"])
    pairs = [
        {"prompt_id": name, "correct": True, "kept": True, "logit_original": 0.0, "logit_counterfactual": other,
         "logprob_original": -1.0, "logprob_counterfactual": -1.0}
        for name, other in (("a", -3.0), ("b", 2.0))
    ]  # fmt: skip
    scan = [
        {"site": "mlp", "layer": 0, "direction": "noising", "prompt_id": name, "token": 4, "token_type": "equals",
         "at_end": True, "logit": -1.0, "logprob": -1.0, "predicted_id": 0}
        for name in "ab"
    ]  # fmt: skip
    for table, rows in (("patching_pairs", pairs), ("patching_scan", scan)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, TABLES[table].schema), {})
    rows = store.rows("SELECT * FROM patching_effects WHERE operation = 'all' ORDER BY measure")
    assert [(row["measure"], row["token_type"], row["fraction_low"]) for row in rows] == [
        ("logit", "end", None), ("logprob", "end", None),
    ]  # fmt: skip
    assert rows[0]["fraction"] == pytest.approx(-1 / -0.5)
    assert rows[1]["fraction"] is None, "both sentences have one score"


@pytest.mark.ray
def test_the_command_plans_runs_draws_and_resumes(tmp_path) -> None:
    where = ["--sites", "residual", "--layers", "0,7", "--limit", "8"]
    planned = CliRunner().invoke(main, ["plan", "activation_patching", *where, "--json"])
    assert planned.exit_code == 0, planned.output
    command = ["scan", "activation_patching", *where, "--store", str(tmp_path / "s"), "--out", str(tmp_path / "f")]
    first, again = (CliRunner().invoke(main, [*command, "--json"]) for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    made, found = (json.loads(done.stdout.splitlines()[-1]) for done in (first, again))
    assert (made["shards_done"], found["shards_done"]) == (3, 0)
    best = {(row["direction"], row["layer"]): row for row in reversed(made["places"])}
    assert best["denoising", 0]["token_type"] == "operator", "the only token in which the sentences differ"
    assert best["denoising", 0]["fraction"] == pytest.approx(1, abs=1e-3)
    assert made["end_decides_from"] == {"denoising": 7, "noising": 7}
    assert {file.suffix for file in (tmp_path / "f").iterdir()} == {".png", ".svg"}
