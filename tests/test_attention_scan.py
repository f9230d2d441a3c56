"""Token types on several tokenizers; END's attention rows against the model's own outputs and values, in float64."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from transformers.models.gptj import modeling_gptj

from mathinterp.cli.main import main
from mathinterp.engine.attention_rows import eager_attention, eager_deviation, end_attention, end_logits
from mathinterp.engine.hooks import caught_input
from mathinterp.engine.pairs import Batch, batches_of
from mathinterp.errors import UserError
from mathinterp.experiments.answered import answered_rightly
from mathinterp.experiments.attention import Attention, ShownHeads
from mathinterp.experiments.attention.figure import draw
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts import Prompt, TokenizedPrompt, prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.token_types import TOKEN_TYPES, operand_spans, typed_tokens
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.charts import table_of
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level
from tests.small_store import FINGERPRINT, open_run, prompt
from tests.statistics_twin import student_interval
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_model, tiny_tokenizer

EXACT = {"rtol": 1e-11, "atol": 1e-12}
SHORT = {"b": "bos", "A": "operand_a", "B": "operand_b", "o": "operator", "e": "equals", ".": "other"}
BUILDERS = {"word_level": word_level, "llama_like": llama_like, "gpt2_like": gpt2_like}

# ---- token types ----


def typed(text: str, a: str | None, b: str | None, builder: str = "word_level", operation: str = "add", **fields):
    """Types as one letter a token, and the operands' first digit tokens as they stand in the text."""
    item = Prompt("p", text, "8", operation=operation, operand_a=a, operand_b=b, **fields)
    tokenizer = BUILDERS[builder]([f"{text} 8"] * 20)
    tokenized = tokenize_prompts([item], tokenizer)
    found = typed_tokens(tokenized, tokenizer)[0]
    assert len(found.types) == tokenized[0].end + 1
    letters = {name: letter for letter, name in SHORT.items()}
    names = tokenizer.convert_ids_to_tokens(list(tokenized[0].input_ids))
    return "".join(letters[kind] for kind in found.types), {k: names[i] for k, i in found.first_digit.items()}


@pytest.mark.parametrize(
    ("builder", "letters", "a", "b"),
    [
        ("word_level", "bAAoBBe", "1", "3"),
        # <s> _ 1 5 _ + _ 3 7 _ = _: its first space token claims the first character of the text, too
        ("llama_like", "b.AA.o.BB.e.", "1", "3"),
        ("gpt2_like", "AoBe", "15", "Ġ37"),  # adds no BOS, and spaces are part of the tokens
    ],
)
def test_types_on_three_kinds_of_tokenizers(builder, letters, a, b):
    assert typed("15 + 37 =", "15", "37", builder) == (letters, {"operand_a": a, "operand_b": b})


@pytest.mark.parametrize(
    ("text", "a", "b", "operation", "letters"),
    [
        ("5 + 5 =", "5", "5", "add", "bAoBe"),  # equal operands: A, then B
        ("-5 + 5 =", "-5", "5", "add", "bAAoBe"),  # the 5 of -5 is not B
        ("5 - -5 =", "5", "-5", "sub", "bAoBBe"),
        ("-5-5=", "-5", "5", "sub", "bAAoBe"),
        ("The sum of 3 and 5 is", "3", "5", "add", "b.o.A.Be"),
        ("What is 3 plus 5? The answer is", "3", "5", "add", "b..AoB...e"),  # the first "is" asks
        ("3 plus 5 is equal to", "3", "5", "add", "bAoBeee"),
        ("3 plus 5 equals to", "3", "5", "add", "bAoBee"),
        ("6 divided by 3 equals", "6", "3", "div", "bAo.Be"),
        ("4.2 plus 2 equals", "4.2", "2", "add", "bAAAoBe"),  # the 2 of 4.2 is not B
        ("two plus one hundred two is", "two", "one hundred two", "add", "bAoBBBe"),
        ("one hundred two plus two is", "one hundred two", "two", "add", "bAAAoBe"),
        ("thirty-four plus four is", "thirty-four", "four", "add", "bAAAoBe"),
        ("Subtract 5 from 12 :", "12", "5", "sub", "b.B.AA."),  # B stands first
        ("She has 3 apples and 5 pears", "3", "5", None, "b..A..B."),  # no operation: no operator
        ("How much is it", None, None, "add", "b..e."),  # no operands named
    ],
)
def test_types_of_sentences(text, a, b, operation, letters):
    assert typed(text, a, b, operation=operation)[0] == letters


