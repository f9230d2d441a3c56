"""One fine-tuning as one call: read the data, say what is ahead, train on Ray, and hand back what came of it.

Knows names of data and a base that was looked at; what trains is a job (precise.py, controls.py), how is sft_ray.py's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mathinterp.cluster.ray_cluster import existing_cluster
from mathinterp.cluster.ray_private import local_card_bytes
from mathinterp.errors import UserError
from mathinterp.gates import real
from mathinterp.models.card_memory import check_trainable
from mathinterp.models.catalog import DTYPES, ModelSpec, ResolvedModel
from mathinterp.tuning.bases import plain_spec, resolve_base, trains_on_gpu
from mathinterp.tuning.controls import FullJob
from mathinterp.tuning.data import Sample
from mathinterp.tuning.lower_layers import cache_bytes
from mathinterp.tuning.preview import Source, read_source
from mathinterp.tuning.settings import TuneSettings, count_steps
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, TuningJob, TuningResult, fit, named
from mathinterp.tuning.steps import sample_order
from mathinterp.tuning.tensorboard import writer_class

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A fine-tuning that could begin: data read and tokenized, nothing loaded."""

    tuning: Tuning
    base: ResolvedModel
    data: Sequence[Source]
    held_out: Sequence[Source]


def tune(
    job: TuningJob, spec: ModelSpec, settings: TuneSettings, out: Path, *, chosen_from: str | None = None,
    say: Say = lambda line: None,
) -> TuningResult:  # fmt: skip
    """Train what ``job`` says of a model, or resume that, and leave what was learnt in the folder ``out``.

    Args:
        job: PreciseJob, FullJob, LoraJob or one of the caller's own.
        chosen_from: which run or SQL named the heads, for people.
        say: gets a line about the data, every row of ``tuning_runs`` and every evaluation.
    Raises:
        UserError: a mistake in the arguments or in the data, found before anything trains where that is possible.
        Unfinished: workers failed again and again; the same call goes on from the last checkpoint.
    """
    base = resolve_tuned(spec, settings)
    return run_tuning(prepare_tuning(job, base, settings, chosen_from=chosen_from, say=say), settings, out, say)


def resolve_tuned(spec: ModelSpec, settings: TuneSettings) -> ResolvedModel:
    """The base of a fine-tuning; raises UserError as ``resolve_base`` does, and for one too large for the cards."""
    on_gpu = trains_on_gpu(settings.gpu, settings.workers, settings.address)
    base = resolve_base(spec, on_gpu=on_gpu)
    if on_gpu and not existing_cluster(settings.address) and (card := local_card_bytes()) is not None:
        check_trainable(base, settings.workers if settings.shard_model else 1, card)
    return base


def prepare_tuning(
    job: TuningJob, base: ResolvedModel, settings: TuneSettings, *, chosen_from: str | None = None,
    say: Say = lambda line: None,
) -> Prepared:  # fmt: skip
    """Read the data and put together what trains; ``say`` gets what they come to. Raises UserError for mistakes."""
    if settings.shard_model and isinstance(job, FullJob):
        raise UserError("`shard_model` spreads frozen layers, and full training freezes none: train heads or a LoRA")
    names, weights = weighted(settings.data)
    data, held_out = (
        [_source(name, base, settings, what, say) for name in chosen]
        for chosen, what in ((names, "data"), (settings.held_out, "held out"))
    )
    samples, kept = ([sample for source in sources for sample in source.samples] for sources in (data, held_out))
    trained = {tuple(sample.input_ids) for sample in samples}
    if both := sum(tuple(sample.input_ids) in trained for sample in kept):
        say(f"warning: {both} of {len(kept)} held-out samples are trained on too")
    sizes = [len(source.samples) for source in data]
    config = SftConfig(
        steps=count_steps(settings, len(samples), 1.0), batch_size=settings.batch, learning_rate=settings.lr,
        micro_batch=settings.micro_batch, seed=settings.seed, weight_decay=settings.weight_decay,
        log_every=settings.log_every, checkpoint_every=settings.checkpoint_every, recompute=settings.recompute,
        pack=settings.pack or 0, cache=settings.cache, compiled=settings.compiled,
        mixture=tuple(zip(sizes, weights, strict=True)) if weights else (),
    )  # fmt: skip
    if settings.tensorboard is not None:
        writer_class()
    _say_what_is_ahead(config, samples, base, say)
    tuning = Tuning(
        job=job, model=plain_spec(base), model_fingerprint=base.fingerprint, samples=samples, held_out=kept,
        config=config, data_label=", ".join(settings.data), store_url=settings.store,
        tensorboard=settings.tensorboard, sharded=settings.shard_model, chosen_from=chosen_from,
    )  # fmt: skip
    return Prepared(named(tuning, base), base, data, held_out)


def run_tuning(prepared: Prepared, settings: TuneSettings, out: Path, say: Say = lambda line: None) -> TuningResult:
    """Train, or resume; raises as ``tune`` does."""
    return fit(
        prepared.tuning, workers=settings.workers, gpu=settings.gpu, out=out, storage=settings.storage,
        address=settings.address, say=say,
    )  # fmt: skip


def weighted(data: Sequence[str]) -> tuple[list[str], list[float]]:
    """Names and weights of FILE:WEIGHT; no weights if none is given. Raises UserError if only some have one."""
    split = [name.rpartition(":") for name in data]
    weights = [_weight(name, last) if colon else None for name, colon, last in split]
    if all(weight is None for weight in weights):
        return list(data), []
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        raise UserError("`data`: give all files a weight (FILE:WEIGHT) or none of them")
    return [name for name, _, _ in split], found


def _weight(name: str, text: str) -> float | None:
    """None if ``text`` is no number, and so a part of the name."""
    try:
        weight = float(text)
    except ValueError:
        return None
    try:
        if real(text) > 0:
            return weight
    except ValueError:  # inf, nan, digits of other scripts
        pass
    raise UserError(f"`data` {name}:{text}: give a weight above 0")


def _source(name: str, base: ResolvedModel, settings: TuneSettings, what: str, say: Say) -> Source:
    source = read_source(base, name, settings.seed, settings.max_tokens)
    say(f"{what}, {name}: {source.budget.line()}")
    return source


def _say_what_is_ahead(config: SftConfig, samples: Sequence[Sample], base: ResolvedModel, say: Say) -> None:
    seen = sample_order(len(samples), config.steps * config.batch_size, config.seed, config.mixture)
    tokens = sum(len(samples[index].input_ids) for index in seen)
    epochs = len(seen) / len(samples)
    say(f"{config.steps:,} steps of {config.batch_size} samples ({epochs:.3g} epochs), {tokens:,} tokens")
    if config.cache:
        size = cache_bytes(samples, base.shape.d_model, DTYPES[base.dtype])
        say(f"the cache takes up to {size / 2**30:.2f} GiB of memory on each worker")
