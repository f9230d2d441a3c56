"""What a scan will cost, before anything loads: FLOPs, rows, bytes, memory and time on known devices.

Knows devices and bytes; what each kind of scan does is counted in scan_costs.py. Loads no weights and needs no Ray.
The counts (FLOPs, rows, model bytes) are exact up to what is said beside them; memory and times are estimates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch

from mathinterp.cluster.places import threads_for
from mathinterp.cluster.ray_private import machine_cores
from mathinterp.engine.lens.increases import neuron_increases
from mathinterp.engine.lens.logsumexp import Base
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.costs import PACK_SIZE, parameters
from mathinterp.models.resolved import DTYPE_BYTES
from mathinterp.models.shape import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.text import counted

# Dense matrix products, TFLOP/s: in 16 bits, and in float32 without tensor cores. The H100's 734 is measured; the
# others are the makers' figures times the part of its maker's figure (989) that the H100 reaches.
DEVICE_TFLOPS: dict[str, tuple[float, float]] = {
    "H100": (734.0, 50.0),
    "A100": (312 * 0.74, 19.5 * 0.74),
    "L40S": (362 * 0.74, 91.6 * 0.74),
    "L4": (121 * 0.74, 30.3 * 0.74),
}
# Terms of neuron scans, 10^12 a second: the H100's is measured (352,256 neurons x 1,600 prompts x 32,000 words, by
# float32 products), the others follow from their float32 products.
DEVICE_TERMS = {device: 4.5 * tflops / 50.0 for device, (_, tflops) in DEVICE_TFLOPS.items()}
CAPPED_TERMS = 0.016  # of that speed under a final soft-cap: each term by itself, as the direct form's 250 s on an H100
GPU_EFFICIENCY = 0.8  # of that ceiling that whole layers reach: .77 to .89 measured on an H100
UPPER_BOUND = "Which cells are computed depends on the data; this is the full grid, the most that it can come to."
TREES, TREE_NODES = 14, 72  # in the batch that a CPU is measured with, as ablations of short prompts have them


@dataclass(frozen=True)
class CpuSpeed:
    """What all cores of this CPU do, from measure_cpu."""

    tflops: float  # of whole layers, counted as scans count them
    terms: float  # of neurons' sums over the vocabulary, 10^12 a second


@dataclass(frozen=True)
class Plan:
    """Costs of one scan; memory is of one replica."""

    scan: str
    shards: int
    evaluations: int  # forward evaluations: one per prompt and intervention
    rows: int
    tokens: int  # of all prompts
    nodes: int  # token positions of a clean pass: of prefix trees, or up to END
    parameters: int  # of one model
    models: int  # that a replica holds, of as many parameters each: 2 where another model is compared
    flops: float  # of the scan itself, as matrix products
    plain_flops: float | None  # the same by full forward passes with hooks; None: it is a few passes anyway
    terms: float  # of neurons' sums over the vocabulary, beside the products
    result_bytes: int  # Parquet, about
    model_bytes: int  # the weights of all models held
    cache_bytes: int  # what is kept of clean passes
    peak_bytes: int  # device memory of a replica, about
    seconds: dict[str, float]  # of computing: device -> on one GPU of that kind, or on all cores of this CPU
    at_most: bool = False  # which cells are computed depends on the data: all of this is of the full grid

    def __str__(self) -> str:
        """For people, a line each."""
        times = ", ".join(f"{device} {seconds:.3g} s" for device, seconds in self.seconds.items())
        plain = "" if self.plain_flops is None else f" ({self.plain_flops / 1e12:.3g} by full forward passes)"
        bound = f"{UPPER_BOUND}\n" if self.at_most else ""
        return (
            f"{bound}{self.scan}: {self.evaluations:,} forward evaluations in {counted(self.shards, 'shard')},"
            f" {self.flops / 1e12:.3g} TFLOP{plain}\n"
            f"{self.rows:,} rows, about {self.result_bytes / 1e6:.3g} MB; a replica takes about"
            f" {self.peak_bytes / 1e9:.3g} GB\ncomputing takes about: {times}"
        )


def plan_scan(
    scan: Experiment,
    shape: ModelShape,
    prompts: Sequence[TokenizedPrompt],
    dtype: str,
    *,
    cpu: CpuSpeed | None = None,
) -> Plan | None:
    """Work out what ``scan`` costs on a model of ``shape``; None where the experiment does not know.

    Args:
        scan: what would be run; its shards are cut as a run would cut them.
        prompts: tokenized.
        dtype: of weights and activations, a key of DTYPE_BYTES.
        cpu: this CPU's speed; None leaves it out of ``seconds``.
    """
    asked, scan = scan, scan.whole()
    shards = scan.shards(shape, prompts)
    cost = scan.cost(shape, prompts, shards)
    if cost is None:
        return None
    width = DTYPE_BYTES[dtype]
    weights, kept = width * parameters(shape) * scan.models_held, width * cost.kept
    return Plan(
        scan=scan.name,
        shards=len(shards),
        evaluations=sum(scan.evaluations(shard, prompts) for shard in shards),
        rows=sum(cost.rows.values()),
        tokens=sum(len(prompt.fed) for prompt in prompts),
        nodes=cost.nodes,
        parameters=parameters(shape),
        models=scan.models_held,
        flops=cost.flops,
        plain_flops=cost.plain_flops,
        terms=cost.terms,
        result_bytes=round(sum(cost.rows[shard.key] * row_bytes(scan.tables[shard.table].schema) for shard in shards)),
        model_bytes=weights,
        cache_bytes=kept,
        peak_bytes=weights + kept + width * cost.working + cost.working_bytes,
        seconds=_seconds(cost.flops, cost.terms, dtype, cpu, capped=shape.logit_softcap is not None),
        at_most=scan is not asked,
    )


def row_bytes(schema: pa.Schema) -> float:
    """Bytes of a stored row, about: floats hardly compress, ids and flags come to about half a byte."""
    return sum(field.type.bit_width / 8 if pa.types.is_floating(field.type) else 0.5 for field in schema)


def measure_cpu(shape: ModelShape, seconds: float = 0.5) -> CpuSpeed:
    """This CPU in float32: a layer of the model's shape as ablations run it, and its neurons' importances.

    One replica's threads are measured and counted once for each replica that the cores have threads for: threads that
    share a product wait for each other, so that on a busy machine all cores at once say little about single ones.
    """
    many, earlier = machine_cores(), torch.get_num_threads()
    threads = threads_for(4 * parameters(shape), many)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            layer, flops = _layer(shape)
            products = _rate(layer, seconds / 2) * flops
            importances, terms = _importances(shape)
            sums = _rate(importances, seconds / 2) * terms
    finally:
        torch.set_num_threads(earlier)
    replicas = max(1, many // threads)
    return CpuSpeed(replicas * products / 1e12, replicas * sums / 1e12)


def _layer(shape: ModelShape) -> tuple[Callable[[], object], float]:
    """A layer's products, attention and activation on trees of prompts, and its FLOPs as scans count them.

    Wide models are measured at a part of their width: their products are as fast, and take too long.
    """
    width, neurons = min(shape.d_model, 1024), min(shape.n_neurons, 4096)
    heads, groups, d_head = min(shape.n_heads, 16), min(shape.n_groups, 16), shape.d_head
    heads -= heads % groups
    x = torch.randn(TREES, TREE_NODES, width) / 10
    query, key, value, out = (
        torch.randn(width, n * d_head) / width for n in (heads, groups, groups, heads)
    )  # fmt: skip
    up, gate, down = (torch.randn(width, neurons) / width for _ in range(3))
    mask = torch.zeros(TREES, 1, TREE_NODES, TREE_NODES)

    def split(values: torch.Tensor) -> torch.Tensor:
        heads_first: torch.Tensor = values.unflatten(-1, (-1, d_head)).transpose(1, 2)
        return heads_first

    def layer() -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x, (width,))
        q, k, v = split(normed @ query), split(normed @ key), split(normed @ value)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        middle = x + mixed.transpose(1, 2).flatten(2) @ out.T
        inner = torch.nn.functional.rms_norm(middle, (width,))
        gated = torch.nn.functional.silu(inner @ gate) * (inner @ up) if shape.gated_mlp else (inner @ up).relu()
        return middle + gated @ down.T

    attention = 2.0 * width * d_head * (2 * heads + 2 * groups) + 4.0 * PACK_SIZE * heads * d_head
    mlp = 2.0 * (3 if shape.gated_mlp else 2) * width * neurons
    return layer, TREES * TREE_NODES * (attention + mlp)


def _importances(shape: ModelShape) -> tuple[Callable[[], object], float]:
    """Sums over the vocabulary for some neurons of 64 prompts, and the number of their terms."""
    prompts, neurons = 64, max(1, 2**18 // shape.vocabulary)
    target = torch.zeros(prompts, dtype=torch.long)
    base = Base.of(torch.randn(prompts, shape.vocabulary), target, shape.logit_softcap)
    amounts, directions = torch.randn(prompts, neurons) / 100, torch.randn(neurons, shape.vocabulary)
    return lambda: neuron_increases(base, amounts, directions), float(prompts * directions.numel())


def _rate(work: Callable[[], object], seconds: float) -> float:
    """How often a second ``work`` can be done, measured for about ``seconds``."""
    work()  # the first time also sets up threads and buffers
    done, started = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - started < seconds:
        work()
        done += 1
    return done / (time.perf_counter() - started)


def _seconds(flops: float, terms: float, dtype: str, cpu: CpuSpeed | None, *, capped: bool) -> dict[str, float]:
    column = {"bfloat16": 0, "float16": 0, "float32": 1}.get(dtype)
    found = {}
    if column is not None:
        for device, tflops in DEVICE_TFLOPS.items():
            products = flops / (tflops[column] * GPU_EFFICIENCY * 1e12)
            speed = DEVICE_TERMS[device] * (CAPPED_TERMS if capped else 1.0)
            found[device] = products + terms / (speed * 1e12)
    if cpu is not None:
        found["this CPU"] = flops / (cpu.tflops * 1e12) + terms / (cpu.terms * 1e12)
    return found
