"""Every table and figure of papers A and B on one model: what has to be run, ours beside the papers' numbers, verdicts.

Each stage is a run of its own in the store: the same call again computes nothing that is there, and items share runs.
What cannot be run on this model (words that its tokenizer does not know, data that are not given, trainings that are
left out) is said with its reason, and the rest goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mathinterp.cluster.plan import CpuSpeed, Plan, measure_cpu, plan_scan
from mathinterp.cluster.run import RunSummary, Work, bound_work
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments.base import Experiment
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve_dtype
from mathinterp.models.handle import Model, model_of
from mathinterp.service.attached import HERE, Workers, check_cards_unsaid, run_at
from mathinterp.store import Store
from mathinterp.workflows.papers import find_items
from mathinterp.workflows.papers.item import PAPER_MODELS, Item
from mathinterp.workflows.stages import STAGES, Asked, Stage, in_order
from mathinterp.workflows.trainings import BENCHMARKS, NEEDS, TRAININGS, Training, train
from mathinterp.workflows.verdicts import COMPARED, Compared, Measured, Verdict, compare, said

Told = Callable[[str, RunSummary], None]
FLOOR, CEILING = 0.1, 0.98  # accuracies that leave nothing to lose, or to gain
NOT_TRAINED = "trainings are left out (`steps` 0)"


@dataclass(frozen=True)
class PlannedStage:
    """One stage, before it runs. plan: None: its cost is not known in advance, ``why`` says why."""

    name: str
    scan: str
    prompts: int | None
    plan: Plan | None
    finished: bool = False
    why: str = ""


@dataclass(frozen=True)
class ReproductionPlan:
    """All stages of the items asked for."""

    stages: tuple[PlannedStage, ...]

    def total(self, device: str) -> float:
        """Seconds on a device of ``Plan.seconds``, of what is known and not finished."""
        return sum(each.plan.seconds.get(device, 0.0) for each in self.stages if each.plan and not each.finished)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that every known plan has a time for."""
        return tuple(next((each.plan.seconds for each in self.stages if each.plan), {}))

    @property
    def peak_bytes(self) -> int:
        """The most memory that one replica takes."""
        return max((each.plan.peak_bytes for each in self.stages if each.plan), default=0)


@dataclass(frozen=True)
class ItemResult:
    """One table or figure: ours beside the paper's, line by line. missing: stages it lacks, and why."""

    item: Item
    lines: tuple[Compared, ...]
    runs: dict[str, str]
    missing: dict[str, str]

    @property
    def verdict(self) -> str:
        """In a few words."""
        if not self.lines:
            return f"{Verdict.NOT_COMPARABLE}: {'; '.join(dict.fromkeys(self.missing.values())) or self.item.why}"
        second_hand = self.item.source.second_hand and any(line.verdict in COMPARED for line in self.lines)
        return said(self.lines) + ("; the paper's numbers are second hand" if second_hand else "")


@dataclass(frozen=True)
class Reproduction:
    """What a reproduction found. own: the paper's model that this one is taken for by its config, or ""."""

    model: str
    fingerprint: str
    dtype: str
    own: str
    store: str
    limit: int | None
    items: tuple[ItemResult, ...]
    runs: dict[str, str]
    ran: tuple[dict[str, Any], ...]  # stage, run_id, prompts (their label), n_prompts, wall_seconds; of every run read
    missing: dict[str, str]  # stage -> why it was not run


def taken_for(model: ResolvedModel) -> str:
    """The paper's model with this config, or "". An adapter, quantised or random weights make it another model."""
    if model.spec.adapter or model.spec.load_in or model.spec.name.startswith("random:"):
        return ""
    facts = {**vars(model.shape), "max_position_embeddings": getattr(model.config, "max_position_embeddings", None)}
    for name, wanted in PAPER_MODELS.items():
        if all(facts.get(key) == value for key, value in wanted.items()):
            return name
    return ""


def chosen_stages(items: Sequence[Item], own: str) -> list[Stage]:
    """What has to be run for these items on this model, in order."""
    names = [name for item in items if _runs(item, own) for name in item.stages]
    return in_order([stage for name in names for stage in (*NEEDS.get(name, ()), name)])


def plan_reproduction(
    model: Model | ModelSpec | str, store: str, *, only: Sequence[str] = (), limit: int | None = None, seed: int = 0,
    data: Path | None = None, steps: int | None = None, place: Workers = HERE, training_place: Workers | None = None,
) -> ReproductionPlan:  # fmt: skip
    """What ``reproduce`` would compute, before anything loads; arguments as there."""
    items, asked = find_items(only), _asked(place.described(model_of(model)), store, limit, seed, data)
    _not_for_the_service(_trainings(items, asked.own), steps, data, place, training_place)
    cpu = measure_cpu(asked.model.shape) if asked.model.dtype == "float32" else None
    planned = [_planned(stage, asked, cpu) for stage in chosen_stages(items, asked.own)]
    cost = NOT_TRAINED if steps == 0 else "a training; its cost is not known in advance"
    more = (
        PlannedStage(name, name, None, None, why="an evaluation; it needs `data`" if name == BENCHMARKS else cost)
        for name in _trainings(items, asked.own)
    )
    return ReproductionPlan((*planned, *more))


