"""Pruning by comparative neuron analysis as one call: keep what a LoRA enhances, prune the rest of the deep layers.

Steps (paper A, section 6.1): a LoRA on one layer; CNA original against tuned on all one-digit cases; the union of each
case's first neurons in the deep layers is kept and all others there are pruned (down_proj columns at zero); a new LoRA
on the same layer, trained on the pruned model. Control: as many random neurons kept in each layer, none of the union.
Layers by share of the depth (models/depth.py). The scan that scores every condition is in prune/.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mathinterp.cluster.ray_cluster import connection, existing_cluster
from mathinterp.cluster.run import RunSummary
from mathinterp.errors import UserError
from mathinterp.experiments.neuron_controls import layer_matched_neurons
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.against import Against, Keep
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.models.depth import deep_layers, lora_layer
from mathinterp.models.units import Neuron
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from mathinterp.tuning import sft_ray
from mathinterp.tuning.bases import check_gpus, plain_spec, resolve_base, scans_on_gpu
from mathinterp.tuning.controls import LoraJob
from mathinterp.tuning.edit import export_edited
from mathinterp.tuning.folders import EDIT_FILE, read_about
from mathinterp.tuning.lora_sweep import TARGETS
from mathinterp.tuning.preview import Source
from mathinterp.tuning.prune import Condition, Prune
from mathinterp.tuning.settings import PruneSettings
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, TuningResult, named
from mathinterp.tuning.sweep import read_data, read_tests, run_prompts, training

LORA, TRAINING = "lora", "training"  # what the first training leaves in the folder
PAPER_TOP, PAPER_NEURONS = 500, 15 * 11008  # of the neurons in paper A's layers 17-31, a case's first
Say = Callable[[str], None]


@dataclass(frozen=True)
class PrunePlan:
    """A pruning that could begin: data and prompts read, nothing loaded."""

    settings: PruneSettings
    base: ResolvedModel
    layer: int  # that has the LoRA
    deep: tuple[int, ...]  # that are pruned
    top: int  # neurons kept per case
    source: Source
    config: SftConfig
    tests: Sequence[Prompt]
    cases: Sequence[Prompt]


@dataclass(frozen=True)
class Pruned:
    """What a pruning left."""

    plan: PrunePlan
    out: Path  # the pruned models and the adapters
    compared: RunSummary
    kept: tuple[Neuron, ...]
    scored: RunSummary | None  # None: the comparison could not be finished

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self.scored is not None and self.scored.complete


def prune(
    spec: ModelSpec, settings: PruneSettings, out: Path, say: Say = lambda line: None, progress: bool = True
) -> Pruned:
    """Prune a model's deep layers to the neurons that a LoRA enhances, against random ones; what is finished is kept.

    Args:
        out: folder for the pruned models (Hugging Face folders) and the LoRAs (PEFT adapters).
        say: gets lines on the way.
        progress: show bars (or lines) on stderr.
    Raises:
        UserError: a mistake in the arguments, before anything trains; ``out`` holds something else.
        Unfinished: workers or replicas died again and again; the same call goes on from there.
    """
    return run_pruning(plan_pruning(spec, settings, say), out, say, progress)


def plan_pruning(spec: ModelSpec, settings: PruneSettings, say: Say = lambda line: None) -> PrunePlan:
    """Read data and prompts, choose layers, and refuse what the model does not have before anything trains."""
    if not existing_cluster(settings.address):
        check_gpus(settings.gpu, settings.workers)
    base = resolve_base(spec, on_gpu=scans_on_gpu(settings.gpus_per_replica, settings.address))
    shape = base.shape
    shape.check_neurons()
    deep = deep_layers(shape.n_layers) if settings.deep is None else settings.deep
    layer = lora_layer(shape.n_layers) if settings.layer is None else settings.layer
    for each in (*deep, layer):
        shape.check_layer(each)
    top = default_top(shape, deep) if settings.top is None else settings.top
    if settings.top is not None and top >= len(deep) * shape.n_neurons:
        raise UserError(f"`top` {top} keeps all {len(deep) * shape.n_neurons} neurons of the deep layers")
    Store(settings.store)  # refuses what is no store
    source = read_data(settings, base, say)
    config = training(settings, len(source.samples), settings.lr, say)
    tests, cases = read_tests(settings, base)
    say(f"LoRA on layer {layer}; layers {deep[0]} to {deep[-1]} keep {top} neurons per case")
    return PrunePlan(settings, base, layer, deep, top, source, config, tests, cases)


def run_pruning(plan: PrunePlan, out: Path, say: Say = lambda line: None, progress: bool = True) -> Pruned:
    """Run, or resume, every step; raises as ``prune`` does."""
    out = out.expanduser().resolve()
    check_own(out)
    with connection(plan.settings.address):
        lora = _train_lora(plan, plan.base, out, LORA, say)
        compared = _compare(plan, lora, progress)
        if not compared.complete:
            return Pruned(plan, out, compared, (), None)
        kept = _kept(Results(Store(compared.store), compared.run_id))
        say(f"{len(kept):,} of {len(plan.deep) * plan.base.shape.n_neurons:,} neurons are kept")
        conditions = [Condition("lora", adapter=str(lora.out), trained_as=lora.run_id)]
        for name, seed, neurons in _sets(plan, kept):
            conditions += _pruned_conditions(plan, out, name, seed, neurons, say)
        scan = Prune(tuple(conditions), plan.deep)
        scored = run_prompts(scan, plan.base, plan.tests, plan.settings.test, plan.settings, progress)
    return Pruned(plan, out, compared, kept, scored)


def check_own(out: Path) -> None:
    """Raise UserError if ``out`` holds something that is not of an earlier call."""
    held = [path.name for path in out.iterdir()] if out.exists() else []
    if held and not {LORA, TRAINING}.intersection(held):
        raise UserError(f"`out` '{out}' exists and holds something else; give a new folder")


def default_top(shape: ModelShape, deep: Sequence[int]) -> int:
    """As large a share of the deep layers' neurons as paper A's 500 of 165,120; at least 1."""
    return max(1, round(PAPER_TOP * len(deep) * shape.n_neurons / PAPER_NEURONS))


def pruned_neurons(shape: ModelShape, deep: Sequence[int], kept: Sequence[Neuron]) -> list[Neuron]:
    """All neurons of the deep layers but those kept."""
    stay = set(kept)
    every = [Neuron(layer, k) for layer in deep for k in range(shape.n_neurons)]
    return [neuron for neuron in every if neuron not in stay]


def random_kept(shape: ModelShape, deep: Sequence[int], kept: Sequence[Neuron], seed: int) -> list[Neuron]:
    """As many neurons of each deep layer as are kept there, none of those that are kept.

    Raises UserError where nothing would be pruned, so that a control says nothing, or a layer has too few others.
    """
    if len(kept) >= len(deep) * shape.n_neurons:
        raise UserError(
            "every neuron of the deep layers is kept, nothing is pruned; give a smaller `top`, other `cases`"
        )
    for layer, count in Counter(layer for layer, _ in kept).items():
        if 2 * count > shape.n_neurons:
            raise UserError(
                f"layer {layer} keeps {count} of {shape.n_neurons} neurons, which leaves {shape.n_neurons - count} for"
                " a random control of as many; give a smaller `top`, or `control_seeds` 0 for none"
            )
    return sorted(layer_matched_neurons(shape, kept, seed), key=lambda neuron: deep.index(neuron[0]))


def _train_lora(plan: PrunePlan, base: ResolvedModel, out: Path, name: str, say: Say) -> TuningResult:
    """Train, or find finished, the LoRA in ``out``/``name`` on a base."""
    settings = plan.settings
    tuning = Tuning(
        job=LoraJob(settings.rank, settings.alpha, TARGETS, (plan.layer,)), model=plain_spec(base),
        model_fingerprint=base.fingerprint, samples=plan.source.samples, held_out=(), config=plan.config,
        data_label=settings.data, store_url=settings.store,
    )  # fmt: skip
    return sft_ray.fit(
        named(tuning, base), workers=settings.workers, gpu=settings.gpu, out=out / name,
        storage=settings.storage or str(out / TRAINING), address=settings.address, say=say,
    )  # fmt: skip


def _compare(plan: PrunePlan, lora: TuningResult, progress: bool) -> RunSummary:
    """CNA original against tuned, in the deep layers."""
    tuned = Against("adapter", str(lora.out))
    scan = Neurons(tuned, plan.settings.target, keep=Keep(plan.top), layers=plan.deep)
    return run_prompts(scan, plan.base, plan.cases, plan.settings.cases, plan.settings, progress)


def _kept(compared: Results) -> tuple[Neuron, ...]:
    """The union of the cases' first neurons."""
    rows = compared.rows(
        "SELECT DISTINCT layer, neuron FROM neuron_changes WHERE run_id = $run AND in_top ORDER BY layer, neuron"
    )
    return tuple(Neuron(row["layer"], row["neuron"]) for row in rows)


