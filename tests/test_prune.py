"""Pruning: sets of neurons, conditions against exported models, the table by hand, the command from start to end."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.local_files import whole_folder
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.models.catalog import LoadedModel, ModelSpec, load, resolve
from mathinterp.models.random_shapes import random_config
from mathinterp.models.sources import BUNDLED_FOLDER
from mathinterp.prompts import load_prompts, write_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store
from mathinterp.tuning import sft_ray
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.edit import zero_columns
from mathinterp.tuning.folders import TUNING_FILE
from mathinterp.tuning.layout import padding_id
from mathinterp.tuning.prune import Condition, Prune
from mathinterp.tuning.pruning import default_top, pruned_neurons, random_kept
from mathinterp.tuning.sft import train
from mathinterp.tuning.sft_ray import Tuning, TuningResult, earlier_result
from tests.exact import PROMPTS, one_at_a_time
from tests.small_store import FINGERPRINT, open_run, prompt, scores
from tests.tiny import of_neurons, tiny_model, tiny_tokenizer

DEEP = (1, 2)
KEPT = ((1, 4), (1, 9), (2, 0), (2, 1), (2, 38))


def test_a_case_keeps_the_papers_share() -> None:
    llama = model_shape(random_config("llama-2-7b"))
    assert llama.n_neurons == 11008
    assert default_top(llama, range(17, 32)) == 500
    smollm2 = model_shape(random_config("smollm2-135m"))
    assert default_top(smollm2, range(16, 30)) == 65
    assert default_top(replace(llama, n_neurons=8), (3,)) == 1


def test_random_sets_have_as_many_in_each_layer(anatomy: Anatomy) -> None:
    draws = [random_kept(anatomy.shape, DEEP, KEPT, seed) for seed in range(3)]
    assert all([layer for layer, _ in draw] == [1, 1, 2, 2, 2] and len(set(draw)) == 5 for draw in draws)
    assert len({tuple(draw) for draw in draws}) == 3
    assert not {neuron for draw in draws for neuron in draw} & set(KEPT), "a control holds what it is a control for"
    gone = pruned_neurons(anatomy.shape, DEEP, KEPT)
    assert len(gone) == 2 * 40 - 5
    assert not set(gone) & set(KEPT)
    assert {layer for layer, _ in gone} == set(DEEP)
    every = [(layer, neuron) for layer in DEEP for neuron in range(40)]
    many = [(1, neuron) for neuron in range(21)]
    with pytest.raises(UserError, match=r"layer 1 keeps 21 of 40 neurons, which leaves 19 for .* `control_seeds` 0"):
        random_kept(anatomy.shape, DEEP, many, 0)
    with pytest.raises(UserError, match="nothing is pruned"):
        random_kept(anatomy.shape, DEEP, every, 0)


def adapter(family: str, folder: Path) -> PeftModel:
    """A LoRA with an update of some size, saved; on a model of its own."""
    model = tiny_model(family)
    loaded = LoadedModel(model, tiny_tokenizer(), Anatomy(model), "", "float64")
    job = LoraJob(2, 4, "attention", (0,))
    tuned = job.build(loaded)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    assert isinstance(tuned, PeftModel)
    job.export(tuned, tiny_tokenizer(), folder, "tiny")
    return tuned.eval()


@pytest.mark.slow
@of_neurons
def test_conditions_are_the_pruned_models_with_their_adapters(
    anatomy: Anatomy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Slow twin: columns of down_proj at zero in a second model with the adapter on it, one prompt at a time."""
    tuned = adapter(request.node.callspec.params["anatomy"], tmp_path / "lora")
    conditions = (
        Condition("lora", adapter=str(tmp_path / "lora"), trained_as="a"),
        Condition("pruned", 0, KEPT),
        Condition("pruned_lora", 0, KEPT, str(tmp_path / "lora"), "b"),
    )
    scan = Prune(conditions, DEEP)
    subject = Subject(anatomy, PROMPTS, tokenizer=tiny_tokenizer())
    before = {name: value.clone() for name, value in anatomy.model.state_dict().items()}
    state = scan.prepare(subject)
    found = {shard.key: scan.run(state, shard).to_pandas() for shard in scan.shards(anatomy.shape, PROMPTS)}
    assert all(torch.equal(value, before[name]) for name, value in anatomy.model.state_dict().items())
    clean = one_at_a_time(anatomy, PROMPTS)
    twin = Anatomy(tuned.get_base_model())
    with torch.no_grad():
        lora = one_at_a_time(twin, PROMPTS)
        zero_columns(twin, pruned_neurons(anatomy.shape, DEEP, KEPT))
        both = one_at_a_time(twin, PROMPTS)
        with tuned.disable_adapter():
            pruned = one_at_a_time(twin, PROMPTS)
    for table, expected in (
        ("baseline/00000", clean), ("prune_scan/00000", lora), ("prune_scan/00001", pruned), ("prune_scan/00002", both),
    ):  # fmt: skip
        np.testing.assert_allclose(found[table]["logprob"], expected, rtol=0, atol=2e-5)
    assert min(abs(a - b).max() for a, b in ((lora, clean), (pruned, clean), (both, pruned), (both, lora))) > 1e-2
    kept = found["prune_neurons/00000"]
    assert [tuple(pair) for pair in kept[["layer", "neuron"]].to_numpy().tolist()] == list(KEPT)
    assert scan.notes(state) == {"pruned_from": 80}


