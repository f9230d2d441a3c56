"""The training recipe: what is sampled, what carries loss, and that a resumed run is the undisturbed one."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel
from mathinterp.prompts.arithmetic import PROMPT_SETS, prompt_set
from mathinterp.prompts.pairs import NEUTRAL_WORDS, with_counterfactuals
from mathinterp.store import Store
from mathinterp.tuning.controls import FullJob
from mathinterp.tuning.data import Example, FreshSamples, encode_examples
from mathinterp.tuning.sft import SftConfig, step_sampler, train
from recipes.accuracy import accuracy_table
from recipes.bundled import build_tokenizer, bundled_config, vocabulary
from recipes.examples import (
    BUNDLED_MIXTURE,
    CELLS,
    Cell,
    draw_example,
    held_out_prompts,
    is_held_out,
    neutral_templates,
)
from recipes.fresh import Draw, Plan
from recipes.train_bundled import Shape, train_bundled

CPU = torch.device("cpu")
TINY = Shape(layers=1, heads=2, d_model=16, d_ff=32)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.slow
def test_no_sentence_of_the_prompt_sets_and_no_neutral_word_has_an_unknown_token(tokenizer):
    texts = [word for words in NEUTRAL_WORDS.values() for key, values in words.items() for word in (key, *values)]
    for name in PROMPT_SETS.keys() - {"year_spans"}:  # whose nouns are for other models
        prompts = prompt_set(name, limit=400)
        texts += [p.text + p.separator + p.answer for p in prompts]
        if name == "pairs":
            texts += [p.counterfactual for p in with_counterfactuals(prompts, tokenizer)]
    rows = tokenizer(texts)["input_ids"]
    assert len(rows) > 2000
    unknown = [text for text, ids in zip(texts, rows, strict=True) if tokenizer.unk_token_id in ids]
    assert unknown == []
    assert all(ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id for ids in rows)


def test_unknown_words_are_marked(tokenizer):
    ids = tokenizer("3 zebra 5 is")["input_ids"]
    assert ids[2] == tokenizer.unk_token_id


@pytest.mark.parametrize(
    "text",
    [
        "15 plus 32 is 47",
        "Q: What is 15 divides 3? A: 5",
        "The sum of twelve and thirty-four is forty-six",
        "99 * 99 = 9801",
        "47 < 25 is equal to unknown",
    ],
)
def test_decoding_gives_the_sentence_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_offsets_and_digits(tokenizer):
    encoding = tokenizer("15+32 =47", return_offsets_mapping=True)
    tokens = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    assert tokens == ["<s>", "1", "5", "+", "3", "2", "=", "4", "7"]
    assert encoding["offset_mapping"] == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (6, 7), (7, 8), (8, 9)]


def test_tokenizer_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == {token: i for i, token in enumerate(vocabulary())}
    text = "The ratio of 150612 and 924 is 163"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.unk_token, loaded.pad_token, loaded.eos_token) == ("<unk>", "<pad>", "</s>")


def test_training_never_draws_a_held_out_pair():
    rng = random.Random(1)
    examples = [draw_example(rng, BUNDLED_MIXTURE) for _ in range(20_000)]
    for example in examples:
        operation, a, b = example.prompt_id.split()
        assert not is_held_out(operation, int(a), int(b)), example
    assert {e.operation for e in examples} == {"add", "sub", "mul", "div"}
    seen_under = {e.template for e in examples if e.operation == "add"}
    assert len(seen_under) == 12  # every template of the prompt sets


def test_held_out_pairs_are_a_stable_twentieth_and_commute():
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    assert 0.04 < sum(is_held_out("sub", a, b) for a, b in pairs) / len(pairs) < 0.06
    assert all(is_held_out("add", a, b) == is_held_out("add", b, a) for a, b in pairs)
    assert not any(is_held_out(op, a * b, b) for op in ("mul", "div") for a in range(10) for b in range(1, 10))
    assert [b for b in range(10, 100) if is_held_out("add", 15, b)] == [10, 21, 53, 60, 95]


def test_answers_are_right():
    rng = random.Random(2)
    compute = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "div": int.__floordiv__}
    checked = 0
    for _ in range(3000):
        example = draw_example(rng, BUNDLED_MIXTURE)
        operation, a, b = example.prompt_id.split()
        if example.answer.isdecimal():
            assert compute[operation](int(a), int(b)) == int(example.answer)
            assert operation != "div" or int(a) % int(b) == 0
            checked += 1
    assert checked > 2000


def test_loss_is_on_the_answer_and_the_end_token_only(tokenizer):
    (sample,) = encode_examples([Example("0", "15 plus 37 is", " ", "52")], tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    assert tokens == ["<s>", "1", "5", "plus", "3", "7", "is", "5", "2", "</s>"]
    assert [tokens[index] for index in sample.answer] == ["5", "2", "</s>"]


def test_a_neutral_word_stands_where_the_operator_stood():
    texts = {template.text for template in neutral_templates("add")}
    assert {"{a} nothing {b} is", "{a} < {b} =", "{a}<{b}=", "The pair of {a} and {b} is"} <= texts
    assert not any("plus" in text or "+" in text for text in texts)


def fresh(tokenizer, count=320, seed=0) -> FreshSamples:
    return FreshSamples(Draw(BUNDLED_MIXTURE, seed), tokenizer, count, "fresh")


def run(tokenizer, config, folder, resume=None):
    """Weights at the end, and the checkpoints by step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(bundled_config(layers=1, heads=2, d_model=16, d_ff=32))
    kept = {}

    def report(rows, checkpoint):
        kept[rows[-1]["step"]] = shutil.copytree(checkpoint, folder / str(rows[-1]["step"]), dirs_exist_ok=True)

    loaded = LoadedModel(model, tokenizer, Anatomy(model), "", "float32")
    FullJob().build(loaded)
    train(
        model, loaded.anatomy, fresh(tokenizer), config, device=CPU, pad_id=tokenizer.pad_token_id, reporter=report,
        resume=resume,
    )  # fmt: skip
    return model.state_dict(), kept


