"""What a scan will cost, before anything loads: FLOPs, rows, bytes, memory and time on known devices.

Knows shapes, prompts and shards; loads no weights and needs no Ray. The counts (FLOPs, rows, model bytes) are exact
for tree-packed replay up to what is said beside them; memory and times are estimates.

Shape legend: L layer, H query head, G key/value group, D model width, K neurons, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch

from mathinterp.forward.packing import GPU_TOKENS
from mathinterp.forward.tree import count_nodes, plant
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.scans.base import Scan, Shard

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PACK_SIZE = 512  # nodes of a typical tree pack

# Dense matrix products, TFLOP/s: in 16 bits, and in float32 without tensor cores. The H100's 734 is measured; the
# others are the makers' figures times the part of its maker's figure (989) that the H100 reaches.
DEVICE_TFLOPS: dict[str, tuple[float, float]] = {
    "H100": (734.0, 50.0),
    "A100": (312 * 0.74, 19.5 * 0.74),
    "L40S": (362 * 0.74, 91.6 * 0.74),
    "L4": (121 * 0.74, 30.3 * 0.74),
}
GPU_EFFICIENCY = 0.8  # of that ceiling that whole layers reach: .77 to .89 measured on an H100
CPU_EFFICIENCY = 0.5  # of a plain matrix product's speed: a CPU also pays for attention, norms and activations


@dataclass(frozen=True)
class Plan:
    """Costs of one scan; memory is of one replica."""

    scan: str
    shards: int
    evaluations: int  # forward evaluations: one per prompt and intervention
    rows: int
    tokens: int  # of all prompts
    nodes: int  # of their prefix trees
    parameters: int
    flops: float  # of the scan itself: replay from each intervention's layer
    plain_flops: float  # the same by full forward passes over every token of every prompt
    result_bytes: int  # Parquet, about
    model_bytes: int
    cache_bytes: int  # the clean pass: every layer's input at every node
    peak_bytes: int  # device memory of a replica, about
    seconds: dict[str, float]  # of computing: device -> on one GPU of that kind, or on all cores of this CPU


def plan_scan(
    scan: Scan,
    shape: ModelShape,
    prompts: Sequence[TokenizedPrompt],
    dtype: str,
    *,
    cpu_tflops: float | None = None,
) -> Plan:
    """Work out what ``scan`` costs on a model of ``shape``.

    Args:
        scan: what would be run; its shards are cut as a run would cut them.
        prompts: tokenized.
        dtype: of weights and activations, a key of DTYPE_BYTES.
        cpu_tflops: this CPU's speed, from measure_cpu; None leaves it out of ``seconds``.
    """
    shards = scan.shards(shape, prompts)
    sequences = [prompt.fed for prompt in prompts]
    forest = plant(sequences, pack_size=PACK_SIZE)
    padded = forest.n_packs * forest.pack_size
    answers = sum(len(prompt.scored) for prompt in prompts)
    evaluations = {shard.key: scan.evaluations(shard, prompts) for shard in shards}
    passes = sum(evaluations.values()) / len(prompts)

    node_flops = layer_flops(shape, forest.pack_size)
    unembedding = 2.0 * shape.d_model * shape.vocabulary * answers
    replayed = sum(replayed_layers(shard, shape, evaluations[shard.key] / len(prompts)) for shard in shards)
    flops = node_flops * padded * (replayed + shape.n_layers) + unembedding * passes
    tokens = sum(len(sequence) for sequence in sequences)
    plain = layer_flops(shape, max(len(s) for s in sequences)) * tokens * shape.n_layers * passes + unembedding * passes

    width = DTYPE_BYTES[dtype]
    cache = width * padded * (shape.n_layers * shape.d_model + forest.pack_size)  # residuals and the trees' masks
    working = width * GPU_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons)
    rows = {shard.key: round(evaluations[shard.key] / len(prompts) * answers) for shard in shards}
    return Plan(
        scan=scan.name,
        shards=len(shards),
        evaluations=sum(evaluations.values()),
        rows=sum(rows.values()),
        tokens=tokens,
        nodes=count_nodes(sequences),
        parameters=parameters(shape),
        flops=flops,
        plain_flops=plain,
        result_bytes=round(sum(rows[shard.key] * row_bytes(scan.schemas[shard.table]) for shard in shards)),
        model_bytes=width * parameters(shape),
        cache_bytes=cache,
        peak_bytes=width * parameters(shape) + cache + working,
        seconds=_seconds(flops, dtype, cpu_tflops),
    )


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer's matrices: q, k, v, o and the MLP's two or three; norms and biases are left out."""
    attention = shape.d_model * shape.d_head * (2 * shape.n_heads + 2 * shape.n_groups)
    return attention + (3 if shape.gated_mlp else 2) * shape.d_model * shape.n_neurons


def parameters(shape: ModelShape) -> int:
    """Weights of the model's matrices, with embedding and unembedding."""
    embeddings = (1 if shape.tied_unembedding else 2) * shape.vocabulary * shape.d_model
    return shape.n_layers * layer_parameters(shape) + embeddings


def layer_flops(shape: ModelShape, attended: int) -> float:
    """FLOPs of one layer for one token or tree node that attends to ``attended`` others (masked ones cost as much)."""
    return 2.0 * layer_parameters(shape) + 4.0 * attended * shape.n_heads * shape.d_head


def replayed_layers(shard: Shard, shape: ModelShape, interventions: float) -> float:
    """Layers that a shard replays, summed over its interventions: L - l for one in layer l.

    A shard that does not name layers counts (L + 1) / 2 for each intervention, the mean over all layers.
    """
    named = [layer for layer, _ in shard.work.get("heads", [])] + list(shard.work.get("layers", []))
    if named:
        return float(sum(shape.n_layers - layer for layer in named))
    return interventions * (shape.n_layers + 1) / 2


def row_bytes(schema: pa.Schema) -> float:
    """Bytes of a stored row, about: floats hardly compress, ids and flags come to about half a byte."""
    return sum(field.type.bit_width / 8 if pa.types.is_floating(field.type) else 0.5 for field in schema)


def measure_cpu(shape: ModelShape, dtype: str = "float32", seconds: float = 0.5) -> float:
    """TFLOP/s of this CPU in the model's own MLP product (2,048 tokens), over about ``seconds``."""
    kind = getattr(torch, dtype)
    left, right = torch.randn(2048, shape.d_model, dtype=kind), torch.randn(shape.d_model, shape.n_neurons, dtype=kind)
    left @ right  # the first product also sets up threads and buffers
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        left @ right
        products += 1
    return products * 2 * left.numel() * shape.n_neurons / (time.perf_counter() - started) / 1e12


def _seconds(flops: float, dtype: str, cpu_tflops: float | None) -> dict[str, float]:
    column = {"bfloat16": 0, "float16": 0, "float32": 1}.get(dtype)
    found = {}
    if column is not None:
        for device, tflops in DEVICE_TFLOPS.items():
            found[device] = flops / (tflops[column] * GPU_EFFICIENCY * 1e12)
    if cpu_tflops is not None:
        found["this CPU"] = flops / (cpu_tflops * CPU_EFFICIENCY * 1e12)
    return found
