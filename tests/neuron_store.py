"""A store with a neuron scan."""

from dataclasses import dataclass
from pathlib import Path

from mathinterp.experiments.base import Subject
from mathinterp.experiments.neurons import Neurons
from mathinterp.models.catalog import LoadedModel, ModelSpec, load, resolve
from mathinterp.prompts import load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.store import Store, prompts_fingerprint
from tests.tiny import save_tiny


@dataclass
class Scanned:
    folder: Path
    loaded: LoadedModel
    store: Store
    run_id: str


def stored_scan(root: Path) -> Scanned:
    """A tiny model's folder, and a finished neuron scan of it on 12 prompts, made without Ray."""
    folder = save_tiny(root / "m", "llama")
    spec = ModelSpec(str(folder))
    loaded, resolved = load(spec, "cpu"), resolve(spec)
    prompts = tokenize_prompts(load_prompts("two_digit", limit=12), loaded.tokenizer)
    scan = Neurons("head:0.1", keep="topk:20", layers=(1, 2))
    state, shards = scan.prepare(Subject(loaded.anatomy, prompts)), scan.shards(loaded.anatomy.shape, prompts)
    store = Store(root / "store")
    run = store.open_run(
        scan="neurons", model="tiny", model_fingerprint=resolved.fingerprint, prompts="two_digit limit=12",
        prompts_fingerprint=prompts_fingerprint(prompts), dtype="float32", parameters=scan.parameters(),
        code_version="0", shards=[shard.key for shard in shards],
    )  # fmt: skip
    store.write_prompts(prompts_fingerprint(prompts), prompts)
    for shard in shards:
        store.write_shard(run.run_id, shard.table, shard.index, scan.run(state, shard), {})
    run.note(scan.notes(state))
    run.finish()
    return Scanned(folder, loaded, store, run.run_id)
