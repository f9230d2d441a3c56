"""The LoRA layer sweep: trials leave no trace and equal a LoRA run of their own; curve and neurons by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel

from mathinterp.cli.main import main
from mathinterp.engine.lens.neurons import NeuronLens, end_activations
from mathinterp.errors import UserError
from mathinterp.experiments.base import NothingToShow, Subject
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel
from mathinterp.models.depth import deep_layers, lora_layer
from mathinterp.prompts import load_prompts, write_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.report.page import write_report
from mathinterp.store import Store
from mathinterp.tuning.attached import attached
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.data import Sample
from mathinterp.tuning.lora_sweep import LoraSweep, adapter_folder
from mathinterp.tuning.sft import SftConfig, train
from mathinterp.tuning.sweep import claim_folder, split_samples
from mathinterp.tuning.sweep_neurons import SweepNeurons, missing_adapters
from tests.charts import table_of
from tests.exact import PROMPTS, one_at_a_time
from tests.statistics_twin import part_of, score_interval, share_interval, share_of
from tests.tiny import of_neurons, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
CONFIG = SftConfig(steps=3, batch_size=4, learning_rate=1.0, micro_batch=4)


def samples(count: int = 12) -> list[Sample]:
    rng = np.random.default_rng(3)
    return [Sample((1, *map(int, rng.integers(4, 160, size=6))), (5, 6)) for _ in range(count)]


def sweep(folder: Path, **changes) -> LoraSweep:
    asked = {"rates": (1e-2, 1e-3), "layers": (0, 2), "rank": 2, "alpha": 4, "base": "tiny"}
    return LoraSweep(samples(), samples(20)[12:], CONFIG, str(folder), **{**asked, **changes})


def test_layers_by_depth() -> None:
    """The paper's own on 32 layers; on others by share of the depth."""
    assert (lora_layer(32), deep_layers(32)) == (9, tuple(range(17, 32)))
    assert (lora_layer(30), deep_layers(30)[0], deep_layers(30)[-1]) == (8, 16, 29)
    assert (lora_layer(8), deep_layers(8)) == (2, (4, 5, 6, 7))
    assert (lora_layer(3), deep_layers(3)) == (0, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox"])
def test_a_trial_is_a_lora_run_of_its_own_and_leaves_no_trace(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    anatomy, tokenizer = Anatomy(model), tiny_tokenizer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    chosen = sweep(tmp_path)
    state = chosen.prepare(Subject(anatomy, PROMPTS, tokenizer=tokenizer))
    shards = chosen.shards(anatomy.shape, PROMPTS)
    assert [(s.work["layer"], s.work["learning_rate"]) for s in shards[1:]] == [
        (0, 1e-2), (0, 1e-3), (2, 1e-2), (2, 1e-3),
    ]  # fmt: skip
    rows = chosen.run(state, shards[3]).to_pandas()
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training

    # The same by itself: a fresh model, the job, the loop; scored one prompt at a time.
    alone = tiny_model(family)
    loaded = LoadedModel(alone, tokenizer, Anatomy(alone), "", "float64")
    torch.manual_seed(CONFIG.seed)
    tuned = LoraJob(2, 4, "attention", (2,)).build(loaded)
    config = SftConfig(steps=3, batch_size=4, learning_rate=1e-2, micro_batch=4, checkpoint_every=3)
    train(tuned, loaded.anatomy, samples(), config, device=CPU, pad_id=3, reporter=lambda *_: None)
    tuned.eval()
    expected = one_at_a_time(loaded.anatomy, PROMPTS)
    np.testing.assert_allclose(rows["logprob"], expected, rtol=0, atol=1e-6 if family != "gemma2" else 1e-4)
    assert abs(expected - one_at_a_time(anatomy, PROMPTS)).max() > 1e-3, "training did nothing"
    assert (rows["layer"] == 2).all()
    assert rows["trained_parameters"][0] == sum(p.numel() for p in tuned.parameters() if p.requires_grad)

    # The adapter is a plain PEFT one, and attached it gives the same again.
    folder = adapter_folder(str(tmp_path), 2, 1e-2)
    with attached(anatomy, folder):
        found = one_at_a_time(anatomy, PROMPTS)
    np.testing.assert_allclose(found, rows["logprob"], rtol=0, atol=1e-5)
    plain = PeftModel.from_pretrained(tiny_model(family), str(folder))
    ids = torch.tensor([PROMPTS[0].fed])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, tuned(ids).logits, rtol=0, atol=1e-5)
    assert {name: type(module) for name, module in model.named_modules()} == modules


def test_validation_samples_are_not_trained() -> None:
    trained, kept = split_samples(samples(20), 5, seed=1)
    assert (len(trained), len(kept)) == (15, 5)
    assert not {s.input_ids for s in trained} & {s.input_ids for s in kept}
    assert split_samples(samples(20), 5, seed=1) == (trained, kept)
    with pytest.raises(UserError, match="between 1 and half"):
        split_samples(samples(20), 11, seed=1)


def test_mistakes(tmp_path: Path) -> None:
    shape = Anatomy(tiny_model("llama")).shape
    with pytest.raises(UserError, match="layer 3 does not exist"):
        sweep(tmp_path, layers=(3,)).shards(shape, PROMPTS)
    with pytest.raises(UserError, match="learning rates"):
        sweep(tmp_path, rates=(1e-3, 1e-3))
    claim_folder(tmp_path / "out", sweep(tmp_path), "model", "float32")
    claim_folder(tmp_path / "out", sweep(tmp_path), "model", "float32")
    with pytest.raises(UserError, match="holds another sweep"):
        claim_folder(tmp_path / "out", sweep(tmp_path, rates=(1e-3,)), "model", "float32")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="something else"):
        claim_folder(tmp_path, sweep(tmp_path), "model", "float32")
    with pytest.raises(UserError, match="is not there"), attached(Anatomy(tiny_model("llama")), tmp_path / "none"):
        pass
    with pytest.raises(UserError, match="`target` 'word'"):
        SweepNeurons("run", ((0, 1e-3),), "", target="word")


