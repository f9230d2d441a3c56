"""Fine-tuning: data forms, loss on the answers alone, a loop that replays, Ray Train, and clear mistakes."""

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import LoadedModel, ModelSpec, load
from mathinterp.store import Store
from mathinterp.tuning import precise
from mathinterp.tuning.answers import AnswerLoss, collate, evaluate
from mathinterp.tuning.controls import FullJob, LoraJob, control_heads
from mathinterp.tuning.data import Sample, encode_examples, read_examples, within_limit
from mathinterp.tuning.precise import PreciseJob, Selection
from mathinterp.tuning.sft import SftConfig, learning_rate_factor, micro_batches, step_samples, train
from tests.small_store import fill, prompt
from tests.tiny import TINY_FAMILIES, save_tiny, tiny_config, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
PRECISE = PreciseJob(Selection(((1, 0), (1, 3), (2, 1))))
CONFIG = SftConfig(steps=6, batch_size=8, learning_rate=1e-2, micro_batch=3, log_every=2, checkpoint_every=4)


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def samples(count: int = 20) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    return [
        Sample(tuple(torch.randint(4, 160, (length,), generator=generator).tolist()), tuple(range(length - 3, length)))
        for length in lengths
    ]


def loaded(family: str = "llama", dtype: torch.dtype = torch.float64) -> LoadedModel:
    model = tiny_model(family, dtype=dtype)
    return LoadedModel(model, tiny_tokenizer(), Anatomy(model), "fingerprint", "float64")


def run_loop(job=PRECISE, config=CONFIG, resume=None, family="llama"):
    base = loaded(family)
    torch.manual_seed(0)
    model = job.build(base)
    states, rows = [], []

    def report(new_rows, state):
        rows.extend(new_rows)
        states.append(state)

    train(model, base.anatomy, samples(), config, device=CPU, pad_id=3, reporter=report, resume=resume)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, states, rows


# Data


def test_every_form_of_record(tmp_path):
    pairs = read_examples(
        write(
            tmp_path / "pairs.jsonl",
            {"prompt": "1 + 2 =", "response": "3"},
            "",
            {"prompt": "1 + 2 =\n", "response": "3"},
            {"prompt": "1+2=", "response": "3", "separator": ""},
        )
    )
    assert [(e.separator, e.where[-6:]) for e in pairs] == [(" ", "line 1"), ("", "line 3"), ("", "line 4")]
    (gsm,) = read_examples(
        write(tmp_path / "gsm.jsonl", {"question": "How many?", "answer": "2 + 1 = <<2+1=3>>3\n#### 3"})
    )
    assert gsm.prompt + gsm.separator + gsm.response == "Question: How many?\nAnswer: 2 + 1 = 3\n#### 3"
    (text,) = read_examples(write(tmp_path / "prompts.jsonl", {"text": "1 + 2 =", "answer": 3}))
    assert (text.prompt, text.separator, text.response) == ("1 + 2 =", " ", "3")
    assert len(read_examples("one_digit")) > 100


def test_loss_is_on_the_response_and_the_end_token(tmp_path):
    tokenizer = tiny_tokenizer()
    examples = read_examples(write(tmp_path / "a.jsonl", {"prompt": "1 5 plus 3 7 is", "response": "5 2"}))
    (sample,) = encode_examples(examples, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    assert tokens == ["<s>", "1", "5", "plus", "3", "7", "is", "5", "2", "</s>"]
    assert [tokens[i] for i in sample.answer] == ["5", "2", "</s>"]


def test_conversations_train_every_answer_of_the_assistant(tmp_path):
    tokenizer = tiny_tokenizer()
    turns = [("user", "1 plus 2"), ("assistant", "3"), ("user", "2 plus 2"), ("assistant", "4")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    examples = read_examples(write(tmp_path / "chat.jsonl", record))
    with pytest.raises(UserError, match="line 1: messages need a chat template"):
        encode_examples(examples, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Q : ' if m.role == 'user' else 'A : ' }}{{ m.content }}"
        "{% if m.role == 'assistant' %} ; {% else %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A : {% endif %}"
    )
    (sample,) = encode_examples(examples, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
    assert [tokens[i] for i in sample.answer] == ["3", ";", "4", ";"]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "holds no training data"),
        ([{"prompt": "1", "response": "2"}, {"prompt": "1"}], "line 2: the field 'response' is missing"),
        ([{"question": "1"}], "line 1: the field 'answer' is missing"),
        ([{"text": "1"}], "line 1: the field 'answer' is missing"),
        ([{"prompt": "1", "response": " "}], "line 1: 'response' is empty"),
        ([{"prompt": "1", "response": 2}], "line 1: 'response' must be text"),
        ([{"prompt": "1", "response": "2"}, "{"], "line 2: broken JSON"),
        ([{"sentence": "1"}], "line 1: no field tells"),
        ([{"messages": [{"role": "user", "content": "1"}]}], "line 1: 'messages' has no message of the assistant"),
    ],
)
def test_faulty_files(tmp_path, records, message):
    with pytest.raises(UserError, match=message):
        read_examples(write(tmp_path / "data.jsonl", *records))


