"""Circuits as an experiment: rankings of runs, what the views say, circuit files, and mistakes."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from scipy import optimize, stats

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.ranking import node_scores
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.circuit.mib_json import read_circuit, write_circuit
from mathinterp.experiments.circuit.ranking import NodeScores, scores_from
from mathinterp.experiments.circuit.tables import FRACTIONS
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.store import Store
from tests import attribution_twin as twin
from tests.charts import table_of

pytestmark = pytest.mark.bundled
PROMPTS = mi.prompts("operand_pairs", limit=5)


@pytest.fixture(scope="module")
def model():
    return mi.load("bundled", device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("circuits"))


@pytest.fixture(scope="module")
def run_of(model, store):
    """Runs an experiment on the prompts."""
    return lambda scan: mi.run(scan, model, PROMPTS, store=store, progress=False)


@pytest.fixture(scope="module")
def ranking(run_of) -> str:
    return run_of(Attribution(method="relp", steps=2)).id


@pytest.fixture(scope="module")
def run(run_of, ranking: str):
    return run_of(Circuit(ranking))


def test_rows_are_of_the_first_nodes_of_the_ranking(model, store, run, ranking: str) -> None:
    """At .1 of the nodes: node by node from the ranking's own frame, each pair alone."""
    rows = run.table("circuit_metric")
    assert set(rows["ranking_run"]) == {ranking}
    assert set(rows["method"]) == {"relp"}
    assert len(rows) == len(PROMPTS) * (2 + 2 * len(FRACTIONS))
    planned = mi.plan(Circuit(ranking), model, PROMPTS, store=store)
    assert planned is not None
    assert planned.rows == len(rows)
    frame = node_scores(mi.open_store(store), ranking)
    for ordering, key in (("signed", frame["score"]), ("absolute", -frame["score"].abs())):
        held = frame.loc[key.sort_values(kind="stable").index[:7]]
        own = rows[(rows["ordering"] == ordering) & (rows["fraction"] == 0.1)].set_index("prompt_id")
        assert set(own["nodes"]) == {7}
        with model.lent() as loaded:
            for item in tokenize_prompts(PROMPTS, loaded.tokenizer)[:2]:
                expected = _by_hand(loaded.anatomy, item, held)
                assert own["metric"][item.prompt.prompt_id] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def _by_hand(anatomy, item, held) -> float:
    heads = {(layer, int(unit)) for node, layer, unit in held[["node", "layer", "unit"]].to_numpy() if node == "head"}
    mlps = set(held.loc[held["node"] == "mlp", "layer"])
    with ExitStack() as hooks:
        given = {(s, n): twin.value(anatomy, item, (s, n), True) for s in ("head", "mlp") for n in range(8)}
        for (site, layer), other in given.items():

            def edit(x, site=site, layer=layer, other=other):
                mixed = x.clone()
                for head in range(8):
                    if site == "head" and (layer, head) not in heads:
                        mixed[..., anatomy.head_slice(head)] = other[..., anatomy.head_slice(head)]
                return other.clone() if site == "mlp" and layer not in mlps else mixed

            hooks.enter_context(twin.put(anatomy, (site, layer), edit))
        return twin.m(anatomy, item)


