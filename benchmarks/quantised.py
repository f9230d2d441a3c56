"""What does quantising a model's layers change, and what noise does a head scan of it have?

    python benchmarks/quantised.py --load-in none                                  # the bundled model, on a CPU too
    python benchmarks/quantised.py --load-in 8bit --model smollm2 --adapter smollm2-arithmetic --limit 160
    python benchmarks/quantised.py --load-in 4bit --model ./llama-7b --limit 160

A head scan of the first, middle and last layer, quantised, with the noise notes that every scan stores: how far a
change of nothing moves log-probabilities, and packed prompts from each alone. Beside it the unedited answers of the
quantised model against those of the unquantised one, at the same dtype: the largest and the median change of an answer
token's log-probability, how many predictions flip, the accuracy of both, and the bytes of their weights. ``none``
compares the model with itself: all changes are 0. A model with an adapter, or from a .gguf file, is first merged and
saved to a folder, which alone can be quantised. Prints one JSON line.
"""

import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
import pandas as pd
import torch

import mathinterp as mi
from mathinterp.experiments.heads import Heads
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.models.handle import Model
from mathinterp.models.quantised import LOAD_IN
from mathinterp.service.shelf import weight_bytes

ROWS = "SELECT prompt_id, position, correct, logprob, predicted_id FROM baseline WHERE run_id = $run ORDER BY 1, 2"
NOISE = ("noise_floor", "alone_deviation", "packing_deviation")  # of a run's notes


@click.command()
@click.option("--model", default="bundled", show_default=True)
@click.option("--adapter", default=None, help="For example smollm2-arithmetic.")
@click.option("--load-in", type=click.Choice([*LOAD_IN, "none"]), default="8bit", show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Of activations, and of the unquantised weights.")
@click.option("--limit", default=160, show_default=True, help="Two-digit prompts.")
def main(model: str, adapter: str | None, load_in: str, dtype: str, limit: int) -> None:
    """Measure, and say what came out."""
    way = None if load_in == "none" else load_in
    with tempfile.TemporaryDirectory() as folder:
        name = in_folder(ModelSpec(model, adapter), f"{folder}/model") if way else model
        left = None if way else adapter
        plain = scanned(ModelSpec(name, left, dtype), limit, f"{folder}/plain")
        quantised = scanned(ModelSpec(name, left, dtype, load_in=way), limit, f"{folder}/quantised")
    asked = {"model": model, "adapter": adapter, "load_in": load_in, "prompts": limit, **quantised.pop("of")}
    changes = compared(plain.pop("rows"), quantised.pop("rows"))
    both = {f"{name}_unquantised": plain[name] for name in quantised}
    print(json.dumps({**asked, **changes, **quantised, **both}))


def in_folder(spec: ModelSpec, folder: str) -> str:
    """Where the model is as a Hugging Face folder without an adapter, which alone can be quantised."""
    found = resolve(spec)
    if found.source.kind == "folder" and found.adapter is None:
        return spec.name
    loaded = load(found, "cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def scanned(spec: ModelSpec, limit: int, store: str) -> dict[str, Any]:
    """Bytes of the model, and the rows and notes of a scan of three layers of heads, in this process."""
    with held(spec) as (model, size):
        n_layers = model.described.shape.n_layers
        layers = sorted({0, n_layers // 2, n_layers - 1})
        scan, prompts = Heads(layers=tuple(layers)), mi.prompts("two_digit", limit=limit)
        run = mi.run(scan, model, prompts, store=store, progress=False)
        notes = (run.store.record(run.id) or {})["notes"]
        of = {"device": model.device, "dtype": model.described.dtype, "layers": layers}
        return {"rows": run.sql(ROWS), "of": of, "weights_bytes": size, **{name: notes[name] for name in NOISE}}


@contextmanager
def held(spec: ModelSpec) -> Iterator[tuple[Model, int]]:
    """A loaded model and its bytes, scales of quantised weights included; let go of after the block."""
    model = Model(spec)
    on_gpu = model.device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with model.lent() as loaded:
        size = torch.cuda.memory_allocated() - before if on_gpu else weight_bytes(loaded)
    del loaded
    yield model, size
    model._loaded = None
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def compared(plain: pd.DataFrame, quantised: pd.DataFrame) -> dict[str, Any]:
    """Changes of the unedited answers, token by token; a prompt is right where all of its tokens are."""
    assert list(plain["prompt_id"]) == list(quantised["prompt_id"])
    change = np.abs(np.asarray(plain["logprob"]) - np.asarray(quantised["logprob"]))
    flipped = np.asarray(plain["predicted_id"]) != np.asarray(quantised["predicted_id"])
    right = [float(rows.groupby("prompt_id")["correct"].all().mean()) for rows in (plain, quantised)]
    return {
        "answer_tokens": len(change), "logprob_change_max": float(change.max()),
        "logprob_change_median": float(np.median(change)), "flipped_predictions": int(flipped.sum()),
        "accuracy_unquantised": right[0], "accuracy": right[1],
    }  # fmt: skip


if __name__ == "__main__":
    main()
