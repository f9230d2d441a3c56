"""Models on three levels; here a model is a name and a size, and moving it is noted."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.models.alignment import BOUNDARY
from mathinterp.models.card_memory import QUANTISED_BYTES, weights_of
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.handle import Model
from mathinterp.models.sources import BUNDLED_FOLDER
from mathinterp.service import shelf as shelves
from mathinterp.service.shelf import CARD, DISK, MEMORY, Limits, Resolving, Shelf, expected_bytes
from tests.tiny import tiny_model, tiny_tokenizer


@dataclass
class Fake:
    fingerprint: str
    dtype: str = "float32"
    load_in: str | None = None

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(self.fingerprint, load_in=self.load_in)

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
        weights = SimpleNamespace(numel=lambda: 4, element_size=lambda: 1, data=f"read {resolved.label}")
        model = SimpleNamespace(
            parameters=lambda: [weights], named_parameters=lambda: [("weights", weights)], buffers=lambda: []
        )
        return SimpleNamespace(name=resolved.label, model=model)

    def put_back(loaded: Any, kept: dict[str, str]) -> None:
        loaded.model.parameters()[0].data = kept["weights"]

    monkeypatch.setattr(shelves, "put_back", put_back)

    def moves(loaded: Any, device: str) -> Any:
        (weights,) = loaded.model.parameters()
        copied = device != "cpu" or not weights.data.startswith("in memory")
        done.append(f"{loaded.name} to {device}" if copied else f"{loaded.name} is in memory")
        if copied:
            weights.data = f"in memory {len(done)}" if device == "cpu" else f"on the card {len(done)}"
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


def test_a_model_that_came_from_memory_goes_back_without_being_copied(made):
    shelf = made.shelf(card=4, memory=8)
    for name in "ababa":
        shelf.take(Fake(name))
    assert levels(shelf) == {"a": CARD, "b": MEMORY}
    assert [line for line in made.done if "leaves" not in line] == [
        "load a", "a to cpu", "load b", "b to cpu", "a to cuda", "a is in memory", "b to cuda", "b is in memory",
        "a to cuda",
    ]  # fmt: skip


def test_copies_in_memory_go_before_models_do(made):
    shelf = made.shelf(card=4, memory=8)
    for name in "abac":  # a came from memory and left its copy there; c is read, and a goes down
        shelf.take(Fake(name))
    assert levels(shelf) == {"c": CARD, "a": MEMORY, "b": MEMORY}
    shelf.take(Fake("a"))  # c goes down; a's copy would be a third one
    assert levels(shelf) == {"a": CARD, "c": MEMORY, "b": MEMORY}
    assert not any(held.copy for held in shelf._held.values())


@pytest.mark.parametrize(("further", "last"), [("d", ["a leaves", "a is in memory"]), ("ad", ["b leaves", "b to cpu"])])
def test_what_goes_down_takes_the_room_of_copies(made, further, last):
    shelf = made.shelf(card=8, memory=8)
    for name in "abcab":
        shelf.take(Fake(name))
    assert levels(shelf) == {"b": CARD, "a": CARD, "c": MEMORY}
    assert [held.label for held in shelf._held.values() if held.copy] == ["a"], "b's would be a third one in memory"
    for name in further:
        shelf.take(Fake(name))
    assert made.done[-3:] == [*last, "load d"]
    assert sorted(levels(shelf).values()) == [CARD, CARD, MEMORY, MEMORY]
    assert levels(shelf)["c"] == MEMORY
    assert not any(held.copy for held in shelf._held.values())


def test_where_a_card_is_full_all_other_models_leave_it_and_the_one_asked_for_is_brought_again(made, caplog):
    """Others may use the card, too, and what is prepared takes room."""
    shelf = made.shelf(card=100, memory=100)
    room, moves, loads = 8, shelf._move, shelf._load

    def full(work: Any) -> Any:
        def done(given: Any, *where: str) -> Any:
            if where != ("cpu",) and shelf.ready_bytes() + 4 > room:
                given.model and setattr(given.model.parameters()[0], "data", "a part of it was moved")
                raise torch.cuda.OutOfMemoryError
            return work(given, *where)

        return done

    shelf._load, shelf._move = full(loads), full(moves)
    for model in (Fake("a"), Fake("b"), Fake("c")):
        model.model = None  # type: ignore[attr-defined]
        shelf.take(model)
    assert levels(shelf) == {"c": CARD, "b": MEMORY, "a": MEMORY}
    assert "c finds no room on cuda: all other models leave it" in caplog.text
    weights = shelf._held["b", "float32"].loaded.model.parameters()[0]
    before, room = weights.data, 4
    shelf.take(Fake("b"))
    assert levels(shelf) == {"b": CARD, "c": MEMORY, "a": MEMORY}
    assert shelf._held["b", "float32"].copy == {"weights": before}
    room = 3
    with pytest.raises(torch.cuda.OutOfMemoryError):
        shelf.take(Fake("a"))
    assert levels(shelf) == {"b": MEMORY, "c": MEMORY}


def test_a_model_that_was_left_with_more_weights_is_copied(made):
    shelf = made.shelf(card=4, memory=8)
    for name in "aba":
        shelf.take(Fake(name))
    model = shelf._held["a", "float32"].loaded.model
    named = model.named_parameters()
    model.named_parameters = lambda: [*named, ("extra", named[0][1])]
    shelf.take(Fake("b"))
    assert made.done[-3:] == ["a leaves", "a to cpu", "b to cuda"]


def test_copies_in_memory_are_told_of(made):
    shelf = made.shelf(card=4, memory=8)
    for name in "aba":
        shelf.take(Fake(name))
    assert [(row["label"], row["level"], row["in_memory"]) for row in shelf.report()] == [
        ("a", CARD, 4), ("b", MEMORY, 4),
    ]  # fmt: skip


def test_a_model_larger_than_the_memory_limit_goes_back_to_its_files(made):
    shelf = made.shelf(card=4, memory=3)
    for name in "aba":
        shelf.take(Fake(name))
    assert levels(shelf) == {"a": CARD, "b": DISK}
    assert made.done.count("load a") == 2


def test_a_model_for_which_the_host_has_no_memory_goes_back_to_its_files(made, caplog):
    """Others may use the host, too. A part of it may have been moved, so it must not stay either."""
    shelf = made.shelf(card=4, memory=8)
    moves = shelf._move

    def full(loaded: Any, device: str) -> Any:
        if device == "cpu":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return moves(loaded, device)

    shelf._move = full
    shelf.take(Fake("a"))
    shelf.take(Fake("b"))
    assert levels(shelf) == {"b": CARD, "a": DISK}
    assert "a could not go to host memory and goes back to its files" in caplog.text
    shelf._move = moves
    shelf.take(Fake("a"))
    assert (levels(shelf), made.done.count("load a")) == ({"a": CARD, "b": MEMORY}, 2)


def test_a_quantised_model_goes_from_the_card_to_its_files(made, monkeypatch):
    """Its scales would not move with it."""
    monkeypatch.setattr(shelves, "layer_parameters", lambda shape: 1)
    whole, quantised = Fake("a"), Fake("b", load_in="8bit")
    whole.shape = quantised.shape = SimpleNamespace(n_layers=1)
    shelf = made.shelf(card=4, memory=8)
    for model in (whole, quantised, whole, quantised):
        shelf.take(model)
    assert levels(shelf) == {"b": CARD, "a": MEMORY}
    assert made.done == [
        "load a", "a leaves", "a to cpu", "load b", "b leaves", "a to cuda", "a leaves", "a is in memory", "load b",
    ]  # fmt: skip


def test_models_are_moved_by_several_threads_and_computed_with_as_few_as_before(monkeypatch):
    model, seen, before = tiny_model("llama"), [], torch.get_num_threads()
    loaded = SimpleNamespace(model=model, tokenizer=None, fingerprint="", dtype="float64")
    monkeypatch.setattr(shelves, "machine_cores", lambda: 3)
    monkeypatch.setattr(shelves, "bring", lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(1)
    try:
        shelves.moved(loaded, "cpu")
        assert (seen, torch.get_num_threads()) == ([3], 1)
    finally:
        torch.set_num_threads(before)


def test_sizes_of_quantised_models_are_known_before_they_are_loaded():
    def expected(load_in: str | None) -> int:
        return expected_bytes(resolve_again(ModelSpec("random:llama-2-7b", dtype="bfloat16"), load_in))

    def resolve_again(spec: ModelSpec, load_in: str | None) -> Any:
        return replace(resolve(spec), spec=replace(spec, load_in=load_in))

    whole = weights_of(resolve(ModelSpec("random:llama-2-7b")).config, 2).rest
    assert [expected(load_in) for load_in in (None, "8bit", "4bit")] == [
        pytest.approx(6_476_005_376 * each + whole, rel=1e-3) for each in (2, *QUANTISED_BYTES.values())
    ]


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
    assert not [line for line in made.done if " to " in line]


def test_the_same_model_in_another_dtype_is_another_one(made):
    shelf = made.shelf(card=8, memory=8)
    first = shelf.take(Fake("a"))
    assert shelf.take(Fake("a", "bfloat16")) is not first
    assert shelf.take(Fake("a")) is first


def saved(folder: Path) -> Path:
    """A tiny model, whose weights begin at a boundary where they are mapped from their file."""
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    size, content = int.from_bytes(file.read_bytes()[:8], "little"), file.read_bytes()[8:]
    header = content[:size] + b" " * (-(8 + size) % BOUNDARY)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[size:])
    return folder


def overwrite(folder: Path) -> None:
    """Put other numbers into the file of the weights, in its place."""
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x3f" * 64)


def test_a_model_in_memory_does_not_change_with_its_files(tmp_path):
    resolved = Resolving()(ModelSpec(str(saved(tmp_path))), "cpu")
    shelf = Shelf("cpu", Limits(0, 10**9))
    model: Any = shelf.take(resolved).model
    before = {name: each.clone() for name, each in model.state_dict().items()}
    overwrite(tmp_path)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert shelf.take(resolved).model is model


def test_files_that_changed_after_the_question_are_not_read_as_its_model(tmp_path):
    resolved = Resolving()(ModelSpec(str(saved(tmp_path))), "cpu")
    shelf = Shelf("cpu", Limits(0, 1))
    shelf.take(resolved)
    shelf.take(Resolving()(ModelSpec("random:llama-tiny"), "cpu"))
    assert levels(shelf)[resolved.label] == DISK
    overwrite(tmp_path)
    with pytest.raises(UserError, match="have changed since it was looked at; ask for it again"):
        shelf.take(resolved)
    assert resolved.label not in levels(shelf)


def test_nor_are_they_in_a_notebook(tmp_path):
    model = Model(ModelSpec(str(saved(tmp_path))), "cpu")
    assert model.fingerprint
    overwrite(tmp_path)
    with pytest.raises(UserError, match="have changed since it was looked at"), model.lent():
        pass


def test_a_name_is_looked_for_again_where_another_model_is_wanted():
    """A model of the hub has a new snapshot by now; the files of the old one are there still."""
    found = [SimpleNamespace(fingerprint=each, source=SimpleNamespace(path=None)) for each in ("old", "new")]
    resolving, spec = Resolving(lambda spec, device: found.pop(0)), ModelSpec("owner/name")  # type: ignore[arg-type, return-value]
    assert resolving(spec, "cpu", "old").fingerprint == "old"
    assert resolving(spec, "cpu", "old").fingerprint == "old"
    assert resolving(spec, "cpu", "new").fingerprint == "new"
    assert resolving(spec, "cpu").fingerprint == "new"


def test_models_that_were_asked_for_long_ago_are_not_remembered():
    """Each has a tokenizer of megabytes, and a sweep asks for hundreds of adapters."""
    asked: list[str] = []

    def resolve(spec: ModelSpec, device: str) -> Any:
        asked.append(spec.name)
        return SimpleNamespace(fingerprint=spec.name, source=SimpleNamespace(path=None))

    resolving = Resolving(resolve)
    for number in range(100):
        resolving(ModelSpec("owner/first"), "cpu")
        resolving(ModelSpec(f"owner/{number}"), "cpu")
    assert asked.count("owner/first") == 1
    assert len(resolving._known) == 16
    resolving(ModelSpec("owner/99"), "cpu")
    resolving(ModelSpec("owner/0"), "cpu")
    assert (asked.count("owner/99"), asked.count("owner/0")) == (1, 2)


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
