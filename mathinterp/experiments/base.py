"""What an experiment is: parameters, tables, a way to cut the work into shards, (state, shard) -> rows, and a meaning.

Everything else (Ray, retries, resume, progress, planning, Parquet, SQL, the command line, the report) is generic and
asks the experiment. docs/adding-an-experiment.md walks through one. A class whose module imports no torch at its top
is quick to list and to plan: heavy imports belong into ``prepare`` and ``run``.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from mathinterp.code_digest import code_digest, has_code, is_ours
from mathinterp.experiments.results import Results, Summary
from mathinterp.experiments.table import Table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.engine.cells import Cells
    from mathinterp.experiments.costs import Cost
    from mathinterp.experiments.figures import Figure
    from mathinterp.experiments.finished_run import HeadRanking
    from mathinterp.experiments.grid import Grid
    from mathinterp.experiments.growing import Growing
    from mathinterp.experiments.ranking import Ranking
    from mathinterp.models.anatomy import Anatomy, ModelShape
    from mathinterp.models.catalog import ResolvedModel
    from mathinterp.prompts.prompt import Prompt, TokenizedPrompt
    from mathinterp.store import Store


CHANGE_NO_ROW = frozenset(  # of a class: what is shown, and what follows
    ("check_shown", "command_examples", "figure", "follow_up", "grid", "head_ranking", "node_ranking", "show_options",
     "summarize", "views")
)  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """A piece of an experiment that is computed, written and resumed as one: one Parquet file of one table."""

    table: str
    index: int  # number within the table: shard-00007.parquet
    work: dict[str, Any] = field(default_factory=dict)  # plain JSON: what to compute
    cost: float = 1.0  # relative; the most expensive shards are dispatched first

    @property
    def key(self) -> str:
        """Unique name within a run."""
        return f"{self.table}/{self.index:05d}"


@dataclass
class Subject:
    """What an experiment works on, once per replica: a model on its device and the tokenized prompts."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    max_tokens: int | None = None  # most token rows in one forward; None = chosen from the device
    tokenizer: PreTrainedTokenizerBase | None = None  # the model's, to ask what a token of the text is


@dataclass(frozen=True)
class Context:
    """What is known before anything loads: the model's files, the prompts, and where results go."""

    model: ResolvedModel
    prompts: Sequence[Prompt]
    store: Store

    def read(self, experiment: Experiment) -> tuple[TokenizedPrompt, ...]:
        """The prompts as the experiment reads them; raises UserError for one that the model cannot read."""
        from mathinterp.models.reading import read_prompts
        from mathinterp.prompts.pairs import with_counterfactuals

        prompts = self.prompts
        if not prompts and experiment.prompt_set is None:
            return ()
        if experiment.needs_counterfactuals:
            prompts = with_counterfactuals(prompts, self.model.tokenizer)
        return tuple(read_prompts(prompts, self.model, experiment.tokens_read))

    def run_id(self, experiment: Experiment) -> str:
        """The id that a run of the experiment has, on this model and these prompts."""
        from mathinterp.prompts.alignment import prompts_fingerprint

        prompts, model = prompts_fingerprint(self.read(experiment)), self.model
        return self.store.run_id(experiment.name, experiment.identity(), model.dtype, model.fingerprint, prompts)


@dataclass(frozen=True)
class NothingToShow:
    """No options of the summary."""


