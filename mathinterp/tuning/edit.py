"""Edits of weights that are exact twins of ablations: a model with neurons or heads zeroed, as a Hugging Face folder.

A neuron's column of down_proj at zero equals its coefficient at zero; a head's columns of o_proj at zero equal its
slice of o_proj's input at zero (method.md section 2). Biases stay. Everything else is bitwise what it was.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ResolvedModel, load
from mathinterp.models.loading import quiet_transformers
from mathinterp.tuning.controls import save_model

Pair = tuple[int, int]  # layer, neuron or head
ABOUT_FILE = "edit.json"


@torch.no_grad()
def zero_columns(anatomy: Anatomy, neurons: Sequence[Pair] = (), heads: Sequence[Pair] = ()) -> None:
    """Set the neurons' columns of down_proj and the heads' columns of o_proj to zero, in place.

    Raises UserError for a neuron or head that does not exist.
    """
    shape = anatomy.shape
    for layer, head in heads:
        shape.check_head(layer, head)
    for layer, neuron in neurons:
        shape.check_layer(layer)
        if not 0 <= neuron < shape.n_neurons:
            raise UserError(
                f"neuron {layer}.{neuron} does not exist: each layer has neurons 0 to {shape.n_neurons - 1}"
            )
    for layer in sorted({layer for layer, _ in neurons}):
        chosen = torch.tensor([neuron for at, neuron in neurons if at == layer], device=anatomy.device)
        anatomy.value_vectors(layer)[chosen] = 0
    for layer, head in heads:
        anatomy.output_weight(layer)[anatomy.head_slice(head)] = 0


def check_free(out: Path) -> None:
    """Raise UserError if something is at ``out`` already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out '{out}' exists already; give a new folder")


@contextlib.contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``out`` (free: see check_free) at the end of the block, or not at all."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of a call that was killed
    part.mkdir(parents=True)
    yield part
    if out.exists():
        out.rmdir()
    part.replace(out)


def export_edited(
    resolved: ResolvedModel, out: Path, *, neurons: Sequence[Pair] = (), heads: Sequence[Pair] = (),
    about: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Load the model on the CPU, zero the columns, and write it to ``out``, as a whole or not at all.

    ``out``/edit.json says what was zeroed in which model, and ``about``. Raises UserError as zero_columns does.
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
    with written_whole(out) as part:
        with quiet_transformers():
            save_model(loaded.model, loaded.tokenizer, part)
        (part / ABOUT_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
