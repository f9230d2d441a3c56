"""A LoRA in each layer by itself, as one call (paper A, section 5): trials, their choice, and neurons compared."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.results import Results
from mathinterp.models.catalog import ModelSpec, ResolvedModel
from mathinterp.models.reading import read_prompts
from mathinterp.models.sources import loadable_base
from mathinterp.prompts import load_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from mathinterp.tuning.bases import plain_spec, resolve_base, scans_on_gpu
from mathinterp.tuning.data import Sample
from mathinterp.tuning.folders import is_free, read_about
from mathinterp.tuning.lora_sweep import LoraSweep
from mathinterp.tuning.preview import Source, read_source
from mathinterp.tuning.settings import LORA_EPOCHS, LoraSettings, SweepSettings, count_steps
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sweep_neurons import SweepNeurons, missing_adapters

ABOUT_FILE = "sweep.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that could begin: data and prompts read, nothing loaded."""

    settings: SweepSettings
    base: ResolvedModel
    source: Source
    scan: LoraSweep  # its folder is not named yet
    tests: Sequence[Prompt]
    cases: Sequence[Prompt]


@dataclass(frozen=True)
class Swept:
    """What a sweep left."""

    out: Path
    trials: RunSummary
    compared: RunSummary | None  # None: not all trials could be finished

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.compared is not None and self.compared.complete


def sweep(
    spec: ModelSpec, settings: SweepSettings, out: Path, say: Say = lambda line: None, progress: bool = True
) -> Swept:
    """Train a LoRA in each layer at each rate, score the test prompts, and compare neurons; finished trials are kept.

    Args:
        out: folder for the adapters, seen by all nodes.
        say: gets lines about the data.
        progress: show bars (or lines) on stderr.
    Raises:
        UserError: a mistake in the arguments, before anything trains; ``out`` holds another sweep, or lost adapters.
        Unfinished: replicas died until none was left; the same call goes on from there.
    """
    return run_sweep(plan_sweep(spec, settings, say), out, progress)


def plan_sweep(spec: ModelSpec, settings: SweepSettings, say: Say = lambda line: None) -> SweepPlan:
    """Read data and prompts, and refuse what the model cannot read or train before anything does."""
    Store(settings.store)
    base = resolve_base(spec, on_gpu=scans_on_gpu(settings.gpus_per_replica, settings.address))
    tests, cases = read_tests(settings, base)
    source = read_data(settings, base, say)
    trained, kept = split_samples(source.samples, settings.validation, settings.seed)
    scan = LoraSweep(
        trained, kept, training(settings, len(trained), 1.0, say), "", settings.rates, settings.layers,
        settings.rank, settings.alpha, loadable_base(base.spec.name),
    )  # fmt: skip
    scan.chosen(base.shape)
    return SweepPlan(settings, base, source, scan, tests, cases)


def run_sweep(plan: SweepPlan, out: Path, progress: bool = True) -> Swept:
    """Run, or resume, the trials and the comparison of their neurons; raises as ``sweep`` does."""
    settings, base, folder = plan.settings, plan.base, out.expanduser().resolve()
    claim_folder(folder, plan.scan, base.fingerprint, base.dtype)
    with connection(settings.address):
        scan = replace(plan.scan, folder=str(folder))
        trained = run_prompts(scan, base, plan.tests, settings.test, settings, progress)
        if not trained.complete:
            return Swept(folder, trained, None)
        trials = chosen_trials(Results(Store(trained.store), trained.run_id))
        if lost := missing_adapters(str(folder), trials):
            raise UserError(f"{len(lost)} adapters of the sweep are not in `out` {folder}, first {lost[0].name}")
        compare = SweepNeurons(trained.run_id, trials, str(folder), settings.top, settings.target)
        compared = run_prompts(compare, base, plan.cases, settings.cases, settings, progress)
    return Swept(folder, trained, compared)


def read_tests(settings: LoraSettings, base: ResolvedModel) -> tuple[list[Prompt], list[Prompt]]:
    """Test prompts and cases; raises UserError for one that the model cannot read."""
    tests = load_prompts(settings.test, seed=settings.seed, limit=settings.test_limit)
    cases = load_prompts(settings.cases, seed=settings.seed, limit=settings.case_limit)
    for prompts in (tests, cases):
        read_prompts(prompts, base)
    return tests, cases


def read_data(settings: LoraSettings, base: ResolvedModel, say: Say) -> Source:
    """The training data, tokenized; ``say`` gets what they come to."""
    source = read_source(base, settings.data, settings.seed, settings.max_tokens)
    say(f"data, {settings.data}: {source.budget.line()}")
    return source


def training(settings: LoraSettings, samples: int, learning_rate: float, say: Say) -> SftConfig:
    """Steps and batches of one training."""
    steps = count_steps(settings, samples, LORA_EPOCHS)
    say(f"a training is {steps:,} steps of {settings.batch} samples")
    return SftConfig(
        steps=steps, batch_size=settings.batch, learning_rate=learning_rate, micro_batch=settings.micro_batch,
        seed=settings.seed,
    )  # fmt: skip


def run_prompts(
    scan: Experiment, base: ResolvedModel, prompts: Sequence[Prompt], label: str, settings: LoraSettings,
    progress: bool = True,
) -> RunSummary:  # fmt: skip
    """Run, or resume, a scan of the base on these prompts, where the settings say."""
    return run_scan(
        scan, plain_spec(base), prompts, settings.store, replicas=settings.replicas,
        gpus_per_replica=settings.gpus_per_replica, address=settings.address, prompts_label=label,
        progress=progress,
    )  # fmt: skip


def chosen_trials(trained: Results) -> tuple[tuple[int, float], ...]:
    """Layer and learning rate of the adapters that the sweep's validation chose."""
    rows = trained.rows(
        "SELECT layer, learning_rate FROM lora_sweep_trials WHERE run_id = $run AND chosen ORDER BY layer"
    )
    return tuple((row["layer"], row["learning_rate"]) for row in rows)


def claim_folder(folder: Path, scan: LoraSweep, model_fingerprint: str, dtype: str) -> None:
    """Make the folder the sweep's own, or find that it is; raises UserError if it holds anything else."""
    about = folder / ABOUT_FILE
    identity = {**scan.parameters(), "model_fingerprint": model_fingerprint, "dtype": dtype}
    if about.is_file():
        if read_about(about) != identity:
            raise UserError(f"`out` '{folder}' holds another sweep (other settings, data or model); give a new folder")
        return
    if not is_free(folder):
        raise UserError(f"`out` '{folder}' exists and holds something else; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    about.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def split_samples(samples: Sequence[Sample], validation: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, and ``validation`` others drawn from them; raises UserError if too few are left."""
    if not 1 <= validation <= len(samples) // 2:
        raise UserError(f"`validation` {validation}: give between 1 and half of the {len(samples)} samples")
    order = np.random.default_rng(seed).permutation(len(samples))
    kept = set(order[:validation].tolist())
    return (
        [sample for index, sample in enumerate(samples) if index not in kept],
        [samples[index] for index in sorted(kept)],
    )
