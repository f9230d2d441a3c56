"""Pairs of heads: rows against one prompt a forward pass, the view by hand, choices, and the command."""

import itertools
import json

import pyarrow as pa
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster.replica import check_rows
from mathinterp.errors import UserError
from mathinterp.experiments import Head, Subject
from mathinterp.experiments.head_pairs import HeadPairs
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.store import Store
from tests.ablation_twin import slow_rows, tiny_model
from tests.made_prompts import PROMPTS
from tests.small_store import open_run, prompt
from tests.statistics_twin import part_of, score_interval, score_p_value
from tests.tiny import tiny_config

HEADS = (Head(0, 1), Head(1, 2), Head(2, 0))


def rows_of(scan: HeadPairs, family: str) -> pa.Table:
    anatomy = Anatomy(tiny_model(family))
    state = scan.prepare(Subject(anatomy, PROMPTS))
    parts = []
    for shard in scan.shards(anatomy.shape, PROMPTS):
        table = scan.run(state, shard)
        check_rows(table, scan.tables[shard.table].schema, shard.key)
        if shard.table == "head_pair_scan":
            parts.append(table)
    return pa.concat_tables(parts)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("ablation", "positions"), [("zero", "all"), ("mean", "end")])
def test_rows_are_those_of_one_prompt_at_a_time(family: str, ablation: str, positions: str) -> None:
    rows = rows_of(HeadPairs(ablation, heads=HEADS), family).to_pylist()
    found = {(row["layer"], row["head"], row["other_layer"], row["other_head"]) for row in rows}
    assert found == {(*head, None, None) for head in HEADS} | {(*a, *b) for a, b in itertools.combinations(HEADS, 2)}
    for out in [HEADS[:1], HEADS[:2], HEADS[1:]]:
        expected = slow_rows(family, out, ablation, positions)
        names = (*out[0], *(out[1] if len(out) > 1 else (None, None)))
        for row in rows:
            if (row["layer"], row["head"], row["other_layer"], row["other_head"]) == names:
                correct, logprob, logit, predicted = expected[row["prompt_id"], row["position"]]
                assert (row["correct"], row["predicted_id"], row["given"]) == (correct, predicted, False)
                assert row["logprob"] == pytest.approx(logprob, rel=1e-5, abs=1e-6)
                assert row["logit"] == pytest.approx(logit, rel=1e-5, abs=1e-6)


def test_given_heads_are_out_beside_every_other() -> None:
    rows = rows_of(HeadPairs(given="0.1", heads="0.1,1.2"), "llama").to_pylist()
    pairs = rows_of(HeadPairs(heads="0.1,1.2"), "llama").to_pylist()
    assert {(row["layer"], row["given"]) for row in rows} == {(None, True), (1, False), (1, True)}
    both = [row for row in rows if row["layer"] == 1 and row["given"]]
    same = [row for row in pairs if row["other_layer"] is not None]
    assert [row["logprob"] for row in both] == [row["logprob"] for row in same]


def test_choices() -> None:
    shape = model_shape(tiny_config("llama"))
    assert len(HeadPairs().sets(shape)) == 12 + 66
    assert HeadPairs(heads=["1.2", (0, 1)]).parameters()["heads"] == ["0.1", "1.2"]
    for scan, message in (
        (HeadPairs(heads="0.1"), "1 heads make 0 pairs"),
        (HeadPairs(heads="0.1,9.9"), "layer 9 does not exist"),
        (HeadPairs(given="0.1", heads="0.1"), "no heads are left"),
    ):
        with pytest.raises(UserError, match=message):
            scan.sets(shape)
    with pytest.raises(UserError, match="`given` names no heads"):
        HeadPairs(given=())
    with pytest.raises(UserError, match="`given` '1-2' cannot be read"):
        HeadPairs(given="1-2")


def test_the_view_by_hand(tmp_path) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["baseline/00000", "head_pair_scan/00000"], scan="head_pairs")
    store.write_prompts("feedbeef00000000", [prompt(name, "add") for name in "abcd"])
    same = {"position": 0, "logprob": -1.0, "logit": 0.0, "predicted_id": 1}
    base = [{**same, "prompt_id": name, "correct": True} for name in "abcd"]
    cells = {(0, 1, None, None): "abd", (1, 2, None, None): "abcd", (0, 1, 1, 2): "d"}  # head(s) out -> still right
    names = ("layer", "head", "other_layer", "other_head")
    scan = [
        {**same, **dict(zip(names, out, strict=True)), "given": False, "prompt_id": name, "correct": name in right}
        for out, right in cells.items()
        for name in "abcd"
    ]
    for table, rows in (("baseline", base), ("head_pair_scan", scan)):
        schema = HeadPairs.tables[table].schema
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, schema), {})
    (row,) = store.rows("SELECT * FROM head_pairs WHERE operation = 'add'")
    assert (row["pair"], row["n"]) == ("0.1 + 1.2", 4)
    assert (row["drop_both"], row["drop_first"], row["drop_second"], row["interaction"]) == (0.75, 0.25, 0, 0.5)
    # per prompt lost together beyond apart: a 1, b 1, c 0, d 0; half of it is between -1 and 1
    part = part_of([0.5, 0.5, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1])
    low, high = score_interval([part])
    assert (row["interaction_low"], row["interaction_high"]) == pytest.approx((2 * low, 2 * high), abs=1e-8)
    assert row["p_value"] == pytest.approx(score_p_value([part]), rel=1e-9)


@pytest.mark.ray
def test_the_command_plans_runs_draws_and_resumes(tmp_path) -> None:
    where = ["--heads", "0.6,0.1,0.2", "--limit", "12"]
    planned = CliRunner().invoke(main, ["plan", "head_pairs", *where, "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.output)["evaluations"] == 12 * (3 + 3 + 1)
    command = ["scan", "head_pairs", *where, "--store", str(tmp_path / "s"), "--out", str(tmp_path / "f"), "--json"]
    first, again = (CliRunner().invoke(main, command) for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    made, found = (json.loads(done.stdout.splitlines()[-1]) for done in (first, again))
    assert (made["shards_done"], found["shards_done"]) == (2, 0)
    for before, after in zip(made["top"], found["top"], strict=True):  # DuckDB adds up in any order
        assert before.pop("pair") == after.pop("pair")
        assert before == pytest.approx(after)
    assert (made["pairs"], len(made["top"])) == (3, 3)
    assert {file.suffix for file in (tmp_path / "f").iterdir()} == {".png", ".svg"}
