"""The weights in the package keep what their card promises."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.accuracy import accuracy_table
from recipes.bundled import build_tokenizer, bundled_config
from recipes.examples import CELLS

FOLDER = Path(str(resources.files("mathinterp.models") / "bundled"))
MOST_BYTES = 12_000_000
LEAST_ACCURACY = {1: 1.0, 2: 0.99, 3: 0.95}  # digits -> share of whole answers right, all but two-digit products
PROMPTS = 200


@pytest.fixture(scope="module")
def table():
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    rows = accuracy_table(model, AutoTokenizer.from_pretrained(FOLDER), prompts_per_cell=PROMPTS, seed=17)
    return {(row.operation, row.digits, row.form): row for row in rows}


def test_the_folder_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MOST_BYTES


def test_the_tokenizer_is_the_one_the_recipe_builds():
    shipped = AutoTokenizer.from_pretrained(FOLDER)
    assert shipped.backend_tokenizer.to_str() == build_tokenizer().backend_tokenizer.to_str()


@pytest.mark.bundled
def test_the_shape_is_the_one_the_recipe_builds():
    shipped = AutoModelForCausalLM.from_pretrained(FOLDER)
    wanted = bundled_config()
    assert shipped.dtype == torch.bfloat16
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(shipped.config, name) == getattr(wanted, name)


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if cell.form == "digits" and (cell.operation, cell.digits) != ("mul", 2)],
    ids=lambda cell: f"{cell.operation}-{cell.digits}",
)
@pytest.mark.bundled
def test_accuracy_on_operand_pairs_never_trained_on(table, cell):
    row = table[cell.operation, cell.digits, cell.form]
    assert row.prompts == PROMPTS
    assert row.exact_match >= LEAST_ACCURACY[cell.digits]


@pytest.mark.parametrize("operation", ["add", "sub", "div"])
@pytest.mark.bundled
def test_accuracy_on_two_digit_number_words(table, operation):
    assert table[operation, 2, "words"].exact_match >= 0.99


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div"])
@pytest.mark.bundled
def test_a_neutral_word_is_answered_unknown(table, operation):
    assert table[operation, 2, "neutral"].exact_match >= 0.99
