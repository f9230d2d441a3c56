"""Stability of rankings: the fast draws against the SQL views asked of stores whose prompts were drawn, one by one."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments import stability as rooms
from mathinterp.experiments.results import Results
from mathinterp.experiments.stability import stability_lines, stability_of
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store
from tests.small_store import fill, open_run
from tests.stability_case import DRAWS, HEADS, SEED, made_prompts

ORDER = "round(drop, 12) DESC, logprob_change, layer, head"  # of heads; ties of accuracy: by log-probability


def made_scores(prompts: list[TokenizedPrompt]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Baseline and head rows; heads that cost much, little, the same, and nothing at all."""
    random = np.random.default_rng(1)
    tokens = [{"prompt_id": p.prompt.prompt_id, "position": t.position} for p in prompts for t in p.scored]
    before = [{**token, "correct": bool(random.random() < 0.9), "logprob": -0.25} for token in tokens]
    rows = []
    for number, (layer, head) in enumerate(HEADS):
        for row in before:
            falls = number < 6 and random.random() < 0.1 * (number + 1)
            moved = -float(random.integers(0, 4)) / 4 if number < 7 else 0.0
            rows.append({**row, "layer": layer, "head": head, "correct": row["correct"] and not falls,
                         "logprob": row["logprob"] + moved})  # fmt: skip
    return before, rows


def drawn(prompts: list[TokenizedPrompt], over: str) -> list[dict[str, int]]:
    """Of each draw how often every prompt is in it: as docs/statistics.md says, operation by operation."""
    random = np.random.default_rng([SEED, ("prompts", "templates").index(over)])
    counts: list[dict[str, int]] = [{} for _ in range(DRAWS)]
    for operation in ("add", "sub"):
        own = [p.prompt for p in prompts if p.prompt.operation == operation]
        unit_of = {p.prompt_id: p.prompt_id if over == "prompts" else str(p.template) for p in own}
        units = sorted(set(unit_of.values()))
        times_DU = random.multinomial(len(units), [1 / len(units)] * len(units), DRAWS)
        for counted, times_U in zip(counts, times_DU, strict=True):
            counted |= {name: int(times_U[units.index(unit)]) for name, unit in unit_of.items()}
    return counts


def repeated(rows: list[dict[str, Any]], counts: dict[str, int]) -> list[dict[str, Any]]:
    return [{**row, "prompt_id": f"{row['prompt_id']}-{i}"} for row in rows for i in range(counts[row["prompt_id"]])]


def ranked_by_view(store: Store) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(run, operation) -> heads, first to last, as head_effects and head_ranking order them."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in store.rows(
        f"SELECT run_id, operation, layer, head FROM head_effects ORDER BY run_id, operation, {ORDER}"
    ):
        found.setdefault((row["run_id"], row["operation"]), []).append((row["layer"], row["head"]))
    return found


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """A store with one head scan of made rows, and its id."""
    store, prompts = Store(tmp_path_factory.mktemp("scanned")), made_prompts()
    return store, fill(store, prompts, *made_scores(prompts))


