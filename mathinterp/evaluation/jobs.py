"""Evaluation as one call: which tasks, which items, what the model was made from; then one run per task.

Knows names, files and models. One run per task, so that a task asked again is not computed again.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.errors import UserError
from mathinterp.evaluation.evaluate import Benchmark, Origin, PromptSetEvaluation
from mathinterp.evaluation.evaluate.summary import EvaluationSummary, summarize_evaluations
from mathinterp.evaluation.harness import require_harness
from mathinterp.evaluation.items import chosen_items, read_examples, read_items, refuse_leaks
from mathinterp.evaluation.task_files import ALIASES, EXAMPLE_SOURCES, ORDER, digest, task_file
from mathinterp.experiments.options import fields_given
from mathinterp.gates import shortened
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.models.handle import Model, named_spec
from mathinterp.models.reading import check_embedded, read_prompts
from mathinterp.models.sources import find_adapter, find_source
from mathinterp.prompts import PROMPT_SETS, WORD_PROBLEMS, Prompt, load_prompts
from mathinterp.prompts.json_lines import exists, json_file
from mathinterp.store import Store
from mathinterp.tuning.folders import EDIT_FILE, TUNING_FILE, read_about


@dataclass(frozen=True)
class Settings:
    """Options of all tasks of a command; None: as the task file says."""

    data_dir: str | None = None
    limit: int | None = None
    fewshot: int | None = None
    examples: str | None = None  # own or train
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One run to be: a scan, its prompts, and their name in tables."""

    scan: Benchmark | PromptSetEvaluation
    prompts: list[Prompt]
    label: str

    @property
    def task(self) -> str:
        """The task's name in the store."""
        task: str = self.scan.parameters()["task"]
        return task


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation left: a run per task, and what they say."""

    jobs: Sequence[Job]
    runs: Sequence[RunSummary]
    summary: EvaluationSummary

    @property
    def complete(self) -> bool:
        """Whether every item was answered."""
        return all(run.complete for run in self.runs)


def evaluate(
    tasks: str | Sequence[str], model: Model | ModelSpec | str, *, store: str = "results",
    replicas: int | None = None, gpus_per_replica: float | None = None, address: str | None = None,
    progress: bool = True, **settings: Any,
) -> Evaluated:  # fmt: skip
    """Evaluate a model on benchmarks and prompt sets, or resume that; every item's answer is kept in the store.

    Args:
        tasks: "svamp,csqa": benchmarks, prompt sets and files.
        model: a name, or what ``load`` returned; with its adapter.
        replicas: as for every run; so are ``gpus_per_replica``, ``address`` and ``progress``.
        settings: fields of ``Settings``: data_dir, limit, fewshot, examples, seed.
    Returns:
        ``summary``, whose ``table`` compares all models that were asked the same in this store, and ``runs``.
    Raises:
        UserError: a mistake in the arguments or files, or a text that the model cannot read, before anything runs.
        Unfinished: replicas died until none was left; the same call goes on from there.
    """
    spec = named_spec(model)
    jobs = prepare_jobs(parse_tasks(tasks), spec, fields_given(settings, Settings)[0])
    check_jobs(jobs, spec)
    with ExitStack() as stack:
        if len(jobs) > 1:
            stack.enter_context(connection(address))  # once for all tasks
        runs = [
            run_scan(
                job.scan,
                spec,
                job.prompts,
                store,
                replicas=replicas,
                gpus_per_replica=gpus_per_replica,
                address=address,
                progress=progress,
                prompts_label=job.label,
            )
            for job in jobs
        ]
    return Evaluated(jobs, runs, summarize_evaluations(Store(runs[0].store), [run.run_id for run in runs]))


def parse_tasks(tasks: str | Sequence[str]) -> list[str]:
    """ "svamp,csqa" -> names, each once; UserError for one that is neither a benchmark nor a prompt set nor a file."""
    given = tasks.split(",") if isinstance(tasks, str) else tasks
    names = [ALIASES.get(name.strip().lower(), name.strip()) for name in given]
    for name in names:
        kind, colon, _ = name.partition(":")
        known = name in ORDER or name in PROMPT_SETS or (colon and kind in WORD_PROBLEMS) or exists(name)
        if not known:
            raise UserError(
                f"task '{shortened(name)}' is not known; the benchmarks are {', '.join(ORDER)}, and prompt sets (see"
                " 'mathinterp prompts `list`') or prompt files are taken too"
            )
    return list(dict.fromkeys(names))


def prepare_jobs(names: Sequence[str], spec: ModelSpec, settings: Settings) -> list[Job]:
    """Read everything that the tasks need; raises UserError before any work starts."""
    if settings.examples is not None and settings.examples not in EXAMPLE_SOURCES:
        raise UserError(f"`examples` '{settings.examples}' is not known; take one of {', '.join(EXAMPLE_SOURCES)}")
    if any(name in ORDER for name in names):
        require_harness()
    elif settings.fewshot is not None or settings.examples is not None:
        raise UserError("`fewshot` and `examples` are for benchmarks; prompt sets are asked without worked examples")
    origin, ends = origin_of(spec), own_ends(resolve(spec))
    return [(_benchmark if name in ORDER else _prompt_set)(name, origin, ends, settings) for name in names]


def own_ends(model: ResolvedModel) -> tuple[int, ...] | None:
    """The tokens that end an answer where generation_config.json, which no fingerprint holds, says others than
    config.json; None where it says the same or is not there. Nothing else in it counts: decoding is plain_greedy's.

    Raises UserError for a file that is broken, which transformers would pass over.
    """
    if model.source.kind != "folder" or not (file := model.source.location / "generation_config.json").is_file():
        return None
    spoken = model.tokenizer.eos_token_id
    own = _ids(json_file(file).get("eos_token_id"), spoken, file)
    return None if own == _ids(model.config.eos_token_id, spoken, file) else own


def _ids(ends: object, otherwise: object, file: Path) -> tuple[int, ...]:
    """End tokens in order, whether one is given or a list; none: the tokenizer's."""
    given = otherwise if ends is None else ends
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(token) is int and token >= 0 for token in ids) or given == []:
        raise UserError(f"'{file}': eos_token_id {given} is no token id and no list of some; mend it or remove it")
    return tuple(sorted(set(ids)))


