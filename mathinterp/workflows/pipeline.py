"""Paper B's path on one model as one function: head scan, path patching, knock-out, attention, MLP probe; the answer.

Each stage is a run of its own in the store, so that the same call again goes on where it stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mathinterp.cluster.run import RunSummary
from mathinterp.errors import UserError
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.paths import Paths
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.handle import Model
from mathinterp.models.reading import read_prompts
from mathinterp.prompts.given import Prompts
from mathinterp.prompts.pairs import with_counterfactuals
from mathinterp.service.attached import HERE, Workers, run_at
from mathinterp.store import Store
from mathinterp.workflows.pipeline_answer import PipelineAnswer, PipelineRuns, answer_pipeline, described_heads


@dataclass(frozen=True)
class NamedPrompts:
    """Prompts, and what they are called in the answer."""

    name: str
    prompts: Prompts


@dataclass(frozen=True)
class Pipeline:
    """What the stages measure.

    top: heads described, at least.
    effect: what ranks heads in path patching, see Paths.
    ablation, ks, control_seeds: of the knock-out, see Knockout.
    """

    top: int = 8
    effect: str = "logit"
    ablation: str = "mean"
    ks: tuple[int, ...] | None = None
    control_seeds: int = 5


@dataclass(frozen=True)
class PipelineResult:
    """A finished pipeline: the runs of its stages, and what they say together."""

    runs: PipelineRuns
    answer: PipelineAnswer


class StageUnfinished(Exception):
    """A stage whose shards could not all be computed; the same call goes on from there."""

    def __init__(self, title: str, run: RunSummary):
        super().__init__(f"{title}: run {run.run_id} is incomplete")
        self.run = run


Told = Callable[[str, RunSummary], None]


def run_stage(
    title: str, experiment: Experiment, model: Model | ModelSpec, prompts: Prompts, store: str, workers: Workers,
    told: Told,
) -> str:  # fmt: skip
    """Run, or resume, one stage; the id of its run. Raises StageUnfinished where shards were given up."""
    run = run_at(workers, experiment, model, prompts, store)
    told(title, run)
    if run.failed or not run.complete:
        raise StageUnfinished(title, run)
    return run.run_id


def run_pipeline(
    asked: Pipeline,
    spec: ModelSpec,
    own: NamedPrompts,
    others: Sequence[NamedPrompts],
    store: Store,
    workers: Workers = HERE,
    told: Told = lambda title, run: None,
) -> PipelineResult:
    """Run, or resume, every stage on ``own``; knock the heads out on ``others``, too.

    Args:
        workers: where all of them are computed.
        told: called after each stage with its title and how it went.
    Raises:
        UserError: what a later stage would refuse after minutes of work is refused before any.
        StageUnfinished: shards of a stage were given up.
        NoReplicaLeft: as run_scan.
    """
    workers = workers.attached()
    check(asked, spec, own, others)

    def stage(title: str, experiment: Experiment, on: NamedPrompts) -> str:
        return run_stage(
            title, experiment, spec, on.prompts, store.url, workers, lambda title, run: told(f"{title}, {on.name}", run)
        )

    with workers.connected():
        heads = stage("head scan", Heads(), own)
        paths = stage("path patching", Paths(effect=asked.effect), own)
        knockout = Knockout(
            ablation=asked.ablation, rank_from=paths, ks=asked.ks, control_seeds=asked.control_seeds
        )  # fmt: skip
        knockouts = {on.name: stage("knock-out", knockout, on) for on in (own, *others)}
        described = described_heads(store, paths, asked.top)
        attention = stage("attention", Attention(heads=described), own)
        probe = stage("MLP probe", MlpProbe(), own)
    runs = PipelineRuns(heads, paths, knockouts, attention, probe, described)
    return PipelineResult(runs, answer_pipeline(store, runs))


def check(asked: Pipeline, spec: ModelSpec, own: NamedPrompts, others: Sequence[NamedPrompts]) -> None:
    """Cut every stage into shards; raises UserError for what one of them would refuse."""
    paths = Paths(effect=asked.effect)
    model = resolve(spec)
    every = tuple(chosen_heads(model.shape, None, None))
    knockout = Knockout(
        ablation=asked.ablation, heads=every, key=(), ks=asked.ks, control_seeds=asked.control_seeds
    )  # fmt: skip
    for on in (own, *others):
        both = on is own or knockout.needs_counterfactuals
        tokenized = read_prompts(with_counterfactuals(on.prompts, model.tokenizer) if both else on.prompts, model)
        for experiment in (knockout, paths, Attention(), MlpProbe()) if on is own else (knockout,):
            experiment.shards(model.shape, tokenized)
    if asked.top > len(every):
        raise UserError(f"`top` {asked.top}: the model has only {len(every)} heads")
