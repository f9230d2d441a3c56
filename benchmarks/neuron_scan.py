"""How long Comparative Neuron Analysis takes: ours whole, and the vectorised direct form on a part, in one run.

    python benchmarks/neuron_scan.py                                 # bundled model on CPU, all neurons x 1,600 prompts
    python benchmarks/neuron_scan.py --model random:llama-2-7b       # H100: 352,256 neurons x 1,600 prompts

Ours is measured from the loaded model to files on disk, for the original alone and for the original against a zeroed
head. The direct form is what a notebook would do at its best: for one prompt and layer, all neurons at once,
log softmax(Lens(r + c v)) - log softmax(Lens(r)) in the model's dtype; measured on the stated prompts and layers, and
scaled up. Both are compared with the direct form in float64 of the same activations (relative error over a layer's
neurons, in the 2-norm). Prints one JSON line last.
"""

import json
import tempfile
import time
from collections.abc import Sequence

import click
import torch

from mathinterp.engine.lens.lens import Lens
from mathinterp.engine.lens.neurons import EndActivations, NeuronLens, end_activations
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.against import Against
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.units import Head
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store


def synchronize(device: str) -> float:
    """Wait for the device; the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_ours(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, scan: Neurons) -> dict[str, float]:
    """The whole scan from the loaded model to files in a store: seconds, those of the clean passes, rows."""
    shards = scan.shards(anatomy.shape, prompts)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        run = store.open_run(
            scan=scan.name, model="benchmark", model_fingerprint="benchmark", prompts="benchmark",
            prompts_fingerprint=prompts_fingerprint(prompts), dtype=str(anatomy.dtype), parameters=scan.parameters(),
            code_version="benchmark", shards=[shard.key for shard in shards],
        )  # fmt: skip
        start = synchronize(device)
        state = scan.prepare(Subject(anatomy, prompts))
        prepared = synchronize(device)
        rows, computing = 0, 0.0
        for shard in shards:
            began = time.perf_counter()
            table = scan.run(state, shard)
            computing += synchronize(device) - began
            store.write_shard(run.run_id, shard.table, shard.index, table, {})
            rows += table.num_rows
        seconds = synchronize(device) - start
    return {"seconds": seconds, "prepare": prepared - start, "compute": computing, "rows": rows}


@torch.inference_mode()
def direct(
    anatomy: Anatomy,
    layer: int,
    seen: EndActivations,
    scale_P: torch.Tensor,
    prompt: int,
    token: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The direct form of all neurons of a layer and one prompt, every step in ``dtype``: K."""
    norm = Lens(anatomy).norm
    weight_VD = anatomy.unembedding.get_parameter("weight").to(dtype)
    r_1D = seen.before_mlp_PD[layer][prompt][None].to(dtype)
    c_K = seen.coefficients_PK[layer][prompt].to(dtype)
    z_ND = torch.cat([r_1D, r_1D + c_K[:, None] * anatomy.value_vectors(layer).to(dtype)])
    normed_ND = norm.centre(z_ND) / scale_P[prompt].to(dtype) * norm.gain_D.to(dtype)
    if norm.bias_D is not None:
        normed_ND = normed_ND + norm.bias_D.to(dtype)
    logprob_N = (normed_ND @ weight_VD.T).log_softmax(dim=-1)[:, token]
    return logprob_N[1:] - logprob_N[0]


def compare_direct(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], device: str, count: int, layers: Sequence[int]
) -> dict[str, float]:
    """Seconds of the direct form for one prompt and layer, and both forms' relative errors against float64."""
    lens = NeuronLens(anatomy)
    part = prompts[:: max(1, len(prompts) // count)][:count]
    seen = end_activations(anatomy, [prompt.input_ids[: prompt.end + 1] for prompt in part])
    scales = lens.frozen_scales(seen)
    target_P = lens.logits(seen).argmax(dim=-1)
    tokens = target_P.tolist()
    direct(anatomy, layers[0], seen, scales.final_P, 0, tokens[0], anatomy.dtype)
    start = synchronize(device)
    found = {
        (layer, p): direct(anatomy, layer, seen, scales.final_P, p, tokens[p], anatomy.dtype)
        for layer in layers
        for p in range(len(part))
    }
    seconds = (synchronize(device) - start) / len(found)
    ours_error, direct_error, size = 0.0, 0.0, 0.0
    for layer in layers:
        ours_PK = lens.layer(layer, seen, scales, target_P, lens.directions(layer)).neurons_PK
        for p in range(min(4, len(part))):
            exact_K = direct(anatomy, layer, seen, scales.final_P, p, tokens[p], torch.float64)
            size += float(exact_K.square().sum())
            ours_error += float((ours_PK[p] - exact_K).square().sum())
            direct_error += float((found[layer, p] - exact_K).square().sum())
    return {
        "seconds": seconds,
        "ours_error": (ours_error / size) ** 0.5,
        "direct_error": (direct_error / size) ** 0.5,
    }


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="two_digit", show_default=True)
@click.option("--limit", type=int, default=None)
@click.option("--direct-prompts", default=32, show_default=True, help="Prompts measured of the direct form.")
@click.option("--direct-layers", default=2, show_default=True, help="Layers measured of the direct form.")
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, prompt_name: str, limit: int | None, direct_prompts: int, direct_layers: int,
    threads: int | None,
) -> None:  # fmt: skip
    """Time the neuron scan against the direct form."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = tokenize_prompts(load_prompts(prompt_name, limit=limit), resolved.tokenizer)
    anatomy = load(resolved, device).anatomy
    shape = anatomy.shape
    neurons = shape.n_layers * shape.n_neurons
    print(f"{resolved.label} {resolved.dtype} on {device}: {neurons:,} neurons x {len(prompts):,} prompts")

    layers = [shape.n_layers * i // direct_layers for i in range(direct_layers)]
    measured = compare_direct(anatomy, prompts, device, direct_prompts, layers)
    Neurons().run(Neurons().prepare(Subject(anatomy, prompts[:64])), Neurons().shards(shape, prompts)[0])
    alone = time_ours(anatomy, prompts, device, Neurons())
    both = time_ours(anatomy, prompts, device, Neurons(Against("head", heads=(Head(0, 0),))))
    direct_s = measured["seconds"] * shape.n_layers * len(prompts)
    figures = {
        "original_s": round(alone["seconds"], 2),
        "original_compute_s": round(alone["compute"], 2),
        "against_head_s": round(both["seconds"], 2),
        "against_head_prepare_s": round(both["prepare"], 2),
        "against_head_compute_s": round(both["compute"], 2),
        "rows": both["rows"],
        "direct_one_condition_s": round(direct_s, 1),
        "direct_measured": direct_prompts * direct_layers,
        "direct_over_compute": round(direct_s / alone["compute"], 2),
        "ours_relative_error": float(f"{measured['ours_error']:.2g}"),
        "direct_relative_error": float(f"{measured['direct_error']:.2g}"),
    }
    if device == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