def test_the_views_are_ratios_of_means_with_fiellers_interval(run) -> None:
    rows = run.table("circuit_metric").astype({"metric": float})
    wide = rows.pivot(index="prompt_id", columns=["ordering", "fraction"], values="metric")
    nothing, whole = wide["empty"].iloc[:, 0].to_numpy(), wide["full"].iloc[:, 0].to_numpy()
    curves = run.table("circuit_curves").set_index(["ordering", "fraction"])
    assert len(curves) == 20
    for ordering in ("signed", "absolute"):
        for fraction in FRACTIONS:
            found = curves.loc[(ordering, fraction)]
            part = wide[ordering, fraction].to_numpy() - nothing
            assert found["faithfulness"] == pytest.approx(part.mean() / (whole - nothing).mean(), abs=1e-9)
            assert (found["low"], found["high"]) == pytest.approx(fieller(part, whole - nothing), abs=1e-6)
    (scores,) = run.sql("SELECT * FROM circuit_scores WHERE run_id = $run").to_dict("records")
    widths = np.diff(FRACTIONS)
    weights = np.append(widths, 0) / 2 + np.insert(widths, 0, 0) / 2
    under = sum(w * (wide["signed", f].to_numpy() - nothing) for w, f in zip(weights, FRACTIONS, strict=True))
    assert scores["cpr"] == pytest.approx(under.mean() / (whole - nothing).mean(), abs=1e-9)
    assert (scores["cpr_low"], scores["cpr_high"]) == pytest.approx(fieller(under, whole - nothing), abs=1e-6)
    f = np.array([curves.loc[("absolute", fraction), "faithfulness"] for fraction in FRACTIONS])
    assert scores["cmd"] == pytest.approx(float((weights * abs(1 - f)).sum()), abs=1e-9)
    apart = sum(
        w * np.sign(1 - share) * (whole - wide["absolute", at].to_numpy())
        for w, share, at in zip(weights, f, FRACTIONS, strict=True)
    )
    low, high = fieller(apart, whole - nothing)
    assert (scores["cmd_low"], scores["cmd_high"]) == pytest.approx((max(low, 0), high), abs=1e-6)
    assert (scores["whole"], scores["nothing"]) == pytest.approx((whole.mean(), nothing.mean()))


