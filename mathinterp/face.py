"""The functions of ``import mathinterp as mi``: what the commands do, for Python.

Each calls one function of the rooms; a run comes back as an object to ask. Nothing here prints.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mathinterp.cluster.places import Place
from mathinterp.cluster.plan import Plan, measure_cpu, plan_scan
from mathinterp.cluster.run import RunSummary, bound_work, run_scan
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.registry import add
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.stability import DRAWS, stability_of
from mathinterp.frame import Frame
from mathinterp.models.catalog import ModelSpec
from mathinterp.models.handle import Model, model_of
from mathinterp.models.wrapped import WrappedModel
from mathinterp.prompts.given import Prompts, prompts_of
from mathinterp.prompts.spread import even_spread
from mathinterp.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mathinterp.experiments.figures import Figure
    from mathinterp.experiments.stability.result import Stability


def load(
    name: str = "bundled",
    *,
    adapter: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    load_in: str | None = None,
) -> Model:
    """A model by any name that the command line takes; its weights are loaded when they are first needed.

    Args:
        name: "bundled", "smollm2", a Hugging Face folder, a ``.gguf`` file, a hub id, or "random:SHAPE".
        adapter: a PEFT LoRA folder, or the name of one that comes with the package; merged into the weights.
        dtype: "float32", "bfloat16", "float16", "float64", or "auto": float32 on a CPU, bfloat16 on a GPU.
        device: "cpu" or "cuda" in this process; None: a GPU where there is one.
        trust_remote_code: run the Python code of the model's folder.
        load_in: "8bit" or "4bit": quantise the layers as they are loaded; needs bitsandbytes and a GPU.
    Raises:
        UserError: there is no such model, or it cannot be read.

    >>> import mathinterp as mi
    >>> mi.load("bundled", device="cpu", dtype="float32").label
    'bundled'
    """
    model = Model(ModelSpec(name, adapter, dtype, trust_remote_code, load_in), device)
    _ = model.described  # found now, or refused
    return model


def wrap(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, name: str = "wrapped") -> Model:
    """A transformers model that is already in memory, with its tokenizer; identified by its content.

    It stays where it is and comes back as it was: while it is used, it is in evaluation mode without gradients; then
    no hook, attribute, mode, gradient flag, config field or attention implementation is left changed, also after an
    exception.

    Args:
        model: a causal language model of a supported family, unquantised, in one dtype and on one device.
        tokenizer: its fast tokenizer.
        name: for tables.
    Raises:
        UserError: it is none of these, or has NaN in its weights.

    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> import mathinterp as mi
    >>> from mathinterp.models.sources import BUNDLED_FOLDER
    >>> of_mine = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER)
    >>> model = mi.wrap(of_mine, AutoTokenizer.from_pretrained(BUNDLED_FOLDER), name="mine")
    >>> model.label
    'mine'
    >>> mi.ablate(model, mi.prompts("two_digit", limit=40), heads=["0.6"]).drop > 0.1
    True
    """
    return WrappedModel(model, tokenizer, name)


def open_store(url: str = "results") -> Store:
    """The runs and rows of a folder or of an s3:// or gs:// URL, to query by SQL.

    Raises UserError where there is no store.

    >>> import mathinterp as mi
    >>> mi.open_store("results").sql("SELECT count(*) AS runs FROM runs").shape
    (1, 1)
    """
    store = Store(url)
    store.require_runs()
    return store


def plan(experiment: Experiment, model: Model | str, prompts: Any = None, *, store: str = "results") -> Plan | None:
    """What a run would cost, before anything loads.

    Args:
        experiment: as for ``run``.
        model: as for ``run``.
        prompts: as for ``run``.
        store: where earlier runs are looked up, for an experiment that needs one.
    Returns:
        FLOPs, rows, bytes, memory, and seconds on GPUs of known kinds and, in float32, on this CPU; None: the
        experiment cannot tell.

    >>> import mathinterp as mi
    >>> planned = mi.plan(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=40))
    >>> planned.evaluations  # the unedited model, and 64 heads
    2600
    """
    work = bound_work(experiment, model_of(model).described, _asked(experiment, prompts), Store(store))
    cpu = measure_cpu(work.model.shape) if work.model.dtype == "float32" else None
    return plan_scan(work.scan, work.model.shape, work.prompts, work.model.dtype, cpu=cpu)


def stability(run: str = "latest", *, store: str = "results", draws: int = DRAWS, seed: int = 0) -> "Stability":
    """How far the ranking of a finished run hangs on its prompts: it is worked out again from prompts drawn anew.

    From stored rows, without a model; stored too, for the views stability and stability_overlap.

    Args:
        run: its id; "latest": the run finished last of those that rank heads, MLPs or neurons.
        store: where it is.
        draws: of prompts, and of templates; the views show a run's computation with the most draws.
        seed: of the draws.
    Returns:
        frames ``nodes`` and ``overlap``, sentences ``lines()``, and ``summary()``.
    Raises:
        UserError: no such run, one that is not finished or ranks nothing, or a number that cannot be.

    >>> import mathinterp as mi
    >>> run = mi.run(mi.experiments.Heads(layers="0"), mi.load("bundled"), mi.prompts("two_digit", limit=16))
    >>> found = mi.stability(run.id, draws=50)
    >>> bool(found.nodes.query("operation == 'all' and over == 'prompts' and rank == 1").in_first_5.item() > 0.5)
    True
    """
    return stability_of(open_store(store), run, draws=draws, seed=seed)


@dataclass(frozen=True)
class Run:
    """A run that was made: its rows, what they say, and the runs that followed from it.

    ended: what this call did: shards, rows, seconds, and in ``failed`` the shards that were given up.
    follow_ups: runs of the experiments that this one asked for.
    """

    experiment: Experiment
    ended: RunSummary
    follow_ups: tuple["Run", ...] = ()
    _results: Results = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_results", Results(Store(self.ended.store), self.ended.run_id))

    @property
    def id(self) -> str:
        """12 hex digits; the same experiment, model and prompts give the same."""
        return self.ended.run_id

    @property
    def store(self) -> Store:
        """Where its rows are."""
        return self._results.store

    @property
    def complete(self) -> bool:
        """Whether every shard has its file."""
        return self.ended.complete

    @cached_property
    def summary(self) -> Summary:
        """What the run says, from stored rows; prints as tables, and ``summary.data`` is the same as plain JSON."""
        return self.summarize()

    def summarize(self, **shown: Any) -> Summary:
        """The summary with other ``show_options`` of the experiment."""
        with _fields_of(type(self.experiment).show_options), self.store.held():
            summary = type(self.experiment).summarize(self._results, type(self.experiment).show_options(**shown))
        self.store.require(self.id)  # else it was of nothing
        return summary

    def figure(self, **shown: Any) -> "Figure | None":
        """The experiment's chart of the run, an Altair object; None: it has none to draw."""
        with _fields_of(type(self.experiment).show_options), self.store.held():
            return type(self.experiment).figure(self._results, type(self.experiment).show_options(**shown))

    def table(self, name: str) -> Frame:
        """All rows of a table or view that are of this run, or of its prompts.

        Raises UserError if there is no such view, or it says nothing about runs or prompts.
        """
        if not re.fullmatch(r"\w+", name):
            raise UserError(f"'{name}' is no name of a table or view; for a query use sql()")
        columns = self.sql(f"SELECT * FROM {name} LIMIT 0").columns
        if "run_id" in columns:
            return self.sql(f"SELECT * FROM {name} WHERE run_id = $run")
        if "prompts_fingerprint" in columns:
            own = "(SELECT prompts_fingerprint FROM runs WHERE run_id = $run)"
            return self.sql(f"SELECT * FROM {name} WHERE prompts_fingerprint = {own}")
        raise UserError(f"'{name}' has no column run_id; ask it through sql()")

    def sql(self, query: str, **values: Any) -> Frame:
        """The result of a query; ``$run`` in it is this run's id, other ``$name`` take their values from here."""
        return self.store.sql(query, run=self.id, **values)

    def stability(self, *, draws: int = DRAWS, seed: int = 0) -> "Stability":
        """How stable its ranking is; see ``mathinterp.stability``."""
        return stability_of(self.store, self.id, draws=draws, seed=seed)

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<Run {self.id} of {self.experiment.name} in {self.ended.store}{state}>"


