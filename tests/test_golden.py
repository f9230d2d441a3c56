"""Rows of every experiment are those that were stored when the result format got its number, value by value."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mathinterp.experiments.ablation import ABLATIONS
from mathinterp.experiments.figures import save
from mathinterp.experiments.registry import experiments, find
from mathinterp.experiments.results import Results
from mathinterp.store.manifest import RESULT_FORMAT
from tests.charts import check_parts, table_of, texts_of
from tests.golden.models import word_model
from tests.golden.runs import FOLDER, INDEX, GoldenStore, run_all

INDEXED = json.loads(INDEX.read_text(encoding="utf-8"))
WITHOUT: dict[str, str] = {}  # experiments without golden rows, each with its reason
OF_A_SAVED_MODEL = {"gender neurons", "edit"}  # its files, and so its fingerprint, differ between library versions


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    folder = tmp_path_factory.mktemp("golden")
    made = GoldenStore(folder / "store")
    run_all(made, word_model(folder / "model"))
    return made


def test_the_rows_are_of_this_result_format() -> None:
    told = "rows changed or the format did: raise RESULT_FORMAT and run python -m tests.golden.runs"
    assert INDEXED["result_format"] == RESULT_FORMAT, told


@pytest.mark.bundled
def test_every_experiment_has_golden_rows(golden: GoldenStore) -> None:
    made = {record["scan"] for record in golden.records()}
    assert made == set(experiments()) - set(WITHOUT)
    assert made.isdisjoint(WITHOUT)
    ablations = {record["parameters"].get("ablation") for record in golden.records() if record["scan"] == "heads"}
    assert ablations == set(ABLATIONS)
    assert golden.ids.keys() == INDEXED["run_ids"].keys()


@pytest.mark.bundled
def test_run_ids_stay(golden: GoldenStore) -> None:
    stable = {name: run for name, run in golden.ids.items() if name not in OF_A_SAVED_MODEL}
    assert stable == {name: run for name, run in INDEXED["run_ids"].items() if name not in OF_A_SAVED_MODEL}


@pytest.mark.parametrize("name", INDEXED["run_ids"])
@pytest.mark.bundled
def test_every_row_is_the_stored_one(golden: GoldenStore, name: str) -> None:
    made = golden.rows(name)
    stored = {file.stem.split("-")[1]: file for file in Path(FOLDER).glob(f"{name.replace(' ', '_')}-*.parquet")}
    assert made.keys() == stored.keys()
    for table, file in stored.items():
        expected = pq.ParquetFile(file).read()
        assert made[table].schema.equals(expected.schema), table
        assert made[table].num_rows > 0
        assert_equal(table, made[table], expected)


def assert_equal(table: str, made: pa.Table, expected: pa.Table) -> None:
    """Say which column and row differ first."""
    for column in expected.column_names:
        found, wanted = made[column].to_pylist(), expected[column].to_pylist()
        different = [row for row, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
        assert not different, f"{table}.{column}, row {different[0]}: {found[different[0]]} was {wanted[different[0]]}"


@pytest.mark.parametrize("name", INDEXED["run_ids"])
@pytest.mark.bundled
def test_every_figure_is_drawn_and_tells_what_its_data_have(golden: GoldenStore, name: str, tmp_path: Path) -> None:
    results = Results(golden.store, golden.ids[name])
    (run,) = results.rows("SELECT scan FROM runs WHERE run_id = $run")
    experiment = find(run["scan"])
    figure = experiment.figure(results, experiment.show_options())
    assert figure is not None
    assert check_parts(figure) > 0
    spec = figure.to_dict()
    assert len(spec["description"]) > 40
    assert len(json.dumps(spec)) < 300_000
    _, svg = save(figure, tmp_path / "figure")
    assert "".join(spec["title"]["text"]) in texts_of(svg.read_text("utf-8")), "lines of one text"


@pytest.mark.parametrize(
    ("name", "column", "sql"),
    [
        ("concept zeroing", "decrease", """SELECT decrease, low, high FROM paper_a_table8 WHERE run_id = $run
             UNION ALL SELECT random, random_least, random_most FROM paper_a_table8
             WHERE run_id = $run AND random_sets > 0"""),
        ("edit", "bias", """SELECT bias, bias_low, bias_high, change, p_value AS p
             FROM gender_effects WHERE run_id = $run"""),
        ("edit", "loss_change", """SELECT loss_change, loss_change_low AS low, loss_change_high AS high, loss
             FROM edit_perplexity WHERE run_id = $run AND edit <> 'original'"""),
        ("gender neurons", "change", """SELECT unnest([change, change_woman, change_man]) AS change, rank
             FROM gender_neurons WHERE run_id = $run AND rank <= 18"""),
        ("prune", "accuracy", """SELECT accuracy, low, high, gain, gain_low, gain_high, baseline_accuracy AS original
             FROM tuned_accuracy WHERE run_id = $run"""),
        ("sweep_neurons", "increase", """SELECT increase, increase_supporting, opposing, layer
             FROM lora_sweep_coefficients WHERE run_id = $run"""),
    ],
)  # fmt: skip
@pytest.mark.bundled
def test_figures_of_edits_and_tunings_hold_the_numbers_of_their_views(
    golden: GoldenStore, name: str, column: str, sql: str
) -> None:
    results = Results(golden.store, golden.ids[name])
    (run,) = results.rows("SELECT scan FROM runs WHERE run_id = $run")
    found, wanted = table_of(find(run["scan"]).figure(results, None), column), results.frame(sql)
    assert len(found) == len(wanted) > 0
    for each in wanted.columns:
        assert sorted(found[each].dropna()) == pytest.approx(sorted(wanted[each].dropna()), rel=1e-3, abs=1e-12), each
