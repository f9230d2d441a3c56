"""What a model cannot read is refused in one line that names it, exit code 2, before Ray starts or weights load."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, GPT2Config

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.evaluation.greedy import new_tokens
from mathinterp.evaluation.jobs import Settings, check_jobs, prepare_jobs
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.reading import read_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.tuning.preview import read_source
from tests.model_configs import CONFIGS
from tests.tiny import VOCABULARY, save_tiny, tiny_tokenizer

POSITIONS = 12
LONG = {"prompt_id": "seven terms", "text": "12 + 34 + 56 + 78 + 11 + 22 =", "answer": "213", "operation": "add",
        "operand_a": "12", "operand_b": "34", "counterfactual": "12 # 34 # 56 # 78 # 11 # 22 ="}  # fmt: skip
ADDED = {"prompt_id": "new word", "text": "3 total_sum 5 =", "answer": "8", "operation": "add", "operand_a": "3",
         "operand_b": "5", "counterfactual": "3 total_sum 4 ="}  # fmt: skip
SCANS = [
    ["scan", "heads"], ["scan", "heads", "--ablation", "mean"], ["scan", "mlps"], ["scan", "paths"],
    ["scan", "neurons"], ["scan", "attention"], ["scan", "probe"], ["knockout", "--heads", "0.1"],
    ["scan", "iterative", "--steps", "1"], ["chain"], ["pipeline"], ["plan", "heads"], ["selftest", "--device", "cpu"],
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models of twelve positions, in a table and by rotation, and one with fewer embeddings than its tokenizer has
    tokens. Nothing may load."""
    monkeypatch.chdir(tmp_path)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS)
    AutoModelForCausalLM.from_config(config).save_pretrained("short")
    tiny_tokenizer().save_pretrained("short")
    save_tiny("rotary", "llama")
    fields = json.loads(Path("rotary/config.json").read_text())
    Path("rotary/config.json").write_text(json.dumps({**fields, "max_position_embeddings": POSITIONS}))
    save_tiny("grown", "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["total_sum"])
    tokenizer.save_pretrained("grown")
    for name, row in (("long", LONG), ("added", ADDED)):
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("Ray started, or weights were loaded")

    monkeypatch.setattr("ray.init", forbidden)
    monkeypatch.setattr("mathinterp.models.catalog.load_weights", forbidden)
    return tmp_path


def refused(*words: str) -> str:
    done = CliRunner().invoke(main, [*words, *(() if "selftest" in words or "plan" in words else ("--store", "new"))])
    assert done.exit_code == 2, (done.output, done.exception)
    assert len(done.output.strip().splitlines()) == 1, done.output
    assert not Path("new").exists()
    return done.output


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("model", ["short", "rotary"])
@pytest.mark.parametrize("command", SCANS, ids=" ".join)
def test_a_prompt_longer_than_the_positions(command: list[str], model: str) -> None:
    """A table has no others; a rotary embedding computes on, with angles that the model never saw."""
    said = refused(*command, "--model", model, "--prompts", "long.jsonl")
    assert "prompt 'seven terms'" in said
    assert "only 12 positions" in said


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", SCANS, ids=" ".join)
def test_a_token_without_an_embedding(command: list[str]) -> None:
    said = refused(*command, "--model", "grown", "--prompts", "added.jsonl")
    assert "prompt 'new word'" in said
    assert f"'total_sum' with id {VOCABULARY}" in said


@pytest.mark.slow
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("model", "file", "named"), [
    ("short", "long.jsonl", "only 12 positions"), ("grown", "added.jsonl", "'total_sum' with id 160"),
])  # fmt: skip
@pytest.mark.parametrize("command", [
    ["evaluate", "--tasks", "FILE"],
    ["tune", "full", "--out", "tuned", "--data", "FILE"],
    ["tune", "lora", "--out", "tuned", "--data", "FILE"],
    ["tune", "precise", "--heads", "0.1", "--out", "tuned", "--data", "FILE"],
    ["tune", "sweep", "--out", "tuned", "--data", "FILE"],
    ["tune", "prune", "--out", "tuned", "--data", "FILE"],
], ids=" ".join)  # fmt: skip
def test_tuning_and_evaluation_refuse_them_too(command: list[str], model: str, file: str, named: str) -> None:
    done = CliRunner().invoke(
        main, [*(file if word == "FILE" else word for word in command), "--model", model, "--store", "new"]
    )
    assert done.exit_code == 2, (done.output, done.exception)
    assert named in done.output
    assert file in done.output or "prompt '" in done.output
    assert not Path("tuned").exists()


