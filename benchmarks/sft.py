"""How fast precise SFT trains: ours, a plain eager loop over the same heads, and full SFT, in one run on one machine.

    python benchmarks/sft.py                                               # bundled model on CPU
    python benchmarks/sft.py --model random:llama-2-7b                     # GPU: 32 heads of layers 12 to 17, 16 x 512
    python benchmarks/sft.py --model random:llama-2-7b --workers 2         # two GPUs: also through Ray Train
    python benchmarks/sft.py --model random:llama-2-7b --method ours --no-compile

Random tokens; the last quarter of a sample is its answer. Every method does whole optimizer steps (AdamW):

- ours: ``mathinterp tune precise`` without Ray, layers compiled on a GPU;
- cached: the same in the second epoch, the inputs of the lowest trained layer kept from the first;
- eager: the same adapter in a hand-written loop, the model called as it comes, with logits for every token;
- full: all weights, in the model's dtype, activations recomputed; also as it comes.

Prints one JSON line last. Memory is the most that a method had on the GPU, in GB.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from mathinterp.models.anatomy import ModelShape
from mathinterp.models.catalog import LoadedModel, ModelSpec, ResolvedModel, load, resolve
from mathinterp.models.units import Head
from mathinterp.store import Store
from mathinterp.tuning.answers import autocast
from mathinterp.tuning.controls import FullJob
from mathinterp.tuning.data import Sample
from mathinterp.tuning.precise import PreciseJob, Selection
from mathinterp.tuning.sft import Row, SftConfig, train
from mathinterp.tuning.sft_ray import Tuning, fit, named

METHODS = ("ours", "cached", "eager", "full")


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, for how long."""

    resolved: ResolvedModel
    device: torch.device
    heads: tuple[Head, ...]
    samples: list[Sample]
    config: SftConfig

    @property
    def measured_steps(self) -> int:
        """Steps of the second half; the first warms up."""
        return self.config.steps // 2