def _sets(plan: PrunePlan, kept: tuple[Neuron, ...]) -> list[tuple[str, int, tuple[Neuron, ...]]]:
    """The chosen neurons and every random draw: name, seed, neurons that stay."""
    seeds = range(plan.settings.control_seeds)
    drawn = [("random", seed, tuple(random_kept(plan.base.shape, plan.deep, kept, seed))) for seed in seeds]
    return [("pruned", 0, kept), *drawn]


def _pruned_conditions(
    plan: PrunePlan, out: Path, name: str, seed: int, kept: tuple[Neuron, ...], say: Say
) -> list[Condition]:
    """The model pruned to ``kept``, as it is and with a LoRA of its own."""
    folder = out / (name if name == "pruned" else f"{name}-{seed}")
    about = {"edit": "prune", "kept": [f"{layer}.{neuron}" for layer, neuron in kept]}
    if not (folder / EDIT_FILE).is_file():
        gone = pruned_neurons(plan.base.shape, plan.deep, kept)
        export_edited(plan.base, folder, neurons=gone, about=about)
    found = read_about(folder / EDIT_FILE, "base_fingerprint", "kept")
    if (found["base_fingerprint"], found["kept"]) != (plan.base.fingerprint, about["kept"]):
        raise UserError(f"{folder} holds another pruned model (other settings, data or base); give a new `out`")
    pruned = resolve(replace(plain_spec(plan.base), name=str(folder)))
    trained = _train_lora(plan, pruned, out, f"{folder.name}-lora", say)
    return [
        Condition(name, seed, kept),
        Condition(f"{name}_lora", seed, kept, str(trained.out), trained.run_id),
    ]
