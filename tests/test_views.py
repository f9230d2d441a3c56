"""The SQL views: the contract's columns, hand-computed effects under every scoring, and the paper's tables."""

import json
import math
import re
import shutil
import subprocess
import sys

import duckdb
import numpy as np
import pytest
from scipy import special, stats

from mathinterp.errors import UserError
from mathinterp.store import Store, query
from mathinterp.store.catalog import catalog
from tests.small_store import FINGERPRINT, fill, open_run, prompt, scores, write_head
from tests.statistics_twin import Unit, effects_by_operation, part_of, score_interval, score_p_value, student_interval

EFFECTS = "operation n baseline_accuracy accuracy drop drop_low drop_high relative_drop p_value q_value logprob_change"
CONTRACT = {
    "runs": "run_id scan model model_fingerprint prompts prompts_fingerprint dtype parameters code_version started_at "
    "finished_at shards shards_done status",
    "prompts": "prompts_fingerprint prompt_id text answer operation template operand_a operand_b counterfactual",
    "answer_tokens": "prompts_fingerprint prompt_id position token_id token kind carry_class",
    "baseline": "run_id prompt_id position correct logprob logit predicted_id",
    "head_scan": "run_id layer head prompt_id position correct logprob logit predicted_id",
    "mlp_scan": "run_id layer prompt_id position correct logprob logit predicted_id",
    "head_effects": f"run_id layer head {EFFECTS}",
    "mlp_effects": f"run_id layer {EFFECTS}",
}
TYPES = {
    "run_id": "VARCHAR", "prompt_id": "VARCHAR", "operation": "VARCHAR", "parameters": "JSON", "status": "VARCHAR",
    "started_at": "TIMESTAMP", "finished_at": "TIMESTAMP", "shards": "BIGINT", "shards_done": "BIGINT",
    "layer": "SMALLINT", "head": "SMALLINT", "position": "SMALLINT", "predicted_id": "INTEGER", "token_id": "INTEGER",
    "correct": "BOOLEAN", "logprob": "FLOAT", "logit": "FLOAT", "n": "BIGINT", "operand_a": "VARCHAR",
    **dict.fromkeys(EFFECTS.split()[2:], "DOUBLE"),
}  # fmt: skip


def columns(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, str]:
    relation = connection.sql(f"SELECT * FROM {view}")
    return dict(zip(relation.columns, map(str, relation.types), strict=True))


def check_contract(connection: duckdb.DuckDBPyConnection) -> None:
    for view, names in CONTRACT.items():
        found = columns(connection, view)
        assert list(found)[: len(names.split())] == names.split(), view
        for name, kind in found.items():
            assert kind == TYPES.get(name, kind), f"{view}.{name}"


@pytest.fixture
def small(tmp_path):
    """Two operations; head 0.0 hurts, head 0.1 changes nothing; one MLP."""
    prompts = [
        prompt("a", "add", ("change-one", "memorize")),
        prompt("b", "add", ("memorize", "memorize")),
        prompt("c", "add", ("memorize",)),
        prompt("d", "sub", ("memorize",), operand_b="-123"),
        prompt("e", "sub", ("memorize",), operand_b="7"),
    ]
    right = {("a", 0): 1, ("a", 1): 1, ("b", 0): 1, ("b", 1): 0, ("c", 0): 1, ("d", 0): 1, ("e", 0): 1}
    hurt = {("a", 0): 0, ("a", 1): 0, ("b", 0): 1, ("b", 1): 1, ("c", 0): 0, ("d", 0): 0, ("e", 0): 1}
    units = [{"prompt_id": p, "position": i} for p, i in right]
    baseline = [
        {**unit, "correct": bool(value), "logprob": -1.0} for unit, value in zip(units, right.values(), strict=True)
    ]
    heads = [
        {**unit, "layer": 0, "head": head, "correct": bool(value), "logprob": logprob}
        for head, values, logprob in ((0, hurt, -1.5), (1, right, -1.0))
        for unit, value in zip(units, values.values(), strict=True)
    ]
    mlps = [{name: value for name, value in row.items() if name != "head"} for row in heads if row["head"] == 0]

    def make(scoring: str = "token", store: Store | None = None) -> Store:
        store = store or Store(tmp_path / "store")
        fill(store, prompts, baseline, heads, mlps, scoring)
        return store

    return make


def effect(store: Store, operation: str, head: int = 0, view: str = "head_effects") -> dict:
    where = f"operation = '{operation}'" + (f" AND head = {head}" if view == "head_effects" else "")
    (row,) = store.rows(f"SELECT * FROM {view} WHERE {where}")
    return row