def fieller(part: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The ratios at which the mean of part - ratio * whole is 0 by Student's t, found by root search."""
    ratio, n = part.mean() / whole.mean(), len(part)
    t = stats.t.ppf(0.975, n - 1)

    def beyond(r: float) -> float:
        apart = part - r * whole
        return abs(apart.mean()) - t * apart.std(ddof=1) / np.sqrt(n)

    if np.ptp(part - ratio * whole) < 1e-9:
        return ratio, ratio
    ends = []
    for side in (-1, 1):
        step = 1e-6
        while beyond(ratio + side * step) < 0:
            step *= 2
        ends.append(optimize.brentq(beyond, ratio, ratio + side * step))
    return ends[0], ends[1]


def test_the_interval_holds_the_ratio_as_often_as_it_says(tmp_path: Path) -> None:
    """In 2,000 draws of 12 prompts whose span varies as much as its mean, by the views' own macro."""
    rng = np.random.default_rng(0)
    span = 2 + 2 * rng.normal(size=(2000, 12))
    part = 0.4 * span + rng.normal(size=span.shape)
    rows = Store(tmp_path).rows(
        """SELECT draw, ratio_bound(p, s, vp, ps, vs, student_factor(n), -1) AS low,
                  ratio_bound(p, s, vp, ps, vs, student_factor(n), 1) AS high
           FROM (SELECT draw, count(*) AS n, avg(part) AS p, avg(span) AS s, var_samp(part) / count(*) AS vp,
                        covar_samp(part, span) / count(*) AS ps, var_samp(span) / count(*) AS vs
                 FROM (SELECT unnest($draw) AS draw, unnest($part) AS part, unnest($span) AS span) GROUP BY draw)
           ORDER BY draw""",
        {"draw": np.repeat(np.arange(2000), 12).tolist(), "part": part.ravel().tolist(), "span": span.ravel().tolist()},
    )
    bounds = [(row["draw"], row["low"], row["high"]) for row in rows if row["low"] is not None]
    assert len(rows) == 2000
    assert len(bounds) > 1000
    for draw, low, high in bounds[:50]:
        assert (low, high) == pytest.approx(fieller(part[draw], span[draw]), rel=1e-5)
    assert 0.93 <= np.mean([low <= 0.4 <= high for _, low, high in bounds]) <= 0.985


def test_heads_and_mlps_together_rank_by_exact_effects(run_of, model, store) -> None:
    exact = [run_of(scan(ablation="resample", positions="all")).id for scan in (Heads, Mlps)]
    both = run_of(Circuit(exact))
    assert set(both.table("circuit_metric")["method"]) == {"exact"}
    assert both.sql("SELECT DISTINCT scored FROM circuit_scores WHERE run_id = $run")["scored"].tolist() == [72]
    heads = run_of(Circuit(exact[0]))  # MLPs have no score and stay
    scored = heads.sql("SELECT scored, cpr FROM circuit_scores WHERE run_id = $run").to_dict("records")[0]
    assert scored["scored"] == 64
    frame = node_scores(mi.open_store(store), exact[0])
    held = frame.loc[frame["score"].sort_values(kind="stable").index[:32]]
    held = pd.concat([held, pd.DataFrame({"node": "mlp", "layer": range(8), "unit": 0})])
    rows = heads.table("circuit_metric").query("ordering == 'signed' and fraction == 0.5").set_index("prompt_id")
    with model.lent() as loaded:
        item = tokenize_prompts(PROMPTS, loaded.tokenizer)[0]
        assert rows["metric"][item.prompt.prompt_id] == pytest.approx(_by_hand(loaded.anatomy, item, held), rel=1e-5)
    attributed = [run_of(Attribution(neurons=neurons)).id for neurons in (False, True)]
    with pytest.raises(UserError, match="that an earlier one of `rank_from` scores, too"):
        run_of(Circuit(attributed))
    with pytest.raises(UserError, match=r"\(exact, .* have scores that do not compare"):
        run_of(Circuit([exact[0], attributed[0]]))


def test_neurons_of_a_run_are_replaced_one_by_one_and_all_else_stays(run_of, model, store) -> None:
    attributed = run_of(Attribution(neurons=True)).id
    run = run_of(Circuit(attributed, level="neuron"))
    curves = run.table("circuit_curves").set_index(["ordering", "fraction"])
    assert curves.loc[("absolute", 0.5), "nodes"] == 8 * model.described.shape.n_neurons // 2
    found = scores_from(mi.open_store(store), [attributed], "neuron", model.described)
    frame = node_scores(mi.open_store(store), attributed).query("node == 'neuron'")
    largest = frame.loc[frame["score"].abs().idxmax()]
    kept = found.first(1, "absolute")
    assert sum(int(each.sum()) for each in kept.values()) == 1
    assert kept["neuron", largest["layer"]][int(largest["unit"])]
    held = set(frame["score"].abs().sort_values(ascending=False, kind="stable").index[: len(frame) // 2])
    rows = run.table("circuit_metric").query("ordering == 'absolute' and fraction == 0.5").set_index("prompt_id")
    with model.lent() as loaded:
        item = tokenize_prompts(PROMPTS, loaded.tokenizer)[1]
        expected = _neurons_by_hand(loaded.anatomy, item, frame[frame.index.isin(held)])
        assert abs(twin.m(loaded.anatomy, item) - expected) > 0.01
    assert rows["metric"][item.prompt.prompt_id] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    with pytest.raises(UserError, match=r"`level` neuron: run .* scores no neurons; scan attribution with `neurons`"):
        run_of(Circuit(run_of(Attribution(method="relp", steps=2)).id, level="neuron"))


def _neurons_by_hand(anatomy, item, held) -> float:
    """m with every MLP neuron outside ``held`` at its value on the counterfactual, layer by layer."""
    with ExitStack() as hooks:
        given = {layer: twin.value(anatomy, item, ("neuron", layer), True) for layer in range(8)}
        for layer, other in given.items():
            out = torch.ones(other.shape[-1], dtype=torch.bool)
            out[held.loc[held["layer"] == layer, "unit"].astype(int).to_list()] = False
            edit = lambda x, out=out, other=other: torch.where(out, other, x)  # noqa: E731
            hooks.enter_context(twin.put(anatomy, ("neuron", layer), edit))
        return twin.m(anatomy, item)


def test_a_ranking_written_as_a_circuit_is_read_back(tmp_path: Path, model, store, ranking: str, run, run_of) -> None:
    shape = model.described.shape
    scores = scores_from(mi.open_store(store), [ranking], "node", model.described)
    file = tmp_path / "relp.json"
    write_circuit(file, scores, 7, "absolute", shape)
    graph = json.loads(file.read_text())
    assert graph["cfg"] == {"n_layers": 8, "n_heads": 8, "d_model": 256, "parallel_attn_mlp": False}
    held = {name for name, node in graph["nodes"].items() if node["in_graph"]} - {"input", "logits"}
    assert len(held) == 7
    for name, edge in graph["edges"].items():
        parent, child = name.partition("<")[0].split("->")
        assert edge["in_graph"] == ({parent, child} <= held | {"input", "logits"}), name
    heads, mlps = 8 * 8, 8
    before = sum(1 + layer * 9 for layer in range(8))  # what heads of all layers read
    assert len(graph["edges"]) == 3 * 8 * before + before + heads + 1 + heads + mlps
    assert graph["nodes"]["input"] == {"in_graph": True}
    back = read_circuit(file, "node", shape)
    assert back.fingerprint == scores.fingerprint
    again = run_of(Circuit(circuit=str(file)))
    columns = ["ordering", "fraction", "prompt_id", "metric"]
    ours, theirs = (each.table("circuit_metric")[columns].sort_values(columns[:3]) for each in (run, again))
    np.testing.assert_array_equal(ours["metric"], theirs["metric"])


def test_summary_and_figure_show_both_orders(run) -> None:
    text = str(run.summary)
    assert "Faithfulness of the first nodes by relp" in text
    assert f"CPR {run.summary.data['cpr']:.3f}" in text
    curves = table_of(run.figure(), "faithfulness")
    assert set(curves["ordering"]) == {"signed scores", "absolute scores"}
    stored = run.sql("SELECT faithfulness FROM circuit_curves WHERE run_id = $run")["faithfulness"]
    assert sorted(curves["faithfulness"]) == pytest.approx(sorted(stored), rel=1e-3)
    assert run.sql("SELECT notes ->> 'forwards_per_prompt' AS n FROM runs WHERE run_id = $run")["n"].item() == "14"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "give the ranking in one way: `rank_from` RUN_ID, or a `circuit` file with scores"),
        ({"rank_from": "a", "circuit": "b"}, "give the ranking in one way"),
        ({"rank_from": "a,a"}, "name each run once"),
        ({"rank_from": "a", "level": "edge"}, "`level` 'edge' is not known"),
        ({"rank_from": "a", "ablation": "dataset_mean"}, "`ablation` 'dataset_mean' is not known"),
    ],
)
def test_mistakes_are_told_before_anything_runs(asked: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Circuit(**asked)


def test_runs_that_rank_nothing_here_are_refused(model, run_of, store, ranking: str) -> None:
    with pytest.raises(UserError, match="no run 'nope'"):
        run_of(Circuit("nope"))
    with pytest.raises(UserError, match="scored nodes of bundled, not of"):
        mi.run(Circuit(ranking), mi.load("random:llama-tiny"), PROMPTS, store=store, progress=False)
    with pytest.raises(UserError, match="has no distractor"):
        mi.run(Circuit(ranking), model, mi.prompts("pairs", limit=4), store=store, progress=False)


def test_the_command_writes_what_it_says(tmp_path: Path, store, ranking: str) -> None:
    file = tmp_path / "c.json"
    found = CliRunner().invoke(main, ["mib", "export", "--from", ranking, "--store", store, "--dtype", "float64",
                                      "--fraction", "0.5", "--signed", "--out", str(file), "--json"])  # fmt: skip
    assert json.loads(found.stdout) == {"file": str(file), "method": "relp", "scored": 72, "nodes": 36}
    wrong = CliRunner().invoke(main, ["mib", "export", "--from", ranking, "--fraction", "2", "--out", str(file)])
    assert wrong.exit_code == 2
    assert wrong.stderr == "mathinterp: --fraction 2: a circuit has at most all nodes, 1\n"
    asked = ["mib", "evaluate", "--from", ranking, "--circuit", str(file)]
    assert CliRunner().invoke(main, asked).stderr.startswith("mathinterp: give the ranking in one way: --from RUN_ID")


def test_the_help_says_that_the_limit_is_taken_first() -> None:
    assert "--limit is taken before pairs" in " ".join(
        CliRunner().invoke(main, ["mib", "evaluate", "--help"]).stdout.split()
    )


def test_scores_of_nothing_are_an_empty_order() -> None:
    ranked = NodeScores("m", "r", {("head", 0): np.full(3, np.nan)})
    assert ranked.scored == 0
    assert ranked.first(0, "signed")["head", 0].all()