def test_words_that_the_tokenizer_does_not_know(tmp_path):
    examples = read_examples(write(tmp_path / "a.jsonl", {"prompt": "1 plus 2 is", "response": "zebra"}))
    with pytest.raises(UserError, match="line 1: the tokenizer does not know 'zebra'"):
        encode_examples(examples, tiny_tokenizer())


def test_samples_over_the_limit_are_left_out_and_counted():
    kept, budget = within_limit(samples(), 9)
    assert 0 < len(kept) < 20
    assert (budget.samples, budget.left_out, budget.longest) == (len(kept), 20 - len(kept), 9)
    assert budget.tokens == sum(len(sample.input_ids) for sample in kept)
    assert budget.answer_tokens == 3 * len(kept)
    assert f"{budget.left_out} longer than 9 tokens left out" in budget.line()
    with pytest.raises(UserError, match="all 20 samples are longer"):
        within_limit(samples(), 2)


# Loss and loop


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_answer_loss_is_the_models_own_loss_on_the_labelled_tokens(family, monkeypatch):
    if family == "gemma2":  # its eager attention sums the softmax in float32, whose error grows with the padding
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    base = loaded(family)
    batch = samples(5)
    total = AnswerLoss(base.model, base.anatomy)(*collate(batch, pad_id=3))
    expected, right, exact = 0.0, 0, 0
    for sample in batch:  # the slow twin: one sample, all logits
        logits_TV = base.model(input_ids=torch.tensor([sample.input_ids])).logits[0]
        gold = torch.tensor(sample.input_ids)[list(sample.answer)]
        rows = logits_TV[[i - 1 for i in sample.answer]]
        expected += cross_entropy(rows, gold, reduction="sum").item()
        right += int((rows.argmax(-1) == gold).sum())
        exact += bool((rows.argmax(-1) == gold).all())
    assert total.item() == pytest.approx(expected, abs=1e-10)
    found = evaluate(base.model, base.anatomy, batch, device=CPU, pad_id=3, micro_batch=2)
    assert (found.answer_tokens, found.samples) == (15, 5)
    assert found.loss == pytest.approx(expected / 15, rel=1e-5)
    assert (found.token_accuracy, found.exact_match) == (right / 15, exact / 5)


def test_an_epoch_is_every_sample_once():
    seen = [index for step in range(10) for index in step_samples(20, 6, 3, step)]
    assert sorted(seen[:20]) == sorted(seen[20:40]) == sorted(seen[40:]) == list(range(20))
    assert seen[:20] != seen[20:40]
    chosen = step_samples(20, 6, 3, 1)
    shares = [micro_batches(samples(), chosen, 2, rank, 2) for rank in range(2)]
    assert sorted(s.input_ids for share in shares for piece in share for s in piece) == sorted(
        samples()[i].input_ids for i in chosen
    )


def test_warm_up_then_cosine():
    factors = [learning_rate_factor(step, 3, 100) for step in range(101)]
    assert factors[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1]
    assert factors[3] == 1
    assert factors[100] == pytest.approx(0)
    assert all(later < earlier for earlier, later in pairwise(factors[3:]))
    assert SftConfig(steps=100, batch_size=1, learning_rate=1).warmup_steps == 3


def test_micro_batches_change_nothing_but_round_off():
    whole, _, rows = run_loop(config=replace(CONFIG, micro_batch=8))
    pieces, _, _ = run_loop()
    assert all(torch.allclose(whole[name], pieces[name], rtol=0, atol=1e-10) for name in whole)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["trained_parameters"] == 2 * 3 * 8 * 32
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("job", [PRECISE, FullJob(), LoraJob(rank=2)])
def test_a_resumed_run_is_the_undisturbed_one(job):
    weights, states, _ = run_loop(job)
    assert [state["progress"]["step"] for state in states] == [4, 6]
    resumed, _, rows = run_loop(job, resume=states[0])
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert [row["step"] for row in rows] == [6]