class Experiment(ABC):
    """One experiment. Subclasses are frozen dataclasses whose fields, made by ``option``, are its parameters.

    The first paragraph of a subclass's docstring is its help on the command line, the rest explains it.
    """

    name: ClassVar[str]  # as in `mathinterp scan heads`, and in the column ``scan`` of the view runs
    tables: ClassVar[Mapping[str, Table]]  # what it stores
    views: ClassVar[Mapping[str, str]] = {}  # SQL of views, by name, beside the files in its folder views/
    packages: ClassVar[tuple[str, ...]] = ()  # installed ones that decide rows, beside those of every run
    command_examples: ClassVar[Sequence[str]] = ()  # command lines, without "mathinterp"
    prompt_set: ClassVar[str | None] = "two_digit"  # read where none are given; None: the experiment needs no prompts
    prompts_needed: ClassVar[int | None] = None  # read as many of a set, whatever the limit of what follows; None: all
    show_options: ClassVar[type] = NothingToShow  # dataclass of options of what is shown or follows; they change no row
    follow_up_key: ClassVar[str | None] = None  # of the follow-up in the JSON, null if there is none; None: its name
    reads_neurons: ClassVar[bool] = False  # True: it names single neurons, which mixtures of experts have not
    on_command_line: ClassVar[bool] = True  # False: a step of a workflow, which has its own command
    own_command: ClassVar[bool] = False  # True: `mathinterp NAME` does the same as `mathinterp scan NAME`
    retired: ClassVar[Mapping[str, str]] = {}  # former options -> what is there instead
    one_replica: ClassVar[bool] = False  # True: a shard needs those before it, so that one replica does all, in order
    runs_split: ClassVar[bool] = True  # False: it needs the model whole on one device (models/split.py)
    runs_quantised: ClassVar[bool] = False  # True: it computes through layers alone, and reads no weight of theirs
    head_ranking: ClassVar[HeadRanking | None] = None  # how a finished run ranks heads; None: it ranks none
    reads_own_rows: ClassVar[bool] = False  # True: summary and figure read nothing of other runs by ``run_id = $run``
    node_ranking: ClassVar[Ranking | None] = None  # of its nodes, for `mathinterp stability`; None: it ranks none

    @property
    def needs_counterfactuals(self) -> bool:
        """Whether every prompt must have its counterfactual X_c; those that have none get a neutral operator."""
        return False

    @property
    def reads_together(self) -> bool:
        """Whether prompts share forward passes: then a replica first compares some of them with each alone."""
        return True

    @property
    def models_held(self) -> int:
        """Models of the subject's shape whose weights a replica holds, for planning and placing only."""
        return 1

    @property
    def binds(self) -> bool:
        """Whether ``bind`` looks at anything but this object."""
        return type(self).bind is not Experiment.bind

    def bind(self, context: Context) -> Self:
        """The same experiment with what follows from model, prompts or earlier runs filled in, before anything loads.

        Raises UserError for what the model or the prompts do not allow.
        """
        return self

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row, as plain JSON; part of the run id."""

    def identity(self) -> dict[str, Any]:
        """The parameters as a run id counts them: to a class from outside this package belongs its code.

        Raises UserError where the code names an object whose content cannot be told.
        """
        if is_ours(type(self)):
            return self.parameters()
        given = [value for value in vars(self).values() if has_code(value)]
        return {**self.parameters(), "code_digest": code_digest(type(self), *given, left_out=CHANGE_NO_ROW)}

    @abstractmethod
    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Cut the work; must depend on the arguments alone, never on the number of replicas."""

    def growing(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> Growing | None:
        """Which shards follow from rows, for a run that begins with ``shards``; None: there are no others."""
        return None

    def whole(self) -> Experiment:
        """The experiment that computes all that this one might, for planning."""
        return self

    @abstractmethod
    def prepare(self, subject: Subject) -> Any:
        """Once per replica: whatever all shards need, for example the clean pass."""

    @abstractmethod
    def run(self, state: Any, shard: Shard) -> pa.Table:
        """Compute one shard's rows with the schema ``tables[shard.table].schema``."""

    def taken_over(self, rows: pa.Table, shard: Shard) -> pa.Table:
        """What of another run's rows is kept; the shard's work names them: ``stored``, a run id and a shard's key."""
        return rows

    def tokens_read(self, prompt: TokenizedPrompt) -> int:
        """The most tokens of ``prompt``, and after it, that the model reads at once: it needs as many positions."""
        return len(prompt.fed)

    def compiles(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], device_type: str) -> bool:
        """Whether ``prepare`` and ``run`` compile the model's layers, so that ``compile_ahead`` saves time."""
        return False

    def compile_ahead(self, stand_in: Subject, shape: ModelShape) -> None:
        """Compile all that this experiment on a model of ``shape`` compiles, on ``stand_in``, few layers of like kinds.

        Called before the weights are loaded and only where ``compiles``; what is compiled stays in torch's cache,
        which belongs to the functions and not to a model.
        """
        raise AssertionError(f"experiment {self.name} says that it compiles, but not what")

    def cells(self, state: Any, subject: Subject) -> Cells:
        """A few numbers, computed within a second after ``prepare``, in which equal replicas agree bit for bit.

        By default those of the model itself; one whose ``prepare`` compiles adds what the compiled functions give.
        """
        from mathinterp.engine.model_cells import model_cells

        return model_cells(subject.anatomy, subject.prompts)

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Forward evaluations in a shard, for progress and planning only: one per prompt and intervention.

        By default an intervention is one of the shard's ``work["heads"]``, else of its ``work["layers"]``, else the
        shard itself.
        """
        return len(prompts) * len(shard.work.get("heads") or shard.work.get("layers") or [shard])

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost | None:
        """FLOPs, rows and memory, counted before anything loads; None: not known, and ``plan`` says so.

        By default what ``cost_of(experiment, shape, prompts, shards)`` in ``cost.py`` of its folder returns.
        """
        own = self._beside("cost", "cost_of")
        return own(self, shape, prompts, shards) if own else None

    def notes(self, state: Any) -> dict[str, Any]:
        """Facts about the run worth storing beside it (engine chosen, noise floor), as plain JSON: ``state.notes``."""
        return dict(getattr(state, "notes", {}))

    def check_shown(self, shown: Any, prompts: Sequence[Prompt]) -> None:
        """Raise UserError, before anything runs, for a value of ``show_options`` that will find nothing to show."""
        return

    @classmethod
    def summarize(cls, results: Results, shown: Any) -> Summary:
        """What a finished run says, from stored rows alone; ``shown`` is a value of ``show_options``.

        By default what ``summarize(results, shown)`` in ``summary.py`` of its folder returns; without ``shown`` where
        there are no such options.
        """
        if own := cls._beside("summary", "summarize"):
            return own(*cls._asked(results, shown))  # type: ignore[no-any-return]
        queries = [results.query(f"SELECT * FROM {table} WHERE run_id = $run LIMIT 20") for table in cls.tables]
        return Summary(queries=queries)

    @classmethod
    def figure(cls, results: Results, shown: Any) -> Figure | None:
        """An Altair chart of a finished run, with its data inside; None: there is none to draw.

        By default what ``draw`` in ``figure.py`` of its folder returns, called as ``summarize`` is.
        """
        own = cls._beside("figure", "draw")
        return own(*cls._asked(results, shown)) if own else None

    @classmethod
    def grid(cls, results: Results) -> Grid | None:
        """Every node by every prompt, for a page that shows single cells; None: there is no such grid.

        By default what ``grid(results)`` in ``grid.py`` of its folder returns.
        """
        own = cls._beside("grid", "grid")
        return own(results) if own else None

    @classmethod
    def draws(cls) -> bool:
        """Whether finished runs have a figure."""
        inherited = cls.figure.__func__ is Experiment.figure.__func__  # type: ignore[attr-defined]
        return not inherited or _in_folder(cls, "figure") is not None

    def follow_up(self, results: Results, shown: Any) -> Experiment | None:
        """The experiment that the finished run asks for, on the same model and prompts; None: it stands alone."""
        return None

    @classmethod
    def _beside(cls, part: str, function: str) -> Callable[..., Any] | None:
        module = _in_folder(cls, part)
        return None if module is None else getattr(importlib.import_module(module), function, None)

    @classmethod
    def _asked(cls, results: Results, shown: Any) -> tuple[Any, ...]:
        return (results,) if cls.show_options is NothingToShow else (results, shown)


def _in_folder(experiment: type[Experiment], part: str) -> str | None:
    """The module ``part`` in the folder of an experiment, or of one that it derives from; None: there is none."""
    for owner in experiment.__mro__:
        name = f"{owner.__module__}.{part}"
        if hasattr(sys.modules.get(owner.__module__), "__path__") and find_spec(name):
            return name
    return None
