"""Models changed for good, as Hugging Face folders: neurons or heads at zero, or an adapter added to its base.

Zeroing is the exact twin of ablation: a neuron's column of down_proj at zero equals its coefficient at zero; a head's
columns of o_proj at zero equal its slice of o_proj's input at zero (method.md section 2). Biases stay. Everything else
is bitwise what it was.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import ranking_from
from mathinterp.experiments.options import read_heads, read_neurons
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, ResolvedModel, load, resolve
from mathinterp.models.loading import quiet_transformers
from mathinterp.models.units import Head, Neuron
from mathinterp.store import Store
from mathinterp.tuning.chosen import first, say_whose_ranking
from mathinterp.tuning.controls import save_model
from mathinterp.tuning.folders import EDIT_FILE, TUNING_FILE, check_free_or_ours, read_about, written_or_same


@torch.no_grad()
def zero_columns(anatomy: Anatomy, neurons: Sequence[Neuron] = (), heads: Sequence[Head] = ()) -> None:
    """Set the neurons' columns of down_proj and the heads' columns of o_proj to zero, in place.

    Raises UserError for a neuron or head that does not exist.
    """
    shape = anatomy.shape
    for layer, head in heads:
        shape.check_head(layer, head)
    for layer, neuron in neurons:
        shape.check_neuron(layer, neuron)
    for layer in sorted({layer for layer, _ in neurons}):
        chosen = torch.tensor([neuron for at, neuron in neurons if at == layer], device=anatomy.device)
        anatomy.value_vectors(layer)[chosen] = 0
    for layer, head in heads:
        anatomy.output_weight(layer)[anatomy.head_slice(head)] = 0


def export_edited(
    resolved: ResolvedModel, out: Path, *, neurons: Sequence[Neuron] = (), heads: Sequence[Head] = (),
    about: dict[str, Any] | None = None,
) -> bool:  # fmt: skip
    """Load the model on the CPU, zero the columns, and write it to ``out``, as a whole or not at all; False: the very
    same is there already.

    ``out``/edit.json says what was zeroed in which model, and ``about``. Raises UserError as zero_columns does, and if
    something else is there.
    """
    loaded = load(resolved, "cpu")
    zero_columns(loaded.anatomy, neurons, heads)
    found = {
        "base": resolved.label,
        "base_fingerprint": loaded.fingerprint,
        "dtype": loaded.dtype,
        "neurons": [f"{layer}.{neuron}" for layer, neuron in neurons],
        "heads": [f"{layer}.{head}" for layer, head in heads],
        **(about or {}),
    }

    def write(part: Path) -> None:
        with quiet_transformers():
            save_model(loaded.model, loaded.tokenizer, part)
        (part / EDIT_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    return written_or_same(out, write)


@dataclass(frozen=True)
class Zeroed:
    """A model that was written with heads and neurons at zero."""

    base: ResolvedModel
    heads: tuple[Head, ...]
    neurons: tuple[Neuron, ...]


def zero(
    spec: ModelSpec, out: Path, *, heads: str | Sequence[Head] | None = None, heads_from: str | None = None,
    top: int = 32, neurons: str | Sequence[Neuron] | None = None, store: str = "results",
    say: Callable[[str], None] = lambda line: None,
) -> Zeroed:  # fmt: skip
    """Write a model without these heads (or the first ``top`` of a run's ranking) and neurons to the folder ``out``.

    Done before, it is left as it is, and ``say`` is told so. Raises UserError for a folder that is taken, a run that
    ranks too few heads, and what the model does not have.
    """
    if heads is not None and heads_from is not None:
        raise UserError("give the heads in one way: `heads` or `heads_from`")
    chosen = tuple(sorted(set(read_heads(heads) or ())))
    if heads_from is not None:
        chosen = first(ranking_from(Store(store), heads_from), top)
    units = tuple(sorted(set(read_neurons(neurons) or ())))
    if not chosen and not units:
        raise UserError("nothing to zero: give `heads` (17.22,14.19), `heads_from` or `neurons` (12.345)")
    check_free_or_ours(out, "config.json", EDIT_FILE)
    base = resolve(spec)
    if heads_from is not None:
        say_whose_ranking(Store(store), heads_from, base, say)
    if not export_edited(base, out, neurons=units, heads=chosen):
        say(f"'{out}' is already there, the same")
    return Zeroed(base, chosen, units)


def merge(adapter: Path, spec: ModelSpec, out: Path, say: Callable[[str], None] = lambda line: None) -> str:
    """Add an adapter's update to its base and write the model to the folder ``out``; returns the weights' dtype.

    Done before, it is left as it is, and ``say`` is told so. Raises UserError for a folder that is taken, and for an
    adapter that says it was trained on another base.
    """
    check_free_or_ours(out, "config.json")
    fingerprint, about = resolve(spec).fingerprint, adapter / TUNING_FILE
    trained_on = read_about(about, "base_fingerprint")["base_fingerprint"] if about.is_file() else fingerprint
    if trained_on != fingerprint:
        raise UserError(f"adapter '{adapter}' was trained on a model of fingerprint {trained_on}, not {fingerprint}")
    loaded = load(ModelSpec(spec.name, str(adapter), spec.dtype, spec.trust_remote_code), "cpu")

    def write(part: Path) -> None:
        save_model(loaded.model, loaded.tokenizer, part)
        if about.is_file():
            (part / TUNING_FILE).write_bytes(about.read_bytes())

    if not written_or_same(out, write):
        say(f"'{out}' is already there, the same")
    return loaded.dtype
