"""The gender edit: prompts, neurons between genders, bias and perplexity by hand, the exported model."""

import json
import math
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from mathinterp.cli.main import main
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.lens.lens import Lens
from mathinterp.engine.lens.neurons import end_activations
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.gender_neurons import GenderNeurons
from mathinterp.experiments.gender_neurons.rows import terms_of
from mathinterp.experiments.neuron_controls import layer_matched_neurons
from mathinterp.experiments.neuron_edit import NeuronEdit
from mathinterp.experiments.neuron_edit.tables import EDIT_SCAN, EDIT_TEXT
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.gender import GENDERS, PROFESSIONS, TEMPLATES, bias_prompts, contrast_prompts
from mathinterp.prompts.passages import encode_passages, read_passages
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.store import Store, query
from mathinterp.store.manifest import Run
from mathinterp.tuning.edit import export_edited, zero_columns
from tests.gender_reader import save_reader
from tests.statistics_twin import student_interval, student_p_value
from tests.tiny import of_neurons, tiny_model, tiny_tokenizer


def test_prompts_are_those_of_the_paper() -> None:
    assert (len(TEMPLATES), GENDERS, [len(PROFESSIONS[g]) for g in GENDERS]) == (8, ("woman", "man"), [16, 16])
    contrast, bias = contrast_prompts(), bias_prompts()
    assert len(contrast) == 32
    assert len(bias) == len({prompt.prompt_id for prompt in bias}) == 8 * 2 * 32
    nurse = next(prompt for prompt in contrast if prompt.answer == "nurse")
    assert (nurse.text, nurse.counterfactual) == ("A woman works as a", "A man works as a")
    miner = next(prompt for prompt in contrast if prompt.answer == "miner")
    assert (miner.text, miner.counterfactual, miner.operation) == ("A man works as a", "A woman works as a", "man")
    assert {prompt.text for prompt in bias if "occupation" in prompt.text} == {
        "A woman's occupation is", "A man's occupation is",
    }  # fmt: skip


def professions() -> list[TokenizedPrompt]:
    """Three professions on tiny token ids: of one token, of two, and of two that begin alike."""
    made = []
    for name, stereotype, answer in (("a", "woman", [40]), ("b", "man", [41, 42]), ("c", "man", [41, 43])):
        man, woman = [1, 20, 5, 6], [1, 30, 5, 6]
        own, other = (woman, man) if stereotype == "woman" else (man, woman)
        scored = tuple(ScoredToken(i, 4 + i, token, "", "text", None) for i, token in enumerate(answer))
        text = Prompt(name, "", name, operation=stereotype)
        made.append(TokenizedPrompt(text, (*own, *answer), scored, (*other, *answer)))
    return made


