"""The second model of the golden runs: tiny, random, with a tokenizer that reads the gender sentences."""

from pathlib import Path

from mathinterp.models.catalog import ModelSpec
from tests.gender_reader import save_reader


def word_model(folder: Path) -> ModelSpec:
    """Words that the tiny vocabulary lacks take the place of its filler entries."""
    save_reader(folder)
    return ModelSpec(str(folder), dtype="float64")
