"""The prediction-enhancing graph: edges against autograd through the real model in float64, rows, views, drawing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.replica import check_rows
from mathinterp.engine.hooks import caught_input, edited_input
from mathinterp.engine.lens.graph import GraphReader
from mathinterp.engine.lens.neurons import end_activations
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.figures import save
from mathinterp.experiments.neuron_graph import GraphShown, NeuronGraph
from mathinterp.experiments.neuron_graph.figure import draw
from mathinterp.experiments.neuron_graph.nodes import NeuronNodes, RankedNodes, nodes_from
from mathinterp.experiments.neuron_graph.summary import summarize
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.stored import check_model, neuron_run
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts import load_prompts
from mathinterp.store import Store
from tests.exact import PROMPTS
from tests.made_prompts import PROMPTS as MADE
from tests.neuron_twin import gain, look, spread, value_row, zero_columns
from tests.small_store import open_run
from tests.statistics_twin import student_interval
from tests.tiny import of_neurons, tiny_model, tiny_tokenizer

NEURONS = [(2, 7), (0, 3), (1, 39), (0, 17), (2, 20), (1, 0)]
EXACTLY = {"rel": 1e-9, "abs": 1e-11}

# ---- the twin: one pair of neurons, formulas as the module states them, derivatives by autograd ----


def read_rows(anatomy: Anatomy, layer: int, neuron: int) -> list[torch.Tensor]:
    """Gate and up rows (plain: fc1), read off the modules of each family."""
    family, mlp = anatomy.family, anatomy.mlp(layer)
    if family.fused_gate_up:
        weight = getattr(mlp, family.fused_gate_up).weight
        rows = [weight[neuron], weight[anatomy.shape.n_neurons + neuron]]
    elif family.gate:
        rows = [getattr(mlp, family.gate).weight[neuron], getattr(mlp, str(family.up)).weight[neuron]]
    else:
        module = getattr(mlp, str(family.up))
        rows = [module.weight[:, neuron] if type(module).__name__ == "Conv1D" else module.weight[neuron]]
    return rows


def key_rows(anatomy: Anatomy, layer: int, neuron: int) -> list[torch.Tensor]:
    """The same times the norm's weight."""
    return [row * gain(anatomy, anatomy.mlp_norm(layer)) for row in read_rows(anatomy, layer, neuron)]


def gradient(anatomy: Anatomy, ids: tuple[int, ...], layer: int, neuron: int) -> torch.Tensor:
    """Of the coefficient at END with respect to the stream that the MLP (its norm) reads, through the model itself."""
    added = torch.zeros(anatomy.shape.d_model, dtype=torch.float64, requires_grad=True)

    def add_at_end(stream_BTD: torch.Tensor) -> torch.Tensor:
        return torch.cat([stream_BTD[:, :-1], stream_BTD[:, -1:] + added], dim=1)

    with edited_input(anatomy.stream_reader(layer), add_at_end), caught_input(anatomy.down_projection(layer)) as caught:
        anatomy.model(torch.tensor([ids]))
    return torch.autograd.grad(caught[0][0, -1, neuron], added)[0]


def written_out_gradient(anatomy: Anatomy, stream: torch.Tensor, layer: int, neuron: int) -> torch.Tensor:
    """The same with norm and MLP written out in float64: models' own RMS norms square in float32."""
    norm, family, mlp = anatomy.mlp_norm(layer), anatomy.family, anatomy.mlp(layer)
    leaf = stream.clone().requires_grad_()
    centred = leaf - leaf.mean() if isinstance(norm, torch.nn.LayerNorm) else leaf
    normed = centred / spread(anatomy, norm, leaf)
    bias = getattr(norm, "bias", None)
    inputs = [float_key @ normed for float_key in key_rows(anatomy, layer, neuron)]
    if bias is not None:
        inputs = [read + row @ bias for read, row in zip(inputs, read_rows(anatomy, layer, neuron), strict=True)]
    if not anatomy.shape.gated_mlp:
        bias = getattr(mlp, str(family.up)).bias
        inputs = [inputs[0] + (0 if bias is None else bias[neuron])]
    coefficient = getattr(mlp, family.activation)(inputs[0])
    for factor in inputs[1:]:
        coefficient = coefficient * factor
    return torch.autograd.grad(coefficient, leaf)[0]