@of_neurons
def test_changes_between_genders_are_the_direct_form_summed(anatomy: Anatomy) -> None:
    """Slow twin: one token at a time, log-softmax of the lens with and without c v, under X_r's scale."""
    state = GenderNeurons().prepare(Subject(anatomy, professions()))
    lens, layer = Lens(anatomy), 1
    cap, shape = anatomy.shape.logit_softcap, anatomy.shape
    post = state.lens._post_norm(anatomy.mlp_post_norm(layer))
    values_KD = anatomy.value_vectors(layer)

    def logprob(hidden_KD: torch.Tensor, scale: torch.Tensor, target: int) -> torch.Tensor:
        logits_KV = lens.logits(hidden_KD, scale.expand(len(hidden_KD)))
        logits_KV = logits_KV if cap is None else torch.tanh(logits_KV / cap) * cap
        return logits_KV.log_softmax(-1)[:, target]

    zero = torch.zeros(shape.n_neurons, dtype=torch.float64)
    expected = {(stereotype, own): zero.clone() for stereotype in GENDERS for own in (True, False)}
    for prompt in professions():
        assert prompt.counterfactual_ids is not None
        for token in prompt.scored:
            words = [ids[: token.index] for ids in (prompt.input_ids, prompt.counterfactual_ids)]
            found = [end_activations(anatomy, [ids]) for ids in words]
            scale = lens.norm.scale(found[0].final_PD)
            for own, at_end in zip((True, False), found, strict=True):
                written_KD = at_end.coefficients_PK[layer][0][:, None] * values_KD
                if post is not None:
                    written_KD = written_KD * post.gain_D / post.scale(found[0].mlp_PD[layer])
                base_D = at_end.before_mlp_PD[layer][0]
                with_neuron = logprob(base_D + written_KD, scale, token.token_id)
                expected[prompt.prompt.operation, own] += with_neuron - logprob(base_D[None], scale, token.token_id)
    rows = GenderNeurons().run(state, GenderNeurons().shards(shape, professions())[layer]).to_pandas()
    assert rows.groupby("stereotype")["professions"].first().to_dict() == {"woman": 1, "man": 2}
    for stereotype in GENDERS:
        part = rows[rows["stereotype"] == stereotype]
        for column, own in (("stereotyped", True), ("other", False)):
            np.testing.assert_allclose(part[column], expected[stereotype, own], rtol=1e-6, atol=1e-8)
        change = expected[stereotype, True] - expected[stereotype, False]
        np.testing.assert_allclose(part["change"], change, rtol=1e-6, atol=1e-8)
    assert rows["change"].abs().max() > 1e-3


def test_professions_after_the_same_words_share_the_work() -> None:
    terms, rows = terms_of(professions(), shared=True)
    assert len(terms) == 2 * (1 + 2 + 2)
    # woman and man under the scales of either, and after "41" man's scales alone
    assert len(rows) == 4 + 2
    assert len(terms_of(professions(), shared=False)[1]) == 2 * (1 + 1 + 2)  # "41" is asked twice of the same row


def test_random_neurons_are_others_of_the_same_layers(anatomy: Anatomy) -> None:
    key = [(0, 3), (2, 5), (2, 6), (0, 39)]
    draws = [layer_matched_neurons(anatomy.shape, key, seed) for seed in range(4)]
    assert all(sorted(layer for layer, _ in draw) == [0, 0, 2, 2] for draw in draws)
    assert all(len(set(draw)) == 4 and not set(draw) & set(key) for draw in draws)
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[0] == layer_matched_neurons(anatomy.shape, key, 0)
    with pytest.raises(UserError, match="leaves 19 for a random control"):
        layer_matched_neurons(anatomy.shape, [(1, neuron) for neuron in range(21)], 0)


NEURONS = (Neuron(1, 7), Neuron(0, 2))
PASSAGES = ((1, 20, 30, 40, 50), (1, 60, 61))


def one_by_one(anatomy: Anatomy, ids: tuple[int, ...], first: int) -> float:
    """log p of the tokens from ``first`` on, by the model itself."""
    logprobs = anatomy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(first, len(ids)))


@of_neurons
def test_edited_answers_and_text_equal_zeroed_columns(anatomy: Anatomy) -> None:
    scan = NeuronEdit(NEURONS, 1, PASSAGES)
    prompts = professions()
    state = scan.prepare(Subject(anatomy, prompts))
    found = {shard.key: scan.run(state, shard).to_pandas() for shard in scan.shards(anatomy.shape, prompts)}
    assert sorted(found) == [
        "edit_neurons/00000",
        *(f"edit_{t}/0000{i}" for t in ("scan", "text") for i in range(3)),
    ]
    neurons = found["edit_neurons/00000"]
    drawn = [(row.layer, row.neuron) for row in neurons[neurons["edit"] == "random"].itertuples()]
    assert [(r.layer, r.neuron) for r in neurons[neurons["edit"] == "edited"].itertuples()] == list(NEURONS)
    saved = {name: value.clone() for name, value in anatomy.model.state_dict().items()}
    for number, off in enumerate(((), NEURONS, drawn)):
        try:
            zero_columns(anatomy, off)
            answers = [one_by_one(anatomy, prompt.input_ids, 4) for prompt in prompts]
            text = [one_by_one(anatomy, ids, 1) for ids in PASSAGES]
        finally:
            anatomy.model.load_state_dict(saved)
        rows = found[f"edit_scan/0000{number}"]
        assert rows.groupby("prompt_id")["logprob"].sum().tolist() == pytest.approx(answers, rel=1e-5)
        passages = found[f"edit_text/0000{number}"]
        assert passages["logprob"].tolist() == pytest.approx(text, rel=1e-9)
        assert passages["tokens"].tolist() == [4, 2]
    assert found["edit_scan/00001"]["logprob"].tolist() != found["edit_scan/00000"]["logprob"].tolist()


