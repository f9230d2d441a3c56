"""Precise SFT with the frozen layers spread over the workers (FSDP2) against the whole model on each.

    python benchmarks/sharded_sft.py                                                   # bundled model, two CPU workers
    python benchmarks/sharded_sft.py --model random:llama-2-7b                         # two GPUs
    python benchmarks/sharded_sft.py --model random:llama-2-70b --only-sharded --steps 6 --micro-batch 2 --accumulate 1

The same job and data both ways, through Ray Train, as ``mathinterp tune precise --workers 2`` with and without
``--shard-model`` runs it. Random tokens; the last quarter of a sample is its answer. Losses stand side by side;
samples/s are of the second half of the steps, all workers together; memory is the most that worker 0 had on its GPU.
Prints one JSON line last.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sft import middle_heads, random_samples
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.store import Store
from mathinterp.tuning.data import Sample
from mathinterp.tuning.precise import PreciseJob, Selection
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, fit, named


def through_ray(
    resolved: ResolvedModel, samples: list[Sample], config: SftConfig, workers: int, gpu: bool, sharded: bool
) -> dict[str, Any]:
    """Rows of ``tuning_runs`` and the seconds of the whole call."""
    heads = middle_heads(resolved.shape)
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(
            job=PreciseJob(Selection(heads)), samples=samples, held_out=[], config=config, data_label="random",
            model=replace(resolved.spec, dtype=resolved.dtype), model_fingerprint=resolved.fingerprint,
            store_url=f"{folder}/store", sharded=sharded,
        )  # fmt: skip
        started = time.perf_counter()
        result = fit(
            named(tuning, resolved), workers=workers, gpu=gpu, out=Path(folder) / "out", storage=None, address="local",
            say=print,
        )  # fmt: skip
        rows = Store(f"{folder}/store").rows(
            f"SELECT * FROM tuning_runs WHERE run_id = '{result.run_id}' AND step > 0 ORDER BY step"
        )
    late = rows[len(rows) // 2 :]
    return {
        "losses": [row["loss"] for row in rows],
        "samples_per_second": len(late) / sum(1 / row["samples_per_second"] for row in late),
        "tokens_per_second": len(late) / sum(1 / row["tokens_per_second"] for row in late),
        "gigabytes": max(row["memory"] for row in rows) / 1e9,
        "trained_parameters": rows[-1]["trained_parameters"],
        "seconds_in_all": time.perf_counter() - started,
    }


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--length", default=None, type=int, help="Tokens of a sample; default 512, on a CPU 64.")
@click.option("--micro-batch", default=16, show_default=True, help="Samples a forward on one worker.")
@click.option("--accumulate", default=2, show_default=True, help="Forwards a step on one worker.")
@click.option("--steps", default=20, show_default=True)
@click.option("--compile/--no-compile", "compiled", default=False, show_default=True)
@click.option("--only-sharded", is_flag=True, help="For a model that no card holds.")
def main(
    model: str, dtype: str, workers: int, length: int | None, micro_batch: int, accumulate: int, steps: int,
    compiled: bool, only_sharded: bool,
) -> None:  # fmt: skip
    """Train both ways and compare."""
    gpu = torch.cuda.device_count() >= workers
    resolved = resolve(ModelSpec(model, dtype=dtype), "cuda" if gpu else "cpu")
    batch = micro_batch * accumulate * workers
    config = SftConfig(
        steps=steps, batch_size=batch, learning_rate=1e-4, micro_batch=micro_batch, log_every=1,
        checkpoint_every=steps, compiled=compiled,
    )  # fmt: skip
    samples = random_samples(steps * batch, length or (512 if gpu else 64), resolved.shape.vocabulary)
    found = {"sharded": through_ray(resolved, samples, config, workers, gpu, sharded=True)}
    if not only_sharded:
        found["whole"] = through_ray(resolved, samples, config, workers, gpu, sharded=False)
    for step, losses in enumerate(zip(*(way["losses"] for way in found.values()), strict=True), start=1):
        print(f"step {step}: " + ", ".join(f"{name} {loss:.6f}" for name, loss in zip(found, losses, strict=True)))
    for name, way in found.items():
        print(
            f"{name}: {way['samples_per_second']:.2f} samples/s, {way['gigabytes']:.1f} GB on a worker,"
            f" {way['seconds_in_all']:.0f} s with the start"
        )
    figures: dict[str, Any] = {
        "model": model,
        "dtype": resolved.dtype,
        "workers": workers,
        "compiled": compiled,
        **found,
    }
    if not only_sharded:
        pairs = zip(found["sharded"]["losses"], found["whole"]["losses"], strict=True)
        figures["largest_loss_difference"] = max(abs(one - other) for one, other in pairs)
        figures["of_whole"] = found["sharded"]["samples_per_second"] / found["whole"]["samples_per_second"]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