@pytest.mark.usefixtures("place")
def test_a_sentence_to_show() -> None:
    words = ("knockout", "--heads", "0.1", "--limit", "4")
    assert "--show" in refused(*words, "--model", "short", "--show", LONG["text"])
    assert "'total_sum'" in refused(*words, "--model", "grown", "--show", ADDED["text"])


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_an_answer_that_may_run_out_of_positions(tmp_path: Path) -> None:
    """Nine tokens fit twelve positions, but five more may be written, of which four are read again."""
    row = {"prompt_id": "p", "text": "3 + 5 + 2 =", "answer": "10", "operation": "add"}
    Path("p.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    spec = ModelSpec("short")
    (fits,) = read_prompts([Prompt("p", row["text"], "1")], resolve(spec))
    assert fits.end + new_tokens(fits) > len(fits.fed)
    check_jobs(prepare_jobs(["p.jsonl"], spec, Settings()), spec)
    Path("p.jsonl").write_text(json.dumps({**row, "text": "3 + 5 + 2 + 1 ="}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"prompt 'p' makes 13 tokens to read at once"):
        check_jobs(prepare_jobs(["p.jsonl"], spec, Settings()), spec)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_what_fits_exactly_is_read() -> None:
    """Twelve tokens are read, the thirteenth only scored; rotary embeddings reach as far as they were made for."""
    words = "3 + 5 + 2 + 1 + 1 ="
    (prompt,) = read_prompts([Prompt("p", words, "12")], resolve(ModelSpec("short")))
    assert len(prompt.fed) == POSITIONS
    fields = json.loads(Path("rotary/config.json").read_text())
    linear = {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}
    for longest, rope, reads in ((12, None, True), (11, None, False), (4, linear, True), (3, linear, False)):
        rotary = {"max_position_embeddings": longest} | ({} if rope is None else {"rope_parameters": rope})
        Path("rotary/config.json").write_text(json.dumps({**fields, **rotary}))
        with nullcontext() if reads else pytest.raises(UserError, match="prompt 'p' makes 12 tokens"):
            assert len(read_prompts([Prompt("p", words, "12")], resolve(ModelSpec("rotary")))) == 1


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_samples_that_would_change_the_shorter_ones_of_their_batch(kind: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(kind)
    tiny_tokenizer().save_pretrained(kind)
    Path("mixed.jsonl").write_text(
        json.dumps({"prompt": "3 + 5 =", "response": "8"})
        + "\n"
        + json.dumps({"prompt": LONG["text"], "response": "9"}),
        encoding="utf-8",
    )
    model = resolve(ModelSpec(kind))
    with pytest.raises(UserError, match=r"mixed.jsonl, line 2 has 21 tokens, and beyond 12 .* `max_tokens` 12"):
        read_source(model, "mixed.jsonl", 0, 512)
    source = read_source(model, "mixed.jsonl", 0, 12)
    assert (len(source.samples), source.budget.left_out) == (1, 1)


# ---- configs ----


@pytest.mark.parametrize(("family", "changes", "said"), [
    ("llama", {"hidden_size": 34, "head_dim": None}, r"hidden size \(34\) is not a multiple"),
    ("llama", {"num_attention_heads": 0}, "modulo by zero|num_attention_heads"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"hidden_act": "nosuch"}, "no model can be built from config.json: KeyError 'nosuch'"),
    ("llama", {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}, "nosuch"),
    ("llama", {"num_hidden_layers": -3}, "num_hidden_layers in config.json is -3"),
    ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers"),
    ("llama", {"intermediate_size": 0}, "intermediate_size in config.json is 0"),
    ("mistral", {"sliding_window": 0}, "sliding_window in config.json is 0"),
    ("gpt2", {"n_embd": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
    ("gpt2", {"n_positions": 0}, "max_position_embeddings in config.json is 0"),
    ("gptj", {"n_embd": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
    ("gpt_neox", {"hidden_size": 30}, "not divisible"),
    ("qwen2", {"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("llama", {"dtype": "nosuch"}, "cannot be read: AttributeError .*nosuch"),
    ("llama", {"dtype": []}, "cannot be read: IndexError"),
    ("llama", {"head_dim": -1}, "head_dim in config.json is -1"),
    ("llama", {"id2label": []}, "cannot be read: AttributeError"),
])  # fmt: skip
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, family: str, changes: dict, said: str) -> None:
    folder = save_tiny(tmp_path / family, family)
    fields = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(UserError, match=said) as caught:
        resolve(ModelSpec(str(folder)))
    assert "\n" not in str(caught.value)