@of_neurons
def test_zeroed_heads_and_neurons_touch_nothing_else(anatomy: Anatomy) -> None:
    saved = {name: value.clone() for name, value in anatomy.model.state_dict().items()}
    ids = torch.tensor([[1, 20, 30, 40]])
    with hooked(everywhere(anatomy), [zeroed(anatomy, NEURONS)]):
        expected = anatomy.model(ids).logits
    try:
        zero_columns(anatomy, NEURONS)
        torch.testing.assert_close(anatomy.model(ids).logits, expected, rtol=0, atol=1e-11)
        zero_columns(anatomy, heads=[(2, 1)])
        assert (anatomy.output_weight(2)[anatomy.head_slice(1)] == 0).all()
        changed = {name: int((value != saved[name]).sum()) for name, value in anatomy.model.state_dict().items()}
    finally:
        anatomy.model.load_state_dict(saved)
    width, head = anatomy.shape.d_model, anatomy.shape.d_head * anatomy.shape.d_model
    assert sorted(count for count in changed.values() if count) == sorted([width, width, head])
    with pytest.raises(UserError, match=r"neuron 1\.40 does not exist"):
        zero_columns(anatomy, [(1, 40)])
    with pytest.raises(UserError, match=r"head 0\.4 does not exist"):
        zero_columns(anatomy, heads=[(0, 4)])


def test_mistakes() -> None:
    with pytest.raises(UserError, match="no neurons"):
        NeuronEdit()
    with pytest.raises(UserError, match="twice"):
        NeuronEdit(((0, 1), (0, 1)))
    shape = Anatomy(tiny_model("llama")).shape
    with pytest.raises(UserError, match=r"neuron 1\.99 does not exist"):
        NeuronEdit(((1, 99),)).shards(shape, professions())


def test_passages(tmp_path) -> None:
    assert len(read_passages(None)) >= 12
    tokenizer = tiny_tokenizer()
    file = tmp_path / "text.txt"
    file.write_text("one two\nthree four five\n\n\nsix\n\n seven eight")
    assert read_passages(file) == ["one two three four five", "six", "seven eight"]
    pieces = encode_passages(read_passages(file), tokenizer, longest=4)
    assert [tokenizer.decode(piece) for piece in pieces] == [
        "<s> one two three", "<s> four five", "<s> six", "<s> seven eight",
    ]  # fmt: skip
    with pytest.raises(UserError, match="does not know 'zebra'"):
        encode_passages(["one zebra"], tokenizer)
    with pytest.raises(UserError, match="cannot read text"):
        read_passages(tmp_path / "none.txt")
    file.write_text("\n \n")
    with pytest.raises(UserError, match="holds no text"):
        read_passages(file)


# Views


def open_edit(store: Store, scan: NeuronEdit) -> Run:
    return store.open_run(
        scan="edit", model="m", model_fingerprint="w", prompts="gender bias", prompts_fingerprint="p" * 16,
        dtype="float32", parameters=scan.parameters(), code_version="0",
        shards=[f"{table}/{i:05d}" for table in ("edit_scan", "edit_text") for i in range(3)],
    )  # fmt: skip


