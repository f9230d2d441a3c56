"""Path, neuron and attribution scans and circuits of a model whose layers lie on two cards: pace and rows.

    python benchmarks/split_scans.py                              # 7B shape, every fourth layer, 1,600 prompts
    python benchmarks/split_scans.py --scan paths --limit 200     # one of them

As split_model.py does for heads: one card, one model on both cards, and two replicas with a card and half of the shards
each, from prepared state to finished tables on the host, best of --rounds. Models have random weights. Beside the
paces, how far the rows of two cards are from those of one card: the largest difference of any number, relative to the
column's spread.

Needs two GPUs and says so where there are fewer. Prints a JSON line per scan.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from benchmarks.split_model import best_of, two_replicas
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.base import Experiment, Subject
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.circuit.ranking import NodeScores
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.paths import Paths
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import with_counterfactuals

SCANS = ("paths", "paths none", "neurons", "attribution", "circuit")
PAIRS = 128  # of attribution and circuits
TABLES = ("path_scan", "neuron_scan", "node_attributions", "circuit_metric")  # of these the rows are compared


class Work:
    """Some shards of a scan of a random model, ready to be timed."""

    def __init__(
        self, name: str, shape: str, limit: int, layers: Sequence[int], half: int | None, cards: int,
        rows: int | None = None,
    ):  # fmt: skip
        spec = ModelSpec(f"random:{shape}", dtype="bfloat16")
        model = load(resolve(spec, "cuda"), "cuda:0", [f"cuda:{card}" for card in range(1, cards)])
        few = name in ("attribution", "circuit")
        given = load_prompts("operand_pairs" if few else "pairs", limit=min(limit, PAIRS) if few else limit)
        prompts = tokenize_prompts(with_counterfactuals(given, model.tokenizer), model.tokenizer)
        self.scan = experiment(name, layers, model.anatomy.shape)
        of_rows = [shard for shard in self.scan.shards(model.anatomy.shape, prompts) if shard.table in TABLES]
        self.shards = of_rows if half is None else [each for n, each in enumerate(of_rows) if (n + n // 2) % 2 == half]
        self.state = self.scan.prepare(Subject(model.anatomy, prompts, rows, model.tokenizer))
        self.scores()  # whatever is compiled late

    def scores(self) -> list[pa.Table]:
        """The rows of each shard."""
        return [self.scan.run(self.state, shard) for shard in self.shards]


def experiment(name: str, layers: Sequence[int], shape: Any) -> Experiment:
    """As asked for by its name here."""
    if name.startswith("paths"):
        return Paths(layers=tuple(layers), keep_all=True, attribution=False, freeze=name.partition(" ")[2] or "heads")
    if name == "neurons":
        return Neurons(layers=tuple(layers), against=f"head:{layers[0]}.0")  # type: ignore[arg-type]
    if name == "attribution":
        return Attribution(method="eap-ig-inputs")
    rng = np.random.default_rng(0)
    values = {
        place: rng.normal(size=shape.n_heads if place[0] == "head" else 1)
        for layer in range(shape.n_layers)
        for place in (("head", layer), ("mlp", layer))
    }
    return Circuit(rank_from=("random",), scores=NodeScores("random", "random", values))


def apart(found: Sequence[pa.Table], expected: Sequence[pa.Table]) -> float:
    """The largest difference of a number, relative to the spread of its column."""
    worst = 0.0
    for one, other in zip(map(listed, found), map(listed, expected), strict=True):
        assert one.schema.equals(other.schema)
        if one.num_rows != other.num_rows:
            return float("nan")
        for field in one.schema:
            if pa.types.is_floating(field.type):
                own, wanted = (table[field.name].to_numpy().astype(float) for table in (one, other))
                spread = np.nanstd(wanted)
                if spread > 0:
                    worst = max(worst, float(np.nanmax(np.abs(own - wanted)) / spread))
    return worst


def listed(rows: pa.Table) -> pa.Table:
    """Rows that are there whatever they hold: of neurons the summaries, not the first ones of each prompt."""
    return rows.filter(pc.is_null(rows["prompt_id"])) if "unit" in rows.schema.names else rows


def compare(name: str, shape: str, limit: int, layers: Sequence[int], rounds: int) -> dict[str, Any]:
    """One card, two cards, two replicas."""
    one = Work(name, shape, limit, layers, None, cards=1)
    found: dict[str, Any] = {"scan": name, "shards": len(one.shards)}
    found["one_card_seconds"], expected = best_of(rounds, one.scores)
    del one
    torch.cuda.empty_cache()
    split = Work(name, shape, limit, layers, None, cards=2)
    found["split_seconds"], rows = best_of(rounds, split.scores)
    found["apart_of_spread"] = apart(rows, expected)
    del split
    torch.cuda.empty_cache()
    halves = [partial(Work, name, shape, limit, layers, half, cards=1) for half in range(2)]
    found["two_replicas_seconds"] = two_replicas(halves, rounds)
    found["of_two_replicas"] = found["two_replicas_seconds"] / found["split_seconds"]
    return found


@click.command()
@click.option("--scan", "scans", multiple=True, type=click.Choice(SCANS), help="Default: all.")
@click.option("--shape", default="llama-2-7b", show_default=True, help="A shape of 'mathinterp models'.")
@click.option("--limit", default=1600, show_default=True, help="Prompts; of attribution and circuits at most 128.")
@click.option("--every", default=4, show_default=True, help="Paths and neurons: of every so many layers one.")
@click.option("--rounds", default=2, show_default=True)
def main(scans: tuple[str, ...], shape: str, limit: int, every: int, rounds: int) -> None:
    """Measure, and say what came out."""
    if torch.cuda.device_count() < 2:
        sys.exit(f"this needs two GPUs, and {torch.cuda.device_count()} can be seen here: nothing was measured")
    layers = range(resolve(ModelSpec(f"random:{shape}", dtype="bfloat16"), "cuda").shape.n_layers)[::every]
    for name in scans or SCANS:
        found = compare(name, shape, limit, layers, rounds)
        print(
            f"{name}: one card {found['one_card_seconds']:.2f} s, both {found['split_seconds']:.2f},"
            f" two replicas {found['two_replicas_seconds']:.2f} ({found['of_two_replicas']:.3f} of their pace);"
            f" rows of one card within {found['apart_of_spread']:.2g} of their spread"
        )
        work = {"shape": shape, "prompts": limit, "every": every}
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **work, **found}), flush=True)


if __name__ == "__main__":
    main()
