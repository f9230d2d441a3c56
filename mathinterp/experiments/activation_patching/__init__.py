"""Activation patching: the residual stream, attention or an MLP at one token takes its value from another sentence.

Two directions: *denoising* runs X_c and patches in what the model computes on X_r, *noising* runs X_r and patches in
what it computes on X_c (pairs as in path patching, method.md section 1). One row per (site, layer, token, pair): the
gold logit and log-probability of the answer's first digit. Everything after the patched token is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from mathinterp.engine import ENGINES
from mathinterp.errors import UserError
from mathinterp.experiments.activation_patching.tables import DIRECTIONS, SITES, TABLES
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.options import check_options, normalized, option, read_layers
from mathinterp.experiments.table import Table
from mathinterp.gates import shortened

if TYPE_CHECKING:
    from mathinterp.experiments.activation_patching.rows import PatchingState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

LAYERS_PER_FILE = 8
MEASURES = ("logprob", "logit")


def _read_names(given: str | Iterable[str] | None, field: str, known: Sequence[str]) -> tuple[str, ...] | None:
    """Some of the known names, in their own order: "mlp,residual", or a list; None stays None. Raises UserError."""
    if given is None:
        return None
    asked = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    if not asked or any(name not in known for name in asked):
        raise UserError(
            f"`{field}` '{shortened(','.join(map(str, asked)))}' is not known; take some of {','.join(known)}"
        )
    return tuple(name for name in known if name in asked)


@dataclass(frozen=True)
class ShownPatches:
    """What the summary and the figure show."""

    measure: str = option("logprob", "What the fractions are of.", choices=MEASURES)
    top: int = option(3, "Places shown per site and direction.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ActivationPatching(Experiment):
    """Patch the residual stream, attention output or MLP output at each token, clean into counterfactual and back.

    Rows are summed up per layer and kind of token. Only pairs that the model answers rightly are kept.
    """

    sites: tuple[str, ...] | None = option(
        None, "What is patched: residual (the stream that a layer reads), attention, mlp.",
        parse=partial(_read_names, field="sites", known=SITES), shown="all",
    )  # fmt: skip
    directions: tuple[str, ...] | None = option(
        None, "denoising: clean into counterfactual; noising: counterfactual into clean.",
        parse=partial(_read_names, field="directions", known=DIRECTIONS), shown="both",
    )  # fmt: skip
    layers: tuple[int, ...] | None = option(None, "Layers, for example 0-3,17.", parse=read_layers, shown="all")
    keep_all: bool = option(False, "Keep pairs that the model answers wrongly, too.")
    engine: str = option("auto", "packed skips layers before the patched one; plain is slow.", choices=ENGINES)

    name: ClassVar[str] = "activation_patching"
    runs_quantised: ClassVar[bool] = True
    tables: ClassVar[Mapping[str, Table]] = TABLES
    prompt_set: ClassVar[str] = "pairs"
    show_options: ClassVar[type] = ShownPatches
    command_examples: ClassVar[Sequence[str]] = (
        "scan activation_patching --limit 32",
        "scan activation_patching --sites residual --directions denoising --layers 0-3 --limit 160",
    )

    def __post_init__(self) -> None:
        normalized(
            self,
            sites=_read_names(self.sites, "sites", SITES),
            directions=_read_names(self.directions, "directions", DIRECTIONS),
            layers=read_layers(self.layers),
        )
        check_options(self)
        if self.layers == ():
            raise UserError("no layers to patch; name at least one, or leave `layers` out for all")

    @property
    def needs_counterfactuals(self) -> bool:
        """Every value is that of the other sentence of a pair."""
        return True

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "sites": list(self.sites or SITES),
            "directions": list(self.directions or DIRECTIONS),
            "layers": None if self.layers is None else list(self.layers),
            "keep_all": self.keep_all,
            "engine": self.engine,
        }

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The pairs, then a file for eight layers of each site and direction; layer l costs L - l.

        Raises UserError for a layer that does not exist, and an answer without a digit, on which a pair is scored.
        """
        from mathinterp.prompts.pairs import first_digit

        layers = shape.chosen_layers(self.layers)
        tokens = sum(first_digit(prompt).index for prompt in prompts)
        pieces = [Shard("patching_pairs", 0, {"tokens": len(prompts)}, cost=0.5)]
        for site in self.sites or SITES:
            for direction in self.directions or DIRECTIONS:
                for start in range(0, len(layers), LAYERS_PER_FILE):
                    own = layers[start : start + LAYERS_PER_FILE]
                    work = {"site": site, "direction": direction, "layers": own, "tokens": tokens}
                    cost = float(sum(shape.n_layers - layer for layer in own))
                    pieces.append(Shard("patching_scan", len(pieces) - 1, work, cost))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (layer, token) of every pair."""
        return int(shard.work["tokens"]) * len(shard.work.get("layers", [None]))

    def prepare(self, subject: Subject) -> PatchingState:
        """Clean passes over X_r and X_c, and the choice of pairs."""
        from mathinterp.experiments.activation_patching.rows import prepare

        return prepare(self, subject)

    def run(self, state: PatchingState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers, or the pairs."""
        from mathinterp.experiments.activation_patching.rows import layer_rows

        if shard.table == "patching_pairs":
            return state.pairs
        site, direction = shard.work["site"], shard.work["direction"]
        return pa.concat_tables([layer_rows(state, site, direction, layer) for layer in shard.work["layers"]])
