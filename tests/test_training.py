"""The training recipe: what is sampled, what carries loss, and that a resumed run is the undisturbed one."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mathinterp.errors import UserError
from mathinterp.prompts.arithmetic import PROMPT_SETS, prompt_set
from mathinterp.prompts.pairs import NEUTRAL_WORDS, with_counterfactuals
from mathinterp.prompts.prompt import Prompt
from mathinterp.tuning import ray_loop
from mathinterp.tuning.accuracy import accuracy_table
from mathinterp.tuning.batches import IGNORED, FreshBatches, encode, to_arrays
from mathinterp.tuning.bundled import build_tokenizer, bundled_config, vocabulary
from mathinterp.tuning.examples import (
    BUNDLED_MIXTURE,
    CELLS,
    Cell,
    draw_example,
    held_out_prompts,
    is_held_out,
    neutral_templates,
)
from mathinterp.tuning.jobs import BundledJob
from mathinterp.tuning.train import TrainingConfig, learning_rate_factor, train

CPU = torch.device("cpu")
TINY = BundledJob(layers=1, heads=2, d_model=16, d_ff=32, prompts_per_cell=10)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


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
    prompt = Prompt("0", "15 plus 37 is", "52")
    input_ids_BT, labels_BT, scored_BT = to_arrays(encode([prompt], tokenizer), tokenizer.pad_token_id)
    tokens = tokenizer.convert_ids_to_tokens(input_ids_BT[0].tolist())
    assert tokens[:10] == ["<s>", "1", "5", "plus", "3", "7", "is", "5", "2", "</s>"]
    assert set(tokens[10:]) == {"<pad>"}
    labelled = [token for token, label in zip(tokens, labels_BT[0].tolist(), strict=True) if label != IGNORED]
    assert labelled == ["5", "2", "</s>"]
    assert [tokens[i] for i in scored_BT[0].nonzero()[:, 0].tolist()] == ["5", "2"]


def test_a_neutral_word_stands_where_the_operator_stood():
    texts = {template.text for template in neutral_templates("add")}
    assert {"{a} nothing {b} is", "{a} < {b} =", "{a}<{b}=", "The pair of {a} and {b} is"} <= texts
    assert not any("plus" in text or "+" in text for text in texts)


def test_learning_rate_warms_up_and_ends_at_zero():
    factors = [learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == pytest.approx(0.91)
    assert factors[100] == 0


def run(tokenizer, config, resume=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM(bundled_config(layers=1, heads=2, d_model=16, d_ff=32))
    batches = FreshBatches(tokenizer, BUNDLED_MIXTURE, 16, seed=config.seed)
    states = []
    progress = train(model, batches, config, device=CPU, reporter=lambda _, s: states.append(s), resume=resume)
    return model.state_dict(), states, progress


def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(tokenizer):
    config = TrainingConfig(steps=20, learning_rate=1e-2, warmup_steps=4, checkpoint_every=10, log_every=7)
    weights, states, progress = run(tokenizer, config)
    assert progress.step == 20
    assert [state["progress"]["step"] for state in states] == [10, 20]
    halfway = states[0]["model"]["lm_head.weight"]
    resumed, _, _ = run(tokenizer, config, resume=states[0])
    assert not torch.equal(halfway, weights["lm_head.weight"])
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_workers_and_steps_see_different_samples(tokenizer):
    def batch(rank, step):
        return FreshBatches(tokenizer, BUNDLED_MIXTURE, 16, seed=0, rank=rank)[step][0]

    assert torch.equal(batch(0, 3), batch(0, 3))
    assert not torch.equal(batch(0, 3), batch(1, 3))
    assert not torch.equal(batch(0, 3), batch(0, 4))


def test_a_time_budget_ends_the_run(tokenizer):
    config = TrainingConfig(steps=10**6, learning_rate=1e-2, minutes=0.05, log_every=5)
    _, states, progress = run(tokenizer, config)
    assert 5 <= progress.step < 10**5
    assert progress.step == progress.planned_steps == states[-1]["progress"]["step"]


def test_a_loss_that_is_not_a_number_stops_the_run(tokenizer):
    config = TrainingConfig(steps=20, learning_rate=float("inf"), log_every=5)
    with pytest.raises(FloatingPointError, match="near step"):
        run(tokenizer, config)


class Oracle(torch.nn.Module):
    """Predicts the next input token, but "0" where that is a "7"."""

    device = CPU

    def __init__(self, tokenizer):
        super().__init__()
        self.seven, self.zero = tokenizer.convert_tokens_to_ids(["7", "0"])

    def forward(self, input_ids, use_cache):
        following = torch.roll(input_ids, -1, dims=1)
        following[following == self.seven] = self.zero
        logits_BTV = torch.nn.functional.one_hot(following, len(vocabulary())).float()
        return type("Output", (), {"logits": logits_BTV})


def test_accuracy_counts_tokens_and_whole_answers(tokenizer):
    cell = Cell("add", 2, "digits")
    answers = [prompt.answer for prompt in held_out_prompts(cell, 60, seed=0)]
    (row,) = accuracy_table(Oracle(tokenizer), tokenizer, cells=[cell], prompts_per_cell=60, batch_size=25)
    digits = "".join(answers)
    assert row.tokens == len(digits)
    assert digits.count("7") > 0
    assert row.token_accuracy == pytest.approx(1 - digits.count("7") / len(digits))
    assert row.exact_match == pytest.approx(sum("7" not in answer for answer in answers) / 60)


def test_held_out_prompts_are_held_out():
    for cell in CELLS:
        for prompt in held_out_prompts(cell, 20, seed=3):
            operation, a, b = prompt.prompt_id.split()
            assert cell.digits == 1 or is_held_out(operation, int(a), int(b))


@pytest.mark.ray
def test_ray_job_writes_a_model_and_the_same_command_resumes(tmp_path: Path):
    config = TrainingConfig(steps=6, learning_rate=1e-2, warmup_steps=2, log_every=3, checkpoint_every=3)
    settings = {"batch_size": 8, "workers": 1, "out": tmp_path / "model", "storage": None, "name": "tiny"}
    ray_loop.connect(None)
    try:
        with pytest.raises(UserError, match="does not divide"):
            ray_loop.fit(TINY, config, **{**settings, "workers": 3})
        first = ray_loop.fit(TINY, config, **settings)
        weights = (tmp_path / "model" / "model.safetensors").read_bytes()
        again = ray_loop.fit(TINY, config, **settings)
    finally:
        ray_loop.ray.shutdown()
    assert len(first) == len(CELLS)
    assert first == again
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    card = (tmp_path / "model" / "README.md").read_text()
    assert "6 steps of 8 samples" in card
    assert "| add (+) | 1 | digits | 10 |" in card