def check_jobs(jobs: Sequence[Job], spec: ModelSpec) -> None:
    """Raise UserError, before any of them runs, for a text that the model cannot read."""
    model = resolve(spec)
    for job in jobs:
        read_prompts(job.prompts, model, job.scan.tokens_read)
        if isinstance(job.scan, Benchmark):
            _check_benchmark(job.scan, model)


def _check_benchmark(scan: Benchmark, model: ResolvedModel) -> None:
    """Words of items and worked examples have embeddings, and beside what is written something can be read."""
    written = 0 if scan.task.multiple_choice else scan.task.config["generation_kwargs"]["max_gen_toks"]
    limit = model.config.max_position_embeddings
    if written >= limit:
        raise UserError(f"{scan.task.title} needs more than the {limit} tokens that the model can read")
    shown = [example for pool in scan.examples.values() for example in pool]
    for document in [*scan.items, *shown]:
        text = "\n".join(str(value) for value in document.values())
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_embedded(f"{scan.task.title}, item or example '{document.get('item_id', text[:40])}'", ids, model)


def origin_of(spec: ModelSpec) -> Origin:
    """The model without its adapter, or the one that a folder of ``mathinterp tune`` says it was trained from."""
    folder = None
    if spec.adapter is not None:
        folder = find_adapter(spec.adapter)
    elif (source := find_source(spec.name, spec.trust_remote_code)).kind == "folder":
        folder = source.path
    about = _about(folder)
    if spec.adapter is None and about:
        return Origin(about["base_fingerprint"], about["method"])
    base = resolve(ModelSpec(spec.name, None, spec.dtype, spec.trust_remote_code)).fingerprint
    if about and about["base_fingerprint"] != base:
        return Origin(base, f"{about['method']} of another base")
    return Origin(base, about.get("method", "base" if spec.adapter is None else "adapter"))


def _about(folder: Path | None) -> dict[str, Any]:
    """What a folder of ``tune``, or one that was edited, zeroed or pruned, says of itself; else nothing."""
    if folder is None:
        return {}
    if (folder / TUNING_FILE).is_file():
        return read_about(folder / TUNING_FILE, "base_fingerprint", "method")
    if (folder / EDIT_FILE).is_file():
        about = read_about(folder / EDIT_FILE, "base_fingerprint")
        return {**about, "method": about.get("edit") or "edited"}
    return {}


def _benchmark(name: str, origin: Origin, ends: tuple[int, ...] | None, settings: Settings) -> Job:
    task = task_file(name)
    fewshot = task.fewshot if settings.fewshot is None else settings.fewshot
    source = task.metadata["examples"] if settings.examples is None or task.by_subject else settings.examples
    items = read_items(task, settings.data_dir)
    examples = read_examples(task, settings.data_dir, source, fewshot, settings.seed)
    refuse_leaks(task, items, examples)
    chosen, prompts = chosen_items(task, items, settings.limit)
    scan = Benchmark(
        task=task, items=tuple(chosen), examples=examples, fewshot=fewshot, source=source, seed=settings.seed,
        limit=settings.limit, origin=origin, ends=ends,
    )  # fmt: skip
    return Job(scan, prompts, " ".join([name, scan.parameters()["setting"]]).strip())


def _prompt_set(name: str, origin: Origin, ends: tuple[int, ...] | None, settings: Settings) -> Job:
    prompts = load_prompts(name, seed=settings.seed, limit=settings.limit)
    label = name if name in PROMPT_SETS else Path(name.partition(":")[2] or name).name
    items = digest([[prompt.prompt_id, prompt.text, prompt.separator, prompt.answer] for prompt in prompts])
    seed = settings.seed if name in PROMPT_SETS else 0
    scan = PromptSetEvaluation(label=label, limit=settings.limit, seed=seed, items=items, origin=origin, ends=ends)
    return Job(scan, prompts, " ".join([label, scan.parameters()["setting"]]).strip())
