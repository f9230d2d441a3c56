"""``mathinterp tune``: clear mistakes, heads from the store, Ray Train with a worker that dies, and a merge."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.store import Store
from mathinterp.tuning import chosen
from mathinterp.tuning.chosen import neurons_of, ranking_of, say_whose_ranking
from mathinterp.tuning.controls import FullJob
from mathinterp.tuning.data import encode_examples, read_examples
from mathinterp.tuning.finetune import weighted
from mathinterp.tuning.precise import PreciseJob, Selection
from mathinterp.tuning.settings import Choice
from mathinterp.tuning.sft import SftConfig, train
from tests.fragile_job import FragileJob
from tests.json_lines import write
from tests.small_store import fill, prompt
from tests.tiny import save_tiny

CPU = torch.device("cpu")
PRECISE = PreciseJob(Selection(((1, 0), (1, 3), (2, 1))))
CONFIG = SftConfig(
    steps=6, batch_size=8, learning_rate=1e-2, micro_batch=3, log_every=2, checkpoint_every=4,
    mixture=((390, 3.0), (8, 1.0)),
)  # fmt: skip


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


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path, tiny_folder):
    common = ("--model", tiny_folder, "--out", tmp_path / "out", "--store", tmp_path / "store", "--steps", 1)
    data = ("--data", "one_digit")
    command = ("tune", "precise", *common)
    assert_one_line(cli(*command, *data, "--heads", "9.1"), "layer 9 does not exist")
    assert_one_line(cli(*command, *data, "--heads", "1.7"), "head 1.7 does not exist")
    assert_one_line(cli(*command, *data, "--heads", "one"), "--heads 'one' cannot be read")
    assert_one_line(cli(*command, *data), "no head is chosen")
    assert_one_line(cli(*command, *data, "--from", "none"), "no run 'none'")
    assert_one_line(cli(*command, *data, "--heads-sql", "SELECT 1 AS layer"), "layer and head")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--epochs", "2"), "--steps or --epochs")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--top", "1"), "--top takes the first of a ranking")
    assert_one_line(cli(*command, *data, "--neurons", "1.1", "--neurons-sql", "SELECT 1"), "neurons in one way")
    assert_one_line(cli(*command, *data, "--neurons-sql", "SELECT 1 AS layer, 2 AS head"), "layer and neuron")
    assert_one_line(cli(*command, "--data", "one_digit:0.5", *data, "--heads", "1.1"), "all files a weight")
    assert_one_line(cli(*command, "--data", "one_digit:-1", "--heads", "1.1"), "a weight above 0")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--adapter", "x"), "tune merge")
    assert_one_line(cli(*command, "--heads", "1.1", "--data", tmp_path / "none.jsonl"), "neither a file")
    assert_one_line(cli(*command, "--heads", "1.1", "--data", write(tmp_path / "e.jsonl")), "no training data")
    missing = write(tmp_path / "m.jsonl", {"prompt": "1", "response": "2"}, {"prompt": "1"})
    assert_one_line(cli(*command, "--heads", "1.1", "--data", missing), "line 2", "'response' is missing")
    assert_one_line(cli(*command, *data, "--heads", "1.1", "--max-tokens", "3"), "longer than 3 tokens")
    assert_one_line(cli("tune", "full", *common, *data, "--layers", "7"), "layer 7 does not exist")
    assert_one_line(cli("tune", "lora", *common, *data, "--alpha", "0"), "--alpha", "0 is not in the range")
    for url in ("s3://bucket/tuned", "memory://tuned"):
        assert_one_line(cli(*command, *data, "--heads", "1.1", "--out", url), "is a URL; give a folder")
    assert_one_line(cli("tune", "full", *common, *data, "--dtype", "float16"), "float16")
    assert_one_line(cli("tune", "full", *common, *data, "--gpu", "--workers", 999), "999 workers need a GPU each")
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
    for broken, message in (("{", "broken JSON"), ("[]", "not a JSON object"), ("{}", "does not say its run_id")):
        (taken / "tuning.json").write_text(broken)
        assert_one_line(cli(*command, *data, "--heads", "1.1"), "tuning.json", message, "give another folder")
    (taken / "tuning.json").rename(taken / "notes.txt")
    assert_one_line(cli(*command, *data, "--heads", "1.1"), "something else")
    assert not (tmp_path / "store").exists()


DRY = {
    "precise": ("--heads", "1.1"), "full": (), "lora": (), "sweep": ("--validation", 1), "prune": ("--deep", "1-2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", DRY)
def test_a_dry_run_shows_the_first_samples_tokens_and_which_count(tmp_path, tiny_folder, command, monkeypatch):
    monkeypatch.setattr("mathinterp.models.catalog.load", None)  # weights are never read
    monkeypatch.chdir(tmp_path)
    data = write(
        Path("data.jsonl"),
        *({"prompt": f"<s>{i} plus 1 is", "response": f"{i + 1}</s>"} for i in (1, 2)),
        {"prompt": "one " * 20, "response": 1},
    )
    words = ("tune", command, "--model", tiny_folder, "--data", data, "--max-tokens", 9, "--dry-run", *DRY[command])
    told = cli(*words, "--json")
    assert told.exit_code == 0, (told.output, told.exception)
    (source,) = json.loads(told.stdout)["data"]
    assert [row["token"] for row in source["first_sample"]] == ["<s>", "1", "plus", "1", "is", "2", "</s>"]
    assert [row["trained"] for row in source["first_sample"]] == [False] * 5 + [True] * 2
    assert (source["samples"], source["left_out"], source["limit"]) == (2, 1, 9)
    assert (source["shortest"], source["longest"], source["answer_tokens"]) == (7, 7, 4)
    assert source["end_tokens"] == {"</s>": 2}
    shown = cli(*words)
    assert "1 longer than 9 tokens left out" in shown.stderr
    assert [line.split() for line in shown.stdout.splitlines() if line.split()[-1:] == ["yes"]] == [
        ["5", str(source["first_sample"][5]["token_id"]), "2", "yes"], ["6", "2", "</s>", "yes"],
    ]  # fmt: skip
    assert "nothing was loaded or trained" in shown.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"], "nothing is written"
    assert_one_line(cli(*words[: -1 - len(DRY[command])], *DRY[command]), "Missing option '--out'")


@pytest.mark.slow
def test_heads_from_a_run_and_from_sql(tmp_path):
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
    assert ranking_of(Choice(heads_from=run), store) == ((1, 2), (0, 0), (2, 1))
    sql = "SELECT layer, head FROM head_effects WHERE operation = 'all' AND drop > 0 ORDER BY drop"
    assert ranking_of(Choice(heads_sql=sql), store) == ((0, 0), (1, 2))
    with pytest.raises(UserError, match="in one way"):
        Choice(heads="1.1", heads_from=run)
    [ranked] = store.rows("SELECT model, model_fingerprint FROM runs")
    said: list[str] = []
    for fingerprint in (ranked["model_fingerprint"], "other"):
        say_whose_ranking(store, run, SimpleNamespace(fingerprint=fingerprint), said.append)
    assert said == [f"run {run} ranked the heads of another model, {ranked['model']}"]


def test_neurons_from_sql_and_weights_of_data(tmp_path):
    sql = "SELECT 2 AS layer, 39 AS neuron UNION ALL SELECT 0, 7 ORDER BY layer"
    assert neurons_of(Choice(neurons_sql=sql), Store(tmp_path)) == ((0, 7), (2, 39))
    assert Choice(neurons="13.7,12.345").neurons == ((13, 7), (12, 345))
    assert Choice(neurons="13_7,12.345").neurons == ((13, 7), (12, 345)), "paper A writes layer_neuron"
    with pytest.raises(UserError, match="`neurons` '13-7' cannot be read"):
        Choice(neurons="13-7")
    assert weighted(("a.jsonl:0.7", "gsm8k:data/x.jsonl:3")) == (["a.jsonl", "gsm8k:data/x.jsonl"], [0.7, 3])
    assert weighted(("a.jsonl", "gsm8k:data/x.jsonl")) == (["a.jsonl", "gsm8k:data/x.jsonl"], [])


def test_a_missing_tensorboard_is_named(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    command = ("tune", "precise", "--model", tiny_folder, "--heads", "1.1", "--data", "one_digit", "--steps", 1)
    assert_one_line(cli(*command, "--out", tmp_path / "out", "--tensorboard", tmp_path), "pip install tensorboard")


def test_controls_are_not_called_what_they_control():
    assert PRECISE.method == "precise"
    assert replace(PRECISE, control="random heads, seed 3").method == "random heads, seed 3"
    assert (FullJob().method, FullJob((1, 2)).method) == ("full", "layers 1, 2")
    assert replace(PRECISE, control="bottom").parameters() == PRECISE.parameters()


@pytest.mark.ray
@pytest.mark.parametrize("way", ["--cache", "--shard-model"])
def test_two_workers_one_of_which_dies_a_second_command_and_a_merge(way, tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how often Ray Train looks for deaths
    monkeypatch.chdir(tmp_path)  # relative paths hold although Ray Train's workers run elsewhere
    shutil.copytree(tiny_folder, "base")
    marker = tmp_path / "marker"
    monkeypatch.setattr(chosen, "PreciseJob", lambda *chosen: FragileJob(*chosen, marker=str(marker)))
    write(Path("few.jsonl"), *({"prompt": f"{i} plus 1 is", "response": str(i + 1)} for i in range(8)))
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    words = (
        "tune", "precise", "--model", "base", "--heads", "1.0,1.3,2.1", "--data", "one_digit:3", "--data",
        "few.jsonl:1", "--held-out", "few.jsonl", "--steps", 6, "--batch", 8, "--micro-batch", 3, "--lr", 1e-2,
        "--workers", 2, "--cpu", way, "--log-every", 2, "--checkpoint-every", 4, "--store", "store", "--out",
        "out", *(("--tensorboard", "board") if has_tensorboard else ()),
    )  # fmt: skip
    result = cli(*words, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert marker.exists()
    assert "data, few.jsonl: 8 samples of" in result.stderr
    assert "warning: 8 of 8 held-out samples are trained on too" in result.stderr
    assert ("the cache takes up to 0.00 GiB" in result.stderr) == (way == "--cache")
    [run] = Store("store").rows("SELECT notes FROM runs")
    notes = json.loads(run["notes"])
    assert (notes["workers"], notes["sharded"]) == (2, way == "--shard-model")
    assert "going on after step 4" in result.stderr
    told = json.loads(result.stdout)
    assert told["trained_now"]
    assert (told["command"], told["method"]) == ("precise", "precise")
    assert "Made by `mathinterp tune precise`" in Path("out/README.md").read_text()
    assert told["trained_parameters"] == 2 * 3 * 8 * 32
    assert told["after"]["loss"] < told["before"]["loss"]
    again = cli(*words)
    assert "finished before, nothing left to compute" in again.stdout

    # The same in this process, with one worker and no death: the same adapter.
    base = load(ModelSpec("base", dtype="float32"), CPU)
    examples = [*read_examples("one_digit"), *read_examples("few.jsonl")]
    data = encode_examples(examples, base.tokenizer)
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
    if has_tensorboard:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(f"board/{told['run_id']}")
        board.Reload()
        assert [event.step for event in board.Scalars("train/loss")] == [2, 4, 6]
        assert [event.value for event in board.Scalars("train/loss")] == pytest.approx([row["loss"] for row in rows])
        assert board.Scalars("held_out/loss")[-1].value == pytest.approx(told["after"]["loss"])

    merged = cli("tune", "merge", "out", "--model", "base", "--out", "merged")
    assert merged.exit_code == 0, merged.output
    model = AutoModelForCausalLM.from_pretrained("merged")
    alone.eval()
    with torch.no_grad():
        ids = torch.tensor([data[7].input_ids])
        assert torch.allclose(model(input_ids=ids).logits, alone(input_ids=ids).logits, rtol=0, atol=1e-3)
    save_tiny("other", "llama", seed=1)
    assert_one_line(cli("tune", "merge", "out", "--model", "other", "--out", "no"), "was trained on a model")