def reproduce(
    model: Model | ModelSpec | str, store: str = "results", *, only: Sequence[str] = (), limit: int | None = None,
    seed: int = 0, data: Path | None = None, steps: int | None = None, trained: Path | None = None,
    place: Workers = HERE, training_place: Workers | None = None, told: Told = lambda stage, run: None,
    say: Callable[[str], None] = lambda line: None,
) -> Reproduction:  # fmt: skip
    """Run, or resume, what the papers' tables and figures are made of, and set ours beside their numbers.

    Args:
        model: from ``load`` or ``wrap``, or a name.
        only: ids of items; none: all.
        limit: prompts of each set at most; None: all.
        data: folder of the public files, as for ``mathinterp.evaluation``; None: what needs them is left out.
        steps: optimizer steps of each training; None: the papers' (four epochs); 0: no training.
        trained: folder for what trainings leave.
        place: where scans are computed.
        training_place: where trainings and benchmarks are, which no service computes; None: as ``place`` without one.
        told: called after each stage. say: gets lines about what is left out, and of trainings.
    Raises:
        UserError: an unknown id, a store or model that cannot be used.
        Unfinished: shards of a stage were given up, or workers died; the same call goes on from there.
    """
    items = find_items(only)
    model, place = model_of(model), place.attached()
    asked = _asked(place.described(model), store, limit, seed, data)
    training_place = replace(place, service=None) if training_place is None else training_place
    if stays := _not_for_the_service(_trainings(items, asked.own), steps, data, place, training_place):
        say(f"not asked of the service, run as without it: {', '.join(stays)}")
    missing: dict[str, str] = {}
    for stage in chosen_stages(items, asked.own):
        if lost := [need for need in stage.needs if need in missing]:
            missing[stage.name] = missing[lost[0]]
            continue
        try:
            prompts, experiment = stage.prompts(asked), stage.experiment(asked)
            run = run_at(place, experiment, model, prompts, asked.store.url)
        except UserError as error:
            missing[stage.name] = str(error)
            say(f"{stage.name} is left out: {error}")
            continue
        if not run.complete:
            raise Unfinished(f"stage {stage.name}: run {run.run_id} is incomplete")
        asked.runs[stage.name] = run.run_id
        told(stage.name, run)
    for name in _trainings(items, asked.own):
        if steps == 0 and name != BENCHMARKS:
            missing[name] = NOT_TRAINED
            continue
        try:
            training = Training(model, asked, steps, trained, training_place.without_service)
            asked.runs.update(train(name, training, say))
        except UserError as error:
            missing[name] = str(error)
            say(f"{name} is left out: {error}")
            continue
    return Reproduction(
        model=asked.model.label, fingerprint=asked.model.fingerprint, dtype=asked.model.dtype, own=asked.own,
        store=asked.store.url, limit=limit, items=tuple(_result(item, asked, missing) for item in items),
        runs=dict(asked.runs), ran=_ran(asked), missing=missing,
    )  # fmt: skip


def _ran(asked: Asked) -> tuple[dict[str, Any], ...]:
    found = {
        row["run_id"]: row
        for row in asked.store.rows(
            """SELECT run_id, r.prompts, wall_seconds, (SELECT count(*) FROM prompts AS p
                      WHERE p.prompts_fingerprint = r.prompts_fingerprint) AS n_prompts
               FROM runs AS r WHERE list_contains($runs, run_id)""",
            {"runs": list(asked.runs.values())},
        )
    }
    return tuple({"stage": stage, **found[run]} for stage, run in asked.runs.items() if run in found)


def _not_for_the_service(
    trainings: list[str], steps: int | None, data: Path | None, place: Workers, training_place: Workers | None
) -> list[str]:
    """Beside a service, what runs as it would without it; refuses cards for replicas where there is nothing of it."""
    if place.service is None:
        return []
    stays = [name for name in trainings if (data is not None if name == BENCHMARKS else steps != 0)]
    if training_place is not None and not stays:
        check_cards_unsaid(training_place.gpus_per_replica)
    return stays


def _asked(described: ResolvedModel, store: str, limit: int | None, seed: int, data: Path | None) -> Asked:
    return Asked(described, taken_for(described), Store(store), limit, seed, data)


def _runs(item: Item, own: str) -> bool:
    return item.sql is not None and (not item.own_model_only or item.model == own)


