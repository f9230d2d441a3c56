"""``mathinterp scan graph``: prediction-enhancing graphs (paper A, section 4.3) and their causal check (Table 6)."""

import math
import sys
from pathlib import Path
from typing import Any

import click

from mathinterp.cli.options import (
    cluster_options,
    json_option,
    model_options,
    out_folder,
    prompt_options,
    store_option,
)
from mathinterp.cli.output import console, file_name, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_chosen, run_json
from mathinterp.errors import UserError

DEFAULT_KS = (99, 50, 30, 20, 10)  # paper A's Table 6
SHOWN_NAMES = 5


@click.command()
@click.option("--neurons-from", "source", required=True, metavar="RUN_ID", help="A finished run of 'scan neurons'.")
@model_options()
@prompt_options()
@click.option(
    "--by", default="prompt", show_default=True, help="A graph for each prompt, or for each operation and all."
)
@click.option("--top", default=30, show_default=True, help="Nodes: the first so many neurons of the neuron scan.")
@click.option(
    "--measure", default="sum", show_default=True,
    help="What ranks edges: sum (inner products, by size), signed, or first_order (positive ones).",
)  # fmt: skip
@click.option("--edges", default="top:60", show_default=True, help="Kept of a graph: top:N, above:X, or all.")
@click.option("--ks", default=None, help="First neurons in the causal check; default those of 99,50,30,20,10; or none.")
@click.option(
    "--control-seeds", "seeds", type=int, default=3, show_default=True, help="Random neurons zeroed as controls."
)
@click.option("--show", "graph", default=None, metavar="GRAPH", help="Prompt id or operation to show and draw.")
@click.option(
    "--out", default=None, metavar="FOLDER", callback=out_folder, help="Also draw that graph there, as PNG and SVG."
)
@store_option()
@cluster_options()
@json_option()
def graph(source: str, by: str, top: int, measure: str, edges: str, ks: str, seeds: int, graph: str | None,
          out: str | None, as_json: bool, **options: Any) -> None:  # fmt: skip
    """Which of the first neurons drive which later ones, and what zeroing the lowest of them does (paper A, 4.3).

    \b
    Give the --model and --prompts of the neuron scan; the neurons rank as they do there. No number of --ks may be above
    what that scan keeps of a prompt (--keep topk:K).

    \b
    Examples:
      mathinterp scan neurons --against head:0.6 --limit 160
      mathinterp scan graph --neurons-from RUN_ID --limit 160 --out figures
      mathinterp scan graph --neurons-from RUN_ID --limit 160 --by operation --measure first_order --show add
    """
    from mathinterp.experiments.figures import save
    from mathinterp.experiments.neuron_graph import NeuronGraph
    from mathinterp.experiments.neuron_graph.summary import graph_figure, graph_name, nodes_from, summarize_graph
    from mathinterp.experiments.neurons.stored import check_model, neuron_run
    from mathinterp.models.catalog import ModelSpec, resolve
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store

    spec = ModelSpec(*(options[name] for name in ("model", "adapter", "dtype", "trust_remote_code")))
    prompts = load_prompts(options["prompt_name"], seed=options["seed"], limit=options["limit"])
    chosen_ks, (strongest, above) = _parse_ks(ks), _parse_edges(edges)
    store, resolved = Store(options["store"]), resolve(spec)
    ranked = neuron_run(store, source)
    check_model(ranked, resolved.fingerprint, resolved.label)
    nodes = nodes_from(store, ranked, by, top, chosen_ks, resolved.fingerprint, prompts)
    chosen = NeuronGraph(
        nodes, by, top, measure, strongest, above, DEFAULT_KS if chosen_ks is None else chosen_ks, seeds
    )
    names = [each.graph for each in nodes.graphs]
    if graph is not None and graph not in names:
        raise UserError(f"--show '{graph}': there is no such graph; there are {', '.join(names[:SHOWN_NAMES])} ...")
    run = run_chosen(chosen, **options)
    store = Store(run.store)
    summary = summarize_graph(store, run.run_id, graph) if run.complete else None
    drawn: list[Path] = []
    if summary is not None and out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        name = graph_name(store, run.run_id, graph)
        drawn = save(graph_figure(store, run.run_id, graph), Path(out) / f"graph-{run.run_id}-{file_name(name)}")
    if as_json:
        told = {"graph": summary.graph, "root": summary.root, "edges": summary.edges, "check": summary.check,
                "agreement": summary.agreement} if summary else {}  # fmt: skip
        print_json({**run_json(run), **told, "figures": [str(path) for path in drawn]})
    else:
        if summary is not None:
            print_table(summary.edges, title=f"Strongest edges of graph {summary.graph} (root {summary.root})")
            title = (
                "Fall of the other first k neurons' coefficients (%), the lowest zeroed, or random ones of its layer"
            )
            print_table(summary.check, title=title)
            title = "Rank correlation of edges from the root with the falls, prompt by prompt (pearson: by value)"
            print_table(summary.agreement, title=title)
            print_sql_hint(run.store, summary.queries)
        for path in drawn:
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
        print_run(run)
    if run.failed or not run.complete:
        sys.exit(1)


def _parse_ks(text: str | None) -> tuple[int, ...] | None:
    """ "50,30" -> (50, 30); "none" -> (); raises UserError for anything else."""
    if text is None:
        return None
    parts = [] if text == "none" else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--ks '{text}' cannot be read; write numbers of neurons, like 50,30,10, or none")
    return tuple(int(part) for part in parts)


def _parse_edges(text: str) -> tuple[int | None, float]:
    """ "top:60" -> (60, 0.0), "above:0.5" -> (None, 0.5), "all" -> (None, 0.0); raises UserError for anything else."""
    if text == "all":
        return None, 0.0
    kind, _, number = text.partition(":")
    try:
        if kind == "top":
            return int(number), 0.0
        if kind == "above" and math.isfinite(float(number)):
            return None, float(number)
    except ValueError:
        pass
    raise UserError(f"--edges '{text}' cannot be read; write top:60, above:0.5 or all")