def middle_heads(shape: ModelShape) -> tuple[Head, ...]:
    """One head in 32, spread over the layers from 3/8 to 9/16 of the depth: 32 heads at 12-17 of Llama-2-7B."""
    low, high = 3 * shape.n_layers // 8, max(3 * shape.n_layers // 8 + 1, 9 * shape.n_layers // 16)
    count = max(2, shape.n_layers * shape.n_heads // 32)
    return tuple(Head(low + i % (high - low), i // (high - low)) for i in range(count))


def random_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Samples of one length; the last quarter is the answer."""
    drawn = torch.randint(4, vocabulary, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [Sample(tuple(ids), tuple(range(length - length // 4, length))) for ids in drawn]


def time_ours(setting: Setting, config: SftConfig) -> tuple[float, int]:
    """Samples/s of the second half of the steps, and trained parameters."""
    loaded = load(setting.resolved, setting.device)
    model = PreciseJob(Selection(setting.heads)).build(loaded)
    rows: list[Row] = []
    train(
        model, loaded.anatomy, setting.samples, config,
        device=setting.device, pad_id=0, reporter=lambda new, _: rows.extend(new),
    )  # fmt: skip
    return float(rows[-1]["samples_per_second"]), int(rows[-1]["trained_parameters"])


def time_by_hand(setting: Setting, build: Callable[[LoadedModel], nn.Module], *, recompute: bool) -> tuple[float, int]:
    """The same figures of a plain loop: forward with labels, backward, clip, AdamW."""
    loaded = load(setting.resolved, setting.device)
    model, config = build(loaded), setting.config
    if recompute:
        loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0, fused=setting.device.type == "cuda")
    model.train()
    start = 0.0
    for step in range(config.steps):
        if step == config.steps - setting.measured_steps:
            start = _now(setting.device)
        batch = setting.samples[step * config.batch_size : (step + 1) * config.batch_size]
        for first in range(0, len(batch), config.micro_batch):
            piece = batch[first : first + config.micro_batch]
            ids = torch.tensor([sample.input_ids for sample in piece], device=setting.device)
            labels = ids.clone()
            labels[:, : piece[0].answer[0]] = -100
            with autocast(setting.device, loaded.anatomy.dtype):
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            (loss * len(piece) / len(batch)).backward()
        nn.utils.clip_grad_norm_(trained, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = _now(setting.device) - start
    return setting.measured_steps * config.batch_size / seconds, sum(parameter.numel() for parameter in trained)


def time_through_ray(setting: Setting, workers: int) -> float:
    """Samples/s of ours through Ray Train, all workers together; each has the benchmark's batch."""
    config = replace(setting.config, batch_size=setting.config.batch_size * workers)
    samples = setting.samples * workers
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(
            job=PreciseJob(Selection(setting.heads)), samples=samples, held_out=[], config=config, data_label="random",
            model=replace(setting.resolved.spec, dtype=setting.resolved.dtype),
            model_fingerprint=setting.resolved.fingerprint, store_url=f"{folder}/store",
        )  # fmt: skip
        result = fit(
            named(tuning, setting.resolved), workers=workers, gpu=setting.device.type == "cuda",
            out=Path(folder) / "out", storage=None, address="local", say=print,
        )  # fmt: skip
        rows = Store(f"{folder}/store").rows(
            f"SELECT samples_per_second FROM tuning_runs WHERE run_id = '{result.run_id}' ORDER BY step"
        )
    return float(rows[-1]["samples_per_second"])


def measure(method: str, setting: Setting) -> tuple[float, int]:
    """Samples/s and trained parameters of one of METHODS."""
    if method == "ours":
        return time_ours(setting, setting.config)
    if method == "cached":  # the first half is the first epoch, which fills the cache
        half = replace(setting, samples=setting.samples[: len(setting.samples) // 2])
        return time_ours(half, replace(setting.config, cache=True))
    if method == "eager":
        return time_by_hand(setting, PreciseJob(Selection(setting.heads)).build, recompute=False)
    return time_by_hand(setting, FullJob().build, recompute=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), help="Default: all.")
@click.option("--length", default=None, type=int, help="Tokens of a sample; default 512, on a CPU 64.")
@click.option("--micro-batch", default=16, show_default=True, help="Samples a forward.")
@click.option("--accumulate", default=2, show_default=True, help="Forwards a step.")
@click.option("--steps", default=10, show_default=True, help="Steps measured, after as many to warm up.")
@click.option("--compile/--no-compile", "compiled", default=None, help="Ours; default: on a GPU.")
@click.option(
    "--workers", default=1, show_default=True, help="Above 1: ours also through Ray Train, with 1 and with so many."
)
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, methods: tuple[str, ...], length: int | None, micro_batch: int, accumulate: int, steps: int,
    compiled: bool | None, workers: int, threads: int | None,
) -> None:  # fmt: skip
    """Time precise SFT against the ordinary ways."""
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = resolve(ModelSpec(model, dtype=dtype), device.type)
    length = length or (512 if device.type == "cuda" else 64)
    config = SftConfig(
        steps=2 * steps, batch_size=micro_batch * accumulate, learning_rate=1e-4, micro_batch=micro_batch,
        log_every=steps, checkpoint_every=2 * steps,
        compiled=device.type == "cuda" if compiled is None else compiled,
    )  # fmt: skip
    samples = random_samples(config.steps * config.batch_size, length, resolved.shape.vocabulary)
    setting = Setting(resolved, device, middle_heads(resolved.shape), samples, config)
    layers = sorted({layer for layer, _ in setting.heads})
    print(
        f"{resolved.label} {resolved.dtype} on {device}: {len(setting.heads)} heads at layers {layers[0]}-{layers[-1]},"
        f" {micro_batch} x {length} tokens per forward, {accumulate} forwards per step, {steps} steps measured"
    )
    figures: dict[str, Any] = {}
    for method in methods or METHODS:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        speed, trained = measure(method, setting)
        figures[method] = round(speed, 2)
        figures[f"{method}_parameters"] = trained
        if device.type == "cuda":
            figures[f"{method}_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        print({name: value for name, value in figures.items() if name.startswith(method)})
        gc.collect()
        torch.cuda.empty_cache()
    for other in ("eager", "full"):
        if "ours" in figures and other in figures:
            figures[f"ours_over_{other}"] = round(figures["ours"] / figures[other], 2)
            if "cached" in figures:
                figures[f"cached_over_{other}"] = round(figures["cached"] / figures[other], 2)
    if workers > 1:
        for count in (1, workers):
            figures[f"ray_{count}"] = round(time_through_ray(setting, count), 2)
        figures[f"ray_{workers}_over_1"] = round(figures[f"ray_{workers}"] / figures["ray_1"], 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
