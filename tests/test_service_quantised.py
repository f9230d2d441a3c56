"""Quantised models in a service: what is asked and refused, and rows before and after the model left its card.

The stand-in for bitsandbytes' layers is that of test_quantised.py; on a GPU the layers are bitsandbytes' own.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.paths import Paths
from mathinterp.models import catalog, quantised
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel, resolve
from mathinterp.models.handle import Model
from mathinterp.models.split import layers_of
from mathinterp.service import shelf
from mathinterp.service.host import Host, HostSettings, spec_of
from mathinterp.service.place import OnService, spec_for
from mathinterp.service.shelf import CARD, DISK, MEMORY
from tests.test_quantised import Eighths
from tests.test_service_cards import Told, prepare, rows, without_service, work_of
from tests.tiny import save_tiny
from tests.two_card_case import NO_ROOM, OTHER, built, stand_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that can be quantised, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "tiny", "llama")


def asking(spec: ModelSpec, scan: Experiment | None = None, **about: Any) -> OnService:
    return OnService(Told(**about), Model(spec), scan=scan)  # type: ignore[arg-type]


def loaded(wanted: ResolvedModel, *_: Any) -> LoadedModel:
    """The model, its layers' last matrices quantised where that is asked for."""
    made = built(replace(wanted, spec=replace(wanted.spec, load_in=None)), "cpu")
    if wanted.spec.load_in is None:
        return made
    for layer in layers_of(made.model):
        layer.self_attn.o_proj = Eighths(layer.self_attn.o_proj)
        layer.mlp.down_proj = Eighths(layer.mlp.down_proj)
    return replace(made, anatomy=Anatomy(made.model))


@pytest.fixture(params=["a stand-in", pytest.param("a GPU", marks=pytest.mark.gpu)])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "a GPU":
        if not torch.cuda.is_available() or find_spec("bitsandbytes") is None:
            pytest.skip("needs a CUDA device and bitsandbytes")
        yield "cuda"
        return
    stand_in(monkeypatch)
    monkeypatch.setattr(quantised, "find_spec", lambda name: object())
    monkeypatch.setattr(catalog, "load", loaded)
    monkeypatch.setattr(shelf, "moved", lambda given, *_: given)
    yield "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("load_in", quantised.LOAD_IN)
def test_rows_of_a_quantised_model_are_the_same_after_another_one_took_its_room(
    load_in: str, card: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of a run without the service; the model left its card for its files, and was quantised again."""
    loads: list[str] = []
    real = catalog.load

    def counted(wanted: Any, *given: Any) -> LoadedModel:
        loads.append(wanted.label)
        return real(wanted, *given)

    work = work_of(tmp_path, ModelSpec(str(folder), dtype="bfloat16", load_in=load_in))
    _, expected = without_service(work, cards=1)
    monkeypatch.setattr(catalog, "load", counted)
    host = Host(HostSettings("cuda", NO_ROOM, cores=1))
    host.load()
    prepare(host, "question", work)
    held = host._shelf._held[work.model.fingerprint, "bfloat16"]
    assert held.loaded is not None
    assert (held.loaded.anatomy.quantised, held.loaded.anatomy.device.type) == (True, card)
    assert rows(host, "question", work) == expected

    other = prepare(host, "other", work_of(tmp_path, OTHER))
    assert [row["level"] for row in other.there.held] == [CARD, DISK]
    assert held.loaded is None
    assert host._sessions["question"].replica is None

    assert rows(host, "question", work) == expected
    assert loads == [f"tiny ({load_in})", OTHER.label, f"tiny ({load_in})"]
    assert [row["level"] for row in host._shelf.report()] == [CARD, MEMORY]


def test_how_a_model_is_quantised_travels_with_its_name(folder: Path) -> None:
    spec = ModelSpec(str(folder), dtype="bfloat16", load_in="8bit")
    described = asking(spec).described()
    assert spec_of(spec_for(Model(spec), described)) == spec
    assert spec_of({"name": "bundled"}).load_in is None
    with pytest.raises(UserError, match="its spec names no model"):
        spec_of({"name": "bundled", "load_in": 8})


def test_who_asks_needs_no_bitsandbytes_and_names_the_model_that_the_service_finds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(str(folder), dtype="bfloat16", load_in="4bit")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    asked = [asking(spec).described() for _ in range(2)]  # the second time without looking at its files again
    monkeypatch.setattr(quantised, "find_spec", lambda name: object())
    there = resolve(spec, "cuda")
    for found in asked:
        assert (found.fingerprint, found.label, found.spec) == (there.fingerprint, "tiny (4bit)", spec)


@pytest.mark.parametrize("scan", [Neurons(), Paths()], ids=lambda scan: scan.name)
def test_what_reads_weights_is_refused_before_anything_is_loaded(
    scan: Experiment, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever asks, and by a service whose client did not."""
    monkeypatch.setattr(quantised, "find_spec", lambda name: object())
    monkeypatch.setattr(catalog, "load", lambda *_: pytest.fail("it was loaded"))
    spec = ModelSpec(str(folder), dtype="bfloat16", load_in="8bit")
    asking(spec, Heads()).described()
    work = replace(work_of(tmp_path, spec), scan=scan)
    host = Host(HostSettings("cuda", NO_ROOM, cores=1))
    for ask in (asking(spec, scan).described, lambda: prepare(host, "question", work)):
        with pytest.raises(UserError, match=r"`load_in` 8bit: .* reads or trains weights as numbers") as error:
            ask()
        assert "\n" not in str(error.value)
    assert (host._sessions, host._shelf.report()) == ({}, [])


@pytest.mark.parametrize(
    ("spec", "device", "said"),
    [
        (ModelSpec(load_in="8bit"), "cpu", "`load_in` 8bit needs a GPU, and this model would run on a CPU"),
        (ModelSpec(load_in="2bit"), "cuda", "`load_in` '2bit' is not known"),
        (ModelSpec(OTHER.name, load_in="4bit"), "cuda", "random weights cannot be quantised"),
    ],
)
def test_what_cannot_be_quantised_is_one_line(spec: ModelSpec, device: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        asking(spec, device=device).described()
