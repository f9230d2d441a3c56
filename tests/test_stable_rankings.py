"""Stability of the other rankings: paths, neurons, and an experiment of someone else's, each against its view."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import mathinterp as mi
from mathinterp.experiments import Ranking, Table, registry
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.ranking import VALUES
from mathinterp.experiments.stability import stability_of
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.made_prompts import PROMPTS as MADE
from tests.neuron_rows import rows_of, scan_of
from tests.small_store import FINGERPRINT, open_run
from tests.stability_case import DRAWS, HEADS, made_prompts


def neuron_store(folder: Path, keep: str, rank: str = "difference") -> tuple[Store, str]:
    """A neuron scan of a tiny model, and its id."""
    scan, store = Neurons(against="head:0.1", keep=keep, rank=rank), Store(folder)  # type: ignore[arg-type]
    rows = rows_of(scan, scan_of("llama"))
    run = open_run(store, [f"{table}/00000" for table in rows], scan="neurons", parameters=scan.parameters())
    store.write_prompts(FINGERPRINT, MADE)
    for table, part in rows.items():
        store.write_shard(run.run_id, table, 0, part, {})
    run.finish()
    return store, run.run_id


def node_ranks(store: Store, run: str, over: str = "prompts") -> dict[tuple[Any, ...], int]:
    stability_of(store, run, draws=DRAWS)
    rows = store.rows("SELECT * FROM stability WHERE run_id = $run AND over = $over", {"run": run, "over": over})
    return {(row["operation"], row["node"], row["layer"], row["unit"]): row["rank"] for row in rows}


@pytest.mark.slow
def test_paths_are_ranked_as_path_effects_ranks_them_heads_and_mlps_apart(tmp_path: Path) -> None:
    store, prompts, random = Store(tmp_path), made_prompts(), np.random.default_rng(0)
    run = open_run(store, ["path_scan/00000"], scan="paths", parameters={"effect": "logit"})
    store.write_prompts(FINGERPRINT, prompts)
    units = [("head", *head) for head in HEADS] + [("mlp", layer, None) for layer in range(2)]
    numbers = ("logit_original", "logit_patched", "effect", "logprob_change", "probability_change", "centred_change")
    rows = [
        {"node": node, "layer": layer, "head": head, "prompt_id": p.prompt.prompt_id,
         **{name: float(random.integers(-3, 2)) / 8 if head != 3 else 0.0 for name in numbers}}
        for node, layer, head in units for p in prompts
    ]  # fmt: skip
    store.write_shard(run.run_id, "path_scan", 0, pa.Table.from_pylist(rows, catalog().tables["path_scan"].schema), {})
    run.finish()
    viewed = store.rows(
        """SELECT operation, node, layer, head,
               row_number() OVER (PARTITION BY operation, node ORDER BY mean, layer, head) AS rank FROM path_effects"""
    )
    expected = {(row["operation"], row["node"], row["layer"], row["head"]): row["rank"] for row in viewed}
    assert node_ranks(store, run.run_id) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["difference", "abs", "ratio"])
@pytest.mark.parametrize("keep", ["topk:5", "all"])
def test_neurons_are_ranked_as_neuron_summary_ranks_them(keep: str, rank: str, tmp_path: Path) -> None:
    store, run_id = neuron_store(tmp_path, keep, rank)
    viewed = store.rows(
        """SELECT operation, layer, neuron,
               row_number() OVER (PARTITION BY operation ORDER BY ranked_by DESC, layer, neuron) AS rank
           FROM neuron_summary"""
    )
    assert node_ranks(store, run_id) == {
        (row["operation"], "neuron", row["layer"], row["neuron"]): row["rank"] for row in viewed
    }
    found = stability_of(store, run_id, draws=DRAWS)
    doubts = [line for line in found.warnings if "not every prompt's value is stored" in line]
    assert bool(doubts) == (keep != "all"), "said where a mean stands for values"
    assert ((found.nodes["known"] == 1).all()) == (keep == "all")


@pytest.mark.slow
def test_a_value_that_is_not_stored_is_the_mean_of_those_that_are_not(tmp_path: Path) -> None:
    """Whatever is kept, sums over all prompts are the same; those not stored are alike in an operation."""
    sums = {}
    for keep in ("topk:5", "all"):
        store, run_id = neuron_store(tmp_path / keep[:3], keep)
        frame = store.dataframe(VALUES, {"run": run_id})
        assert len(frame) == len(MADE) * frame.groupby(["layer", "unit"]).ngroups
        sums[keep] = frame.groupby(["layer", "unit"])[["change", "importance"]].sum().sort_index()
        if keep != "all":
            hidden = frame[~frame["known"]].copy()
            hidden["operation"] = hidden["prompt_id"].map({p.prompt.prompt_id: p.prompt.operation for p in MADE})
            assert len(hidden) > 0
            assert (hidden.groupby(["layer", "unit", "operation"])["change"].nunique() == 1).all()
    np.testing.assert_allclose(sums["topk:5"], sums["all"], atol=1e-6)


WIDTHS = Table(
    pa.schema([("layer", pa.int16()), ("prompt_id", pa.string()), ("width", pa.float64())]),
    doc="a width of each prompt.",
)


@dataclass(frozen=True)
class Widths(mi.experiments.Experiment):
    """Layers ranked by a number of each prompt: an experiment of someone else's."""

    name: ClassVar[str] = "widths"
    tables: ClassVar[Mapping[str, Table]] = {"widths": WIDTHS}
    node_ranking: ClassVar[Ranking] = Ranking(
        """SELECT 'layer' AS node, layer, NULL AS unit, prompt_id, 1 AS n, width, true AS known
           FROM widths WHERE run_id = $run""",
        ("width",),
        lambda means, parameters: [-means["width"]],
    )
    parameters = shards = prepare = run = None  # type: ignore[assignment]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The experiment above, for the time of a test."""
    monkeypatch.setattr(registry, "_added", {})
    registry.add(Widths)
    yield
    monkeypatch.undo()
    registry.stored.cache_clear()
    registry.experiments.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("known")
def test_an_experiment_from_outside_has_it_too(tmp_path: Path) -> None:
    store, random = Store(tmp_path), np.random.default_rng(0)
    run = open_run(store, ["widths/00000"], scan="widths")
    prompts = made_prompts()
    store.write_prompts(FINGERPRINT, prompts)
    rows = [
        {"layer": layer, "prompt_id": p.prompt.prompt_id, "width": layer + random.normal()}
        for layer in range(7)
        for p in prompts
    ]
    store.write_shard(run.run_id, "widths", 0, pa.Table.from_pylist(rows, WIDTHS.schema), {})
    run.finish()
    found = stability_of(store)
    assert found.scan == "widths"
    assert found.nodes.query("operation == 'all' and over == 'prompts'")["layer"].tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert found.lines()[0].startswith("The first 5 layers: 5 are in")
