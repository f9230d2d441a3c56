"""The chain: reads and neuron shares against the real model in float64 on every family; rows, SQL, command, drawing."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.replica import check_rows
from mathinterp.engine.hooks import caught_input, edited_output, zeroed_columns
from mathinterp.engine.lens.head_reads import HeadReader, target_logodds
from mathinterp.engine.lens.shares import NeuronShares
from mathinterp.engine.pairs import batches_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.chain import Chain, ChainOptions
from mathinterp.experiments.chain.figure import STAGES
from mathinterp.experiments.figures import save
from mathinterp.experiments.neurons import Against, Neurons
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.sentence import sentence_prompt
from mathinterp.report.page import write_report
from mathinterp.store import Store
from tests.exact import PROMPTS
from tests.neuron_rows import grid
from tests.neuron_twin import gain, spread, value_row
from tests.small_store import open_run
from tests.tiny import of_neurons, tiny_model, tiny_tokenizer

SEQUENCES = [prompt.input_ids[: prompt.end + 1] for prompt in PROMPTS[:6]]
TARGETS = torch.tensor([prompt.scored[0].token_id for prompt in PROMPTS[:6]])
DEEP = [[(2, 7), (1, 39), (2, 20)]] * 6
HEADS = [(2, 1), (1, 3), (2, 2), (0, 0), (1, 0), (2, 3)]


@pytest.fixture(autouse=True)
def softmax_in_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention sums its softmax in float32 in most families, whatever the model's dtype."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None, **_: softmax(x, dim=dim))


def attention_of(anatomy: Anatomy) -> dict[str, float]:
    """GPT-J's own attention computes in float32."""
    return {"rtol": 1e-4, "atol": 1e-6} if anatomy.shape.model_type == "gptj" else {"rtol": 1e-8, "atol": 1e-10}


def one_batch(anatomy: Anatomy):
    (batch,) = batches_of(SEQUENCES, anatomy)
    order = batch.rows.tolist()
    return batch, TARGETS[order], [SEQUENCES[i] for i in order]


