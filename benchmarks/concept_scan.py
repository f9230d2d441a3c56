"""How long a concept scan takes: ours whole, and two other ways on a part, in one run.

    python benchmarks/concept_scan.py                              # bundled model on CPU
    python benchmarks/concept_scan.py --model random:llama-2-7b    # GPU: 176,128 neurons x 17 attention layers

Ours is measured from the loaded model to files on disk, for the same neurons and attention layers as the paper (each
with each: --into all), with the texts of the first tokens and the values and random directions that it also reads. Its
hits alone and the other ways are measured on a few pairs of a neuron layer and an attention layer, spread over the
model, and scaled up:

- ordinary: a layer's values as one batch through v_proj, o_proj, gains and unembedding in the model's dtype, topk, and
  a look-up of the concept tokens; no texts, nothing stored;
- published: one neuron at a time, all tokens sorted, the first ones decoded and compared with the concepts' spellings.

Of both ours and ordinary it is said which share of vectors has the hits that float64 gives. Prints one JSON line last.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import click
import pyarrow.compute as pc
import torch

from mathinterp.engine.lens.concepts import ConceptReader, concept_hits, top_ids
from mathinterp.engine.lens.lens import norm_parts, written_values
from mathinterp.experiments.base import Subject
from mathinterp.experiments.concepts import Concepts, default_top
from mathinterp.experiments.concepts.rows import Vocabulary, match_vocabulary
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store import Store

Pair = tuple[int, int]  # neuron layer, attention layer


def synchronize(device: str) -> float:
    """Wait for the device; the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_ours(subject: Subject, prompts: Sequence[TokenizedPrompt], device: str, scan: Concepts) -> dict[str, float]:
    """The whole scan from the loaded model to files in a store: seconds, those of computing alone, rows and hits."""
    shards = scan.shards(subject.anatomy.shape, prompts)
    scan.run(scan.prepare(subject), shards[-1])  # imports and buffers
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        run = store.open_run(
            scan=scan.name, model="benchmark", model_fingerprint="benchmark", prompts="benchmark",
            prompts_fingerprint=prompts_fingerprint(prompts), dtype=str(subject.anatomy.dtype),
            parameters=scan.parameters(), code_version="benchmark", shards=[shard.key for shard in shards],
        )  # fmt: skip
        start = synchronize(device)
        state = scan.prepare(subject)
        rows, hits, computing = 0, 0, 0.0
        with ThreadPoolExecutor(1) as writer:  # as a replica on a GPU: a file is written while the next shard computes
            written: list[Future[Any]] = []
            for shard in shards:
                began = time.perf_counter()
                table = scan.run(state, shard)
                computing += synchronize(device) - began
                for earlier in written[-1:]:
                    earlier.result()
                written.append(writer.submit(store.write_shard, run.run_id, shard.table, shard.index, table, {}))
                rows += table.num_rows
                hits += pc.sum(pc.greater(table["hits"], 0)).as_py()
            for file in written:
                file.result()
        seconds = synchronize(device) - start
    return {"seconds": seconds, "compute": computing, "rows": rows, "with_hits": hits}


