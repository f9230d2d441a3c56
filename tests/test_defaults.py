"""What commands say by default cannot mislead: units, baselines that rank nothing, too few prompts, other settings."""

import json
import logging
from pathlib import Path

import pytest
from scipy.stats import false_discovery_control

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.experiments.heads.summary import summarize
from mathinterp.experiments.reach import prompts_needed, smallest_q
from mathinterp.experiments.results import Results, Shown, Summary
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.store import Store
from tests.small_store import fill, prompt
from tests.statistics_twin import Unit, clustered_effect

MODEL = mi.load("bundled", device="cpu", dtype="float32")


def summary_of(
    folder: Path, right: float, cost: int, prompts: int = 20, operations: tuple[str | None, ...] = ("add", "mul"),
    logprob: float = -0.5,
) -> tuple[Results, Summary]:  # fmt: skip
    """A head scan whose baseline is right on a part of the prompts; head 0.1 loses ``cost`` of them, head 0.0 none."""
    asked = [prompt(f"{op}{i}", op) for op in operations for i in range(prompts)]
    good = {f"{op}{i}" for op in operations for i in range(round(right * prompts))}
    lost = {f"{op}{i}" for op in operations for i in range(cost)}
    ids = [item.prompt.prompt_id for item in asked]
    baseline = [{"prompt_id": name, "correct": name in good} for name in ids]
    heads = [
        {"layer": 0, "head": head, "prompt_id": name, "correct": name in good and not (head and name in lost),
         "logprob": logprob - head}
        for head in (0, 1)
        for name in ids
    ]  # fmt: skip
    store = Store(folder)
    results = Results(store, fill(store, asked, baseline, heads))
    return results, summarize(results)


@pytest.mark.slow
def test_json_has_fractions_and_the_printed_table_its_units_in_the_header(tmp_path: Path) -> None:
    _, summary = summary_of(tmp_path, 1.0, 10)
    top = summary.data["top"][0]
    assert (top["node"], top["accuracy"], top["drop"], top["relative"]) == ("0.1", 0.5, 0.5, 0.5)
    assert summary.data["baseline"] == {"all": 1.0, "add": 1.0, "mul": 1.0}
    (table,) = [part for part in summary.parts if isinstance(part, Shown) and part.title.startswith("Largest")]
    assert table.printed[0]["drop (points)"] == table.printed[0]["accuracy (%)"] == 50
    assert "drop" not in table.printed[0]
    assert "50" in str(summary)


def test_shown_leaves_missing_values_and_other_columns_alone() -> None:
    table = Shown("title", [{"a": 0.5, "b": 0.5, "c": None}], {"a": "%", "c": "points"})
    assert table.printed == [{"a (%)": 50.0, "b": 0.5, "c (points)": None}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "cost", "why"),
    [(1.0, 0, "100 % right, and nothing that is out costs 2 points"), (0.0, 0, "never right"), (1.0, 10, None)],
)
def test_where_accuracy_ranks_nothing_log_probabilities_are_shown(
    tmp_path: Path, right: float, cost: int, why: str | None
) -> None:
    results, summary = summary_of(tmp_path, right, cost)
    text, ranks_nothing = str(summary), summary.data["accuracy_ranks_nothing"]
    assert ("Accuracy cannot rank heads here" in text) == (why is not None)
    assert ("Accuracy (%), one head ablated" in text) == (why is None)
    assert ("Change of log-probability (nats per unit), one head ablated" in text) == (why is not None)
    if why is not None:
        assert why in ranks_nothing["add"]
        assert set(ranks_nothing) == {"all", "add", "mul"}
        assert summary.data["top"][0]["node"] == "0.1"  # which loses a nat
        assert "logprob_change" in summary.queries[0]
        assert results.store.rows(summary.queries[0])
        assert "points of accuracy" not in text


@pytest.mark.slow
def test_a_baseline_at_chance_ranks_nothing(tmp_path: Path) -> None:
    """Two gold tokens, so that half of the answers are right by guessing."""
    asked = [prompt(f"p{i}", "yes", carry=("memorize",)) for i in range(40)]
    asked = [
        type(item)(item.prompt, item.input_ids, (item.scored[0].__class__(0, 3, 40 + i % 2, "y", "text", None),))
        for i, item in enumerate(asked)
    ]
    ids = [item.prompt.prompt_id for item in asked]
    store = Store(tmp_path)
    baseline = [{"prompt_id": name, "correct": i % 2 == 0} for i, name in enumerate(ids)]
    heads = [{"layer": 0, "head": 0, "prompt_id": name, "correct": i % 4 == 0} for i, name in enumerate(ids)]
    summary = summarize(Results(store, fill(store, asked, baseline, heads)))
    assert "50 % right" in summary.data["accuracy_ranks_nothing"]["yes"]
    assert "no more than chance (50 %)" in str(summary)