def factors(anatomy: Anatomy, layer: int, neuron: int, ids: tuple[int, ...]) -> list[float]:
    """act(a) and u on the prompt (plain: act(a) alone), seen inside the MLP."""
    family, mlp = anatomy.family, anatomy.mlp(layer)
    activation = getattr(mlp, family.activation)
    seen: list[torch.Tensor] = []
    handle = activation.register_forward_hook(lambda _, args, output: seen.append(output[0, -1, neuron]))
    try:
        with caught_input(anatomy.down_projection(layer)) as caught:
            anatomy.model(torch.tensor([ids]))
    finally:
        handle.remove()
    if not anatomy.shape.gated_mlp:
        return [float(seen[0])]
    return [float(seen[0]), float(caught[0][0, -1, neuron] / seen[0])]


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


@of_neurons
def test_edges_are_inner_products_and_autograds_derivatives(anatomy: Anatomy) -> None:
    sequences = [prompt.input_ids[: prompt.end + 1] for prompt in PROMPTS[:6]]
    activations = end_activations(anatomy, sequences)
    graph = GraphReader(anatomy)
    for prompt in (0, 4):
        ids = sequences[prompt]
        seen = look(anatomy, ids)
        found = graph.edges(NEURONS, activations, prompt)
        counted = 0
        for i, (low, k) in enumerate(NEURONS):
            for j, (high, m) in enumerate(NEURONS):
                assert bool(found.exists_MN[i, j]) == (low < high)
                if low >= high:
                    continue
                value, keys = value_row(anatomy, low, k), key_rows(anatomy, high, m)
                if isinstance(anatomy.mlp_norm(high), torch.nn.LayerNorm):
                    value = value - value.mean()
                products = [float(value @ key) for key in keys]
                c_low, c_high = float(seen.c[low][k]), float(seen.c[high][m])
                assert float(found.sum_MN[i, j]) == pytest.approx(sum(products), **EXACTLY)
                fed = factors(anatomy, high, m, ids)
                pushed = sum(sign(factor) * product for factor, product in zip(fed, products, strict=True))
                assert float(found.signed_MN[i, j]) == pytest.approx(sign(c_low) * pushed, **EXACTLY)
                written = c_low * value_row(anatomy, low, k)
                if anatomy.family.mlp_post_norm:
                    written = written / spread(anatomy, anatomy.mlp_post_norm(low), seen.f[low])
                stream = seen.x[high] + (0 if anatomy.shape.parallel else seen.a[high])
                along = float(written_out_gradient(anatomy, stream, high, m) @ written) * sign(c_high)
                assert float(found.first_order_MN[i, j]) == pytest.approx(along, **EXACTLY)
                along = float(gradient(anatomy, ids, high, m) @ written) * sign(c_high)
                own_norm = 1e-9 if isinstance(anatomy.mlp_norm(high), torch.nn.LayerNorm) else 1e-5
                assert float(found.first_order_MN[i, j]) == pytest.approx(along, rel=own_norm, abs=1e-8)
                counted += 1
        assert counted == 12
        sizes = found.first_order_MN[found.exists_MN].abs()
        assert (sizes.max() if anatomy.shape.model_type == "opt" else sizes.min()) > 0  # behind a ReLU some are 0


# ---- the scan ----


def ranked(graph: str, neurons: list[tuple[int, int]], importance: list[float] | None = None) -> RankedNodes:
    given = importance or [1.0 / (i + 1) for i in range(len(neurons))]
    return RankedNodes(graph, tuple(neurons), tuple(given), (None,) * len(neurons))


def rows_of(scan: NeuronGraph, model: Anatomy) -> dict[str, pd.DataFrame]:
    """Every shard's rows, by table; no Ray, no store."""
    state = scan.prepare(Subject(model, MADE, tokenizer=tiny_tokenizer()))
    found: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(model.shape, MADE):
        found.setdefault(shard.table, []).append(scan.run(state, shard))
        check_rows(found[shard.table][-1], scan.tables[shard.table].schema, shard.key)
    return {table: pa.concat_tables(parts).to_pandas() for table, parts in found.items()}


def _of(rows: pd.DataFrame, graph: str) -> pd.DataFrame:
    return rows[rows["graph"] == graph]


def of_prompts(ks: tuple[int, ...] = (4, 2), **changes: Any) -> NeuronGraph:
    """Every prompt's graph has the same neurons, in an order of its own."""
    graphs = [ranked(p.prompt.prompt_id, NEURONS[i % 3 :] + NEURONS[: i % 3]) for i, p in enumerate(MADE)]
    nodes = NeuronNodes("run", tuple(graphs))
    return NeuronGraph("run", top=len(NEURONS), ks=ks, nodes=nodes, **{"control_seeds": 1, **changes})


