"""How long path patching takes: ours by END rows, and the ordinary way by hooked forward passes, on one machine.

    python benchmarks/path_scan.py                                   # bundled model on CPU
    python benchmarks/path_scan.py --model random:llama-2-7b         # H100: 1,024 heads + 32 MLPs x 1,600 pairs

Ours is measured whole, for every head and MLP and all pairs, to results on the host: the clean passes and the first
call (compiling) apart. The ordinary way patches one node at END a pass over all pairs, padded batches,
other heads held at their X_r outputs by hooks; it is measured on the stated number of nodes and scaled up.

Prints one JSON line last.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack

import click
import torch

from mathinterp.engine.hooks import edited_input
from mathinterp.engine.pairs import Batch, CleanPairs, Ends, Pairs, batches_of, ends_of, pairs_of
from mathinterp.engine.paths.frozen import PathEngine, measure_logits
from mathinterp.engine.paths.nodes import Node
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.units import Head, Mlp
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import with_counterfactuals


def synchronize(device: str) -> float:
    """Wait for the device; the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_ours(engine: PathEngine, freeze: str, device: str) -> dict[str, float]:
    """Seconds for all nodes and pairs, and those of a first call of the last layer, which compiles."""
    shape = engine.anatomy.shape
    layers: list[list[Node]] = [
        [*(Head(layer, head) for head in range(shape.n_heads)), Mlp(layer)] for layer in range(shape.n_layers)
    ]
    start = synchronize(device)
    engine.patched(layers[-2], freeze).numpy()
    warm = synchronize(device)
    for nodes in layers:
        engine.patched(nodes, freeze).numpy()
    return {"first": warm - start, "all": synchronize(device) - warm}


@torch.inference_mode()
def time_hooked(anatomy: Anatomy, pairs: Pairs, own: Ends, other: Ends, device: str, nodes: int, tokens: int) -> float:
    """Seconds a node of the ordinary way: full forward passes, all heads but the patched one held at END by hooks."""
    gold_P = torch.from_numpy(pairs.gold_P).to(device)
    batches = list(batches_of(pairs.original, anatomy, tokens))

    def hold(batch: Batch, values_PZ: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def edit(inputs_BTZ: torch.Tensor) -> torch.Tensor:
            inputs_BTZ = inputs_BTZ.clone()
            inputs_BTZ[torch.arange(len(batch.rows)), batch.ends] = values_PZ[batch.rows]
            return inputs_BTZ

        return edit

    def one_node(patched: int) -> None:
        for batch in batches:
            with ExitStack() as hooks:
                for layer in range(anatomy.shape.n_layers):
                    values = own.heads_LPZ[layer]
                    if layer == patched:
                        values = values.clone()
                        values[:, anatomy.head_slice(0)] = other.heads_LPZ[layer][:, anatomy.head_slice(0)]
                    hooks.enter_context(edited_input(anatomy.output_projection(layer), hold(batch, values)))
                hidden = anatomy.decoder(input_ids=batch.token_ids, use_cache=False).last_hidden_state
            logits = anatomy.unembedding(batch.at_end(hidden)).float()
            torch.stack(measure_logits(logits, gold_P[batch.rows])[:3]).cpu()

    one_node(0)
    start = synchronize(device)
    for index in range(nodes):
        one_node(index * anatomy.shape.n_layers // nodes)
    return (synchronize(device) - start) / nodes


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--prompts", "prompt_name", default="pairs", show_default=True)
@click.option("--limit", type=int, default=None)
@click.option("--hooked-nodes", default=4, show_default=True, help="Nodes measured of the ordinary way.")
@click.option("--hooked-tokens", default=None, type=int, help="Tokens a batch of this way; default 2,048, GPU 8,192.")
@click.option("--max-rows", default=None, type=int, help="Rows in one batch of ours.")
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, prompt_name: str, limit: int | None, hooked_nodes: int, hooked_tokens: int | None,
    max_rows: int | None, threads: int | None,
) -> None:  # fmt: skip
    """Time path patching two ways."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = with_counterfactuals(load_prompts(prompt_name, limit=limit), resolved.tokenizer)
    pairs = pairs_of(tokenize_prompts(prompts, resolved.tokenizer))
    anatomy = load(resolved, device).anatomy
    shape = anatomy.shape
    nodes = shape.n_layers * (shape.n_heads + 1)
    print(f"{resolved.label} {resolved.dtype} on {device}: {nodes} nodes x {len(pairs)} pairs")

    start = synchronize(device)
    own, other = (ends_of(anatomy, side) for side in (pairs.original, pairs.counterfactual))
    cached = synchronize(device)
    engine = PathEngine(anatomy, CleanPairs(pairs, own, other), max_rows=max_rows)
    ready = synchronize(device)
    heads, direct = (time_ours(engine, freeze, device) for freeze in ("heads", "all"))
    tokens = hooked_tokens or (8192 if device == "cuda" else 2048)
    hooked = time_hooked(anatomy, pairs, own, other, device, hooked_nodes, tokens)
    figures: dict[str, float | str | dict[str, float]] = {
        "nodes": nodes,
        "pairs": len(pairs),
        "clean_passes_s": round(cached - start, 2),
        "clean_rows_s": round(ready - cached, 2),
        "first_call_s": round(heads["first"], 2),
        "freeze_heads_s": round(heads["all"], 2),
        "freeze_all_s": round(direct["all"], 2),
        "hooked_s": round(hooked * nodes, 1),
        "hooked_nodes_measured": hooked_nodes,
        "hooked_over_heads": round(hooked * nodes / heads["all"], 1),
        "hooked_over_all": round(hooked * nodes / direct["all"], 1),
        "forward_deviation": engine.deviation(),
        "noise_floor": engine.noise_floor(),
    }
    if device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name()
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
