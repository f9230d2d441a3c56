"""Every experiment on a model whose layers lie on two cards: the golden rows of one card, to rounding.

The cards are those of two_cards.py, where any operation that mixes two fails.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mathinterp.experiments.base import Experiment
from mathinterp.experiments.registry import experiments
from mathinterp.models import handle
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel
from tests.golden.models import word_model
from tests.golden.runs import FOLDER, GoldenStore, run_all
from tests.two_cards import CARDS, on_cards

pytestmark = [pytest.mark.bundled, pytest.mark.slow]


class SplitStore(GoldenStore):
    """Runs what can be run so on two cards, and what others build on on one."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.split: list[str] = []

    def run(self, name: str, scan: Experiment, *given: Any) -> str:
        if not scan.runs_split:
            return super().run(name, scan, *given)
        self.split.append(name)
        with ExitStack() as cards, pytest.MonkeyPatch.context() as patch:
            patch.setattr(handle, "load", _loader(cards, handle.load))
            return super().run(name, scan, *given)


def _loader(cards: ExitStack, load: Any) -> Any:
    def split(*given: Any, **more: Any) -> LoadedModel:
        loaded: LoadedModel = load(*given, **more)
        anatomy = Anatomy(cards.enter_context(on_cards(loaded.model)))
        assert anatomy.cards == CARDS
        return LoadedModel(loaded.model, loaded.tokenizer, anatomy, loaded.fingerprint, loaded.dtype)

    return split


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> SplitStore:
    folder = tmp_path_factory.mktemp("split")
    made = SplitStore(folder / "store")
    run_all(made, word_model(folder / "model"))
    return made


def test_every_experiment_that_says_so_was_split(split: SplitStore) -> None:
    names = {record["scan"] for record in split.records() if record["run_id"] in {split.ids[n] for n in split.split}}
    assert names == {name for name, experiment in experiments().items() if experiment.runs_split}
    assert len(names) >= 20


def test_rows_are_those_of_one_card(split: SplitStore) -> None:
    for name in split.split:
        made = split.rows(name)
        stored = {file.stem.split("-")[1]: file for file in Path(FOLDER).glob(f"{name.replace(' ', '_')}-*.parquet")}
        assert made.keys() == stored.keys()
        for table, file in stored.items():
            assert_close(f"{name}: {table}", made[table], pq.ParquetFile(file).read())


def assert_close(where: str, made: pa.Table, expected: pa.Table) -> None:
    assert made.schema.equals(expected.schema), where
    assert made.num_rows == expected.num_rows > 0, where
    for column in expected.schema:
        found, wanted = made[column.name].to_pylist(), expected[column.name].to_pylist()
        if pa.types.is_floating(column.type):
            found, wanted = np.array(found, float), np.array(wanted, float)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=f"{where}.{column.name}")
        else:
            assert found == wanted, f"{where}.{column.name}"
