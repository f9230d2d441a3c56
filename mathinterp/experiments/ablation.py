"""What experiments that replace activations share: how they are replaced, at which tokens, and what counts as right.

Replacements of method.md section 2: zero (0 at every token), mean (the average over counterfactual prompts),
resample (the paired counterfactual prompt's own activation); and dataset_mean (the average over all prompts of the run
themselves), for prompts that have no counterfactuals. How that is computed is next door, in ablated.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.engine import ENGINES
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.costs import Cost, replayed
from mathinterp.experiments.options import check_options, option
from mathinterp.models.units import Head, Mlp

if TYPE_CHECKING:
    from mathinterp.engine.cells import Cells
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

ABLATIONS = ("zero", "mean", "resample", "dataset_mean")
POSITIONS = ("all", "end")
SCORINGS = ("token", "first_token", "exact_match")


@dataclass(frozen=True)
class Ablation(Experiment):
    """Parameters of every experiment that replaces activations."""

    ablation: str = option(
        "zero",
        "zero; mean over the counterfactual prompts; resample from the paired counterfactual; or dataset_mean, the mean"
        " over all prompts themselves, which needs no counterfactuals.",
        choices=ABLATIONS,
    )
    positions: str | None = option(
        None, "Tokens that are edited: all or end.", choices=(None, *POSITIONS), shown="all for zero, else end"
    )
    scoring: str | None = option(
        None,
        "What counts as right: later answer tokens see an edit of END only through attention.",
        choices=(None, *SCORINGS),
        shown="token, but first_token when only END is edited",
    )
    engine: str = option("auto", "packed shares prefixes; plain is slow and obvious.", choices=ENGINES)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def edited_positions(self) -> str:
        """ "all" or "end", the default resolved."""
        return self.positions or ("all" if self.ablation == "zero" else "end")

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row or how it is counted."""
        scoring = self.scoring or ("token" if self.edited_positions == "all" else "first_token")
        return {
            "ablation": self.ablation,
            "positions": self.edited_positions,
            "scoring": scoring,
            "engine": self.engine,
        }

    @property
    def needs_counterfactuals(self) -> bool:
        """Mean and resample ablation take their values from X_c."""
        return self.ablation in ("mean", "resample")

    def batches(self, shape: ModelShape) -> list[list[Head]] | list[list[Mlp]]:
        """All units ablated alone, as the engine is asked for them at once; none for scans too small to compile."""
        return []

    def edits_per_batch(self, shape: ModelShape) -> int:
        """Most edits that the engine is asked for at once."""
        return max(map(len, self.batches(shape)), default=1)

    def compiles(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], device_type: str) -> bool:
        """The engine's own rule; the plain engine compiles nothing."""
        from mathinterp.engine.choose import choose, pays_to_compile
        from mathinterp.models.families import family_of

        packed = choose(self.engine, family_of(shape.model_type).tree_mask) == "packed"
        return packed and pays_to_compile(device_type, prompts, sum(map(len, self.batches(shape))))

    def compile_ahead(self, stand_in: Subject, shape: ModelShape) -> None:
        """The passes of ``prepare``, and edits of each layer in every number that the scan asks for at once."""
        from mathinterp.engine.packed import PackedEngine
        from mathinterp.experiments.ablated import build_scan_engine

        engine = build_scan_engine(self, stand_in, self.edits_per_batch(shape), compiled=True)
        assert isinstance(engine, PackedEngine)
        engine.noise_floor(engine.baseline())
        for units in {len(units): units for units in self.batches(shape)}.values():
            for layer in range(stand_in.anatomy.shape.n_layers):
                engine.compile_for([Mlp(layer) if isinstance(unit, Mlp) else Head(layer, unit.head) for unit in units])

    def cells(self, state: Any, subject: Subject) -> Cells:
        """The model's own, and the packed engine's."""
        from mathinterp.engine.cells import Cells
        from mathinterp.engine.packed import PackedEngine
        from mathinterp.experiments.ablated import AblationState

        engine = (state if isinstance(state, AblationState) else state.ablation).engine
        own = super().cells(state, subject)
        return Cells.joined([own, engine.cells()]) if isinstance(engine, PackedEngine) else own

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """Interventions one at a time, each from its own layer on, unless the experiment has a ``cost.py``."""
        return super().cost(shape, prompts, shards) or replayed(self, shape, prompts, shards)
