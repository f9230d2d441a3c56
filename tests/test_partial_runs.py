"""Unfinished runs: their effects say so, every reader is told in one line, and the latest finished run is a view."""

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.face import open_store
from mathinterp.store import Store
from tests.small_store import fill, open_run, prompt, scores

PROMPTS = [prompt(f"p{i}") for i in range(4)]
IDS = [item.prompt.prompt_id for item in PROMPTS]


def heads_of(layer: int) -> list[dict[str, object]]:
    return [{"layer": layer, "head": 0, "prompt_id": name, "correct": name != "p0"} for name in IDS]


def partial_run(store: Store, **changes: object) -> str:
    """A run with two of its three files."""
    run = open_run(store, ["baseline/00000", "head_scan/00000", "head_scan/00001"], **changes)
    store.write_prompts("feedbeef00000000", PROMPTS)
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", [{"prompt_id": name} for name in IDS]), {})
    store.write_shard(run.run_id, "head_scan", 0, scores("head_scan", heads_of(1)), {})
    assert run.finish() == ["head_scan/00001"]
    return run.run_id


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, str, str]:
    """A store with a finished run and an unfinished one of another model."""
    store = Store(tmp_path / "store")
    whole = fill(store, PROMPTS, [{"prompt_id": name} for name in IDS], heads_of(0))
    return tmp_path / "store", whole, partial_run(store, model="m2", model_fingerprint="weights-2")


@pytest.mark.slow
def test_effects_carry_their_runs_model_and_status(mixed: tuple[Path, str, str]) -> None:
    folder, whole, partial = mixed
    rows = Store(folder).rows("SELECT DISTINCT run_id, model, status FROM head_effects ORDER BY model")
    assert rows == [
        {"run_id": whole, "model": "m", "status": "finished"},
        {"run_id": partial, "model": "m2", "status": "unfinished"},
    ]
    with_status = {
        "head_effects", "mlp_effects", "path_effects", "patching_effects", "head_pairs", "knockout_curve",
        "knockout_summary",
        "maskkeep_effects", "concept_zeroing_effects", "attention_by_type", "mlp_probe_curve", "accuracies",
        "paper_a_table1", "paper_a_table2", "paper_a_table3", "head_operations", "paper_b_figure5",
        "paper_b_mlp_probe", "logit_difference_effects", "path_logit_differences",
    }  # fmt: skip
    connection = Store(folder).connect()
    for view in with_status:
        columns = connection.sql(f"SELECT * FROM {view} LIMIT 0").columns
        assert {"run_id", "model", "status"} <= set(columns), view


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT * FROM head_effects", True),
        ("SELECT count(*) FROM head_scan", True),
        ("SELECT * FROM paper_a_table1", True),
        ("SELECT * FROM head_effects WHERE run_id = '{partial}'", True),
        ("SELECT * FROM head_effects WHERE run_id = '{whole}'", False),
        ("SELECT * FROM head_effects WHERE run_id <> '{whole}'", True),
        ("SELECT * FROM head_effects AS e WHERE e.run_id NOT IN ('0123456789ab', '{whole}')", True),
        ("SELECT * FROM head_effects WHERE NOT run_id = '{whole}'", True),
        ("SELECT * FROM head_effects WHERE run_id != '{partial}'", False),
        ("SELECT * FROM head_effects WHERE run_id = '{whole}' AND run_id <> '{partial}'", False),
        ("SELECT * FROM head_effects WHERE status = 'finished'", False),
        ("SELECT * FROM head_effects JOIN latest_runs USING (run_id)", False),
        ("SELECT * FROM path_effects", False),
        ("SELECT * FROM runs", False),
        ("SELECT text FROM prompts", False),
    ],
)
def test_the_sql_command_warns_of_the_unfinished_runs_it_reads(
    mixed: tuple[Path, str, str], query: str, told: bool
) -> None:
    folder, whole, partial = mixed
    done = CliRunner().invoke(main, ["sql", "--store", str(folder), query.format(whole=whole, partial=partial)])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stderr.splitlines() if "unfinished" in line]
    assert len(lines) == told
    there = "1 of 2" if query.endswith("head_scan") else "2 of 3"  # of the tables that the query reads
    assert all(f"{partial} (heads: {there} shards)" in line and whole not in line for line in lines)


@pytest.mark.slow
def test_python_readers_are_warned_once(mixed: tuple[Path, str, str], caplog: pytest.LogCaptureFixture) -> None:
    folder, _, partial = mixed
    with caplog.at_level(logging.WARNING, logger="mathinterp"):
        store = open_store(str(folder))
        store.sql("SELECT * FROM head_effects WHERE run_id = $run", run=partial)
        store.dataframe("SELECT * FROM head_effects")
    assert len([record for record in caplog.records if partial in record.getMessage()]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("view", ["head_scan", "head_scan_logit_differences", "logit_difference_effects"])
def test_a_look_at_a_whole_table_of_an_unfinished_run_hides_no_warning_of_another(
    mixed: tuple[Path, str, str], caplog: pytest.LogCaptureFixture, view: str
) -> None:
    """Also of views that read the rows themselves, not through the view of their table."""
    folder, _, partial = mixed
    store, query = Store(folder), f"SELECT * FROM {view} WHERE run_id = '{partial}'"
    with caplog.at_level(logging.WARNING, "mathinterp"):
        store.rows(f"SELECT * FROM baseline WHERE run_id = '{partial}'")
        assert caplog.messages == [], "its table is whole"
        store.rows(query)
        store.rows(query)
    (line,) = caplog.messages
    assert line.startswith(f"unfinished: {partial} (heads: ")


@pytest.mark.slow
def test_the_report_of_an_unfinished_run_is_warned_of(mixed: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, _, partial = mixed
    words = ["report", "--store", str(folder), "--out", str(tmp_path / "page"), "--run", partial]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"{partial} (heads: 2 of 3 shards)" in done.stderr


@pytest.mark.slow
def test_latest_runs_has_the_finished_run_that_ended_last_of_each_scan(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    baseline = [{"prompt_id": name} for name in IDS]
    runs = [
        fill(store, PROMPTS, baseline, heads_of(0), model_fingerprint=f"weights-{number}", model=f"m{number}")
        for number in range(3)
    ]
    partial_run(store, model_fingerprint="weights-9", model="m9")
    other = fill(store, PROMPTS, baseline, heads_of(0), model_fingerprint="weights-0", scan="mlps")
    rows = store.rows("SELECT run_id, scan FROM latest_runs ORDER BY scan")
    assert rows == [{"run_id": runs[-1], "scan": "heads"}, {"run_id": other, "scan": "mlps"}]
    shown = store.rows("SELECT DISTINCT model FROM head_effects JOIN latest_runs USING (run_id) WHERE scan = 'heads'")
    assert shown == [{"model": "m2"}]