def test_dropout_replays():
    base = tiny_config("gpt2")
    assert base.resid_pdrop == 0  # so it is turned on here

    def run(resume=None):
        given = loaded("gpt2")
        for module in given.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        model = PRECISE.build(given)
        states = []
        train(
            model, given.anatomy, samples(), CONFIG,
            device=CPU, pad_id=3, reporter=lambda _, state: states.append(state), resume=resume,
        )  # fmt: skip
        return [p.detach().clone() for p in model.parameters() if p.requires_grad], states

    weights, states = run()
    again, _ = run(states[0])
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_a_loss_that_is_not_a_number_stops_the_run():
    with pytest.raises(FloatingPointError, match="at step"):
        run_loop(config=replace(CONFIG, learning_rate=float("inf")))


# Controls


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whole_layers_train_and_nothing_else_under_weight_decay(family):
    before = dict(tiny_model(family).named_parameters())
    after, _, _ = run_loop(FullJob((1,)), replace(CONFIG, weight_decay=0.1), family=family)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (".layers.1." not in name), name


def test_full_training_touches_everything_and_keeps_weights_tied():
    before = dict(tiny_model("gemma2").named_parameters())
    after, _, _ = run_loop(FullJob(), family="gemma2")
    assert after.keys() == before.keys()
    assert "lm_head.weight" not in after
    assert not any(torch.equal(after[name], before[name]) for name in after)


def test_lora_trains_the_modules_asked_for():
    count = {
        name: sum(p.numel() for p in LoraJob(2, 4, *asked).build(loaded()).parameters() if p.requires_grad)
        for name, asked in {"all": ("all",), "attention": ("attention",), "one": ("attention", (1,))}.items()
    }
    assert count["attention"] == 3 * count["one"] == 3 * 2 * (32 + 32 + 2 * (32 + 16) + 32 + 32)
    assert count["all"] == count["attention"] + 3 * 2 * 3 * (32 + 40)
    with pytest.raises(UserError, match="--targets"):
        LoraJob(targets="heads").check(model_shape(tiny_config("llama")))


def test_control_heads():
    shape = model_shape(tiny_config("llama"))
    key = [(0, 1), (2, 2), (2, 3)]
    ranking = [*key, *[(layer, head) for layer in range(3) for head in range(4) if (layer, head) not in key]]
    draws = [control_heads("random", key, (), shape, seed) for seed in range(3)]
    assert all(len(set(draw)) == 3 and not set(draw) & set(key) for draw in draws)
    assert draws[0] != draws[1]
    matched = control_heads("random_layer", key, (), shape, 0)
    assert sorted(layer for layer, _ in matched) == [0, 2, 2]
    assert control_heads("bottom", key, ranking, shape, 0) == ranking[-3:]
    with pytest.raises(UserError, match="needs a ranking"):
        control_heads("bottom", key, key, shape, 0)
    with pytest.raises(UserError, match="not known"):
        control_heads("top", key, ranking, shape, 0)


# The command line