@torch.no_grad()
def accuracy(model: torch.nn.Module, prompts: list[TokenizedPrompt]) -> float:
    """Per cent of scored tokens, mean over operations, one prompt a forward pass."""
    hits: dict[str, list[bool]] = {}
    for asked in prompts:
        logits = model(torch.tensor([asked.fed])).logits[0]
        right = [int(logits[token.index - 1].argmax()) == token.token_id for token in asked.scored]
        hits.setdefault(str(asked.prompt.operation), []).extend(right)
    return float(np.mean([np.mean(values) for values in hits.values()]))


def fit_here(tuning: Tuning, *, out: Path, **_: object) -> TuningResult:
    """What sft_ray.fit does, in this process: three Ray Train runs would take a minute."""
    if (found := earlier_result(out, tuning.run_id)) is not None:
        return TuningResult(tuning.run_id, out, found, trained_now=False)
    loaded = load(tuning.model, "cpu")
    torch.manual_seed(tuning.config.seed)
    model = tuning.job.build(loaded)
    train(
        model, loaded.anatomy, tuning.samples, tuning.config, device=torch.device("cpu"),
        pad_id=padding_id(loaded.tokenizer), reporter=lambda *_: None,
    )  # fmt: skip
    tuning.job.export(model, loaded.tokenizer, out, tuning.model.label)
    about = {"run_id": tuning.run_id}
    (out / TUNING_FILE).write_text(json.dumps(about))
    return TuningResult(tuning.run_id, out, about, trained_now=True)