def test_root_is_of_the_lowest_layer_and_there_of_the_largest_importance() -> None:
    assert ranked("a", [(3, 1), (2, 9), (2, 4), (5, 0)], [9.0, 0.1, 0.2, 8.0]).root == 2
    assert ranked("a", [(2, 9), (2, 4)], [0.2, 0.2]).root == 1
    assert ranked("a", [(3, 1), (2, 9), (2, 4), (5, 0)], [9.0, 0.1, 0.2, 8.0]).first(2).root == 1


def test_edges_of_an_operation_are_means_over_its_prompts_and_the_strongest_stay() -> None:
    model = Anatomy(tiny_model("llama"))
    graphs = NeuronNodes("run", (ranked("add", NEURONS), ranked("all", NEURONS)))
    everything = rows_of(NeuronGraph("run", "operation", edges="all", ks=(), nodes=graphs), model)
    assert set(everything) == {"neuron_graph_nodes", "neuron_graph_edges"}, "ks=() makes no check"
    for graph_name, members in (("add", [p for p in MADE if p.prompt.operation == "add"]), ("all", list(MADE))):
        activations = end_activations(model, [p.input_ids[: p.end + 1] for p in members])
        graph = GraphReader(model)
        each = [graph.edges(NEURONS, activations, row) for row in range(len(members))]
        found = _of(everything["neuron_graph_edges"], graph_name)
        assert len(found) == 12
        assert (found["n"] == len(members)).all()
        assert found["inner_product"].abs().is_monotonic_decreasing
        for row in found.to_dict("records"):
            i = NEURONS.index((row["layer"], row["neuron"]))
            j = NEURONS.index((row["to_layer"], row["to_neuron"]))
            values = np.array([float(edges.of("first_order")[i, j]) for edges in each])
            assert row["first_order"] == pytest.approx(values.mean(), rel=1e-5)
            assert row["first_order_std"] == pytest.approx(values.std(), rel=1e-4, abs=1e-7)
            assert row["signed_product"] == pytest.approx(
                np.mean([float(e.of("signed")[i, j]) for e in each]), rel=1e-5
            )
        nodes = _of(everything["neuron_graph_nodes"], graph_name)
        expected = [float(activations.coefficients_PK[layer][:, k].mean()) for layer, k in NEURONS]
        np.testing.assert_allclose(nodes["coefficient"], expected, rtol=1e-5)
        assert nodes["root"].tolist() == [neuron == (0, 3) for neuron in NEURONS]
    by_first_order = rows_of(
        NeuronGraph("run", "operation", measure="first_order", edges="top:3", ks=(), nodes=graphs), model
    )
    edges = by_first_order["neuron_graph_edges"].query("graph == 'add'")
    whole = everything["neuron_graph_edges"].query("graph == 'add'")["first_order"].sort_values(ascending=False)
    np.testing.assert_allclose(edges["first_order"], whole[:3])
    above = rows_of(NeuronGraph("run", "operation", edges="above:0.5", ks=(), nodes=graphs), model)
    kept = above["neuron_graph_edges"]["inner_product"]
    assert (kept.abs() > 0.5).all()
    assert len(kept) == (everything["neuron_graph_edges"]["inner_product"].abs() > 0.5).sum() > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_check_is_the_lowest_neurons_column_zeroed(name: str) -> None:
    model = Anatomy(tiny_model(name))
    rows = rows_of(of_prompts(), model)["neuron_graph_check"]
    assert len(rows) == len(MADE) * 2 * (3 + 1)
    saved = {key: value.clone() for key, value in model.model.state_dict().items()}
    for place in (0, 1, 5):
        prompt = MADE[place]
        clean = look(model, prompt.input_ids[: prompt.end + 1])
        own = rows[rows["prompt_id"] == prompt.prompt.prompt_id]
        for (k, zeroed), part in own.groupby(["k", "zeroed"]):
            first = (NEURONS[place % 3 :] + NEURONS[: place % 3])[:k]
            lowest = min(first, key=lambda neuron: (neuron[0], first.index(neuron)))
            cut = (int(part["zeroed_layer"].iloc[0]), int(part["zeroed_neuron"].iloc[0]))
            assert cut[0] == lowest[0]
            assert (cut == lowest) == (zeroed == "root")
            assert zeroed == "root" or cut not in NEURONS
            zero_columns(model, [cut])
            try:
                after = look(model, prompt.input_ids[: prompt.end + 1])
            finally:
                model.model.load_state_dict(saved)
            assert {(row.layer, row.neuron) for row in part.itertuples()} == set(first) - {lowest}
            for row in part.to_dict("records"):
                layer, neuron = row["layer"], row["neuron"]
                assert row["coefficient"] == pytest.approx(float(clean.c[layer][neuron]), rel=1e-5, abs=1e-7)
                assert row["coefficient_zeroed"] == pytest.approx(float(after.c[layer][neuron]), rel=1e-5, abs=1e-7)
                assert pd.isna(row["first_order"]) == (layer <= cut[0])
            later = part[part["layer"] > cut[0]]
            assert (later["coefficient"] != later["coefficient_zeroed"]).all()