def run(anatomy: Anatomy, ids: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Log-odds of every token, coefficients and o_proj inputs at END of one prompt."""
    coefficients: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    handles = []
    for layer in range(anatomy.shape.n_layers):
        for module, kept in (
            (anatomy.down_projection(layer), coefficients),
            (anatomy.output_projection(layer), inputs),
        ):
            handles.append(module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][0, -1])))
    try:
        p = anatomy.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    finally:
        for handle in handles:
            handle.remove()
    return p.log() - (1 - p).log(), coefficients, inputs


@of_neurons
def test_weights_times_values_are_what_the_heads_add(anatomy: Anatomy) -> None:
    batch, targets, sequences = one_batch(anatomy)
    reads = HeadReader(anatomy).read(batch, targets, DEEP)
    shape = anatomy.shape
    with torch.no_grad(), caught_input(anatomy.final_norm) as final:
        batch.forward(anatomy)
        logodds_B = target_logodds(anatomy, batch.at_end(final[0]), targets)
    for row, ids in enumerate(sequences):
        logodds, _, inputs = run(anatomy, ids)
        assert float(logodds_B[row]) == pytest.approx(float(logodds[targets[row]]), rel=1e-9)
        for layer in range(shape.n_layers):
            for head in range(shape.n_heads):
                group = head // (shape.n_heads // shape.n_groups)
                values_Td = reads.values_BTC[layer][row, :, group * shape.d_head : (group + 1) * shape.d_head]
                added = reads.weights_BHT[layer][row, head] @ values_Td
                torch.testing.assert_close(added, inputs[layer][anatomy.head_slice(head)], **attention_of(anatomy))


def written(anatomy: Anatomy, ids: tuple[int, ...], head: tuple[int, int], neuron: tuple[int, int], token: int):
    """What the neuron writes at the token, as the head moves it into o_proj's output: its formula, written out."""
    at, k = neuron
    layer, h = head
    shape, norm = anatomy.shape, anatomy.attention_norm(head[0])
    reader = anatomy.attention(layer) if isinstance(norm, torch.nn.Identity) else norm  # OLMo-2 has no norm there
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, values: torch.Tensor) -> None:
        rows[name] = values[0, token]

    handles = [
        anatomy.down_projection(at).register_forward_pre_hook(lambda _, args: keep("c", args[0])),
        anatomy.down_projection(at).register_forward_hook(lambda _, args, output: keep("f", output)),
        reader.register_forward_pre_hook(
            lambda _, args, kwargs: keep("x", args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
    ]
    implementation = anatomy.model.config._attn_implementation
    anatomy.model.set_attn_implementation("eager")
    try:
        weight = anatomy.model(torch.tensor([ids]), output_attentions=True).attentions[layer][0, h, -1, token]
    finally:
        anatomy.model.set_attn_implementation(implementation)
        for handle in handles:
            handle.remove()
    value = rows["c"][k] * value_row(anatomy, at, k)
    if anatomy.family.mlp_post_norm:
        value = value / spread(anatomy, anatomy.mlp_post_norm(at), rows["f"])
    if isinstance(norm, torch.nn.LayerNorm):
        value = value - value.mean()
    normed = value / spread(anatomy, norm, rows["x"]) * gain(anatomy, norm)
    group = h // (shape.n_heads // shape.n_groups)
    read = anatomy.value(layer).weight[group * shape.d_head : (group + 1) * shape.d_head] @ normed
    return weight * read @ anatomy.output_weight(layer)[anatomy.head_slice(h)]


@of_neurons
def test_shares_are_derivatives_and_removals_in_the_real_model(anatomy: Anatomy) -> None:
    batch, targets, sequences = one_batch(anatomy)
    reader = HeadReader(anatomy)
    shares = NeuronShares(reader)
    reads = reader.read(batch, targets, DEEP)
    found, total_BT = shares.first(batch, reads, HEADS, top=10**6)
    for row, (ids, head) in enumerate(zip(sequences, HEADS, strict=True)):
        tokens = batch.token_ids.shape[1]
        assert len(found[row]) == head[0] * tokens * anatomy.shape.n_neurons, "every neuron before the head"
        sums = [sum(share.effect for share in found[row] if share.token == t) for t in range(tokens)]
        assert total_BT[row].tolist() == pytest.approx(sums, rel=1e-8, abs=1e-11)
        chosen = [share for share in found[row] if share.token < len(ids)][:: max(1, len(found[row]) // 3)][:3]
        exact = shares.exact(batch, reads, targets, row, head, chosen)
        for share, removed in zip(chosen, exact, strict=True):
            moved = written(anatomy, ids, head, (share.layer, share.neuron), share.token)
            amount = torch.zeros((), dtype=torch.float64, requires_grad=True)

            def add(output_BTD: torch.Tensor, moved=moved, amount=amount) -> torch.Tensor:
                return torch.cat([output_BTD[:, :-1], output_BTD[:, -1:] + amount * moved], dim=1)

            with edited_output(anatomy.output_projection(head[0]), add):
                logodds, coefficients, _ = run(anatomy, ids)
            values = torch.stack([coefficients[layer][k] for layer, k in DEEP[0]])
            drive = (values * values.detach().sign()).sum() / values.detach().abs().sum()
            slope = torch.autograd.grad(logodds[targets[row]], amount, retain_graph=True)[0]
            own_norm = {"rel": 1e-4, "abs": 1e-9}  # models' own RMS norms square in float32
            assert share.effect == pytest.approx(float(slope), **own_norm)
            deep = torch.autograd.grad(drive, amount, allow_unused=True)[0] if drive.requires_grad else None
            assert share.deep == pytest.approx(0.0 if deep is None else float(deep), **own_norm)
            with edited_output(anatomy.output_projection(head[0]), lambda output, moved=moved: add(output, -moved, 1)):
                without, _, _ = run(anatomy, ids)
            fall = float((logodds - without)[targets[row]].detach())
            assert removed == pytest.approx(fall, rel=1e-4, abs=5e-8)
            if not moved.abs().max():  # outside the window
                continue
            direction = shares.moved([(share.layer, share.neuron)], head)[0]
            post = anatomy.attention_post_norm(head[0])
            expected = moved if post is None else moved * gain(anatomy, post)
            cosine = float(direction @ expected / direction.norm() / expected.norm())
            assert cosine == pytest.approx(1.0 if share.coefficient > 0 else -1.0, abs=1e-9)


@of_neurons
def test_effects_of_reads_sum_to_the_heads_whole_worth(anatomy: Anatomy) -> None:
    batch, targets, _ = one_batch(anatomy)
    reader = HeadReader(anatomy)
    reads = reader.read(batch, targets, DEEP)
    for layer in range(anatomy.shape.n_layers):
        with caught_input(anatomy.output_projection(layer)) as caught:
            batch.forward(anatomy)
        slices_BHd = batch.at_end(caught[0]).unflatten(1, (anatomy.shape.n_heads, -1))
        for goal in ("answer", "deep"):
            worth_BH = (slices_BHd * reads.gradient_BZ[goal][layer].unflatten(1, (anatomy.shape.n_heads, -1))).sum(-1)
            effects_BHT = reader.effects(reads, layer, goal)
            torch.testing.assert_close(effects_BHT.sum(-1), worth_BH, **attention_of(anatomy))
    assert float(reads.gradient_BZ["deep"][0].abs().max()) > 0


# ---- the scan ----

WHOLE = {pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype()}  # stay whole where some are null
HEADS_GIVEN = ((1, 2), (2, 1))
SET = load_prompts("two_digit", limit=32)
MADE = tokenize_prompts(
    [p for p in SET if p.operation == "add"] + [p for p in SET if p.operation == "sub"][:5], tiny_tokenizer()
)


def rows_of(scan: Chain, model: Anatomy, prompts: list[TokenizedPrompt]) -> pd.DataFrame:
    """Every shard's rows; no Ray, no store."""
    state = scan.prepare(Subject(model, prompts, tokenizer=tiny_tokenizer()))
    parts = []
    for shard in scan.shards(model.shape, prompts):
        parts.append(scan.run(state, shard))
        check_rows(parts[-1], scan.tables[shard.table].schema, shard.key)
    return pa.concat_tables(parts).to_pandas(types_mapper=WHOLE.get)


@pytest.mark.parametrize(("name", "target"), [("llama", "predicted"), ("gptj", "gold")])
def test_each_prompts_heads_are_ranked_by_what_zeroing_them_costs(name: str, target: str) -> None:
    model, scan = Anatomy(tiny_model(name)), Chain(n_heads=2, top=4, target=target)
    rows = rows_of(scan, model, MADE)
    for prompt in (MADE[0], MADE[7]):
        own = rows[rows["prompt_id"] == prompt.prompt.prompt_id]
        ids = torch.tensor([prompt.input_ids[: prompt.end + 1]])
        before = model.model(ids).logits[0, -1].softmax(-1)
        token = prompt.scored[0].token_id if target == "gold" else int(before.argmax())
        after = {}
        for layer in range(3):
            for head in range(4):
                with zeroed_columns(model, layer, head):
                    after[layer, head] = model.model(ids).logits[0, -1].softmax(-1)
        heads = own[own["stage"] == "head"].sort_values("place")
        named = list(zip(heads["layer"], heads["unit"], strict=True))
        assert named == sorted(after, key=lambda head: float(after[head][token]))
        np.testing.assert_allclose(heads["probability"], float(before[token]), rtol=1e-5)
        np.testing.assert_allclose(heads["probability_zeroed"], [float(after[h][token]) for h in named], rtol=1e-5)
        assert heads["arithmetic"].tolist() == [True] * 2 + [False] * 10
        predicted = own[own["stage"] == "prediction"]
        assert {token, *before.topk(5).indices.tolist()} <= set(predicted["token_id"])
        assert predicted[predicted["target"] == True]["token_id"].tolist() == [token]  # noqa: E712
        for row in predicted.to_dict("records"):
            assert row["probability"] == pytest.approx(float(before[row["token_id"]]), rel=1e-5)
            assert row["probability_zeroed"] == pytest.approx(float(after[named[0]][row["token_id"]]), rel=1e-5)
            assert row["place"] == int((before > before[row["token_id"]]).sum()) + 1
    limited = rows_of(Chain(n_heads=1, layers=(2,), top=1), model, MADE[:2])
    assert set(limited[limited["stage"] == "deep_neuron"]["via_layer"]) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [("llama", "gold"), ("gemma2", "predicted")])
def test_deep_neurons_are_the_neuron_scans_first(name: str, target: str) -> None:
    model = Anatomy(tiny_model(name))
    rows = rows_of(Chain(heads=HEADS_GIVEN, top=6, target=target), model, MADE)
    neurons = Neurons(Against("head", heads=HEADS_GIVEN[:1]), target, keep="all")
    state = neurons.prepare(Subject(model, MADE))
    tables = [neurons.run(state, shard) for shard in neurons.shards(model.shape, MADE) if shard.table == "neuron_scan"]
    whole = pa.concat_tables(tables)
    change = grid(whole, "importance") - grid(whole, "intervened_importance")
    for p in (0, 5, 9):
        own = rows[(rows["prompt_id"] == MADE[p].prompt.prompt_id) & (rows["stage"] == "deep_neuron")]
        order = np.argsort(-change[p, 1:].ravel(), kind="stable")[:6]
        expected = [(1 + place // 40, place % 40) for place in order.tolist()]
        assert list(zip(own["layer"], own["unit"], strict=True)) == expected
        np.testing.assert_allclose(own["change"], [change[p][at] for at in expected], rtol=1e-4, atol=1e-7)
        for column in ("coefficient", "intervened_coefficient"):
            values = grid(whole, column)[p]
            mine = own[column if column == "coefficient" else "coefficient_zeroed"]
            np.testing.assert_allclose(mine, [values[at] for at in expected], rtol=1e-5, atol=1e-7)
        assert all(len(json.loads(tokens)) == 10 for tokens in own["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_reads_and_shallow_neurons_of_a_prompt_alone_and_among_others(name: str) -> None:
    model, scan = Anatomy(tiny_model(name)), Chain(heads=HEADS_GIVEN, top=5)
    together = rows_of(scan, model, MADE)
    for prompt in (MADE[3], MADE[10]):
        own = together[together["prompt_id"] == prompt.prompt.prompt_id]
        alone = rows_of(scan, model, [prompt])
        for stage in ("attention", "shallow_neuron"):
            a, b = (part[part["stage"] == stage].reset_index(drop=True) for part in (own, alone))
            names = ["layer", "unit", "via_layer", "via_head", "position", "token", "place"]
            pd.testing.assert_frame_equal(a[names], b[names])
            for column in ("weight", "effect", "exact_effect", "deep_effect", "from_neurons", "coefficient"):
                np.testing.assert_allclose(a[column], b[column], rtol=1e-4, atol=1e-7)
        reads = own[own["stage"] == "attention"]
        length = prompt.end + 1
        for layer, head in HEADS_GIVEN:
            of_head = reads[(reads["layer"] == layer) & (reads["unit"] == head)]
            assert sorted(of_head["position"]) == list(range(length)), "every token of an arithmetic head"
            assert of_head["weight"].sum() == pytest.approx(1.0, abs=1e-5)
            assert of_head["from_neurons"].notna().all()
            shallow = own[(own["stage"] == "shallow_neuron") & (own["via_layer"] == layer)]
            assert len(shallow) == 5
            assert (shallow["layer"] < layer).all()
            assert shallow["effect"].is_monotonic_decreasing
            assert [prompt.input_ids[at] for at in shallow["position"]] == shallow["token_id"].tolist()
        assert set(range(1, 6)) <= set(reads["place"])
    first = rows_of(Chain(heads=((0, 1),), top=5), model, MADE[:3])
    assert not (first["stage"] == "shallow_neuron").any(), "nothing comes before a head of layer 0"
    assert (first[first["stage"] == "attention"]["from_neurons"].dropna() == 0).all()


@pytest.mark.slow
def test_summary_adds_up_the_prompts_of_an_operation(tmp_path: Path) -> None:
    model, scan, store = Anatomy(tiny_model("llama")), Chain(n_heads=2, top=4), Store(tmp_path)
    rows = rows_of(scan, model, MADE)
    run = open_run(store, ["chain_scan/00000"], scan="chain", parameters=scan.parameters())
    store.write_prompts("feedbeef00000000", MADE)
    store.write_shard(run.run_id, "chain_scan", 0, pa.Table.from_pandas(rows, scan.tables["chain_scan"].schema), {})
    run.finish()
    shallow, deep = (rows[rows["stage"] == stage] for stage in ("shallow_neuron", "deep_neuron"))
    assert (shallow["layer"] < shallow["via_layer"]).all(), "before the head's layer"
    assert (deep["layer"] >= deep["via_layer"]).all(), "from the head's layer on"
    found = store.dataframe("FROM chain_summary")
    n = {"add": sum(p.prompt.operation == "add" for p in MADE), "all": len(MADE)}
    for operation, count in n.items():
        part = rows if operation == "all" else rows[rows["operation"] == operation]
        deep = part[part["stage"] == "deep_neuron"]
        expected = deep.groupby(["layer", "unit"]).agg(total=("change", "sum"), prompts=("prompt_id", "nunique"))
        mine = found[(found["operation"] == operation) & (found["stage"] == "deep_neuron")].set_index("name")
        assert len(mine) == len(expected) > 4
        for (layer, unit), row in expected.iterrows():
            of = mine.loc[f"{layer}.{unit}"]
            assert of["strength"] == pytest.approx(row["total"] / count, rel=1e-5)
            assert (of["in_prompts"], of["n"]) == (row["prompts"], count)
        heads = part[part["stage"] == "head"]
        fall = (heads["probability"] - heads["probability_zeroed"]).groupby([heads["layer"], heads["unit"]]).mean()
        mine = found[(found["operation"] == operation) & (found["stage"] == "head")].set_index("name")
        for (layer, unit), value in fall.items():
            assert mine.loc[f"{layer}.{unit}"]["strength"] == pytest.approx(value, rel=1e-4, abs=1e-7)
            leads = ((heads["layer"] == layer) & (heads["unit"] == unit) & (heads["place"] == 1)).sum() / count
            assert mine.loc[f"{layer}.{unit}"]["leads"] == pytest.approx(leads)
    results = Results(store, run.run_id)
    table = Chain.summarize(results, ChainOptions("add")).data["chain"]
    assert {row["stage"] for row in table} == {*STAGES} - (
        set() if (rows["stage"] == "shallow_neuron").any() else {"shallow_neuron"}
    )
    png, svg = save(Chain.figure(results, ChainOptions("add")), tmp_path / "chain")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert all(row["name"] in svg.read_text() for row in table if row["stage"] == "head")
    with pytest.raises(UserError, match="no prompts of `operation` 'pow'"):
        Chain.summarize(results, ChainOptions("pow"))


# ---- the sentence and the command ----


@pytest.mark.parametrize(
    ("text", "operation", "operands", "answer", "separator"),
    [
        ("3+5=", "add", ("3", "5"), "8", ""),
        ("3 + 5 =", "add", ("3", "5"), "8", " "),
        ("The difference between 47 and 38 is", "sub", ("47", "38"), "9", " "),
        ("12 times 11 is", "mul", ("12", "11"), "132", " "),
        ("84 divided by 7 is", "div", ("84", "7"), "12", " "),
    ],
)
def test_a_sentence_shows_its_operation_and_answer(
    text: str, operation: str, operands: tuple[str, str], answer: str, separator: str
) -> None:
    prompt = sentence_prompt(text)
    assert (prompt.operation, prompt.operand_a, prompt.operand_b) == (operation, *operands)
    assert (prompt.answer, prompt.separator) == (answer, separator)


def test_a_sentence_that_does_not_show_its_answer_needs_one() -> None:
    for text in ("three plus five is", "3 + 5 - 2 =", "7 / 2 =", "1 2 3", ""):
        with pytest.raises(UserError, match=r"`answer`|is empty"):
            sentence_prompt(text)
    given = sentence_prompt("three plus five is", "eight", separator="")
    assert (given.answer, given.operation, given.operand_a, given.separator) == ("eight", "add", None, "")


@pytest.mark.bundled
def test_the_chain_of_a_sentence_is_planned_as_it_would_run() -> None:
    done = CliRunner().invoke(main, ["plan", "chain", "--sentence", "3 + 5 =", "--layers", "1-3"])
    assert done.exit_code == 0, done.output
    assert "chain: 1 shard; what this costs is not known" in done.output


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["chain", *map(str, words)])


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for words, message in (
        (["--sentence", "3 and 5"], "give --answer"),
        (["--answer", "8"], "belong to --sentence"),
        (["--sentence", "3+5=", "--heads", "0.9"], "head 0.9 does not exist"),
        (["--sentence", "3+5=", "--heads", "0.1", "--layers", "2"], "give --heads or --layers, not both"),
    ):
        result = command("--store", tmp_path, *words)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.ray
def test_command_tells_draws_and_resumes_a_sentences_chain(tmp_path: Path) -> None:
    words = [
        "--sentence",
        "3+5=",
        "--layers",
        "1-7",
        "--n-heads",
        "1",
        "--top",
        "3",
        "--store",
        tmp_path / "s",
        "--json",
    ]
    first = command(*words, "--out", tmp_path / "drawn")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["title"].startswith("3+5= 8")
    assert {row["stage"] for row in found["chain"]} == set(STAGES)
    assert {Path(path).suffix for path in found["figures"]} == {".png", ".svg"}
    stored = Store(tmp_path / "s").rows("SELECT text, answer FROM prompts")
    assert stored == [{"text": "3+5=", "answer": "8"}]
    again = json.loads(command(*words).stdout)
    assert (again["run_id"], again["shards_reused"], again["shards_done"]) == (found["run_id"], 1, 0)
    assert again["chain"] == found["chain"]
    page = write_report(Store(tmp_path / "s"), tmp_path / "page").page.read_text(encoding="utf-8")
    assert f'data-name="chain-{found["run_id"]}"' in page
    assert "deep_neuron" in page
