"""Models on three levels; here a model is a name and a size, and moving it is noted."""

import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mathinterp.models.catalog import ModelSpec
from mathinterp.models.sources import BUNDLED_FOLDER
from mathinterp.service import shelf as shelves
from mathinterp.service.shelf import CARD, DISK, MEMORY, Limits, Resolving, Shelf, key_of


@dataclass
class Fake:
    fingerprint: str
    dtype: str = "float32"

    @property
    def label(self) -> str:
        return self.fingerprint

    shape = None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A shelf of a process with a card, models of 4 bytes each, and what was done to them."""
    monkeypatch.setattr(shelves, "parameters", lambda shape: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    done: list[str] = []

    def loads(resolved: Fake, device: str) -> Any:
        done.append(f"load {resolved.label}")
        weights = SimpleNamespace(numel=lambda: 4, element_size=lambda: 1)
        return SimpleNamespace(
            name=resolved.label, model=SimpleNamespace(parameters=lambda: [weights], buffers=lambda: [])
        )

    def moves(loaded: Any, device: str) -> Any:
        done.append(f"{loaded.name} to {device}")
        return loaded

    def shelf(card: int, memory: int, device: str = "cuda") -> Shelf:
        left = lambda key: done.append(f"{key[0]} leaves")  # noqa: E731
        return Shelf(device, Limits(card, memory), left, loads, moves)

    return SimpleNamespace(shelf=shelf, done=done)


def levels(shelf: Shelf) -> dict[str, str]:
    return {row["label"]: row["level"] for row in shelf.report()}


def test_the_model_used_longest_ago_goes_down_a_level(made):
    shelf = made.shelf(card=8, memory=4)
    for name in "abacd":
        shelf.take(Fake(name))
    # b left the card first, as a was used after it; then a, for which b left the memory
    assert levels(shelf) == {"d": CARD, "c": CARD, "a": MEMORY, "b": DISK}
    assert made.done == [
        "load a", "load b", "b leaves", "b to cpu", "load c", "a leaves", "a to cpu", "load d",
    ]  # fmt: skip


def test_a_model_comes_back_from_memory_without_being_read_again(made):
    shelf = made.shelf(card=4, memory=4)
    for name in "aba":
        shelf.take(Fake(name))
    assert levels(shelf) == {"a": CARD, "b": MEMORY}
    assert made.done[-3:] == ["b leaves", "b to cpu", "a to cuda"]
    assert made.done.count("load a") == 1


def test_a_model_larger_than_the_memory_limit_goes_back_to_its_files(made):
    shelf = made.shelf(card=4, memory=3)
    for name in "aba":
        shelf.take(Fake(name))
    assert levels(shelf) == {"a": CARD, "b": DISK}
    assert made.done.count("load a") == 2


def test_one_model_always_has_room(made):
    shelf = made.shelf(card=1, memory=0)
    shelf.take(Fake("a"))
    shelf.take(Fake("b"))
    assert levels(shelf) == {"b": CARD, "a": DISK}


def test_a_process_without_a_card_has_two_levels(made):
    shelf = made.shelf(card=0, memory=8, device="cpu")
    for name in "abc":
        shelf.take(Fake(name))
    assert levels(shelf) == {"c": MEMORY, "b": MEMORY, "a": DISK}
    assert shelf.level(key_of(Fake("b"))) == MEMORY  # type: ignore[arg-type]
    assert not [line for line in made.done if " to " in line]


def test_the_same_model_in_another_dtype_is_another_one(made):
    shelf = made.shelf(card=8, memory=8)
    first = shelf.take(Fake("a"))
    assert shelf.take(Fake("a", "bfloat16")) is not first
    assert shelf.take(Fake("a")) is first


@pytest.mark.slow
def test_files_that_changed_are_looked_at_again(tmp_path):
    for file in BUNDLED_FOLDER.iterdir():
        shutil.copy(file, tmp_path)
    resolving = Resolving()
    first = resolving(ModelSpec(str(tmp_path)), "cpu")
    assert resolving(ModelSpec(str(tmp_path)), "cpu") is first
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert resolving(ModelSpec(str(tmp_path)), "cpu").fingerprint != first.fingerprint