@pytest.mark.slow
@pytest.mark.parametrize("url", [None, "memory://empty-views/store"])
def test_an_empty_store_has_all_views_with_the_contract_columns(tmp_path, url):
    connection = Store(url or tmp_path / "nothing").connect()
    check_contract(connection)
    names = [name for (name,) in connection.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()]
    assert {"paper_a_table1", "paper_a_table2", "paper_a_table3", *CONTRACT} <= set(names)
    for name in names:
        assert connection.execute(f"SELECT * FROM {name}").fetchall() == []
    assert not (tmp_path / "nothing").exists(), "reading writes nothing"


@pytest.mark.slow
def test_a_filled_store_has_the_same_columns_as_an_empty_one(tmp_path, small):
    full, empty = small().connect(), Store(tmp_path / "nothing").connect()
    check_contract(full)
    texts = dict(catalog().views)
    of_other_scans = {"neuron_runs", "evaluation_runs", "maskkeep_runs"}  # the records of runs that are not here
    unfilled = (
        catalog().tables.keys() - {"baseline", "head_scan", "mlp_scan", "prompts", "answer_tokens"} | of_other_scans
    )
    for (name,) in full.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall():
        assert columns(full, name) == columns(empty, name), name
        read = reads(name, texts)
        of_distractors = any("logit_difference" in view for view in read)  # there are none; see test_own_prompts.py
        if not of_distractors and not read & unfilled:
            assert full.execute(f"SELECT * FROM {name}").fetchone() is not None, name


def reads(view: str, texts: dict[str, str]) -> set[str]:
    """The view, and all views and tables that its text, file names left out, and theirs mention."""
    code = {name: re.sub(r"'[^'\n]*'", "", re.sub(r"--[^\n]*", "", text)) for name, text in texts.items()}
    found, left = {view}, [view]
    while left:
        mentioned = set(re.findall(r"\w+", code.get(left.pop(), "")))
        new = (mentioned & (texts.keys() | catalog().tables.keys())) - found
        found |= new
        left += sorted(new)
    return found


def test_every_view_gives_fractions():
    for name, text in catalog().views.items():
        said = re.sub(r"--[^\n]*", "", text)
        assert not re.search(r"\b100(?:\.0)? \*|\* 100\b|percent", said), name


def test_heads_and_neurons_are_named_with_a_dot():
    named = [
        line
        for text in catalog().views.values()
        for line in text.splitlines()
        if re.search(r"\b(layer|to_layer) \|\| ", line)
    ]
    assert len(named) > 5
    assert all("layer || '.' || " in line for line in named)


@pytest.mark.slow
def test_head_effects_by_hand_token_scoring(small):
    store = small("token")
    add = effect(store, "add")
    # prompts a, b, c: n = 2, 2, 1 units, of which 2, 0, 1 fell and 0, 1, 0 rose; drop = 2/5
    part = part_of([2, 0, 1], [0, 1, 0], [2, 2, 1])
    # all 3 prompts moved; e = 2 - .8, -1 - .8, 1 - .4; variance 3/2 * 5.04 / 25, times 3 over the .6 + .2 - .4^2 of one
    # unit; tokens right or wrong together: 3 * (4 + 4 + 1) / 25
    ratio = (3 * min(3 / 2 * 5.04 / 25 * 3 / 0.64, 1.5 * 1.08) + 4 * 1.08) / 7 * (1 + 0.3 / 4)
    assert (part.fell, part.rose, part.units) == pytest.approx((0.6, 0.2, 3 / ratio))
    assert (add["n"], add["baseline_accuracy"], add["accuracy"]) == (5, 0.8, 0.4)
    assert add["drop"] == pytest.approx(0.4, abs=1e-15)
    assert add["relative_drop"] == pytest.approx(0.5, abs=1e-15)
    assert (add["drop_low"], add["drop_high"]) == pytest.approx(score_interval([part]), abs=1e-9)
    assert add["p_value"] == pytest.approx(2 * stats.norm.sf(0.4 / math.sqrt((0.6 + 0.2) * ratio / 3)), rel=1e-9)
    assert (add["prompts"], add["noise"], add["sure"]) == (3, 0, False)
    assert add["logprob_change"] == -0.5
    sub = effect(store, "sub")
    assert (sub["n"], sub["drop"], sub["prompts"]) == (2, 0.5, 2)
    every = effect(store, "all")
    assert every["n"] == 7
    assert every["drop"] == pytest.approx(0.45)
    assert every["baseline_accuracy"] == pytest.approx(0.9)
    assert every["relative_drop"] == pytest.approx(0.5)
    parts = [part, part_of([1, 0], [0, 0], [1, 1])]
    assert (every["drop_low"], every["drop_high"]) == pytest.approx(score_interval(parts), abs=1e-9)
    assert every["p_value"] == pytest.approx(score_p_value(parts), rel=1e-9)
    assert every["prompts"] == 2, "of the smallest operation"