@pytest.mark.ray
def test_the_command_prunes_and_trains_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray once, the bundled model, two steps: exported models, the table by hand, the same command again."""
    monkeypatch.setattr(sft_ray, "fit", fit_here)
    data, tests = tmp_path / "data.jsonl", tmp_path / "tests.jsonl"
    write_prompts(load_prompts("signed_two_digit_train", limit=64), data)
    write_prompts(load_prompts("signed_two_digit_test", limit=48), tests)
    words = [
        "tune", "prune", "--data", str(data), "--test", str(tests), "--case-limit", "8", "--steps", "2",
        "--batch", "16", "--lr", "1e-2",
        "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"), "--replicas", "1", "--cpu",
    ]  # fmt: skip
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    assert (told["layer"], told["deep"]) == (2, [4, 5, 6, 7])
    rows = {(row["condition"], row["seed"]): row for row in told["accuracy"]}
    assert [name for name, _ in rows] == ["origin", "lora", "pruned", "pruned_lora", "random", "random_lora"]
    assert rows["pruned", 0]["kept"] == rows["random_lora", 0]["kept"] == told["kept"]
    assert rows["pruned", 0]["kept_share"] == pytest.approx(told["kept"] / (4 * 608))
    assert rows["lora", 0]["kept"] is None
    assert 0 <= rows["origin", 0]["low"] < rows["origin", 0]["accuracy"] < rows["origin", 0]["high"] <= 1

    # The exported models, by plain transformers and peft, say what the table says.
    connection = Store(tmp_path / "store").connect()
    kept = {tuple(pair) for pair in connection.sql(
        "SELECT layer, neuron FROM prune_neurons WHERE condition = 'pruned'").fetchall()}  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "pruned").eval()
    zero = [
        (i, int(k)) for i in (4, 5, 6, 7) for k in (base.model.layers[i].mlp.down_proj.weight == 0).all(0).nonzero()
    ]
    assert set(zero) == {(layer, k) for layer in (4, 5, 6, 7) for k in range(608)} - kept
    tokenized = tokenize_prompts(load_prompts(tests), resolve(ModelSpec()).tokenizer)
    assert rows["pruned", 0]["accuracy"] == pytest.approx(accuracy(base, tokenized))
    tuned = PeftModel.from_pretrained(base, tmp_path / "out" / "pruned-lora")
    assert rows["pruned_lora", 0]["accuracy"] == pytest.approx(accuracy(tuned, tokenized))

    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0, again.output
    assert again.stdout.count("nothing left to compute") == 2
    other = CliRunner().invoke(main, [*words, "--top", "1"])
    assert other.exit_code == 2
    assert "holds another pruned model" in other.stderr.splitlines()[-1]


@pytest.mark.bundled
def test_zero_writes_a_model_without_heads(tmp_path: Path) -> None:
    words = ["tune", "zero", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, [*words, "--heads", "0.6,3.1", "--neurons", "4.7"])
    assert result.exit_code == 0, (result.output, result.exception)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER)
    changed = {n: int((p != q).sum()) for (n, p), q in zip(model.named_parameters(), base.parameters(), strict=True)}
    assert {n: c for n, c in changed.items() if c} == {
        "model.layers.0.self_attn.o_proj.weight": 32 * 256,
        "model.layers.3.self_attn.o_proj.weight": 32 * 256,
        "model.layers.4.mlp.down_proj.weight": 256,
    }
    assert json.loads((tmp_path / "out" / "edit.json").read_text())["heads"] == ["0.6", "3.1"]
    for options, message in (
        (["--heads", "0.6"], "exists already"),
        (["--heads", "0.6", "--from", "x"], "in one way"),
        (["--neurons", "four"], "--neurons 'four' cannot be read"),
        ([], "nothing to zero"),
    ):
        failed = CliRunner().invoke(main, [*words, *options])
        assert failed.exit_code == 2
        assert message in failed.stderr


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"

    def write(content: str) -> None:
        with whole_folder(out) as part:
            assert not list(part.iterdir())
            (part / content).touch()
            if content == "half":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("half")
    assert not out.exists()
    out.mkdir()  # an empty folder is free
    write("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "out", "whole"]


@pytest.mark.parametrize("moment", ["first rename", "second rename"])
def test_a_folder_that_is_replaced_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Killed at either rename, the former content is there at the next call; a failed one restores it at once."""
    out = tmp_path / "out"
    with whole_folder(out) as part:
        (part / "former").touch()
    real, done = os.replace, []

    def killed(source: Path, target: Path) -> None:
        done.append(source)
        if len(done) == (1 if moment == "first rename" else 2):
            raise SystemExit("killed")  # no handler of OSError runs
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(SystemExit), whole_folder(out) as part:
        (part / "new").touch()
    monkeypatch.setattr(os, "replace", real)
    with pytest.raises(KeyboardInterrupt), whole_folder(out) as part:
        raise KeyboardInterrupt
    assert [path.name for path in out.iterdir()] == ["former"]

    def refused(source: Path, target: Path) -> None:
        if source.name == ".out.part":
            raise PermissionError(13, "not allowed")
        real(source, target)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(PermissionError), whole_folder(out):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "former"]


@pytest.mark.slow
def test_heads_carry_over_to_a_sibling(tmp_path: Path) -> None:
    """Two models of the same shape, two heads: the view's correlation and overlap."""
    store = Store(tmp_path)
    prompts = [prompt(name) for name in "abcd"]

    def scan(lost: dict[int, int], **model: str) -> None:
        """A head scan in which head 0.h costs ``lost[h]`` of four answers."""
        run = open_run(store, parameters={"scoring": "token", "ablation": "zero"}, **model)
        store.write_prompts(FINGERPRINT, prompts)
        baseline = [{"prompt_id": name} for name in "abcd"]
        heads = [
            {"layer": 0, "head": head, "prompt_id": name, "correct": i >= count}
            for head, count in lost.items()
            for i, name in enumerate("abcd")
        ]
        for table, rows in (("baseline", baseline), ("head_scan", heads)):
            store.write_shard(run.run_id, table, 0, scores(table, rows), {})

    scan({0: 0, 1: 1, 2: 3})
    scan({0: 0, 1: 4, 2: 2}, model="sibling", model_fingerprint="weights-2")
    rows = store.rows("SELECT * FROM head_transfer WHERE operation = 'all' AND method = 'zero ablation' ORDER BY model")
    assert [(row["model"], row["other_model"]) for row in rows] == [("m", "sibling"), ("sibling", "m")]
    assert rows[0]["spearman"] == pytest.approx(0.5)  # ranks 1 2 3 against 1 3 2
    assert (rows[0]["heads"], rows[0]["overlap_10"], rows[0]["chance_10"], rows[0]["same_prompts"]) == (3, 3, 3, True)
