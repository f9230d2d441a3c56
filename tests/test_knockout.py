"""Knock-out: random heads, the rows of a scan against a slow twin, and the command itself."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.controls import layer_matched_heads, random_heads
from mathinterp.experiments.knockout import Knockout, Sentence
from mathinterp.experiments.knockout.figure import draw
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import model_shape
from mathinterp.store import Store
from tests import ablation_twin
from tests.ablation_twin import slow_rows
from tests.charts import table_of
from tests.head_sets import RANKING
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer

# ---- controls ----

EVERY = [(layer, head) for layer in range(4) for head in range(8)]


def test_random_heads_are_never_key_heads_and_seeds_differ() -> None:
    key = [(0, 3), (2, 1), (2, 2), (3, 7)]
    draws = [random_heads(EVERY, key, seed) for seed in range(50)]
    assert all(len(set(drawn)) == 4 and not set(drawn) & set(key) for drawn in draws)
    assert len({tuple(drawn) for drawn in draws}) > 45
    assert {head for drawn in draws for head in drawn} == set(EVERY) - set(key), "some head is never drawn"
    assert random_heads(EVERY, key, 7) == draws[7]
    assert set(random_heads(EVERY, key[:2], 3)) < {*random_heads(EVERY, key, 3), *key}, "curves of one seed are nested"
    with pytest.raises(AssertionError, match="leave only 15 others"):
        random_heads(EVERY, EVERY[:17], 0)


def test_layer_matched_heads_have_the_layers_of_the_key_heads() -> None:
    key = [(0, 3), (2, 1), (2, 2), (3, 7)]
    for seed in range(20):
        drawn = layer_matched_heads(EVERY, key, seed)
        assert [layer for layer, _ in drawn] == [0, 2, 2, 3]
        assert not set(drawn) & set(key)
    crowded = [*((1, head) for head in range(6)), (2, 0)]  # layer 1 has two others: four come from its neighbours
    drawn = layer_matched_heads(EVERY, crowded, 0)
    assert len(set(drawn)) == 7
    assert not set(drawn) & set(crowded)
    assert Counter(layer for layer, _ in drawn) == {1: 2, 2: 1, 0: 4}


# ---- the scan, on prompts with counterfactuals ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ablation", "positions"), [("mean", None), ("mean", "all"), ("zero", None), ("resample", None)]
)
@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_knockout_rows_equal_their_twin(family: str, engine: str, ablation: str, positions: str | None) -> None:
    scan = Knockout(ablation, positions, engine=engine, heads=RANKING, key=(), ks=(0, 1, 3), control_seeds=1)
    on = ablation_twin.subject(ablation_twin.tiny_model(family))
    found = ablation_twin.run_all(scan, on)
    assert_rows = ablation_twin.assert_rows
    assert_rows(ablation_twin.rows_where(found["baseline"]), slow_rows(family, [], ablation, scan.edited_positions))
    for ranking in ("effect", "random", "random_layer"):
        for k in (1, 3):
            heads = scan.heads_of(on.anatomy.shape, ranking, 0, k)
            rows = ablation_twin.rows_where(found["knockout_scan"], ranking=ranking, k=k)
            assert_rows(rows, slow_rows(family, heads, ablation, scan.edited_positions))
            stored = [r for r in found["knockout_heads"].to_pylist() if (r["ranking"], r["k"]) == (ranking, k)]
            assert [(r["place"], (r["layer"], r["head"])) for r in stored] == list(enumerate(heads, start=1))
    assert scan.heads_of(on.anatomy.shape, "effect", 0, 3) == [(1, 3), (0, 2), (2, 0)], "the ranking's order is lost"


def test_default_numbers_of_heads_and_controls() -> None:
    shape = model_shape(tiny_config("llama"))  # 3 layers of 4 heads
    every = tuple(chosen_heads(shape, None, None))
    assert Knockout(heads=every, key=()).chosen_ks(shape) == [1, 2, 4]
    assert Knockout(heads=every[:3], key=()).chosen_ks(shape) == [1, 2]
    curves = Knockout(heads=every, key=(), ks=(0, 5, 6), control_seeds=2).curves(shape)
    assert curves[0] == ("effect", 0, [5, 6])
    assert [(name, seed, ks) for name, seed, ks in curves[1:]] == [
        (name, seed, [5, 6]) for name in ("random", "random_layer") for seed in (0, 1)
    ]
    assert Knockout(heads=every, ks=(0, 7, 12), control_seeds=0).curves(shape) == [("effect", 0, [7, 12])]
    same = [Knockout(heads=ranking, key=(), ks=(2,)).parameters() for ranking in (every, every[:2])]
    assert same[0] == same[1], "heads that no k reaches change no row"
    default = Knockout(heads=every, key=()).parameters()
    assert (default["ablation"], default["positions"], default["scoring"]) == ("mean", "end", "first_token")


def test_no_control_holds_a_key_head_or_one_that_is_knocked_out_at_another_k() -> None:
    shape = model_shape(tiny_config("llama"))  # 3 layers of 4 heads
    every = tuple(chosen_heads(shape, None, None))
    scan = Knockout(heads=every, key=((2, 2), (2, 3)), ks=(1, 4), control_seeds=8)
    drawn = {
        head
        for kind in ("random", "random_layer")
        for seed in range(8)
        for k in (1, 4)
        for head in scan.heads_of(shape, kind, seed, k)
    }
    assert drawn == set(every[4:10]), "all that are left, and no other"
    assert scan.parameters()["key_heads"] == ["2.2", "2.3"]
    assert scan.parameters() != Knockout(heads=every, key=(), ks=(1, 4), control_seeds=8).parameters(), (
        "other rows, other run"
    )


def test_too_few_heads_for_controls_are_told() -> None:
    shape = model_shape(tiny_config("llama"))
    every = tuple(chosen_heads(shape, None, None))
    with pytest.raises(UserError, match=r"7 of 12 heads are knocked out or key heads, which leaves 5 for random .* 7;"):
        Knockout(heads=every, key=(), ks=(1, 7)).shards(shape, [])
    crowded = {"heads": every, "key": every[4:9]}  # three are left beside four
    with pytest.raises(UserError, match=r"9 of 12 .* leaves 3 for random controls of 4; .* `control_seeds` 0"):
        Knockout(**crowded, ks=(4,)).shards(shape, [])
    assert Knockout(**crowded, ks=(4,), control_seeds=0).chosen_ks(shape) == [4]
    assert Knockout(**crowded).chosen_ks(shape) == [1, 2], "the default goes as far as there are controls"
    with pytest.raises(UserError, match="leaves 0 for random controls of 1"):
        Knockout(heads=every).shards(shape, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ()}, "no heads to knock out"),
        ({"heads": ((0, 1), (0, 1))}, "head 0.1 is twice"),
        ({"ks": (0,)}, "more than 0"),
        ({"ks": (5,)}, "cannot knock out 5 heads: the ranking has 4"),
        ({"heads": ((9, 0),)}, "layer 9 does not exist"),
        ({"ablation": "half"}, "'half' is not known"),
        ({"control_seeds": -1}, "`control_seeds` -1 is too small; give 0 or more"),
        ({"ablation": "resample", "sentences": (Sentence("1", (1,)),)}, "no counterfactual"),
    ],
)
def test_mistakes_in_a_knockout(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Knockout(**{"heads": RANKING, "key": (), **changes}).shards(model_shape(tiny_config("llama")), [])


# ---- the command ----


def command(*words: object, of: tuple[str, ...] = ("knockout",)) -> Result:
    return CliRunner().invoke(main, [*of, *(str(word) for word in words)])


def iterative(*words: object) -> Result:
    return command(*words, of=("scan", "iterative"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--heads", "--from", "scan iterative"]),
        (["--heads", "0.1", "--from", "x"], ["one way"]),
        (["--heads", "0-1"], ["cannot be read"]),
        (["--heads", "0.1,0.1"], ["twice"]),
        (["--heads", "0.1", "--ks", "1,two"], ["--ks", "cannot be read"]),
        (["--heads", "0.1", "--ks", "2"], ["cannot knock out 2 heads"]),
        (["--heads", "0.1", "--rank-operation", "add"], ["--rank-operation"]),
        (["--heads", "0.1", "--layers", "0"], ["--layers", "scan iterative --steps N"]),
        (["--heads", "0.1", "--engine", "warp"], ["warp", "packed"]),
        (["--heads", "0.1", "--show", "qwertz"], ["--show", "qwertz"]),
        (["--heads", "9.1"], ["layer 9 does not exist"]),
        (
            ["--heads", ",".join(f"{layer}.{head}" for layer in range(8) for head in range(8)), "--ks", "1"],
            ["64 of 64 heads are knocked out or key heads", "--control-seeds 0"],
        ),
        (["--from", "nothing"], ["no run 'nothing'"]),
        (["--iterative", "2"], ["--iterative is no option any more", "scan iterative --steps N"]),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    result = command("--store", tmp_path / "s", "--limit", 16, "--ablation", "zero", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("words", "part"), [(["--steps", 2, "--replicas", 2], "one replica"), (["--steps", 99], "cannot mask 99 heads")]
)
def test_mistakes_in_iterative_masking_on_the_command_line(tmp_path: Path, words: list[object], part: str) -> None:
    result = iterative("--store", tmp_path / "s", "--limit", 16, "--ablation", "zero", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert part in line


@pytest.mark.ray
def test_the_command_ranks_knocks_out_shows_and_resumes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    common = ["--model", folder, "--store", tmp_path / "s", "--limit", 16, "--ablation", "zero", "--replicas", 1]
    masked = json.loads(iterative("--steps", 2, *common, "--json").stdout)
    assert len(masked["ranking"]) == masked["shards_done"] == 2
    store = Store(tmp_path / "s")
    chosen = store.rows("SELECT layer || '.' || head AS head FROM iterative_scan WHERE masked ORDER BY step")
    assert masked["ranking"] == [row["head"] for row in chosen]
    (second,) = (tmp_path / "s" / "iterative_scan").glob("*/shard-00001.parquet")
    content = second.read_bytes()
    second.unlink()
    again = json.loads(iterative("--steps", 2, *common, "--json").stdout)
    assert (again["shards_reused"], again["shards_done"], again["steps"]) == (1, 1, masked["steps"])
    assert len(second.read_bytes()) == len(content)

    words = ["--from", masked["run_id"], "--control-seeds", 2, "--show", "3 plus 5 is", *common]
    found = json.loads(command(*words, "--json").stdout)
    assert found["ranking"] == masked["ranking"]
    assert [row["k"] for row in found["curve"]] == [0, 1, 2]
    assert (found["shards_done"], found["failed"]) == (8, [])
    examples = store.rows(f"SELECT * FROM knockout_examples WHERE run_id = '{found['run_id']}' ORDER BY k, rank")
    assert [(row["k"], row["rank"]) for row in examples] == [(k, rank) for k in (0, 1, 2) for rank in range(1, 6)]
    assert examples[0]["probability"] >= examples[1]["probability"] > 0
    assert {row["token"] for row in examples} <= set(tiny_tokenizer().get_vocab())
    lines = table_of(draw(Results(store, found["run_id"])), "heads_out").query("operation == 'all'")
    assert set(lines["heads_out"]) == {"ranked heads", "random heads", "random heads, same layers"}
    drawn = [row["effect"] for row in found["curve"]]
    np.testing.assert_allclose(lines.query("heads_out == 'ranked heads'")["accuracy"], drawn, rtol=1e-3)
    shown = command(*words)  # nothing left to compute: no Ray
    assert shown.exit_code == 0, shown.output
    for part in ("Accuracy (%), first k heads out", "random_layer", "has halved", "knockout_curve", "nothing left"):
        assert part in shown.stdout