def cli(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def assert_one_line(result: Result, *parts: str) -> None:
    """Exit code 2, the mistake in one line (after what the data come to), no traceback."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith("mathinterp: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama")


def test_mistakes_are_one_line(tmp_path, tiny_folder):
    common = ("--model", tiny_folder, "--out", tmp_path / "out", "--store", tmp_path / "store", "--steps", 1)
    data = ("--data", "one_digit")
    command = ("tune", "precise", *common)
    assert_one_line(cli(*command, *data, "--heads", "9.1"), "layer 9 does not exist")
    assert_one_line(cli(*command, *data, "--heads", "1.7"), "head 1.7 does not exist")
    assert_one_line(cli(*command, *data, "--heads", "one"), "--heads 'one' cannot be read")
    assert_one_line(cli(*command, *data), "no head is chosen")
    assert_one_line(cli(*command, *data, "--heads-from", "none"), "no run 'none'")
    assert_one_line(cli(*command, *data, "--heads-sql", "SELECT 1 AS layer"), "layer and head")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--epochs", "2"), "--steps or --epochs")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--adapter", "x"), "tune merge")
    assert_one_line(cli(*command, "--heads", "1.1", "--data", tmp_path / "none.jsonl"), "neither a file")
    assert_one_line(cli(*command, "--heads", "1.1", "--data", write(tmp_path / "e.jsonl")), "no training data")
    missing = write(tmp_path / "m.jsonl", {"prompt": "1", "response": "2"}, {"prompt": "1"})
    assert_one_line(cli(*command, "--heads", "1.1", "--data", missing), "line 2", "'response' is missing")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--max-tokens", "3"), "longer than 3 tokens")
    assert_one_line(cli("tune", "full", *common, *data, "--layers", "7"), "layer 7 does not exist")
    assert_one_line(cli("tune", "full", *common, *data, "--dtype", "float16"), "float16")
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "bloom"}
    (other / "config.json").write_text(json.dumps(config))
    unknown = ("tune", "precise", "--model", other, "--out", tmp_path / "out", *data, "--heads", "1.1")
    assert_one_line(cli(*unknown), "family 'bloom'")
    taken = tmp_path / "out"
    taken.mkdir()
    write(taken / "tuning.json", {"run_id": "another"})
    assert_one_line(cli(*command, *data, "--heads", "1.1"), "holds run another", "give a new folder")
    (taken / "tuning.json").rename(taken / "notes.txt")
    assert_one_line(cli(*command, *data, "--heads", "1.1"), "something else")
    assert not (tmp_path / "store").exists()


def test_heads_from_a_run_and_from_sql(tmp_path):
    from mathinterp.cli.tune import _ranking

    store = Store(tmp_path)
    prompts = [prompt("a"), prompt("b")]
    baseline = [{"prompt_id": name, "position": 0} for name in "ab"]
    right = {(0, 0): 1, (1, 2): 0, (2, 1): 2}  # of two answers
    heads = [
        {"layer": layer, "head": head, "prompt_id": name, "correct": i < count}
        for (layer, head), count in right.items()
        for i, name in enumerate("ab")
    ]
    run = fill(store, prompts, baseline, heads)
    assert _ranking(None, run, None, str(tmp_path)) == ((1, 2), (0, 0), (2, 1))
    sql = "SELECT layer, head FROM head_effects WHERE operation = 'all' AND drop > 0 ORDER BY drop"
    assert _ranking(None, None, sql, str(tmp_path)) == ((0, 0), (1, 2))
    with pytest.raises(UserError, match="in one way"):
        _ranking("1.1", run, None, str(tmp_path))


@dataclass(frozen=True)
class FragileJob(PreciseJob):
    """Its process dies once, after the last step and before anything of it is saved."""

    marker: str = ""

    def export(self, model, tokenizer, folder, base):
        if not os.path.exists(self.marker):
            Path(self.marker).write_text("died")
            time.sleep(4)  # Ray Train takes a checkpoint in within about 2 s
            os._exit(1)
        super().export(model, tokenizer, folder, base)


def test_two_workers_one_of_which_dies_a_second_command_and_a_merge(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # the workers know FragileJob
    monkeypatch.chdir(tmp_path)  # relative paths hold although Ray Train's workers run elsewhere
    shutil.copytree(tiny_folder, "base")
    marker = tmp_path / "marker"
    monkeypatch.setattr(precise, "PreciseJob", lambda selection: FragileJob(selection, marker=str(marker)))
    words = (
        "tune", "precise", "--model", "base", "--heads", "1.0,1.3,2.1", "--data", "one_digit", "--held-out",
        "one_digit", "--steps", 6, "--batch", 8, "--lr", 1e-2, "--workers", 2, "--cpu", "--log-every", 2,
        "--checkpoint-every", 4, "--store", "store", "--out", "out",
    )  # fmt: skip
    result = cli(*words, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert marker.exists()
    assert "samples of" in result.stderr
    assert "going on after step 4" in result.stderr
    told = json.loads(result.stdout)
    assert told["trained_now"]
    assert told["trained_parameters"] == 2 * 3 * 8 * 32
    assert told["after"]["loss"] < told["before"]["loss"]
    again = cli(*words)
    assert "finished before, nothing left to compute" in again.stdout

    # The same in this process, with one worker and no death: the same adapter.
    base = load(ModelSpec("base", dtype="float32"), CPU)
    data = encode_examples(read_examples("one_digit"), base.tokenizer)
    torch.manual_seed(0)
    alone = PRECISE.build(base)
    train(alone, base.anatomy, data, CONFIG, device=CPU, pad_id=3, reporter=lambda *_: None)
    PRECISE.export(alone, base.tokenizer, tmp_path / "alone", "tiny")
    expected = load_file("alone/adapter_model.safetensors")
    found = load_file("out/adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-4), name

    rows = Store("store").rows(f"SELECT * FROM tuning_runs WHERE run_id = '{told['run_id']}' ORDER BY step")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["loss"] > 0 and row["samples_per_second"] > 0 and row["memory"] > 2**20 for row in rows)
    assert Store("store").rows("SELECT scan, status FROM runs") == [{"scan": "tune_precise", "status": "finished"}]

    merged = cli("tune", "merge", "out", "--model", "base", "--out", "merged")
    assert merged.exit_code == 0, merged.output
    model = AutoModelForCausalLM.from_pretrained("merged")
    alone.eval()
    with torch.no_grad():
        ids = torch.tensor([data[7].input_ids])
        assert torch.allclose(model(input_ids=ids).logits, alone(input_ids=ids).logits, rtol=0, atol=1e-3)
    save_tiny("other", "llama", seed=1)
    assert_one_line(cli("tune", "merge", "out", "--model", "other", "--out", "no"), "was trained on a model")