@pytest.mark.slow
def test_table_6_and_agreement_from_the_rows(tmp_path: Path) -> None:
    model, scan = Anatomy(tiny_model("llama")), of_prompts(ks=(6, 3), control_seeds=2)
    store = Store(tmp_path)
    source = open_run(store, ["neuron_targets/00000"], scan="neurons", parameters={"against": None})
    scan = replace(scan, neurons_from=source.run_id, nodes=NeuronNodes(source.run_id, scan.ranked.graphs))
    right = [i % 3 != 1 for i in range(len(MADE))]
    targets = {
        "prompt_id": [p.prompt.prompt_id for p in MADE], "condition": ["original"] * len(MADE),
        "target_id": [1] * len(MADE),
        "logprob": [0.0] * len(MADE), "predicted_id": [1] * len(MADE), "correct": right,
    }  # fmt: skip
    store.write_shard(
        source.run_id, "neuron_targets", 0, pa.table(targets, Neurons.tables["neuron_targets"].schema), {}
    )
    rows = rows_of(scan, model)
    run = open_run(store, [f"{table}/00000" for table in rows], scan="graph", parameters=scan.parameters())
    for table, frame in rows.items():
        store.write_shard(run.run_id, table, 0, pa.Table.from_pandas(frame, scan.tables[table].schema), {})
    run.finish()
    check = rows["neuron_graph_check"].astype({"coefficient": float, "coefficient_zeroed": float})
    check["fall"] = (check["coefficient"] - check["coefficient_zeroed"]) * np.sign(check["coefficient"])
    check["size"] = check["coefficient"].abs()
    check["right"] = check["prompt_id"].map(dict(zip(targets["prompt_id"], right, strict=True)))
    found = store.dataframe("FROM paper_a_table6")
    assert len(found) == 3 * 2 * 2  # operations and all, cases, ks
    for row in found.to_dict("records"):
        for zeroed in ("root", "random"):
            part = check[(check["k"] == row["k"]) & (check["zeroed"] == zeroed)]
            part = part[part["right"]] if row["cases"] == "correct" else part
            means, variances, counts = [], [], []
            for operation, of_operation in part.groupby("operation"):
                if row["operation"] not in ("all", operation):
                    continue
                sums = of_operation.groupby("prompt_id")[["fall", "size"]].sum()
                ratio = sums["fall"].sum() / sums["size"].sum()
                n = len(sums)
                counts.append(n)
                residuals = sums["fall"] - ratio * sums["size"]
                means.append(ratio)
                variances.append(n / (n - 1) * (residuals**2).sum() / sums["size"].sum() ** 2)
            half = student_interval(0.0, sum(variances) / len(variances) ** 2, min(counts))[1]
            assert row[zeroed] == pytest.approx(np.mean(means), rel=1e-4, abs=1e-6)
            assert row[f"{zeroed}_low"] == pytest.approx((np.mean(means) - half), rel=1e-4, abs=1e-6)
    root = check[
        (check["zeroed"] == "root") & check["first_order"].notna() & (check["operation"] == "add") & (check["k"] == 6)
    ]
    expected = [
        part["first_order"].corr(part["fall"], method="spearman")
        for _, part in root.groupby("prompt_id")
        if len(part) >= 3
    ]
    agreement = store.rows("FROM neuron_graph_agreement WHERE operation = 'add' AND k = 6")[0]
    assert agreement["first_order"] == pytest.approx(np.mean(expected))
    assert agreement["n"] == len(expected) > 1
    names = store.rows("SELECT layer, neuron, lower_name, to_layer, to_neuron, upper_name FROM neuron_graph_edges")
    assert {row["lower_name"] for row in names} == {f"{row['layer']}.{row['neuron']}" for row in names}
    assert {row["upper_name"] for row in names} == {f"{row['to_layer']}.{row['to_neuron']}" for row in names}
    share = store.rows(
        """SELECT share, first_order, n.coefficient_size AS size FROM neuron_graph_edges e
           JOIN neuron_graph_nodes n ON e.graph = n.graph AND to_layer = n.layer AND to_neuron = n.neuron LIMIT 5"""
    )
    for row in share:
        assert row["share"] == pytest.approx(row["first_order"] / row["size"])
    written = save(draw(Results(store, run.run_id), GraphShown(MADE[2].prompt.prompt_id)), tmp_path / "drawn")
    svg = written[1].read_text()
    assert written[0].read_bytes()[:4] == b"\x89PNG"
    for layer, neuron in NEURONS:
        assert f"{layer}.{neuron}" in svg
    with pytest.raises(UserError, match="has no graph 'zzz'"):
        summarize(Results(store, run.run_id), GraphShown("zzz"))