@pytest.mark.slow
@pytest.mark.parametrize("over", ["prompts", "templates"])
def test_it_is_the_views_ranking_of_stores_whose_prompts_were_drawn(
    over: str, scanned: tuple[Store, str], tmp_path: Path
) -> None:
    (before, heads), prompts, twin, runs = made_scores(made_prompts()), made_prompts(), Store(tmp_path), []
    for number, counts in enumerate(drawn(prompts, over)):
        again = [
            dataclasses.replace(p, prompt=dataclasses.replace(p.prompt, prompt_id=f"{p.prompt.prompt_id}-{i}"))
            for p in prompts for i in range(counts[p.prompt.prompt_id])
        ]  # fmt: skip
        rows = (repeated(part, counts) for part in (before, heads))
        runs.append(fill(twin, again, *rows, prompts_fingerprint=f"feedbeef{number:08d}"))
    by_view, own = ranked_by_view(twin), ranked_by_view(scanned[0])[scanned[1], "all"]
    assert len({tuple(by_view[run, "all"]) for run in runs}) > 2, "the draws differ"

    found = stability_of(*scanned, draws=DRAWS, seed=SEED)
    for operation in ("all", "add", "sub"):
        orders = [by_view[run, operation] for run in runs]
        own = ranked_by_view(scanned[0])[scanned[1], operation]
        nodes = found.nodes[(found.nodes["over"] == over) & (found.nodes["operation"] == operation)]
        assert list(zip(nodes["layer"], nodes["unit"], strict=True)) == own
        for row in nodes.to_dict("records"):
            ranks = sorted(order.index((row["layer"], row["unit"])) + 1 for order in orders)
            assert (row["rank_low"], row["rank_high"]) == (ranks[0], ranks[-1]), "of 20 draws 95 % are all but none"
            assert row["in_first_5"] == pytest.approx(np.mean([rank <= 5 for rank in ranks]))
            assert np.isnan(row["in_first_10"]), "there are only eight"
            assert row["known"] == 1
        (overlap,) = found.overlap[(found.overlap["over"] == over) & (found.overlap["operation"] == operation)].to_dict(
            "records"
        )
        firsts = [set(order[:5]) for order in orders]
        alike = [len(first & set(own[:5])) / len(first | set(own[:5])) for first in firsts]
        pairs = [len(a & b) / len(a | b) for i, a in enumerate(firsts) for b in firsts[:i]]
        assert (overlap["k"], overlap["nodes"]) == (5, 8)
        assert overlap["jaccard"] == pytest.approx(np.mean(alike))
        assert (overlap["jaccard_low"], overlap["jaccard_high"]) == pytest.approx((min(alike), max(alike)))
        assert overlap["pairwise"] == pytest.approx(np.mean(pairs))
        assert overlap["units"] == {"prompts": {"add": 9}, "templates": {}}[over].get(
            operation, 6 if over == "prompts" else 3
        )


def test_rank_intervals_hold_95_of_a_hundred_draws(scanned: tuple[Store, str]) -> None:
    from mathinterp.experiments.stability.resample import _middle

    low, high = _middle(np.arange(1, 201)[:, None])
    assert (low[0], high[0]) == (5, 195)


# ---- what is said, stored and refused ----