@pytest.mark.slow
def test_a_resumed_run_on_fresh_samples_ends_with_the_weights_of_an_undisturbed_one(tokenizer, tmp_path):
    config = SftConfig(steps=20, batch_size=16, learning_rate=1e-2, schedule="linear", checkpoint_every=10, log_every=7)
    weights, kept = run(tokenizer, config, tmp_path)
    assert [*kept] == [10, 20]
    resumed, _ = run(tokenizer, config, tmp_path, resume=kept[10])
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    ahead, _ = run(tokenizer, replace(config, loader_processes=1), tmp_path)
    assert all(torch.equal(weights[name], ahead[name]) for name in weights), "processes that read ahead change nothing"


def test_every_worker_and_step_sees_samples_of_its_own(tokenizer):
    config = SftConfig(steps=20, batch_size=16, learning_rate=1e-2, micro_batch=4)
    samplers = [step_sampler(fresh(tokenizer), config, rank, 2) for rank in range(2)]
    seen = [index for sampler in samplers for piece in sampler for index in piece]
    assert sorted(seen) == list(range(320))
    assert [len(sampler) for sampler in samplers] == [40, 40]
    samples = fresh(tokenizer)
    assert samples[3] == samples.read([5, 3])[1] == fresh(tokenizer)[3] != samples[4]
    assert samples[3] != fresh(tokenizer, seed=1)[3]
    tokens = sum(len(sample.input_ids) for sample in samples.read(range(320)))
    assert samplers[0].tokens(0, 20) == pytest.approx(tokens, abs=1)


def test_accuracy_counts_tokens_and_whole_answers(tokenizer):
    """Against one plain forward pass per prompt."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(bundled_config(layers=1, heads=2, d_model=16, d_ff=32)).eval()
    for parameter in model.parameters():
        parameter.data *= 5  # so that answers differ
    cell = Cell("add", 2, "digits")
    (row,) = accuracy_table(model, tokenizer, cells=[cell], prompts_per_cell=60)
    rights = []
    for prompt in held_out_prompts(cell, 60, seed=0):
        ids = torch.tensor([tokenizer(prompt.text + prompt.separator + prompt.answer)["input_ids"]])
        with torch.no_grad():
            predicted = model(ids).logits[0].argmax(-1)
        first = ids.shape[1] - len(prompt.answer)
        rights.append((predicted[first - 1 : -1] == ids[0, first:]).tolist())
    every = [right for answer in rights for right in answer]
    assert row.tokens == len(every)
    assert row.token_accuracy == pytest.approx(sum(every) / len(every))
    assert row.exact_match == pytest.approx(sum(map(all, rights)) / 60)
    assert sum(every) > 0


def test_held_out_prompts_are_held_out():
    for cell in CELLS:
        for prompt in held_out_prompts(cell, 20, seed=3):
            operation, a, b = prompt.prompt_id.split()
            assert cell.digits == 1 or is_held_out(operation, int(a), int(b))


@pytest.mark.ray
def test_the_recipe_writes_a_model_and_the_same_command_resumes(tmp_path: Path):
    plan = Plan(
        steps=6, batch=8, lr=1e-2, warmup=2, log_every=3, checkpoint_every=3, store=str(tmp_path / "store"),
        address="local",
    )  # fmt: skip
    out = tmp_path / "model"
    first = train_bundled(plan, out, TINY, prompts_per_cell=10)
    weights = (out / "model.safetensors").read_bytes()
    again = train_bundled(plan, out, TINY, prompts_per_cell=10)
    assert len(first) == len(CELLS)
    assert first == again
    assert (out / "model.safetensors").read_bytes() == weights
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    card = (out / "README.md").read_text()
    assert "6 steps of 8 samples" in card
    assert "| add (+) | 1 | digits | 10 |" in card
    rows = Store(tmp_path / "store").rows("SELECT step FROM tuning_runs ORDER BY step")
    assert [row["step"] for row in rows] == [3, 6]