# ---- the command ----


def command(folder: Path, *words: str | Path) -> Result:
    return CliRunner().invoke(main, ["scan", "graph", "--store", str(folder), "--limit", "8", *map(str, words)])


@pytest.mark.bundled
def test_mistakes_are_one_line(scanned: tuple[Path, str]) -> None:
    folder, run = scanned
    for words, message in (
        (["--from", "nothing"], "no run 'nothing'"),
        (["--from", run, "--edges", "few"], "--edges 'few' cannot be read"),
        (["--from", run, "--ks", "some"], "--ks 'some' cannot be read"),
    ):
        result = command(folder, *words)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.bundled
def test_a_neuron_scan_that_does_not_fit_is_refused(scanned: tuple[Path, str]) -> None:
    folder, run = scanned
    store, prompts, weights = Store(folder), load_prompts("two_digit", limit=8), resolve(ModelSpec()).fingerprint
    good = nodes_from(store, neuron_run(store, run), "prompt", 20, (10,), weights, prompts[:3])
    assert [len(nodes.neurons) for nodes in good.graphs] == [20] * 3
    assert {nodes.graph for nodes in good.graphs} == {prompt.prompt_id for prompt in prompts[:3]}
    others = load_prompts("two_digit", limit=8, seed=1)
    for arguments, message in (
        (("prompt", 50, None, weights, prompts), "keeps 20 neurons per prompt, not 50; scan with `keep` topk:50 first"),
        (("prompt", 10, (21,), weights, prompts), "keeps 20 neurons per prompt, not 21"),
        (("prompt", 10, None, weights, others), "without prompt"),
    ):
        with pytest.raises(UserError, match=message):
            nodes_from(store, neuron_run(store, run), *arguments)
    with pytest.raises(UserError, match=f"run {run} ranked the neurons of bundled, not of another"):
        check_model(neuron_run(store, run), "other", "another")
    for fields, message in (
        ({"by": "layer"}, "`by` 'layer' is not known"),
        ({"measure": "best"}, "`measure` 'best' is not known"),
        ({"top": 1}, "`top` 1 is too small; give 2 or more"),
        ({"ks": (1,)}, "fewer than 2 first neurons"),
        ({"edges": "top:0"}, "cannot be read; write top:60"),
        ({"edges": "above:-1"}, "cannot be read; write top:60"),
    ):
        with pytest.raises(UserError, match=message):
            NeuronGraph(run, **fields)


def test_edges_are_written_as_they_are_read() -> None:
    for text, strongest, above in (("top:60", 60, 0.0), ("above:0.5", None, 0.5), ("all", None, 0.0)):
        edges = NeuronGraph("run", edges=text).edges
        assert (edges.strongest, edges.above, str(edges)) == (strongest, above, text)


@pytest.mark.ray
@pytest.mark.bundled
def test_command_makes_draws_and_resumes_a_graph(scanned: tuple[Path, str], tmp_path: Path) -> None:
    folder, source = scanned
    words = [
        "--from",
        source,
        "--top",
        "12",
        "--control-seeds",
        "1",
        "--replicas",
        "1",
        "--out",
        tmp_path,
        "--json",
    ]
    first = command(folder, *words)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert (found["shards"], found["shards_done"]) == (3, 3)
    assert {row["k"] for row in found["check"]} == {20, 10}
    assert all(Path(path).stat().st_size > 0 for path in found["figures"])
    store = Store(folder)
    assert store.rows("SELECT count(*) AS n FROM neuron_graph_nodes") == [{"n": 8 * 12}]
    ranks = store.rows("""SELECT count(*) AS n FROM neuron_graph_nodes AS nodes JOIN neuron_changes AS changes
        ON graph = prompt_id AND nodes.layer = changes.layer AND nodes.neuron = changes.neuron
            AND nodes.rank = changes.rank
        WHERE abs(nodes.coefficient - changes.coefficient) < 1e-4""")
    assert ranks == [{"n": 8 * 12}], "nodes are the scan's first neurons, with their coefficients"
    again = json.loads(command(folder, *words).stdout)
    assert (again["run_id"], again["shards_reused"], again["shards_done"]) == (found["run_id"], 3, 0)
    assert again["edges"] == found["edges"]