def run(
    experiment: Experiment,
    model: Model | str,
    prompts: Any = None,
    *,
    store: str = "results",
    replicas: int | None = None,
    gpus_per_replica: float | None = None,
    address: str | None = None,
    progress: bool = True,
    max_attempts: int = 3,
    place: Place | None = None,
) -> Run:
    """Run an experiment, or resume it, and whatever follows from it.

    With none of ``replicas``, ``gpus_per_replica`` and ``address`` it runs in this process, on the model's device and
    without Ray; else on Ray. The rows are the same. What is in the store is never computed again.

    Args:
        experiment: for example ``mathinterp.experiments.Heads(ablation="zero")``, or one of your own.
        model: from ``load`` or ``wrap``, or a name; a wrapped one goes to Ray's replicas with its weights.
        prompts: as for ``mathinterp.prompts``; None: the experiment's own set.
        store: a folder or URL; on several machines one that all of them share.
        replicas: number of model replicas; None: one per GPU, else one per CPU core while memory allows.
        gpus_per_replica: 0 for CPU, 1, a fraction, or 2 and more: the model's layers lie on so many GPUs of one node;
            None: 1 if the cluster has GPUs.
        address: a running Ray cluster; "local": a local Ray for this call.
        progress: show a bar (or lines) on stderr.
        max_attempts: exceptions after which a shard is given up.
        place: where to compute, in place of what those three say; ``connect(url).run`` gives a service.
    Returns:
        the run; ``run.complete`` and ``run.ended.failed`` say if shards were given up.
    Raises:
        UserError: a mistake in the arguments.
        mathinterp.cluster.dispatch.NoReplicaLeft: no replica could load the model.

    >>> import mathinterp as mi
    >>> model, prompts = mi.load("bundled"), mi.prompts("two_digit", limit=16)
    >>> run = mi.run(mi.experiments.Heads(heads=["0.6"]), model, prompts, store="results", progress=False)
    >>> run.complete, len(run.table("head_effects"))
    (True, 5)
    >>> run.sql("SELECT layer, head FROM head_effects WHERE run_id = $run AND operation = 'all'").arrow().to_pylist()
    [{'layer': 0, 'head': 6}]
    """
    add(type(experiment))
    model, asked = model_of(model), _asked(experiment, prompts)
    ended = run_scan(
        experiment, model, _needed(experiment, asked), store, replicas=replicas, gpus_per_replica=gpus_per_replica,
        address=address, progress=progress, max_attempts=max_attempts, place=place,
    )  # fmt: skip
    results = Results(Store(ended.store), ended.run_id)
    following = experiment.follow_up(results, experiment.show_options()) if ended.complete else None
    if following is None:
        return Run(experiment, ended)
    next_run = run(
        following, model, asked, store=store, replicas=replicas, gpus_per_replica=gpus_per_replica, address=address,
        progress=progress, max_attempts=max_attempts, place=place,
    )  # fmt: skip
    return Run(experiment, ended, (next_run, *next_run.follow_ups))


def _asked(experiment: Experiment, prompts: Any) -> Prompts:
    """The prompts given, else the experiment's own set, or none."""
    if prompts is None:
        return Prompts(()) if experiment.prompt_set is None else prompts_of(experiment.prompt_set)
    return prompts if isinstance(prompts, Prompts) else prompts_of(prompts)


def _needed(experiment: Experiment, prompts: Prompts) -> Prompts:
    """As many as the experiment itself reads; what follows it reads all."""
    needed = experiment.prompts_needed
    if needed is None:
        return prompts
    return Prompts(tuple(even_spread(prompts, needed)), f"{prompts.label} limit={needed}", prompts.columns)


@contextmanager
def _fields_of(options: type) -> Iterator[None]:
    """A TypeError about an unknown field becomes a UserError."""
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UserError(f"{options.__name__}: {error}") from error