@pytest.mark.slow
def test_a_head_that_changes_nothing_has_p_1(small):
    for operation in ("add", "sub", "all"):
        row = effect(small(), operation, head=1)
        assert (row["drop"], row["p_value"], row["q_value"]) == (0, 1, 1)
        assert row["drop_low"] == pytest.approx(-row["drop_high"]), "how much a few prompts cannot show"
        assert 0.3 < row["drop_high"] < 0.9


@pytest.mark.slow
def test_q_values_are_benjamini_hochberg_over_heads(small):
    store = small()
    for operation in ("add", "sub", "all"):
        rows = store.rows(f"SELECT p_value, q_value FROM head_effects WHERE operation = '{operation}' ORDER BY head")
        expected = stats.false_discovery_control([row["p_value"] for row in rows])
        assert [row["q_value"] for row in rows] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_head_effects_by_hand_first_token_scoring(small):
    add = effect(small("first_token"), "add")
    assert (add["n"], add["baseline_accuracy"], add["accuracy"]) == (3, 1.0, pytest.approx(1 / 3))
    expected = score_interval([part_of([1, 0, 1], [0, 0, 0], [1, 1, 1])])
    assert (add["drop_low"], add["drop_high"]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_head_effects_by_hand_exact_match_scoring(small):
    store = small("exact_match")
    add = effect(store, "add")
    # answers right before: a, c; after: b; the log-probability of a whole answer is the sum over its tokens
    assert (add["n"], add["baseline_accuracy"], add["accuracy"]) == (3, pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (add["drop"], add["relative_drop"]) == (pytest.approx(1 / 3), pytest.approx(1 / 2))
    expected = score_interval([part_of([1, 0, 1], [0, 1, 0], [1, 1, 1])])
    assert (add["drop_low"], add["drop_high"]) == pytest.approx(expected, abs=1e-9)
    assert add["logprob_change"] == pytest.approx(-2.5 / 3)
    assert effect(store, "all")["n"] == 5


@pytest.mark.slow
def test_mlp_effects_use_the_same_estimator(small):
    store = small()
    for operation in ("add", "sub", "all"):
        head, mlp = effect(store, operation), effect(store, operation, view="mlp_effects")
        over = ("q_value", "joint_q")  # components
        assert {name: mlp[name] for name in mlp if name not in over} == {
            name: head[name] for name in head if name not in (*over, "head")
        }
        assert mlp["q_value"] == mlp["p_value"]  # one component, one test


@pytest.mark.slow
def test_prompts_without_operation_count_as_none_and_all_equals_it(tmp_path):
    store = Store(tmp_path)
    rows = [{"prompt_id": p, "correct": p != "b"} for p in "abc"]
    fill(
        store, [prompt(p, operation=None) for p in "abc"], rows,
        [{**row, "layer": 2, "head": 3, "correct": row["prompt_id"] == "c"} for row in rows],
    )  # fmt: skip
    none, every = effect(store, "none", 3), effect(store, "all", 3)
    assert none["n"] == 3
    assert none["drop"] == pytest.approx(1 / 3)
    assert {**none, "operation": "all"} == every


@pytest.mark.slow
def test_a_baseline_that_is_never_right_has_no_relative_drop(tmp_path):
    store = Store(tmp_path)
    wrong = [{"prompt_id": p, "correct": False} for p in "ab"]
    fill(store, [prompt(p) for p in "ab"], wrong, [{**row, "layer": 0, "head": 0} for row in wrong])
    row = effect(store, "add")
    assert (row["relative_drop"], row["drop"], row["p_value"]) == (None, 0, 1)


@pytest.mark.slow
def test_a_single_prompt_says_next_to_nothing(tmp_path):
    store = Store(tmp_path)
    fill(store, [prompt("a")], [{"prompt_id": "a"}], [{"prompt_id": "a", "layer": 0, "head": 0, "correct": False}])
    row = effect(store, "all")
    assert (row["n"], row["drop"]) == (1, 1)
    assert (row["prompts"], row["logprob_low"], row["logprob_high"]) == (1, None, None)
    assert row["drop_low"] < -0.4
    assert (row["drop_high"], row["sure"]) == (1, False)
    assert row["p_value"] > 0.25


@pytest.mark.slow
def test_a_head_whose_shard_is_missing_is_absent(tmp_path):
    store = Store(tmp_path)
    run = open_run(store, ["baseline/00000", "head_scan/00000", "head_scan/00001"])
    store.write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
    write_head(store, run.run_id, 1)
    assert store.rows("SELECT * FROM head_effects") == []
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", [{"prompt_id": str(i)} for i in range(3)]), {})
    assert store.rows("SELECT layer, head, operation FROM head_effects ORDER BY operation") == [
        {"layer": 1, "head": 1, "operation": "add"}, {"layer": 1, "head": 1, "operation": "all"},
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_are_kept_apart(small):
    store = small("token")
    small("first_token", store)
    rows = store.rows(
        "SELECT run_id, count(*) AS n, min(n) AS units FROM head_effects GROUP BY run_id ORDER BY units DESC"
    )
    assert [row["n"] for row in rows] == [6, 6]
    for row in store.rows("SELECT run_id, parameters ->> 'scoring' AS scoring FROM runs"):
        (add,) = store.rows(
            f"SELECT n FROM head_effects WHERE run_id = '{row['run_id']}' AND operation = 'add' AND head = 0"
        )
        assert add["n"] == {"token": 5, "first_token": 3}[row["scoring"]]


def random_run(store: Store, scoring: str, seed: int) -> dict[int, list[Unit]]:
    """A run of 6 heads over 90 prompts of 3 operations with 1-3 tokens; returns its units by head."""
    random = np.random.default_rng(seed)
    prompts = [
        prompt(f"p{i}", ("add", "sub", None)[i % 3], ("memorize",) * int(random.integers(1, 4))) for i in range(90)
    ]
    places = [(p.prompt.prompt_id, token.position, p.prompt.operation or "none") for p in prompts for token in p.scored]
    before = [(bool(random.random() < 0.7), float(np.float32(-random.exponential()))) for _ in places]
    units: dict[int, list[Unit]] = {head: [] for head in range(6)}
    for head, members in units.items():
        for (p, i, operation), (right, logprob) in zip(places, before, strict=True):
            after, change = bool(right ^ (random.random() < 0.05 * head)), float(np.float32(-random.exponential()))
            members.append(Unit(p, i, operation, right, after, logprob, change))
    baseline = [
        {"prompt_id": p, "position": i, "correct": right, "logprob": logprob}
        for (p, i, _), (right, logprob) in zip(places, before, strict=True)
    ]
    heads = [
        {"layer": 0, "head": head, "prompt_id": u.prompt_id, "position": u.position}
        | {"correct": u.correct, "logprob": u.logprob}
        for head, members in units.items()
        for u in members
    ]  # fmt: skip
    fill(store, prompts, baseline, heads, scoring=scoring)
    return units


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["token", "first_token", "exact_match"])
def test_sql_agrees_with_its_python_twin(tmp_path, scoring):
    store = Store(tmp_path)
    twins = random_run(store, scoring, seed=3)
    found = {(row["head"], row["operation"]): row for row in store.rows("SELECT * FROM head_effects")}
    assert len(found) == 6 * 4
    for head, units in twins.items():
        if scoring == "first_token":  # the change of log-probability counts scored tokens only
            units = [unit for unit in units if unit.position == 0]
        for operation, expected in effects_by_operation(units, scoring).items():
            row = found[head, operation]
            assert row["n"] == expected.n
            for name in ("baseline_accuracy", "accuracy", "drop", "relative_drop", "p_value", "logprob_change"):
                assert row[name] == pytest.approx(getattr(expected, name), abs=1e-9, rel=1e-9), (head, operation, name)
            assert (row["drop_low"], row["drop_high"]) == pytest.approx(expected.interval, abs=1e-8)
            assert (row["p_value"] < 0.05) == (row["drop_low"] > 0 or row["drop_high"] < 0), "they never contradict"
            fewest = min(part.prompts for part in expected.parts)
            interval = student_interval(expected.logprob_change, expected.logprob_variance or math.nan, fewest)
            assert (row["logprob_low"], row["logprob_high"]) == pytest.approx(interval, rel=1e-9)


@pytest.mark.slow
def test_q_values_of_many_heads_with_ties(tmp_path):
    store = Store(tmp_path)
    random_run(store, "token", seed=4)
    found = store.rows("SELECT operation, p_value, q_value, joint_q FROM head_effects")
    joint = stats.false_discovery_control([row["p_value"] for row in found])
    assert [row["joint_q"] for row in found] == pytest.approx(joint, rel=1e-12), "over heads and operations together"
    for operation in ("add", "sub", "none", "all"):
        rows = [row for row in found if row["operation"] == operation]
        assert len(rows) == 6
        expected = stats.false_discovery_control([row["p_value"] for row in rows])
        assert [row["q_value"] for row in rows] == pytest.approx(expected, rel=1e-12)


def test_erfc_keeps_its_relative_accuracy_far_into_the_tail(tmp_path):
    values = np.concatenate([np.linspace(0, 6, 1201), np.linspace(6, 26, 201), [0.46875, 4.0]])
    listed = ", ".join(f"({value!r}::DOUBLE)" for value in values.tolist())
    found = Store(tmp_path).arrow(f"SELECT erfc(x) AS y FROM (VALUES {listed}) AS t(x)")["y"].to_numpy()
    assert np.max(np.abs(found / special.erfc(values) - 1)) < 1e-12


@pytest.mark.slow
def test_table_1(small):
    rows = small().rows("SELECT * FROM paper_a_table1 ORDER BY rank")
    assert [(row["rank"], row["head"]) for row in rows] == [(0, "original"), (1, "0.0"), (2, "0.1")]
    original, hurt, same = rows
    assert original["accuracy"] == pytest.approx(0.9)
    assert (original["accuracy_add"], original["accuracy_sub"], original["drop_add"]) == (0.8, 1, 0)
    assert (hurt["accuracy_add"], hurt["accuracy_sub"]) == (0.4, 0.5)
    assert [hurt[name] for name in ("accuracy", "drop", "drop_add", "drop_sub")] == pytest.approx(
        [0.45, 0.45, 0.4, 0.5]
    )
    assert (hurt["accuracy_mul"], hurt["drop_mul"]) == (None, None)
    assert (same["drop"], same["accuracy"]) == (0, original["accuracy"])


@pytest.mark.slow
def test_ranks_of_the_tables_agree_also_for_ties(tmp_path):
    store = Store(tmp_path)
    random_run(store, "token", seed=6)
    ranks = []
    for table in ("paper_a_table1", "paper_a_table2", "paper_a_table3"):
        rows = store.rows(f"SELECT DISTINCT rank, head FROM {table} WHERE rank > 0 ORDER BY rank")
        ranks.append([(row["rank"], row["head"]) for row in rows])
    assert len(ranks[0]) == 6
    assert ranks[0] == ranks[1] == ranks[2]


@pytest.mark.slow
def test_table_2(small):
    rows = small().rows("SELECT * FROM paper_a_table2 WHERE head = '0.0' ORDER BY digits")
    assert [row["digits"] for row in rows] == [1, 2, 3]  # operands 7, 12 and -123
    assert [row["n"] for row in rows] == [1, 5, 1]
    assert [row["decrease_add"] for row in rows] == [None, 0.5, None]
    assert [row["decrease_sub"] for row in rows] == [0, None, 1]
    assert [row["decrease"] for row in rows] == pytest.approx([0, 0.5, 1])
    assert {row["rank"] for row in rows} == {1}


@pytest.mark.slow
def test_table_3(small):
    rows = small().rows("SELECT * FROM paper_a_table3 WHERE head = '0.0' ORDER BY operation, carry_class")
    by_class = {(row["operation"], row["carry_class"]): row for row in rows}
    assert set(by_class) == {("add", "change-one"), ("add", "memorize"), ("sub", "memorize")}
    change, memorize, sub = by_class.values()
    assert (change["n"], change["original"], change["accuracy"], change["decrease"]) == (1, 1, 0, 1)
    assert (memorize["n"], memorize["original"], memorize["accuracy"]) == (4, 0.75, 0.5)  # a1 lost, b1 won, c0 lost
    assert memorize["decrease"] == pytest.approx(1 / 3)
    assert (sub["n"], sub["decrease"], sub["rank"]) == (2, 0.5, 1)


@pytest.mark.slow
def test_views_sql_works_in_any_client_and_after_a_move(tmp_path, small):
    store = small()
    before = store.rows("SELECT * FROM head_effects ORDER BY ALL")
    plain = duckdb.connect()
    plain.execute((tmp_path / "store" / "views.sql").read_text())
    plain.execute((tmp_path / "store" / "views.sql").read_text())
    assert query.json_rows(plain.sql("SELECT * FROM head_effects ORDER BY ALL").to_arrow_table()) == before

    moved = tmp_path / "moved's place"
    shutil.move(tmp_path / "store", moved)
    Store(moved).write_views()
    plain = duckdb.connect()
    plain.execute((moved / "views.sql").read_text())
    assert query.json_rows(plain.sql("SELECT * FROM head_effects ORDER BY ALL").to_arrow_table()) == before
    assert str(tmp_path / "store") not in (moved / "views.sql").read_text()


@pytest.mark.slow
def test_views_sql_shows_rows_as_soon_as_the_first_shard_is_there(tmp_path):
    run = open_run(Store(tmp_path)).run_id
    views = (tmp_path / "views.sql").read_text()
    assert "read_parquet" not in views
    write_head(Store(tmp_path), run, 0)
    plain = duckdb.connect()
    plain.execute((tmp_path / "views.sql").read_text())
    assert plain.sql("SELECT count(*) FROM head_scan").fetchall() == [(3,)]
    write_head(Store(tmp_path), run, 1)
    assert plain.sql("SELECT count(*) FROM head_scan").fetchall() == [(6,)]
    assert plain.sql("SELECT shards_done FROM runs").fetchall() == [(1,)]  # shard 1 was not asked for


@pytest.mark.slow
def test_views_sql_is_the_same_text_in_every_process(tmp_path):
    code = f"from mathinterp.store import Store; print(Store({str(tmp_path)!r}).views_sql())"
    texts = {
        subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}) for seed in "12"
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_numeric_run_ids_and_prompt_ids_stay_text(tmp_path, monkeypatch):
    for module in ("store", "manifest"):
        monkeypatch.setattr(f"mathinterp.store.{module}.run_id", lambda *_: "012345678901")
    store = Store(tmp_path)
    fill(store, [prompt("007")], [{"prompt_id": "007"}], prompts_fingerprint="000000000001")
    assert store.rows("SELECT run_id, prompt_id FROM baseline") == [{"run_id": "012345678901", "prompt_id": "007"}]
    assert store.rows("SELECT prompts_fingerprint FROM prompts") == [{"prompts_fingerprint": "000000000001"}]


def test_results_are_plain_json(tmp_path):
    store = Store(tmp_path)
    (row,) = store.rows(
        "SELECT 'nan'::DOUBLE AS a, 'inf'::FLOAT AS b, sum(2) AS c, 1.5::DECIMAL(4, 1) AS d, [1, NULL] AS e, "
        "{'x': 'nan'::DOUBLE} AS f, TIMESTAMP '2026-01-02 03:04:05' AS g, DATE '2026-01-02' AS h, NULL AS i, true AS j"
    )
    assert row == {
        "a": None, "b": None, "c": 2, "d": 1.5, "e": [1, None], "f": {"x": None},
        "g": "2026-01-02T03:04:05", "h": "2026-01-02", "i": None, "j": True,
    }  # fmt: skip
    json.dumps(row, allow_nan=False)


def test_columns_of_one_name_are_all_kept(tmp_path):
    assert Store(tmp_path).rows("SELECT 1 AS a, 2 AS a, 3 AS b, 4 AS a") == [{"a": 1, "a_1": 2, "b": 3, "a_2": 4}]


@pytest.mark.slow
def test_dataframe(small):
    frame = small().dataframe("SELECT head, drop FROM head_effects WHERE operation = 'all' ORDER BY head")
    assert frame["drop"].tolist() == pytest.approx([0.45, 0])


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM head_effect", r"^SQL: .* head_effect does not exist! Did you mean head_effects .*\?$"),
        ("SELEC 1", r"^SQL: Parser Error: .*$"),
        ("SELECT 'x'::INT", r"^SQL: Conversion Error: .*$"),
    ],
)
def test_mistakes_in_sql_are_one_line_for_the_user(tmp_path, sql, message):
    with pytest.raises(UserError, match=message):
        Store(tmp_path).rows(sql)


@pytest.mark.slow
def test_filter_on_a_run_reads_only_its_files(small):
    store = small("token")
    small("first_token", store)
    connection = store.connect()
    ((run,),) = connection.sql("SELECT min(run_id) FROM runs").fetchall()
    plan = connection.sql(f"EXPLAIN ANALYZE SELECT * FROM head_effects WHERE run_id = '{run}'").fetchall()[0][1]
    assert "Scanning Files: 1/2" in plan