@torch.inference_mode()
def moved(anatomy: Anatomy, values_KD: torch.Tensor, attention_layer: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors through an attention layer, head by head, and to the logits, every step in ``dtype``: N V."""
    shape = anatomy.shape
    norm, final = norm_parts(anatomy, anatomy.attention_norm(attention_layer)), norm_parts(anatomy, anatomy.final_norm)
    read_ND = norm.centre(values_KD.to(dtype)) * norm.gain_D.to(dtype)
    values_NZ = read_ND @ anatomy.value(attention_layer).weight.to(dtype).T
    heads_NGZ = values_NZ.unflatten(1, (shape.n_groups, shape.d_head))
    heads_NHZ = heads_NGZ.repeat_interleave(shape.n_heads // shape.n_groups, dim=1)
    written_ND = heads_NHZ.flatten(1) @ anatomy.output_weight(attention_layer).to(dtype)
    post = anatomy.attention_post_norm(attention_layer)
    if post is not None:
        written_ND = written_ND * norm_parts(anatomy, post).gain_D.to(dtype)
    weight_VD = anatomy.unembedding.get_parameter("weight").to(dtype)
    return (final.centre(written_ND) * final.gain_D.to(dtype)) @ weight_VD.T


def time_ordinary(
    anatomy: Anatomy, vocabulary: Vocabulary, pairs: Sequence[Pair], top: int, device: str
) -> tuple[float, list[torch.Tensor]]:
    """Seconds a pair, and the hits of each pair's neurons."""
    concept_V = vocabulary.concept_V.to(device)

    def one_pair(layer: int, attention_layer: int) -> torch.Tensor:
        values_KD = written_values(anatomy, layer).to(anatomy.dtype)
        parts = [
            moved(anatomy, rows, attention_layer, anatomy.dtype).topk(top).indices for rows in values_KD.split(4096)
        ]
        return concept_hits(torch.cat(parts), concept_V, distinct=True).cpu()

    one_pair(*pairs[0])
    start = synchronize(device)
    hits = [one_pair(*pair) for pair in pairs]
    return (synchronize(device) - start) / len(pairs), hits


def time_reading(
    anatomy: Anatomy, vocabulary: Vocabulary, pairs: Sequence[Pair], layers: int, top: int, device: str
) -> float:
    """Seconds a pair of our way to the hits alone: no texts, nothing stored.

    ``layers`` of neurons share a reader; a pair has its share of making one.
    """

    def one_pair(layer: int, attention_layer: int) -> None:
        found = readers[attention_layer].read(written_values(anatomy, layer))
        concept_hits(found.ids_RT, vocabulary.concept_V, distinct=True)

    ConceptReader(anatomy, vocabulary.concept_V, top, pairs[0][1])
    start = synchronize(device)
    readers = {a: ConceptReader(anatomy, vocabulary.concept_V, top, a) for a in {a for _, a in pairs}}
    making = (synchronize(device) - start) / len(readers)
    one_pair(*pairs[0])
    start = synchronize(device)
    for pair in pairs:
        one_pair(*pair)
    return (synchronize(device) - start) / len(pairs) + making / layers


def time_published(
    anatomy: Anatomy, scan: Concepts, tokenizer: object, pairs: Sequence[Pair], count: int, device: str
) -> float:
    """Seconds a neuron and attention layer."""
    layer, attention_layer = pairs[0]
    values_KD = written_values(anatomy, layer)[:count].to(anatomy.dtype)
    start = synchronize(device)
    for row in range(count):
        logits_V = moved(anatomy, values_KD[row : row + 1], attention_layer, anatomy.dtype)[0]
        first = logits_V.sort(descending=True).indices[: scan.top].tolist()
        texts = [tokenizer.decode([number]) for number in first]  # type: ignore[attr-defined]
        len({number for number in scan.looked_for.numbers(texts) if number is not None})
    return (synchronize(device) - start) / count


def agreement(
    anatomy: Anatomy, vocabulary: Vocabulary, pairs: Sequence[Pair], top: int, ordinary: Sequence[torch.Tensor],
    rows: int,
) -> dict[str, float]:  # fmt: skip
    """Shares of vectors whose hits are those of float64: ours, ordinary."""
    concept_V = vocabulary.concept_V
    same, seen = {"ours": 0, "ordinary": 0}, 0
    for (layer, attention_layer), ordinary_K in zip(pairs, ordinary, strict=True):
        values_KD = written_values(anatomy, layer)[:rows]
        exact_NV = moved(anatomy, values_KD, attention_layer, torch.float64)
        exact_N = concept_hits(top_ids(exact_NV, top).cpu(), concept_V, distinct=True)
        found = ConceptReader(anatomy, concept_V, top, attention_layer).read(values_KD)
        ours_N = torch.zeros_like(exact_N)
        ours_N[found.rows_R] = concept_hits(found.ids_RT, concept_V, distinct=True)
        same["ours"] += int((ours_N == exact_N).sum())
        same["ordinary"] += int((ordinary_K[: len(exact_N)] == exact_N).sum())
        seen += len(exact_N)
    return {name: count / seen for name, count in same.items()}


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--top", default=None, type=int, help="Default: what the scan takes for the vocabulary.")
@click.option("--into", default="all", show_default=True, help="all or later.")
@click.option("--pairs", "measured", default=4, show_default=True, help="Layer pairs measured of the ordinary way.")
@click.option("--published-neurons", default=64, show_default=True, help="Neurons measured of the published way.")
@click.option("--exact-neurons", default=256, show_default=True, help="Neurons of each pair compared with float64.")
@click.option("--threads", default=None, type=int, help="CPU threads.")
def main(
    model: str, dtype: str, top: int | None, into: str, measured: int, published_neurons: int, exact_neurons: int,
    threads: int | None,
) -> None:  # fmt: skip
    """Time the concept scan three ways."""
    if threads:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve(ModelSpec(model, dtype=dtype), device)
    prompts = tokenize_prompts(load_prompts("two_digit", limit=1), resolved.tokenizer)
    anatomy = load(resolved, device).anatomy
    shape = anatomy.shape
    first = top or default_top(shape.vocabulary)
    scan = Concepts(top=first, into=into)
    layers, attention = scan.chosen(shape)
    every = [(layer, a) for a in attention for layer in layers if into == "all" or a > layer]
    print(
        f"{resolved.label} {resolved.dtype} on {device}: {len(layers) * shape.n_neurons:,} neurons, {len(attention)}"
        f" attention layers, {len(every)} pairs of layers, first {scan.top} of {shape.vocabulary:,} tokens"
    )
    pairs = [every[index * len(every) // measured] for index in range(measured)]
    vocabulary = match_vocabulary(scan.looked_for, resolved.tokenizer, shape.vocabulary)
    ordinary, hits = time_ordinary(anatomy, vocabulary, pairs, first, device)
    reading = time_reading(anatomy, vocabulary, pairs, len(every) // len(attention), first, device)
    published = time_published(anatomy, scan, resolved.tokenizer, pairs, published_neurons, device)
    right = agreement(anatomy, vocabulary, pairs, first, hits, exact_neurons)
    ours = time_ours(Subject(anatomy, prompts, tokenizer=resolved.tokenizer), prompts, device, scan)
    vectors = len(every) * shape.n_neurons
    figures = {
        "ours_s": round(ours["seconds"], 2),
        "ours_compute_s": round(ours["compute"], 2),
        "ours_hits_alone_s": round(reading * len(every), 2),
        "ordinary_s": round(ordinary * len(every), 2),
        "pairs_measured": measured,
        "published_s": round(published * vectors, 1),
        "published_neurons_measured": published_neurons,
        "ordinary_over_ours": round(ordinary * len(every) / ours["seconds"], 2),
        "ordinary_over_hits_alone": round(ordinary / reading, 2),
        "published_over_ours": round(published * vectors / ours["seconds"], 1),
        "ours_as_float64": round(right["ours"], 4),
        "ordinary_as_float64": round(right["ordinary"], 4),
        "rows": ours["rows"],
        "rows_with_hits": ours["with_hits"],
    }
    if device == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
