"""What a scan is: table schemas, a way to cut the work into shards, and a function (state, shard) -> rows.

Everything else (Ray, retries, resume, progress, Parquet, SQL) is generic and lives in cluster/ and store/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:  # a driver that only hands out shards need not wait for torch
    from transformers import PreTrainedTokenizerBase

    from mathinterp.forward.cells import Cells
    from mathinterp.models.anatomy import Anatomy, ModelShape


@dataclass(frozen=True)
class Shard:
    """A piece of a scan that is computed, written and resumed as one: one Parquet file of one table."""

    table: str
    index: int  # number within the table: shard-00007.parquet
    work: dict[str, Any] = field(default_factory=dict)  # plain JSON: what to compute
    cost: float = 1.0  # relative; dearest shards are dispatched first

    @property
    def key(self) -> str:
        """Unique name within a run."""
        return f"{self.table}/{self.index:05d}"


@dataclass
class Subject:
    """What a scan works on, once per replica: a model on its device and the tokenized prompts."""

    anatomy: Anatomy
    prompts: Sequence[TokenizedPrompt]
    max_tokens: int | None = None  # most token rows in one forward; None = chosen from the device
    tokenizer: PreTrainedTokenizerBase | None = None  # the model's, for scans that ask what a token of the text is


class Scan(ABC):
    """One experiment. Subclasses are dataclasses whose fields are its parameters."""

    name: ClassVar[str]  # as in `mathinterp scan heads`
    schemas: ClassVar[dict[str, pa.Schema]]  # table -> stored columns, without run_id
    packages: ClassVar[tuple[str, ...]] = ()  # installed ones that decide rows, beside those of every run

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

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row, as plain JSON; part of the run id."""

    @abstractmethod
    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """Cut the work; must depend on the arguments alone, never on the number of replicas."""

    @abstractmethod
    def prepare(self, subject: Subject) -> Any:
        """Once per replica: whatever all shards need, for example the clean pass."""

    @abstractmethod
    def run(self, state: Any, shard: Shard) -> pa.Table:
        """Compute one shard's rows with the schema ``schemas[shard.table]``."""

    def tokens_read(self, prompt: TokenizedPrompt) -> int:
        """The most tokens of ``prompt``, and after it, that the model reads at once: it needs as many positions."""
        return len(prompt.fed)

    def compiles(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], device_type: str) -> bool:
        """Whether ``prepare`` and ``run`` compile the model's layers, so that ``compile_ahead`` saves time."""
        return False

    def compile_ahead(self, stand_in: Subject, shape: ModelShape) -> None:
        """Compile all that this scan of a model of ``shape`` compiles, on ``stand_in``, few layers of the same kinds.

        Called before the weights are loaded and only where ``compiles``; what is compiled stays in torch's cache,
        which belongs to the functions and not to a model.
        """
        raise AssertionError(f"scan {self.name} says that it compiles, but not what")

    def cells(self, state: Any, subject: Subject) -> Cells:
        """A few numbers, computed within a second after ``prepare``, in which equal replicas agree bit for bit.

        By default those of the model itself; a scan whose ``prepare`` compiles adds what the compiled functions give.
        """
        from mathinterp.forward.model_cells import model_cells  # torch: only a replica needs it

        return model_cells(subject.anatomy, subject.prompts)

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """Forward evaluations in a shard, for progress and planning only: one per prompt and intervention.

        By default an intervention is one of the shard's ``work["heads"]``, else of its ``work["layers"]``, else the
        shard itself.
        """
        return len(prompts) * len(shard.work.get("heads") or shard.work.get("layers") or [shard])

    def notes(self, state: Any) -> dict[str, Any]:
        """Facts about the run worth storing beside it (engine chosen, noise floor); plain JSON."""
        return {}