def gold(prompt: TokenizedPrompt) -> int:
    return prompt.scored[0].token_id


@pytest.mark.slow
@of_neurons
def test_enhanced_neurons_are_the_first_of_all_layers(anatomy: Anatomy, tmp_path: Path) -> None:
    """Against every neuron's change from two plain passes and the lens, sorted in numpy."""
    chosen = sweep(tmp_path)
    subject = Subject(anatomy, PROMPTS, tokenizer=tiny_tokenizer())
    state = chosen.prepare(subject)
    chosen.run(state, chosen.shards(anatomy.shape, PROMPTS)[1])
    scan = SweepNeurons("run", ((0, 1e-2),), str(tmp_path), top=7, target="gold")
    rows = scan.run(scan.prepare(subject), scan.shards(anatomy.shape, PROMPTS)[0]).to_pandas()

    lens, sequences = NeuronLens(anatomy), [prompt.input_ids[: prompt.end + 1] for prompt in PROMPTS]
    target_P = torch.tensor([gold(prompt) for prompt in PROMPTS])
    original = end_activations(anatomy, sequences)
    with attached(anatomy, adapter_folder(str(tmp_path), 0, 1e-2)):
        tuned = end_activations(anatomy, sequences)
    scales = lens.frozen_scales(original)
    changes = []
    for layer in range(3):
        directions = lens.directions(layer)
        sides = [lens.layer(layer, a, scales, target_P, directions).neurons_PK.float() for a in (original, tuned)]
        changes.append(sides[1] - sides[0])
    flat_PN = torch.cat(changes, dim=1).numpy()
    for number, prompt in enumerate(PROMPTS):
        part = rows[rows["prompt_id"] == prompt.prompt.prompt_id].sort_values("rank")
        order = np.argsort(-flat_PN[number], kind="stable")[:7]
        assert list(zip(part["layer"], part["neuron"], strict=True)) == [divmod(int(i), 40) for i in order]
        np.testing.assert_allclose(part["tuned_importance"] - part["importance"], flat_PN[number][order], atol=1e-6)
        coefficients = [float(tuned.coefficients_PK[i // 40][number, i % 40]) for i in order]
        np.testing.assert_allclose(part["tuned_coefficient"], coefficients, rtol=1e-6)


# The command: the bundled model at a small size


@pytest.mark.ray
def test_the_command_sweeps_resumes_and_compares_neurons(tmp_path: Path) -> None:
    """Ray once: two layers, two rates; the trials' rows, the curve by hand, the same command again."""
    data = tmp_path / "data.jsonl"
    write_prompts(load_prompts("signed_two_digit_train", limit=120), data)
    words = [
        "tune", "sweep", "--data", str(data), "--layers", "2,6", "--rates", "1e-2,1e-3", "--steps", "2",
        "--batch", "32", "--test-limit", "64", "--validation", "40", "--case-limit", "8", "--replicas", "1",
        "--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"),
    ]  # fmt: skip
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout)
    assert [row["layer"] for row in told["accuracy"]] == [-1, 2, 6]
    assert {row["band"] for row in told["coefficients"]} == {"1-9", "17-30"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "layer-02-lr-0.001", "layer-02-lr-0.01", "layer-06-lr-0.001", "layer-06-lr-0.01", "sweep.json",
    ]  # fmt: skip

    connection = Store(tmp_path / "store").connect()
    trials = connection.sql("SELECT * FROM lora_sweep_trials").df()
    for _, group in trials.groupby("layer"):
        best = group.sort_values(["validation_accuracy", "validation_loss"], ascending=[False, True]).iloc[0]
        assert group[group["chosen"]]["learning_rate"].tolist() == [best["learning_rate"]]
    rows = connection.sql(
        "SELECT s.*, p.operation, b.correct AS right_before FROM sweep_scan AS s JOIN run_records AS r USING (run_id)"
        " JOIN baseline AS b USING (run_id, prompt_id, position)"
        " JOIN prompts AS p ON p.prompts_fingerprint = r.prompts_fingerprint AND p.prompt_id = s.prompt_id"
    ).df()
    curve = connection.sql("SELECT * FROM lora_sweep_curve").df()
    assert len(curve) == 2 * 5
    for point in curve.itertuples():
        own = rows[(rows["layer"] == point.layer) & (rows["learning_rate"] == point.learning_rate)]
        accuracies, gains, parts, original = [], [], [], []
        for _, part in own.groupby("operation"):
            per = part.groupby("prompt_id")[["correct", "right_before"]].agg(["sum", "count"]).astype(float)
            hits, n, before = per["correct", "sum"], per["correct", "count"], per["right_before", "sum"]
            accuracies.append(hits.sum() / n.sum())
            gains.append((hits.sum() - before.sum()) / n.sum())
            gained = part["correct"] & ~part["right_before"]
            lost = part["right_before"] & ~part["correct"]
            moves = [of.astype(float).groupby(part["prompt_id"]).sum().to_list() for of in (gained, lost)]
            parts.append(part_of(*moves, n.to_list()))
            original.append(share_of(before.to_list(), n.to_list()))
        if point.operation == "all":
            assert point.accuracy == pytest.approx(np.mean(accuracies))
            assert point.gain == pytest.approx(np.mean(gains))
            assert (point.gain_low, point.gain_high) == pytest.approx(score_interval(parts), abs=1e-8)
            assert point.low <= point.accuracy <= point.high
            ends = share_interval(original)
            assert (point.baseline_low, point.baseline_high) == pytest.approx(ends, abs=1e-8)
            told_of = connection.sql("SELECT low, high FROM paper_a_table9 WHERE layer = -1").fetchall()
            assert told_of == [(point.baseline_low, point.baseline_high)]

    neurons = connection.sql("SELECT * FROM sweep_neurons WHERE tuned_layer = 2 AND rank <= 20").df()
    increase = ((neurons["tuned_coefficient"] - neurons["coefficient"]) * np.sign(neurons["coefficient"])).sum()
    found = connection.sql("SELECT increase FROM lora_sweep_coefficients WHERE layer = 2 AND k = 20").fetchall()
    assert found == [(pytest.approx(increase / neurons["coefficient"].abs().sum(), rel=1e-4),)]
    own = neurons[neurons["importance"] >= 0]
    grown = ((own["tuned_coefficient"] - own["coefficient"]) * np.sign(own["coefficient"])).sum()
    parts = "SELECT opposing, increase_supporting FROM lora_sweep_coefficients WHERE layer = 2 AND k = 20"
    opposing, supporting = connection.sql(parts).fetchall()[0]
    assert opposing == pytest.approx(1 - len(own) / len(neurons))
    assert supporting == pytest.approx(grown / own["coefficient"].abs().sum(), rel=1e-4)
    band = connection.sql("SELECT layers, top20 FROM paper_a_table10 WHERE band = '1-9'").fetchall()
    assert band == [(1, pytest.approx(found[0][0]))]

    curves = LoraSweep.figure(Results(Store(tmp_path / "store"), told["sweep"]["run_id"]), NothingToShow())
    assert curves is not None
    points = table_of(curves, "gain").query("operation == 'all'")[["layer", "accuracy", "low", "high"]]
    every = curve[curve["operation"] == "all"].sort_values("layer")
    np.testing.assert_allclose(points, every[["layer", "accuracy", "low", "high"]], rtol=1e-3)

    assert write_report(Store(tmp_path / "store"), tmp_path / "report").page.is_file()

    again = CliRunner().invoke(main, words)
    assert again.exit_code == 0, again.output
    assert again.stdout.count("nothing left to compute") == 2
    assert missing_adapters(str(tmp_path / "out"), [(2, 1e-2), (3, 1e-2)]) == [tmp_path / "out" / "layer-03-lr-0.01"]
