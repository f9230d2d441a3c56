"""``mi.tune``: what the commands ``mathinterp tune ...`` do, for Python.

Each takes the fields of its settings (mathinterp/tuning/settings.py) by name: what the command line writes as
``--held-out`` is ``held_out``. Nothing here prints; ``say`` gets the lines that a command writes to stderr. Training
runs on Ray; a call that is made again goes on where it stopped, or finds its result.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mathinterp.experiments.options import fields_given
from mathinterp.models.handle import Model, named_spec
from mathinterp.store import Store
from mathinterp.tuning import edit, finetune, pruning
from mathinterp.tuning import sweep as sweeping
from mathinterp.tuning.chosen import precise_job
from mathinterp.tuning.controls import FullJob, LoraJob
from mathinterp.tuning.settings import Choice, PruneSettings, SweepSettings, TuneSettings
from mathinterp.tuning.sft_ray import TuningResult

Say = Callable[[str], None]
Layers = tuple[int, ...] | None


def _silent(line: str) -> None:
    """Tell nobody."""


def precise(
    model: Model | str, *, out: str | Path, lr: float = 1e-4, say: Say = _silent, **options: Any
) -> TuningResult:
    """Train chosen heads (and neurons) and nothing else (paper B, section 4.3); leaves a plain PEFT adapter.

    Args:
        model: a name or what ``load`` returned; not one of ``wrap``, whose folder other processes cannot read.
        out: folder for the adapter.
        options: fields of ``Choice`` (heads or heads_from, top, control, ...) and of ``TuneSettings`` (data, held_out,
            steps, batch, store, ...).
    Returns:
        ``out``, ``run_id``, and in ``about`` the parameters, seconds, and figures on held-out data before and after.
    Raises:
        UserError: a mistake in the arguments or in the data, before anything trains where that is possible.
        Unfinished: workers failed again and again; the same call goes on from the last checkpoint.
    """
    choice, settings = fields_given({**options, "lr": lr}, Choice, TuneSettings)
    base = finetune.resolve_tuned(named_spec(model), settings)
    job = precise_job(choice, base, Store(settings.store), say)
    prepared = finetune.prepare_tuning(job, base, settings, chosen_from=choice.chosen_from, say=say)
    return finetune.run_tuning(prepared, settings, Path(out), say)


def lora(
    model: Model | str, *, out: str | Path, rank: int = 16, alpha: int | None = None, targets: str = "all",
    layers: Layers = None, lr: float = 2e-4, say: Say = _silent, **options: Any,
) -> TuningResult:  # fmt: skip
    """Train an ordinary LoRA adapter; ``options`` are fields of ``TuneSettings``, and the rest is as for ``precise``.

    Args:
        alpha: None: twice the rank.
        targets: "attention", "mlp" or "all" linear modules.
        layers: only these; None: all.
    """
    job = LoraJob(rank, 2 * rank if alpha is None else alpha, targets, layers)
    (settings,) = fields_given({**options, "lr": lr}, TuneSettings)
    return finetune.tune(job, named_spec(model), settings, Path(out), say=say)


def full(
    model: Model | str, *, out: str | Path, layers: Layers = None, lr: float = 2e-5, say: Say = _silent, **options: Any
) -> TuningResult:
    """Train all weights, or those of some layers, in float32 unless ``model`` says otherwise; leaves a model folder.

    ``options`` are fields of ``TuneSettings``, and the rest is as for ``precise``.
    """
    spec = named_spec(model)
    (settings,) = fields_given({**options, "lr": lr}, TuneSettings)
    spec = replace(spec, dtype="float32") if spec.dtype == "auto" else spec
    return finetune.tune(FullJob(layers), spec, settings, Path(out), say=say)


def sweep(
    model: Model | str, *, out: str | Path, progress: bool = True, say: Say = _silent, **options: Any
) -> sweeping.Swept:
    """Train a LoRA in each layer by itself (paper A, section 5); ``options`` are fields of ``SweepSettings``.

    ``progress`` is as for ``run``.
    """
    (settings,) = fields_given(options, SweepSettings)
    return sweeping.sweep(named_spec(model), settings, Path(out), say, progress)


def prune(
    model: Model | str, *, out: str | Path, progress: bool = True, say: Say = _silent, **options: Any
) -> pruning.Pruned:
    """Prune deep layers to what a LoRA enhances (paper A, section 6.1); ``options`` are fields of ``PruneSettings``.

    ``progress`` is as for ``run``.
    """
    (settings,) = fields_given(options, PruneSettings)
    return pruning.prune(named_spec(model), settings, Path(out), say, progress)


def merge(
    adapter: str | Path, model: Model | str = "bundled", *, out: str | Path, dtype: str = "auto", say: Say = _silent
) -> Path:
    """Add an adapter's update to its base and write the model as a Hugging Face folder, whose path is returned."""
    edit.merge(Path(adapter), replace(named_spec(model), adapter=None, dtype=dtype), Path(out), say)
    return Path(out)


def zero(
    model: Model | str, *, out: str | Path, heads: Any = None, heads_from: str | None = None, top: int = 32,
    neurons: Any = None, store: str = "results", say: Say = _silent,
) -> edit.Zeroed:  # fmt: skip
    """Write a model whose heads (o_proj columns) and neurons (down_proj columns) are zero for good, as a folder."""
    return edit.zero(
        named_spec(model), Path(out), heads=heads, heads_from=heads_from, top=top, neurons=neurons, store=store,
        say=say,
    )  # fmt: skip