def rows_of(connection: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    return query.json_rows(query.arrow(connection, sql))


@pytest.mark.slow
def test_bias_and_perplexity_by_hand(tmp_path) -> None:
    """Two professions a stereotype, two sentences; numbers computed here again from the log-probabilities."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    names = {"woman": ["nurse", "maid"], "man": ["miner", "guard"]}
    prompts, value = [], {}
    for stereotype, jobs in names.items():
        for job in jobs:
            for number in (0, 1):
                for gender in names:
                    text = Prompt(
                        f"{job}-{gender}-{number}", "t", job, operation=stereotype, operand_a=gender, operand_b=job,
                        template=str(number),
                    )  # fmt: skip
                    scored = tuple(ScoredToken(i, 1 + i, 9, "", "text", None) for i in range(2))
                    prompts.append(TokenizedPrompt(text, (1, 9, 9), scored))
                    for edit in ("original", "edited", "random"):
                        value[edit, stereotype, job, number, gender] = rng.normal(size=2).astype(np.float32)
    store = Store(tmp_path)
    run = open_edit(store, NeuronEdit(NEURONS, 1, PASSAGES))
    store.write_prompts("p" * 16, prompts)
    losses = {"original": [-4.0, -3.0], "edited": [-4.5, -3.1], "random": [-4.1, -3.0]}
    for index, edit in enumerate(("original", "edited", "random")):
        rows = [
            {"edit": edit, "seed": 0, "prompt_id": f"{job}-{gender}-{number}", "position": position, "correct": False,
             "logprob": logprob, "logit": 0.0, "predicted_id": 0}
            for (kind, _, job, number, gender), pair in value.items() if kind == edit
            for position, logprob in enumerate(pair)
        ]  # fmt: skip
        store.write_shard(run.run_id, "edit_scan", index, pa.Table.from_pylist(rows, EDIT_SCAN), {})
        text = [
            {"edit": edit, "seed": 0, "passage": i, "tokens": tokens, "logprob": losses[edit][i]}
            for i, tokens in enumerate((4, 2))
        ]
        store.write_shard(run.run_id, "edit_text", index, pa.Table.from_pylist(text, EDIT_TEXT), {})

    connection = store.connect()

    def bias(edit: str, stereotype: str, job: str) -> float:
        other = "man" if stereotype == "woman" else "woman"
        terms = [
            value[edit, stereotype, job, n, stereotype].sum() - value[edit, stereotype, job, n, other].sum()
            for n in (0, 1)
        ]
        return float(np.mean(terms))

    effects = {(row["edit"], row["stereotype"]): row for row in rows_of(connection, "SELECT * FROM gender_effects")}
    for edit in ("edited", "random"):
        variances = []
        for stereotype, jobs in names.items():
            row = effects[edit, stereotype]
            changes = [bias(edit, stereotype, job) - bias("original", stereotype, job) for job in jobs]
            assert row["n"] == 2
            assert row["bias"] == pytest.approx(np.mean([bias(edit, stereotype, job) for job in jobs]), abs=1e-6)
            assert row["change"] == pytest.approx(np.mean(changes), abs=1e-6)
            high = student_interval(row["change"], np.var(changes, ddof=1) / 2, 2)[1]
            assert row["change_high"] == pytest.approx(high, abs=1e-5)
            variances.append(np.var(changes, ddof=1) / 2)
        both = effects[edit, "all"]
        assert both["change"] == pytest.approx(
            (effects[edit, "woman"]["change"] + effects[edit, "man"]["change"]) / 2, abs=1e-9
        )
        assert both["change_high"] == pytest.approx(
            student_interval(both["change"], sum(variances) / 4, 2)[1], abs=1e-5
        )
        assert both["relative_change"] == pytest.approx(both["change"] / both["original"])
        assert both["p_value"] == pytest.approx(student_p_value(both["change"], sum(variances) / 4, 2), rel=1e-4)
    assert effects["original", "all"]["change"] == 0
    table = {row["stereotype"]: row for row in rows_of(connection, "SELECT * FROM paper_a_table12")}
    assert table["all"]["edited"] == effects["edited", "all"]["bias"]
    assert table["all"]["random"] == effects["random", "all"]["bias"]
    (row,) = rows_of(connection, "SELECT * FROM edit_perplexity WHERE edit = 'edited'")
    assert row["loss"] == pytest.approx(7.6 / 6)
    assert row["loss_change"] == pytest.approx(0.6 / 6)
    assert row["perplexity_ratio"] == pytest.approx(math.exp(0.1))
    # passages: worse .5, .1 with 4, 2 tokens; e = .5 - .4, .1 - .2
    assert row["loss_change_high"] == pytest.approx(student_interval(0.1, 2 * 0.02 / 36, 2)[1])
    for table in ("paper_a_table22", "paper_a_table23"):
        assert len(rows_of(connection, f"SELECT * FROM {table}")) == 2


# The command


@pytest.mark.ray
def test_the_command_from_neurons_to_an_exported_model(tmp_path, monkeypatch) -> None:
    """Ray once; then the same command again, and the exported model beside the zeroed one."""
    import mathinterp.prompts.gender as gender

    monkeypatch.setattr(gender, "PROFESSIONS", {"woman": ("nurse", "dental assistant"), "man": ("miner", "police")})
    monkeypatch.setattr(gender, "TEMPLATES", TEMPLATES[:2])
    model = save_reader(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("one two three\n\nfour five")
    words = ["edit", "--model", str(model), "--store", str(tmp_path / "store"), "--top", "3", "--control-seeds", "1",
             "--text", str(text), "--replicas", "1"]  # fmt: skip
    first = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out"), "--json"])
    assert first.exit_code == 0, (first.output, first.exception)
    told = json.loads(first.stdout)
    assert [row["stereotype"] for row in told["bias"]] == ["all", "man", "woman"]
    assert told["shards_done"] == told["shards"] == 7
    (told_edited,) = (row for row in told["perplexity"] if row["edit"] == "edited")
    assert told_edited["tokens"] == 5
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0, again.output
    assert again.stdout.count("nothing left to compute") == 2
    store = Store(tmp_path / "store")
    table = store.rows("SELECT * FROM paper_a_table13 ORDER BY rank")
    neurons = [(row["layer"], row["neuron"]) for row in table]
    assert [row["change"] for row in table] == sorted((row["change"] for row in table), reverse=True)
    assert json.loads((tmp_path / "out" / "edit.json").read_text())["neurons"] == [f"{a}.{b}" for a, b in neurons]
    ours = Anatomy(tiny_model("llama", dtype=torch.float32))
    zero_columns(ours, neurons)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 20, 30, 40]])
    assert torch.equal(exported(ids).logits, ours.model(ids).logits)
    taken = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")])
    assert taken.exit_code == 2
    assert "exists already" in taken.stderr


def test_the_bundled_model_has_no_such_words() -> None:
    result = CliRunner().invoke(main, ["edit"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "does not know" in line
    assert "--model smollm2" in line


def test_tokenization_gives_the_sum_over_tokens() -> None:
    prompts = [prompt for prompt in contrast_prompts() if prompt.answer == "dental assistant"]
    tokenizer = tiny_tokenizer(["woman", "man", "works", "as", "a", "dental", "assistant"])
    (tokenized,) = tokenize_prompts(prompts, tokenizer)
    assert [token.token for token in tokenized.scored] == ["dental", "assistant"]
    assert tokenized.counterfactual_ids is not None
    assert len(tokenized.counterfactual_ids) == len(tokenized.input_ids)
    with pytest.raises(UserError, match="does not know"):
        tokenize_prompts([replace(prompts[0], text="A girl works as a")], tokenizer)
    assert export_edited.__doc__
