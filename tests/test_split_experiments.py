"""Every experiment on a model whose layers lie on two cards: the rows of one card, to rounding.

Without a GPU the cards are those of two_cards.py, where any operation that mixes two fails, and rows are the golden
ones. With one, layers lie on it and on the CPU; with two, on both; rows are those of the first GPU alone.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mathinterp.experiments.base import Experiment
from mathinterp.experiments.chain import stages
from mathinterp.experiments.concepts import rows as concept_rows
from mathinterp.experiments.registry import experiments
from mathinterp.models import catalog
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel
from mathinterp.models.split import layers_of, spread
from tests.golden.models import word_model
from tests.golden.runs import FOLDER, GoldenStore, run_all
from tests.two_cards import CARDS, InThisThread, on_cards

pytestmark = [pytest.mark.bundled, pytest.mark.slow]

CHOSEN = {  # of the golden runs, one and more of each experiment
    "heads mean", "head_pairs", "mlps zero", "paths heads", "paths none", "paths 6.3.v", "activation_patching",
    "attribution relp", "mask", "operands", "circuit", "attention", "probe written", "knockout", "iterative",
    "neurons head", "maskkeep", "graph prompt", "concepts", "concept zeroing", "chain", "gender neurons", "edit",
}  # fmt: skip
ALIKE, UNLIKE = 1e-6, 2e-5  # float32 on devices of one kind, and on a GPU and a CPU, which add in other orders
Place = Callable[[LoadedModel, ExitStack], Anatomy]  # where a loaded model's layers are brought


class SplitStore(GoldenStore):
    """The chosen golden runs, on a model that is brought to other places."""

    def __init__(self, folder: Path, place: Place):
        super().__init__(folder)
        self.place, self.done = place, list[str]()
        run_all(self, word_model(folder / "model"))

    def run(self, name: str, scan: Experiment, *given: Any) -> str:
        self.ids[name] = "0" * 12  # of a run that is left out
        if name not in CHOSEN:
            return self.ids[name]
        assert scan.runs_split
        self.done.append(name)
        with ExitStack() as until, pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalog, "load", self._loader(until, catalog.load))
            return super().run(name, scan, *given)

    def _loader(self, until: ExitStack, load: Callable[..., LoadedModel]) -> Callable[..., LoadedModel]:
        def placed(*given: Any) -> LoadedModel:
            loaded = load(*given)
            anatomy = self.place(loaded, until)
            return LoadedModel(loaded.model, loaded.tokenizer, anatomy, loaded.fingerprint, loaded.dtype)

        return placed


def test_no_experiment_is_left_out() -> None:
    """Those that say that they run so are here, or in test_split_evaluation.py; training says that it does not."""
    whole = {name for name, experiment in experiments().items() if not experiment.runs_split}
    assert whole == {"lora_sweep", "sweep_neurons", "prune"}
    assert len(CHOSEN) >= len(set(experiments()) - whole - {"evaluate"})


def test_rows_on_two_cards_are_the_golden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concept_rows, "ThreadPoolExecutor", InThisThread)
    monkeypatch.setitem(stages.READ_TOKENS, CARDS[0].type, stages.READ_TOKENS["cpu"])

    def place(loaded: LoadedModel, until: ExitStack) -> Anatomy:
        anatomy = Anatomy(until.enter_context(on_cards(loaded.model)))
        assert anatomy.cards == CARDS
        return anatomy

    split = SplitStore(tmp_path, place)
    assert set(split.done) == CHOSEN
    for name in split.done:
        stored = {file.stem.split("-")[1]: file for file in FOLDER.glob(f"{name.replace(' ', '_')}-*.parquet")}
        made = split.rows(name)
        assert made.keys() == stored.keys()
        for table, file in stored.items():
            assert_close(f"{name}: {table}", made[table], pq.ParquetFile(file).read())


def on_devices(*names: str) -> Place:
    """Layers dealt out to these devices, the first one home."""

    def place(loaded: LoadedModel, until: ExitStack) -> Anatomy:
        cards = [torch.device(name) for name in names]
        spread(layers_of(loaded.model.to(cards[0])), cards)
        anatomy = Anatomy(loaded.model)
        assert set(anatomy.cards) == set(cards)
        return anatomy

    return place


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> SplitStore:
    return SplitStore(tmp_path_factory.mktemp("one"), on_devices("cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_rows_on_two_devices_are_those_of_one(other: str, on_one_gpu: SplitStore, tmp_path: Path) -> None:
    if other == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    split = SplitStore(tmp_path, on_devices("cuda:0", other))
    for name in split.done:
        made, expected = split.rows(name), on_one_gpu.rows(name)
        assert made.keys() == expected.keys()
        for table in expected:
            assert_close(f"{name}: {table}", made[table], expected[table], UNLIKE if other == "cpu" else ALIKE)


def assert_close(where: str, made: pa.Table, expected: pa.Table, apart: float = ALIKE) -> None:
    assert made.schema.equals(expected.schema), where
    assert made.num_rows == expected.num_rows > 0, where
    for column in expected.schema:
        found, wanted = made[column.name].to_pylist(), expected[column.name].to_pylist()
        if pa.types.is_floating(column.type):
            close = np.array(found, float), np.array(wanted, float)
            np.testing.assert_allclose(*close, rtol=1e-5, atol=apart, err_msg=f"{where}.{column.name}")
        elif pa.types.is_list(column.type) and apart > ALIKE:  # of numbers kept in half precision
            assert [each and len(each) for each in found] == [each and len(each) for each in wanted]
            flat = [np.concatenate([each or [] for each in rows]) for rows in (found, wanted)]
            np.testing.assert_allclose(*flat, rtol=1e-3, atol=1e-3, err_msg=f"{where}.{column.name}")
        else:
            assert found == wanted, f"{where}.{column.name}"
