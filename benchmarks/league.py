"""How long exact patching of every head and MLP takes, and every method that estimates it, on the same pairs.

    python benchmarks/league.py                                   # bundled model on CPU
    python benchmarks/league.py --model random:llama-2-7b         # one GPU: 1,056 nodes x 100 pairs

Each from the loaded model to its rows in memory, compiling included. Aims on one H100: exact under 60 s, all methods
together under 10 minutes. Prints one JSON line last.
"""

import json
import time

import click
import torch

from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.tables import METHODS
from mathinterp.experiments.base import Experiment, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mlps import Mlps
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.reading import read_prompts
from mathinterp.prompts import load_prompts


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="operand_pairs", show_default=True)
@click.option("--limit", type=int, default=100, show_default=True)
@click.option("--steps", type=int, default=5, show_default=True, help="Of the eap-ig methods.")
@click.option("--mask-steps", type=int, default=200, show_default=True)
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, prompt_name: str, limit: int, steps: int, mask_steps: int, threads: int | None
) -> None:  # fmt: skip
    """Time every stage of a league."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = read_prompts(load_prompts(prompt_name, limit=limit), resolved)
    subject = Subject(load(resolved, device).anatomy, tuple(prompts))
    shape = subject.anatomy.shape
    nodes = shape.n_layers * (shape.n_heads + 1)
    print(f"{resolved.label} {resolved.dtype} on {device}: {nodes} nodes x {len(prompts)} pairs")
    stages: dict[str, Experiment] = {
        "exact_heads": Heads(ablation="resample", positions="all"),
        "exact_mlps": Mlps(ablation="resample", positions="all"),
        **{method: Attribution(method=method, steps=steps) for method in METHODS},
        "mask": Mask(steps=mask_steps),
    }
    seconds = {}
    for name, scan in stages.items():
        seconds[name] = timed(scan, subject, device)
        print(f"{name}: {seconds[name]:.2f} s", flush=True)
    figures: dict[str, float | str | dict[str, float]] = {
        "nodes": nodes,
        "pairs": len(prompts),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "exact_s": round(sum(value for name, value in seconds.items() if name.startswith("exact")), 2),
        "methods_s": round(sum(value for name, value in seconds.items() if not name.startswith("exact")), 2),
    }
    if device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


def timed(scan: Experiment, subject: Subject, device: str) -> float:
    """Seconds from the loaded model to all rows."""
    start = time.perf_counter()
    state = scan.prepare(subject)
    for shard in scan.shards(subject.anatomy.shape, subject.prompts):
        scan.run(state, shard)
    if device == "cuda":
        torch.cuda.synchronize()
        del state
        torch.cuda.empty_cache()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
