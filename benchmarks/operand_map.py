"""How long operand maps of one operation take: every head and neuron over all pairs of operands.

    python benchmarks/operand_map.py                                # bundled model on CPU, 10,000 pairs
    python benchmarks/operand_map.py --model random:llama-2-7b      # one GPU

From the loaded model to all rows in memory, part by part: what is prepared once, maps and statistics of all layers, and
the first answer token with few neurons kept. Aims: the bundled model under 3 minutes on 2 cores, the 7B shape under 2
minutes on one H100. Prints one JSON line last.
"""

import json
import time

import click
import torch

from mathinterp.experiments.base import Subject
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.reading import read_prompts
from mathinterp.prompts import load_prompts


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="operands_add", show_default=True)
@click.option("--limit", type=int, default=None, help="Pairs; all if not given.")
@click.option("--every-map", is_flag=True, help="Keep every neuron's map.")
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(model: str, dtype: str, prompt_name: str, limit: int | None, every_map: bool, threads: int | None) -> None:
    """Time every part."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = read_prompts(load_prompts(prompt_name, limit=limit), resolved)
    subject = Subject(load(resolved, device).anatomy, tuple(prompts))
    scan, shape = OperandMap(every_map=every_map), subject.anatomy.shape
    units = shape.n_layers * (shape.n_heads + shape.n_neurons)
    print(f"{resolved.label} {resolved.dtype} on {device}: {units} units x {len(prompts)} pairs")
    began, cpu_began = synchronized(device), time.process_time()
    state = scan.prepare(subject)
    seconds, rows, stored = {"prepare": synchronized(device) - began}, 0, 0
    for shard in scan.shards(shape, subject.prompts):
        start = synchronized(device)
        table = scan.run(state, shard)
        seconds[shard.table] = seconds.get(shard.table, 0.0) + synchronized(device) - start
        rows, stored = rows + table.num_rows, stored + table.nbytes
    figures = {
        "units": units,
        "pairs": len(prompts),
        "nodes": state.notes.get("nodes"),
        "tokens": state.notes["tokens"],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "total_s": round(sum(seconds.values()), 2),
        "process_s": round(time.process_time() - cpu_began, 2),
        "rows": rows,
        "table_mb": round(stored / 1e6, 1),
        "packing_deviation": state.notes["packing_deviation"],
    }
    if device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


def synchronized(device: str) -> float:
    """The time in seconds, the device's work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