def test_the_least_q_is_what_the_statistics_give_when_one_head_moves_every_prompt() -> None:
    for prompts in (4, 8, 12):
        moved = [Unit(str(i), 0, "add", True, False) for i in range(prompts)]
        still = [Unit(str(i), 0, "add", True, True) for i in range(prompts)]
        p_values = [clustered_effect(units).p_value for units in (moved, *[still] * 63)]
        assert false_discovery_control(p_values)[0] == pytest.approx(smallest_q(prompts, 64))
    assert smallest_q(prompts_needed(64) - 1, 64) >= 0.05 > smallest_q(prompts_needed(64), 64)


@pytest.mark.slow
def test_too_few_prompts_for_a_small_q_are_told(tmp_path: Path) -> None:
    _, few = summary_of(tmp_path / "few", 1.0, 3, prompts=4)
    (line,) = [line for line in few.warnings if "too few prompts" in line]
    assert f"'add' (4 prompts: q {smallest_q(4, 2):.2g} at best)" in line
    assert f"it takes {prompts_needed(2)} prompts of an operation" in line
    (rough,) = [line for line in few.warnings if "rough figures: under 12 prompts" in line]
    assert "'add' (4), 'mul' (4)" in rough
    _, enough = summary_of(tmp_path / "enough", 1.0, 3)
    assert not [line for line in enough.warnings if "too few prompts" in line]


@pytest.mark.slow
def test_prompts_without_operation_are_shown_once_and_their_queries_have_rows(tmp_path: Path) -> None:
    results, summary = summary_of(tmp_path, 1.0, 10, operations=(None,))
    for part in summary.parts:
        if isinstance(part, Shown):
            assert {row["operation"] for row in part.rows} == {"all"}
    assert "none" not in str(summary)
    for query in summary.queries:
        assert results.store.rows(query), query


@pytest.mark.bundled
def test_a_knockout_says_that_the_head_scan_measured_otherwise(tmp_path: Path) -> None:
    prompts = mi.prompts("two_digit", limit=16)
    scan = mi.run(mi.experiments.Heads(heads=["0.6"]), MODEL, prompts, store=str(tmp_path), progress=False)
    drop = scan.sql("SELECT drop FROM head_effects WHERE run_id = $run AND operation = 'all'")["drop"][0]
    asked = {"heads": ["0.6"], "ks": [1], "control_seeds": 0}
    other = mi.run(mi.experiments.Knockout(**asked), MODEL, prompts, store=str(tmp_path), progress=False)
    (line,) = [part for part in other.summary.parts if "Not to be compared" in str(part)]
    assert f"head scan {scan.id} (zero ablation at all tokens; right by token" in str(line)
    assert f"0.6 alone costs {100 * drop:.1f} points" in str(line)
    assert "mean ablation at END; right by first_token" in str(line)
    assert list(other.summary.parts).index(line) == 1, "it stands beside the figures"
    alike = mi.run(mi.experiments.Knockout("zero", **asked), MODEL, prompts, store=str(tmp_path), progress=False)
    assert "Not to be compared" not in str(alike.summary)


@pytest.mark.bundled
def test_every_experiments_json_is_in_fractions(tmp_path: Path) -> None:
    prompts = mi.prompts("pairs", limit=8)
    knockout = mi.run(
        mi.experiments.Knockout(heads=["0.6"], ks=[1], control_seeds=1), MODEL, prompts, store=str(tmp_path),
        progress=False,
    )  # fmt: skip
    assert 0 <= knockout.summary.data["curve"][0]["effect"] <= 1
    assert 0 <= knockout.summary.data["summary"][0]["original"] <= 1
    attention = mi.run(mi.experiments.Attention(heads=["0.6"]), MODEL, prompts, store=str(tmp_path), progress=False)
    assert 0 < attention.summary.data["top"][0]["weight"] <= 1
    paths = mi.run(mi.experiments.Paths(layers="0"), MODEL, prompts, store=str(tmp_path), progress=False)
    assert all(0 <= row["answered right"] <= 1 for row in paths.summary.data["pairs"])
    effects = paths.table("path_effects").set_index(["operation", "node", "layer", "head"])["mean"].to_dict()
    first = paths.summary.data["top"][0]
    assert first["effect"] in effects.values()
    assert json.dumps(dict(paths.summary.data))


@pytest.mark.parametrize(
    ("name", "told"),
    [("bundeld", "Did you mean 'bundled'"), ("Smollm-2", "Did you mean 'smollm2'"),
     ("smollm2-arithmetic", "is an adapter, not a model")],
)  # fmt: skip
def test_nearly_the_name_of_a_bundled_model_is_no_matter_for_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=told):
        resolve(ModelSpec(name))


def test_misspelt_sets_and_adapters_suggest_near_names() -> None:
    with pytest.raises(UserError, match="Did you mean 'two_digit'"):
        mi.prompts("two_digits")
    with pytest.raises(UserError, match="Did you mean 'smollm2-arithmetic'"):
        resolve(ModelSpec("bundled", "smollm2_arithmetic"))


@pytest.mark.slow
def test_nothing_warns_on_a_store_of_finished_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mathinterp"):
        results, _ = summary_of(tmp_path, 1.0, 10)
        results.rows("SELECT * FROM head_effects")
    assert caplog.records == []