def test_a_number_in_words_is_named_by_its_first_token():
    assert typed("Twelve plus thirty-four is", "twelve", "thirty-four")[1] == {
        "operand_a": "Twelve",
        "operand_b": "thirty",
    }
    assert typed("-12 + 5 =", "-12", "5")[1] == {"operand_a": "1", "operand_b": "5"}  # past the sign


def test_a_bos_that_the_text_itself_writes_counts_once():
    item = Prompt("p", "<s>3 + 5 =", "8", operation="add", operand_a="3", operand_b="5")
    tokenizer = word_level(["3 + 5 = 8"])
    assert typed_tokens(tokenize_prompts([item], tokenizer), tokenizer)[0].types[:3] == ("bos", "operand_a", "operator")


@pytest.mark.parametrize("name", ["pairs", "two_digit_words", "signed_two_digit_test", "one_digit_equals", "rationals"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_set_has_both_operands_in_full(name, builder):
    prompts = prompt_set(name, limit=40)
    tokenizer = BUILDERS[builder]([f"{p.text}{p.separator}{p.answer}" for p in prompts])
    tokenized = tokenize_prompts(prompts, tokenizer)
    for item, found in zip(tokenized, typed_tokens(tokenized, tokenizer), strict=True):
        assert "operator" in found.types, item.prompt.text
        for kind, value in (("operand_a", item.prompt.operand_a), ("operand_b", item.prompt.operand_b)):
            ids = [i for i, t in zip(item.input_ids, found.types, strict=False) if t == kind]
            text = "".join(tokenizer.convert_ids_to_tokens(ids))
            plain = text.replace("Ġ", "").replace("▁", "")
            assert plain == value.replace(" ", ""), (item.prompt.text, kind, plain)


@pytest.mark.parametrize("text", ["15 + 7 =", "4.2 + 7 =", "4,200 + 7 =", "forty-two + 7 ="])
@pytest.mark.parametrize("a", ["5", "2", "two", "200", "9"])
def test_an_operand_that_is_not_in_the_text(text, a):
    with pytest.raises(UserError, match=f"'p': operand_a '{a}' does not stand in the text"):
        operand_spans(Prompt("p", text, "22", operand_a=a, operand_b="7"))


def test_operands_that_share_a_token():
    item = Prompt("p", "5+5 =", "8", operation="add", operand_a="5", operand_b="5")
    tokenizer = word_level(["5+5 = 8"])
    tokenizer.add_tokens(["5+5"])
    with pytest.raises(UserError, match="'p': operand_b '5' shares its tokens"):
        typed_tokens(tokenize_prompts([item], tokenizer), tokenizer)


# ---- attention rows ----


@cache
def tiny_prompts() -> list[TokenizedPrompt]:
    """Sentences of 6 to 13 tokens."""
    return tokenize_prompts(prompt_set("pairs", limit=12, seed=1), tiny_tokenizer())


def sentences() -> list[tuple[int, ...]]:
    return [item.input_ids[: item.end + 1] for item in tiny_prompts()]


@pytest.fixture(autouse=True)
def eager_in_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention works in float32 whatever the model's dtype (softmax; in GPT-J all); identities need float64."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    monkeypatch.setattr(modeling_gptj, "torch", SimpleNamespace(**{**vars(torch), "float32": torch.float64}))


@pytest.fixture(params=TINY_FAMILIES)
def anatomy(request: pytest.FixtureRequest) -> Anatomy:
    return Anatomy(tiny_model(request.param))


@pytest.fixture
def llama() -> Anatomy:
    return Anatomy(tiny_model("llama"))


def batches(anatomy: Anatomy) -> Iterator[Batch]:
    return batches_of(sentences(), anatomy, max_tokens=70)


def test_rows_are_the_models_own_attentions(anatomy: Anatomy) -> None:
    model, layers = anatomy.model, [0, 2]
    seen, widths = 0, set()
    for batch in batches(anatomy):
        weights_BLHT = end_attention(anatomy, batch, layers)
        widths.add((batch.ends.min().item() + 1, batch.token_ids.shape[1]))
        for row, index in enumerate(batch.rows.tolist()):
            ids = sentences()[index]
            with eager_attention(model):
                alone = model(torch.tensor([ids]), output_attentions=True).attentions
            for place, layer in enumerate(layers):
                torch.testing.assert_close(
                    weights_BLHT[row, place, :, : len(ids)], alone[layer][0, :, len(ids) - 1], **EXACT
                )
            assert (weights_BLHT[row, :, :, len(ids) :] == 0).all()
            seen += 1
    assert seen == len(sentences())
    assert any(low < high for low, high in widths), "nothing was padded: the test shows nothing"


def test_rows_times_values_are_what_the_heads_write_under_the_models_own_attention(anatomy: Anatomy) -> None:
    """o_proj's input at END, caught from the model as it is (SDPA where it has it), is the weighted sum of values."""
    shape = anatomy.shape
    for batch in batches(anatomy):
        weights_BLHT = end_attention(anatomy, batch, range(shape.n_layers))
        for layer in range(shape.n_layers):
            with (
                caught_input(anatomy.output_projection(layer)) as heads,
                caught_input(anatomy.layers[layer]) as stream,
            ):
                batch.forward(anatomy)
            value, bias = anatomy.value(layer).weight, anatomy.value(layer).bias
            values_BTX = anatomy.attention_norm(layer)(stream[0]) @ value.T + (0 if bias is None else bias)
            values_BTGE = values_BTX.unflatten(-1, (shape.n_groups, shape.d_head))
            values_BTHE = values_BTGE.repeat_interleave(shape.n_heads // shape.n_groups, dim=2)
            expected = torch.einsum("bht,bthe->bhe", weights_BLHT[:, layer], values_BTHE)
            found = batch.at_end(heads[0]).unflatten(-1, (shape.n_heads, shape.d_head))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_eager_and_the_models_own_attention_give_the_same_outputs(anatomy: Anatomy) -> None:
    model = anatomy.model
    before = model.config._attn_implementation
    assert before == anatomy.family.attention_backend
    for batch in batches(anatomy):
        own = end_logits(anatomy, batch)
        with eager_attention(model):
            assert model.config._attn_implementation == "eager"
            eager = end_logits(anatomy, batch)
        assert model.config._attn_implementation == before
        torch.testing.assert_close(own, eager, rtol=1e-10, atol=1e-11)
        assert eager_deviation(anatomy, batch) < 1e-10
        for row, index in enumerate(batch.rows.tolist()):  # padding on the right changes nothing
            alone = model(torch.tensor([sentences()[index]])).logits[0, -1]
            torch.testing.assert_close(own[row], alone, rtol=1e-10, atol=1e-11)


def test_attention_and_hooks_are_put_back_after_an_exception(llama: Anatomy) -> None:
    with pytest.raises(RuntimeError, match="oh no"), eager_attention(llama.model):
        raise RuntimeError("oh no")
    assert llama.model.config._attn_implementation == "sdpa"
    batch = next(batches(llama))
    broken = Batch(batch.rows, batch.ends + 1000, batch.token_ids)
    with pytest.raises(IndexError):
        end_attention(llama, broken, [0])
    assert llama.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in llama.model.modules())


def test_no_weights_and_no_switch_are_said(llama: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(batches(llama))
    monkeypatch.setattr(type(llama.model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(UserError, match="cannot be switched to eager attention"):
        end_attention(llama, batch, [0])
    monkeypatch.setattr("mathinterp.engine.attention_rows.eager_attention", lambda _: torch.no_grad())
    with pytest.raises(UserError, match="LlamaAttention gives no attention weights"):
        end_attention(llama, batch, [0])


# ---- the scan ----


def scan_rows(scan: Attention, anatomy: Anatomy, max_tokens: int = 70) -> tuple[list[dict], dict]:
    prompts = tiny_prompts()
    state = scan.prepare(Subject(anatomy, prompts, max_tokens, tiny_tokenizer()))
    rows = []
    for shard in scan.shards(anatomy.shape, prompts):
        table = scan.run(state, shard)
        assert table.schema == scan.tables[shard.table].schema
        rows += table.to_pylist()
    return rows, scan.notes(state)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_scan_rows_by_hand(family: str) -> None:
    anatomy = Anatomy(tiny_model(family))
    model, prompts = anatomy.model, tiny_prompts()
    rows, notes = scan_rows(Attention(keep_all=True), anatomy)
    assert len(rows) == 3 * 4 * len(prompts) * len(TOKEN_TYPES)
    found = {(r["layer"], r["head"], r["prompt_id"], r["token_type"]): r for r in rows}
    assert len(found) == len(rows)
    assert notes["eager_deviation"] < 1e-10
    assert notes["weight_sum_deviation"] < 1e-12
    for item, types in zip(prompts, typed_tokens(prompts, tiny_tokenizer()), strict=True):
        with eager_attention(model):
            attentions = model(torch.tensor([item.input_ids[: item.end + 1]]), output_attentions=True).attentions
        for layer in range(3):
            for head in range(4):
                row = attentions[layer][0, head, -1].tolist()
                best = max((w, -t) for t, w in enumerate(row) if types.types[t] != "bos")
                for kind in TOKEN_TYPES:
                    weights = [w for w, t in zip(row, types.types, strict=True) if t == kind]
                    stored = found[layer, head, item.prompt.prompt_id, kind]
                    assert stored["tokens"] == len(weights)
                    assert stored["mass"] == pytest.approx(sum(weights), rel=1e-6, abs=1e-9)
                    assert stored["argmax"] == (types.types[-best[1]] == kind)
                    if weights:
                        assert stored["mean"] == pytest.approx(np.mean(weights), rel=1e-6, abs=1e-9)
                    else:
                        assert stored["mean"] is None


def test_answered_rightly_is_the_argmax_of_one_prompt_at_a_time(anatomy: Anatomy) -> None:
    prompts = told_answers(anatomy)
    assert answered_rightly(anatomy, prompts, max_tokens=40).tolist() == [i % 3 > 0 for i in range(len(prompts))]


def told_answers(anatomy: Anatomy) -> list[TokenizedPrompt]:
    """The prompts with the model's own prediction as their answer, but for every third, which gets another token."""
    told = []
    for i, item in enumerate(tiny_prompts()):
        predicted = int(anatomy.model(torch.tensor([item.input_ids[: item.end + 1]])).logits[0, -1].argmax())
        token = replace(item.scored[0], token_id=predicted if i % 3 else (predicted + 1) % 160)
        told.append(replace(item, scored=(token, *item.scored[1:])))
    return told


def test_prompts_answered_wrongly_are_left_out(llama: Anatomy) -> None:
    prompts = told_answers(llama)
    rows = {}
    for keep_all in (False, True):
        scan = Attention(layers=(1,), keep_all=keep_all)
        state = scan.prepare(Subject(llama, prompts, 70, tiny_tokenizer()))
        table = scan.run(state, scan.shards(llama.shape, prompts)[0])
        rows[keep_all] = {(r["head"], r["prompt_id"], r["token_type"]): r for r in table.to_pylist()}
        counts = [scan.notes(state)[name] for name in ("prompts", "answered_rightly", "prompts_kept")]
        assert counts == [12, 8, 12 if keep_all else 8]
    right = {item.prompt.prompt_id for i, item in enumerate(prompts) if i % 3}
    assert {name for _, name, _ in rows[False]} == right
    for key, row in rows[False].items():
        assert row["mass"] == pytest.approx(rows[True][key]["mass"], abs=1e-6)
        assert row["argmax"] == rows[True][key]["argmax"]
    with pytest.raises(UserError, match="answers none of the 4 prompts right"):
        Attention().prepare(Subject(llama, prompts[::3], 70, tiny_tokenizer()))


def test_masses_sum_to_one_and_bos_is_never_the_argmax(anatomy: Anatomy) -> None:
    rows, _ = scan_rows(Attention(layers=(1,), keep_all=True), anatomy)
    sums: dict[tuple, float] = {}
    tops: dict[tuple, list[str]] = {}
    for row in rows:
        key = (row["layer"], row["head"], row["prompt_id"])
        sums[key] = sums.get(key, 0.0) + row["mass"]
        tops.setdefault(key, []).extend([row["token_type"]] if row["argmax"] else [])
    assert len(sums) == 4 * len(tiny_prompts())
    assert list(sums.values()) == pytest.approx([1] * len(sums), abs=1e-6)
    assert all(len(top) == 1 and top[0] != "bos" for top in tops.values())


def test_chosen_heads_have_the_rows_of_the_whole_scan(llama: Anatomy) -> None:
    def masses(rows: list[dict]) -> dict[tuple, float]:
        return {(r["layer"], r["head"], r["prompt_id"], r["token_type"]): r["mass"] for r in rows}

    everything, _ = scan_rows(Attention(keep_all=True), llama)
    scan = Attention(heads=((2, 3), (0, 1), (2, 3)), keep_all=True)
    some, _ = scan_rows(scan, llama, max_tokens=13)
    expected = [row for row in everything if (row["layer"], row["head"]) in ((0, 1), (2, 3))]
    assert masses(some) == pytest.approx(masses(expected), rel=1e-6)
    assert len(some) == 2 * len(tiny_prompts()) * len(TOKEN_TYPES)
    assert scan.parameters() == {"heads": ["0.1", "2.3"], "layers": None, "keep_all": True}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": ((0, 1),), "layers": (0,)}, "two ways"),
        ({"heads": ()}, "no heads"),
        ({"heads": ((0, 4),)}, "head 0.4 does not exist"),
        ({"layers": (3,)}, "layer 3 does not exist"),
    ],
)
def test_mistakes_are_named(fields, message, llama: Anatomy) -> None:
    with pytest.raises(UserError, match=message):
        Attention(**fields).shards(llama.shape, tiny_prompts())


def test_wide_layers_are_cut_and_an_operand_that_is_missing_is_found_before_any_model(llama: Anatomy) -> None:
    assert [len(s.work["heads"]) for s in Attention(keep_all=True).shards(llama.shape, tiny_prompts())] == [12]
    odd = TokenizedPrompt(Prompt("odd", "3 + 5 =", "8", operand_a="4"), (1, 2), ())
    with pytest.raises(UserError, match="'odd': operand_a '4'"):
        Attention(keep_all=True).shards(llama.shape, [odd])
    assert Attention().evaluations(Shard("attention_scan", 0, {"heads": [[0, 0]] * 9}), tiny_prompts()) == 12


# ---- views and the command ----


@pytest.mark.slow
def test_views_by_hand(tmp_path: Path) -> None:
    store = Store(tmp_path)
    items = [prompt("a"), prompt("b"), prompt("c", "sub"), prompt("d", None)]
    run = open_run(store, ["attention_scan/00000"], scan="attention", parameters={})
    store.write_prompts(FINGERPRINT, items)
    masses = {"a": (0.5, 0.3, 0.2), "b": (0.1, 0.2, 0.7), "c": (0.3, 0.4, 0.3), "d": (0.9, 0.0, 0.1)}
    rows = []
    for name, weights in masses.items():
        largest = "operand_a" if name in "ac" else "equals"
        for kind, mass in zip(("bos", "operand_a", "equals"), weights, strict=True):
            absent = name == "d" and kind == "operand_a"
            tokens = 0 if absent else 2 if kind == "operand_a" else 1
            rows.append(
                {"layer": 1, "head": 2, "prompt_id": name, "token_type": kind, "mass": mass, "tokens": tokens,
                 "mean": None if absent else mass / tokens, "argmax": kind == largest}
            )  # fmt: skip
    table = catalog().tables["attention_scan"]
    store.write_shard(run.run_id, "attention_scan", 0, pa.Table.from_pylist(rows, table.schema), {})
    run.finish()
    by_type = store.rows("SELECT * FROM attention_by_type")
    columns = "run_id layer head operation token_type mean mass low high argmax_share"
    assert list(by_type[0])[:10] == columns.split()  # others rely on these
    found = {(r["operation"], r["token_type"]): r for r in by_type}
    assert {operation for operation, _ in found} == {"add", "sub", "none", "all"}
    add = found["add", "operand_a"]
    assert (add["n"], add["mass"], add["mean"], add["argmax_share"]) == pytest.approx((2, 0.25, 0.125, 0.5))
    variance = (0.05**2 + 0.05**2) / 1 / 2
    assert (add["low"], add["high"]) == pytest.approx(student_interval(0.25, variance, 2))
    assert add["mean_low"] == pytest.approx(student_interval(0.125, variance / 4, 2)[0])
    whole = found["all", "operand_a"]
    assert whole["mass"] == pytest.approx((0.25 + 0.4 + 0) / 3)  # operations weigh alike; absent is no weight
    assert whole["mean"] == pytest.approx((0.125 + 0.2) / 2)  # but not a token of weight 0
    assert whole["low"] is None  # one prompt alone has no variance
    for operation in ("add", "sub", "none", "all"):
        for column in ("mass", "argmax_share"):
            assert sum(found[operation, kind][column] for kind in ("bos", "operand_a", "equals")) == pytest.approx(1)
    figure = {r["operation"]: r for r in store.rows("SELECT * FROM paper_b_figure5")}
    assert figure["add"]["head"] == "1.2"
    assert figure["add"]["operand_a"] == pytest.approx(0.125)
    assert (figure["sub"]["looks_at"], figure["sub"]["looks_at_share"]) == ("operand_a", 1)
    assert (figure["none"]["looks_at"], figure["none"]["operator"]) == ("equals", None)
    assert (
        Attention.summarize(Results(store, run.run_id), ShownHeads()).data["verdict"].endswith("outside BOS: equals 1.")
    )  # a tie
    other = open_run(store, ["attention_scan/00000"], scan="attention", parameters={"layers": [1]})
    without = pa.Table.from_pylist([row for row in rows if row["token_type"] != "bos"], table.schema)
    store.write_shard(other.run_id, "attention_scan", 0, without, {})
    assert "adds no BOS" in Attention.summarize(Results(store, other.run_id), ShownHeads()).data["verdict"]


@pytest.mark.ray
def test_command_prints_heads_by_type_and_resumes(tmp_path: Path) -> None:
    folder, store = save_tiny(tmp_path / "llama", "llama"), tmp_path / "store"
    command = ["scan", "attention", "--model", folder, "--store", store, "--limit", "8", "--keep-all", "--replicas", 1]
    first = CliRunner().invoke(main, [str(word) for word in command])
    assert first.exit_code == 0, first.output
    assert "Of 12 heads, by what they look at most often outside BOS" in first.stdout
    assert "of 8 prompts rightly (first token); all are read." in first.stdout
    assert "paper_b_figure5" in first.stdout
    again = CliRunner().invoke(main, [str(word) for word in (*command, "--json")])
    found = json.loads(again.stdout)
    assert (found["shards_done"], found["shards_reused"]) == (0, 1)
    assert {row["operation"] for row in found["top"]} == {"all", "add", "sub", "mul", "div"}
    assert len(found["top"]) == 5 * 8
    counted = Store(store).rows("SELECT count(*) AS n, count(DISTINCT (layer, head)) AS heads FROM attention_scan")
    assert counted == [{"n": 12 * 8 * 6, "heads": 12}]
    bars = table_of(draw(Results(Store(store), found["run_id"]), ShownHeads()), "mass")
    every = bars[bars["operation"] == "all"]
    assert len(every) == 8 * 6, "eight heads, six token types"
    assert every["mass"].sum() == pytest.approx(8, abs=1e-3)
    wrong = CliRunner().invoke(main, [*[str(word) for word in command], "--heads", "0.9"])
    assert wrong.exit_code == 2
    assert "head 0.9 does not exist" in wrong.stderr