def _trainings(items: Sequence[Item], own: str) -> list[str]:
    """Trainings and benchmarks that the items read, each once."""
    names = [name for item in items if _runs(item, own) for name in item.stages if name in TRAININGS]
    return list(dict.fromkeys(TRAININGS[name] for name in names))


def _planned(stage: Stage, asked: Asked, cpu: CpuSpeed | None) -> PlannedStage:
    """A stage that follows from runs that are not there yet is planned by its stand-in, or its cost is not known."""
    ready = all(need in asked.runs for need in stage.needs)
    made = stage.experiment if ready else stage.stand_in
    try:
        prompts = stage.prompts(asked)
        if made is None:
            return PlannedStage(stage.name, "", len(prompts), None, why=f"follows from {', '.join(stage.needs)}")
        work = bound_work(made(asked), asked.model, prompts, asked.store)
    except UserError as error:
        return PlannedStage(stage.name, "", None, None, why=f"left out: {error}")
    plan = _cost(work, asked.model, cpu)
    finished = _finished(work.scan, asked, work.prompts_fingerprint) if ready else None
    if finished is not None:
        asked.runs[stage.name] = finished
    why = "" if plan is not None else "its cost is not known in advance"
    return PlannedStage(stage.name, work.scan.name, len(work.prompts), plan, finished is not None, why)


def _cost(work: Work, model: ResolvedModel, cpu: CpuSpeed | None) -> Plan | None:
    """Memory in the model's dtype; times on GPUs in the dtype that "auto" means there, on this CPU in its own."""
    plan = plan_scan(work.scan, model.shape, work.prompts, model.dtype, cpu=cpu)
    gpu = plan_scan(work.scan, model.shape, work.prompts, resolve_dtype(model.spec.dtype, "cuda"))
    if plan is None or gpu is None:
        return None
    here = {device: seconds for device, seconds in plan.seconds.items() if device not in gpu.seconds}
    return replace(plan, seconds={**gpu.seconds, **here})


def _finished(scan: Experiment, asked: Asked, prompts_fingerprint: str) -> str | None:
    """The run of this stage, if the store has all of it."""
    store, model = asked.store, asked.model
    run = store.run_id(
        scan=scan.name, parameters=scan.parameters(), dtype=model.dtype, model_fingerprint=model.fingerprint,
        prompts_fingerprint=prompts_fingerprint,
    )  # fmt: skip
    return run if store.has_finished(run, prompts_fingerprint) else None


def _result(item: Item, asked: Asked, missing: dict[str, str]) -> ItemResult:
    """Ours, read from the store, beside the paper's."""
    same = item.model == asked.own
    reasons = [] if same else [f"another model than the paper's {item.model}"]
    if not _runs(item, asked.own):
        lines = compare(item, (), reasons or [], same, ran=False)
        return ItemResult(item, lines, {}, {})
    lost = {TRAININGS.get(name, name): missing.get(TRAININGS.get(name, name), "") for name in item.stages}
    lost = {name: why for name, why in lost.items() if why}
    runs = {name: asked.runs[name] for name in item.stages if name in asked.runs}
    if lost:
        return ItemResult(
            item, compare(item, (), [*reasons, *dict.fromkeys(lost.values())], same, ran=False), runs, lost
        )
    if item.exact and asked.model.dtype not in ("float32", "float64"):
        reasons.append(f"computed in {asked.model.dtype}")
    reasons += _saturated(item, runs, asked)
    return ItemResult(item, compare(item, _measured(item, runs, asked), reasons, same), runs, {})


def _saturated(item: Item, runs: dict[str, str], asked: Asked) -> list[str]:
    """Why an accuracy at the floor or the ceiling says nothing."""
    if not item.baseline or not runs:
        return []
    found = asked.store.rows(
        "SELECT min(accuracy) AS least FROM accuracies WHERE list_contains($runs, run_id) AND operation = 'all'",
        {"runs": list(runs.values())},
    )
    accuracy = found[0]["least"]
    if accuracy is not None and item.baseline == "loss" and accuracy < FLOOR:
        return [f"the model has only {accuracy:.1%} to lose"]
    if accuracy is not None and item.baseline == "gain" and accuracy > CEILING:
        return [f"saturated baseline: the model has {accuracy:.1%} already"]
    return []


def _measured(item: Item, runs: dict[str, str], asked: Asked) -> list[Measured]:
    assert item.sql is not None
    known: dict[str, Any] = {**runs, "units": list(item.units), "fingerprint": asked.model.fingerprint}
    rows = asked.store.rows(item.sql, {name: known[name] for name in item.stages})
    found = []
    for row in rows:
        scale = item.scale(row["what"])
        value, low, high = (None if row[name] is None else scale * row[name] for name in ("value", "low", "high"))
        found.append(Measured(row["what"], value, low, high, row["n"], row["unit"], row["rank"]))
    return found


assert set(STAGES).isdisjoint(TRAININGS)
