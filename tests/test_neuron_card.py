"""A neuron's card: tokens against the lens itself, ranks and means by hand, the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.engine.lens.lens import Lens
from mathinterp.engine.lens.neurons import NeuronLens
from mathinterp.engine.lens.top_tokens import top_tokens, value_directions
from mathinterp.errors import UserError
from mathinterp.experiments.neurons.card import NeuronCard, card_of, neuron_card, written_tokens
from mathinterp.experiments.neurons.stored import neuron_run
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec
from mathinterp.models.units import Neuron
from mathinterp.prompts import load_prompts
from tests.neuron_store import Scanned, stored_scan
from tests.neuron_twin import gain
from tests.tiny import of_neurons

NEURONS = [Neuron(0, 3), Neuron(2, 39)]


# ---- tokens ----


@of_neurons
def test_directions_are_those_of_the_importances_and_what_the_lens_gains(anatomy: Anatomy) -> None:
    found_NV = value_directions(anatomy, NEURONS)
    lens, neurons = Lens(anatomy), NeuronLens(anatomy)
    torch.manual_seed(0)
    stream_1D, scale = torch.randn(1, anatomy.shape.d_model, dtype=torch.float64), torch.tensor([1.75]).double()
    for (layer, neuron), direction_V in zip(NEURONS, found_NV, strict=True):
        torch.testing.assert_close(direction_V, neurons.directions(layer)[neuron], rtol=1e-11, atol=1e-12)
        value_D = anatomy.value_vectors(layer)[neuron]
        if (norm := anatomy.mlp_post_norm(layer)) is not None:
            value_D = value_D * gain(anatomy, norm)
        gained = lens.logits(stream_1D - 2 * value_D, scale) - lens.logits(stream_1D, scale)
        torch.testing.assert_close(-2 * direction_V / 1.75, gained[0], rtol=1e-9, atol=1e-10)


def test_top_tokens_follow_the_sign_of_the_coefficient() -> None:
    direction_V = torch.tensor([0.5, -3.0, 2.0, 0.0])
    assert top_tokens(direction_V, 2.0, 2) == [(2, 4.0), (0, 1.0)]
    assert top_tokens(direction_V, -1.0, 2) == [(1, 3.0), (3, 0.0)]
    assert len(top_tokens(direction_V, 1.0, 10)) == 4


# ---- the card, from a stored run of a tiny model ----


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Scanned:
    return stored_scan(tmp_path_factory.mktemp("card"))


def made_card(scanned: Scanned, neuron: tuple[int, int]) -> NeuronCard:
    run = neuron_run(scanned.store, scanned.run_id)
    return card_of(scanned.store, run, Neuron(*neuron), scanned.loaded, "tiny", 6)


@pytest.mark.slow
def test_card_has_the_neurons_means_ranks_prompts_and_tokens(scanned: Scanned) -> None:
    summary = scanned.store.rows("SELECT * FROM neuron_summary ORDER BY change DESC, layer, neuron")
    first = next(row for row in summary if row["operation"] == "mul")  # the neuron that ranks first for products
    card = made_card(scanned, (first["layer"], first["neuron"]))
    assert (card.neuron, card.against) == (f"{first['layer']}.{first['neuron']}", "head:0.1")
    assert [row["operation"] for row in card.operations] == ["all", "add", "div", "mul", "sub"]
    for row in card.operations:
        same = [other for other in summary if other["operation"] == row["operation"]]
        place = next(i for i, other in enumerate(same) if f"{other['layer']}.{other['neuron']}" == card.neuron)
        assert (row["rank"], row["neurons"]) == (place + 1, 2 * 40)
        for column in ("coefficient", "coefficient_std", "importance", "change", "change_std", "n"):
            assert row[column] == same[place][column]
        assert row["in_top"] == pytest.approx(same[place]["in_top"])
    mul = card.operations[3]
    assert mul["rank"] == 1
    assert f"ranks highest for mul: 1 of 80, among the first of {100 * mul['in_top']:.0f} %" in card.verdict

    ranks = [row["rank"] for row in card.prompts]
    assert 1 <= len(ranks) <= 5
    assert ranks == sorted(ranks)
    texts = {prompt.prompt_id: prompt.text for prompt in load_prompts("two_digit", limit=12)}
    assert all(texts[row["prompt_id"]] == row["text"] for row in card.prompts)

    model = scanned.loaded
    value_D = model.anatomy.value_vectors(first["layer"])[first["neuron"]]
    logits = (model.model.lm_head.weight @ (model.anatomy.final_norm.weight * value_D)).numpy()
    vocabulary = model.tokenizer.convert_ids_to_tokens(list(range(len(logits))))
    order = np.argsort(-logits)
    assert [token["token"] for token in card.tokens["v"]] == [vocabulary[i] for i in order[:6]]
    assert [token["token"] for token in card.tokens["-v"]] == [vocabulary[i] for i in order[::-1][:6]]
    sign = "v" if mul["coefficient"] > 0 else "-v"
    assert [token["token"] for token in card.tokens["c v, mul"]] == [token["token"] for token in card.tokens[sign]]
    values = [token["value"] for token in card.tokens["c v, mul"]]
    assert values == pytest.approx([abs(mul["coefficient"]) * token["value"] for token in card.tokens[sign]], rel=1e-5)


def test_tokens_beside_the_first_neurons_of_a_scan(scanned: Scanned) -> None:
    loaded = scanned.loaded
    rows = [
        {"operation": "add", "neuron": "2.5", "coefficient": 1.5},
        {"operation": "sub", "neuron": "2.5", "coefficient": -0.5},
    ]
    add, sub = written_tokens(rows, loaded.anatomy, loaded.tokenizer, 3)
    tokens = made_card(scanned, (2, 5)).tokens
    assert add["c v raises"] == sub["c v lowers"] == " ".join(repr(token["token"]) for token in tokens["v"][:3])
    assert add["c v lowers"] == sub["c v raises"] == " ".join(repr(token["token"]) for token in tokens["-v"][:3])
    assert (sub["operation"], sub["neuron"], sub["coefficient"]) == ("sub", "2.5", -0.5)


@pytest.mark.slow
def test_mistakes_of_the_card(scanned: Scanned) -> None:
    for neuron, message in (
        ("1.40", r"neuron 1\.40 does not exist: each layer has neurons 0 to 39"),
        ((3, 0), "layer 3 does not exist"),
        ("0.3", "did not look at layer 0"),
    ):
        with pytest.raises(UserError, match=message):
            neuron_card(neuron, ModelSpec(str(scanned.folder)), scanned.store, scanned.run_id)


# ---- the commands ----


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


@pytest.mark.slow
def test_command_finds_the_models_only_scan(scanned: Scanned) -> None:
    folder, store, run_id = scanned.folder, scanned.store, scanned.run_id
    result = command("neuron", "2.5", "--model", folder, "--store", store.url, "--tokens", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    card = made_card(scanned, (2, 5))
    assert (found["run_id"], found["neuron"], found["against"]) == (run_id, "2.5", "head:0.1")
    assert found["operations"] == card.operations
    assert [token["token"] for token in found["tokens"]["-v"]] == [token["token"] for token in card.tokens["-v"][:4]]
    shown = command("neuron", "2.5", "--model", folder, "--store", store.url, "--from", run_id)
    assert shown.exit_code == 0, shown.output
    assert card.verdict.split(".")[0] in shown.stdout


@pytest.mark.slow
def test_scan_neurons_shows_what_its_first_neurons_write(scanned: Scanned) -> None:
    """The stored run is found again: nothing is computed, no Ray starts."""
    folder, store, run_id = scanned.folder, scanned.store, scanned.run_id
    words = ["--model", folder, "--store", store.url, "--limit", "12", "--against", "head:0.1", "--keep", "topk:20"]
    result = command("scan", "neurons", *words, "--layers", "1,2", "--tokens", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["run_id"], found["shards_done"]) == (run_id, 0)
    assert [row["neuron"] for row in found["tokens"]] == [row["neuron"] for row in found["top"]]
    layer, neuron = (int(part) for part in found["top"][0]["neuron"].split("."))
    raised = made_card(scanned, (layer, neuron)).tokens["c v, all"][0]["token"]
    assert found["tokens"][0]["c v raises"].startswith(repr(raised))


@pytest.mark.slow
def test_mistakes_are_one_line(scanned: Scanned, tmp_path: Path) -> None:
    folder, store, run_id = scanned.folder, scanned.store, scanned.run_id
    for words, message in (
        (["2", "--store", store.url], "neuron '2' cannot be read; write layer.neuron, like 28.3696"),
        (["2.5,2.6", "--store", store.url], "neuron '2.5,2.6' names 2; a card is of one"),
        (["2_40", "--store", store.url, "--model", folder], "neuron 2.40 does not exist"),
        (["2.5", "--store", tmp_path], "has no finished neuron scan of bundled; run 'mathinterp scan neurons' first"),
        (["2.5", "--store", store.url, "--from", run_id], "ranked the neurons of tiny, not of bundled"),
        (["2.40", "--store", store.url, "--model", folder], "neuron 2.40 does not exist"),
    ):
        result = command("neuron", *words)
        assert result.exit_code == 2, result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert message in result.stderr