@pytest.mark.slow
def test_draws_are_a_function_of_run_and_seed_and_are_made_once(
    scanned: tuple[Store, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = scanned
    first = stability_of(store, run, draws=40, seed=5)
    assert not stability_of(store, run, draws=40, seed=6).nodes.equals(first.nodes)
    monkeypatch.setattr(rooms, "_computed", lambda *_: pytest.fail("drawn a second time"))
    again = stability_of(Store(store.url), run, draws=40, seed=5)
    assert again.nodes.equals(first.nodes)
    assert again.overlap.equals(first.overlap)


@pytest.mark.slow
def test_views_show_the_computation_with_most_draws(scanned: tuple[Store, str]) -> None:
    store, run = scanned
    stability_of(store, run, draws=30)
    found = stability_of(store, run, draws=60, seed=9)
    nodes = store.sql("SELECT * FROM stability WHERE run_id = $run ORDER BY over, operation, rank", run=run)
    assert set(zip(nodes["draws"], nodes["seed"], strict=True)) == {(60, 9)}
    assert len(nodes) == len(found.nodes) == len(HEADS) * 3 * 2
    assert (nodes["head"] == nodes["unit"]).all()
    assert nodes["neuron"].isna().all()
    overlap = store.sql("SELECT * FROM stability_overlap WHERE run_id = $run", run=run)
    assert (overlap["bar"] == 0.8).all()
    assert ((overlap["jaccard"] >= 0.8) & ~overlap["above_bar"]).any(), "what only resembles the run's own list is not"
    assert (overlap["above_bar"] == (overlap["pairwise"] >= 0.8)).all()
    assert store.rows("SELECT status FROM runs WHERE run_id = $run", {"run": run}) == [{"status": "finished"}]


@pytest.mark.slow
def test_a_summary_of_its_own_rows_alone_says_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation is a run of its own: it was not seen, and other figures, of fewer draws, were made anew."""
    store, prompts = Store(tmp_path), made_prompts()
    run = fill(store, prompts, *made_scores(prompts))
    (line,) = stability_of(store, run, draws=400, seed=9).lines()
    monkeypatch.setattr(rooms, "_computed", lambda *_: pytest.fail("drawn anew"))
    for own in (None, run):
        with store.held(own):
            assert stability_lines(Results(store, run)) == [line]
            assert len(store.rows("SELECT * FROM stability WHERE run_id = $run", {"run": run})) == len(HEADS) * 3 * 2


@pytest.mark.slow
def test_a_summary_says_it_in_a_line_and_of_a_large_run_how_to_find_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompts = Store(tmp_path), made_prompts()
    run = fill(store, prompts, *made_scores(prompts))
    (line,) = stability_lines(Results(store, run))
    found = stability_of(store, run)
    assert [line] == found.lines()
    nodes = found.nodes.query("operation == 'all' and over == 'prompts' and rank <= 5 and in_first_5 >= 0.95")
    sure = f"{len(nodes)} are in at least 95 % of draws of prompts"
    assert line.startswith(f"The first 5 heads: {sure} (any two draws: Jaccard 0.")
    assert "; 3 per operation are too few to mean much)" in line
    summary = mi.experiments.Heads.summarize(Results(store, run), None)
    assert line in str(summary)
    assert summary.data["stability"] == [line]
    other = fill(store, prompts, *made_scores(prompts), dtype="bfloat16")
    monkeypatch.setattr(rooms, "AT_ONCE", 10)
    assert stability_lines(Results(store, other)) == [f"How stable this ranking is: mathinterp stability `run` {other}"]
    assert stability_lines(Results(store, run)) == [line], "what is stored is said"


@pytest.mark.slow
def test_one_template_is_not_drawn(tmp_path: Path) -> None:
    store, prompts = Store(tmp_path), made_prompts(templates=1)
    found = stability_of(store, fill(store, prompts, *made_scores(prompts)))
    assert set(found.nodes["over"]) == set(found.overlap["over"]) == {"prompts"}
    assert "templates are not drawn: some operation has only one" in " ".join(found.warnings)
    assert "with 6 prompts of an operation the draws say little" in " ".join(found.warnings)


@pytest.mark.slow
def test_a_node_without_some_prompts_is_refused(tmp_path: Path) -> None:
    store, prompts = Store(tmp_path), made_prompts()
    before, heads = made_scores(prompts)
    run = fill(store, prompts, before, heads[:-4])
    with pytest.raises(UserError, match=f"run {run}: not every node has every prompt"):
        stability_of(store, run)
    assert store.rows("SELECT count(*) AS n FROM runs") == [{"n": 1}], "nothing half written"
    (line,) = stability_lines(Results(store, run))
    assert "cannot be told: run" in line


# ---- the command ----


def told(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["stability", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_the_command_says_what_the_library_finds(scanned: tuple[Store, str]) -> None:
    store, run = scanned
    found = stability_of(store, run, draws=25)
    code, out, _ = told("--store", store.url, "--draws", "25", "--run", run, "--operation", "add", "--json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["run_id"], answer["draws"], answer["lines"]) == (run, 25, found.lines("add"))
    assert Counter(row["operation"] for row in answer["nodes"]) == {"add": 16}
    code, out, _ = told("--store", store.url, "--draws", "25")
    assert code == 0
    assert found.lines()[0] in out


@pytest.mark.slow
def test_mistakes_are_one_line(scanned: tuple[Store, str], tmp_path: Path) -> None:
    store, run = scanned
    empty = Store(tmp_path)
    other = open_run(empty, scan="attention").run_id
    for arguments, line in (
        (("--store", store.url, "--run", "none"), "no run 'none' in"),
        (("--store", store.url, "--run", run, "--operation", "pow"), "--operation 'pow' is not in run"),
        (("--store", store.url, "--draws", "3"), "3 is not in the range"),
        (("--store", empty.url, "--run", other), "is a scan of attention, which ranks no nodes"),
        (("--store", empty.url), "no finished run in"),
        (("--store", str(tmp_path / "nowhere")), "there is no store at"),
    ):
        code, out, err = told(*arguments)
        assert (code, out) == (2, "")
        assert line in err
        assert "Traceback" not in err
    with pytest.raises(UserError, match="`draws` 3 is too small"):
        mi.stability(run, store=store.url, draws=3)
