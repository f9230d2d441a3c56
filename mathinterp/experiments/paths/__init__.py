"""Path scan: patch one head or MLP at END with its counterfactual output (paper B, Algorithm 1; method.md section 3).

One row per (node, pair): how the logit of the answer's first digit moves when the node reads as on X_c and the rest, as
``freeze`` says, stays as on X_r. Beside it, first-order attribution and direct logit shares of all nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mathinterp.engine.paths.nodes import FREEZES, Node, Receiver
from mathinterp.errors import UserError
from mathinterp.experiments.adaptive import drops as adaptive
from mathinterp.experiments.adaptive.judge import accuracy_weights
from mathinterp.experiments.adaptive.reuse import with_reused
from mathinterp.experiments.adaptive.scan import Adaptive
from mathinterp.experiments.adaptive.summary import decided, summarize_decisions
from mathinterp.experiments.adaptive.tables import TABLES as DECISIONS
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.finished_run import HeadRanking
from mathinterp.experiments.options import check_options, normalized, option, read_layers
from mathinterp.experiments.paths.tables import TABLES
from mathinterp.experiments.ranking import Ranking
from mathinterp.experiments.results import SIGNIFICANT, Results, Summary
from mathinterp.experiments.table import Table
from mathinterp.models.units import Head, Mlp

if TYPE_CHECKING:
    from mathinterp.engine.cells import Cells
    from mathinterp.experiments.paths.rows import PathState
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

EFFECTS = ("logit", "centred", "probability", "logprob")
DENOMINATORS = ("absolute", "paper")
POSITIONS = ("end", "all")
FEWEST_NODES = 16  # in a file


def check_distractors(prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise UserError for a distractor that first differs from the answer in another token than the one scored here."""
    from mathinterp.prompts.pairs import first_digit

    for item in prompts:
        if item.distractor is None or item.distractor.index == (scored := first_digit(item).index):
            continue
        where = "before" if item.distractor.index < scored else "after"
        raise UserError(
            f"prompt '{item.prompt.prompt_id}': the distractor {item.prompt.distractor!r} first differs from the answer"
            f" {item.prompt.answer!r} {where} the one token that path patching scores, the answer's first digit; give a"
            " distractor that differs there first"
        )


@dataclass(frozen=True)
class ShownNodes:
    """How much of a path scan is shown."""

    top: int = option(10, "Nodes shown per operation.", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Paths(Adaptive):
    """Patch each head and MLP with its output on a counterfactual sentence (paper B, Algorithm 1)."""

    freeze: str = option(
        "heads", "What keeps its X_r output: heads (MLPs run), all, or none (plain activation patching).",
        choices=FREEZES,
    )  # fmt: skip
    effect: str = option(
        "logit",
        "What ranks: logit and centred relative to the original value, probability and logprob as the change itself.",
        choices=EFFECTS,
    )
    denominator: str = option(
        "absolute", "Relative effects are divided by |original|, or (paper) by the original value.",
        choices=DENOMINATORS,
    )  # fmt: skip
    positions: str = option(
        "end", "Patch at end, or at all tokens (slow; only where nothing is frozen, else both are the same).",
        choices=POSITIONS,
    )  # fmt: skip
    keep_all: bool = option(False, "Keep pairs that the model answers wrongly, too.")
    layers: tuple[int, ...] | None = option(
        None, "Layers of the patched nodes, for example 0-3,17.", parse=read_layers, shown="all"
    )
    receiver: str | None = option(
        None, "Pass the change on through one node alone: 17.22.q (.k, .v) or 17.mlp.", shown="every later node"
    )
    attribution: bool = True  # also fill attribution_scan, where ``attributes`` allows it

    name: ClassVar[str] = "paths"
    node_table: ClassVar[str] = "path_scan"
    has_baseline: ClassVar[bool] = False
    choosing: ClassVar[Shard | None] = Shard("path_pairs", 0, cost=0.1)
    tables: ClassVar[Mapping[str, Table]] = {**TABLES, **DECISIONS}
    prompt_set: ClassVar[str] = "pairs"
    show_options: ClassVar[type] = ShownNodes
    command_examples: ClassVar[Sequence[str]] = (
        "scan paths",
        "scan paths --freeze all --effect logprob --limit 400",
        "scan paths --receiver 5.2.q",
        "scan paths --decide 5",
    )

    head_ranking: ClassVar[HeadRanking] = HeadRanking(
        ranked="""SELECT layer, head FROM path_effects WHERE run_id = $run AND operation = $operation AND node = 'head'
                  ORDER BY mean, layer, head""",
        key=f"""SELECT layer, head FROM path_effects WHERE run_id = $run AND node = 'head' AND below
                  AND (operation = $operation OR q_value < {SIGNIFICANT})""",
    )  # most negative mean effect first
    node_ranking: ClassVar[Ranking] = Ranking(
        "SELECT node, layer, head AS unit, prompt_id, 1 AS n, effect, true AS known FROM path_scan WHERE run_id = $run",
        ("effect",),
        lambda means, parameters: [means["effect"]],
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        normalized(self, layers=read_layers(self.layers))
        check_options(self)
        if self.layers == ():
            raise UserError("no layers to patch; name at least one, or leave `layers` out for all")
        if self.positions == "all" and self.freeze != "none":
            raise UserError(
                f"with `freeze` {self.freeze} no token but END reaches the logits, so `positions` all changes nothing;"
                " leave it out, or take `freeze` none"
            )
        if self.receiver is not None:
            Receiver.parse(self.receiver)
            if self.freeze == "none":
                raise UserError("with `receiver` the rest is frozen: take `freeze` heads or all")

    @property
    def needs_counterfactuals(self) -> bool:
        """Every node takes its output on X_c."""
        return True

    @property
    def attributes(self) -> bool:
        """Whether attribution_scan is filled; not where pairs are left out."""
        return self.decide is None and self.attribution and self.receiver is None and self.positions == "end"

    def parameters(self) -> dict[str, Any]:
        """Everything that changes a stored row."""
        return {
            "freeze": self.freeze,
            "effect": self.effect,
            "denominator": self.denominator,
            "positions": self.positions,
            "keep_all": self.keep_all,
            "layers": None if self.layers is None else sorted(set(self.layers)),
            "receiver": None if self.receiver is None else str(Receiver.parse(self.receiver)),
            "attribution": self.attributes,
            **self.decision_parameters(),
        }

    def nodes(self, shape: ModelShape) -> dict[int, list[Node]]:
        """Layer -> its nodes: heads, then the MLP.

        Raises UserError for a layer that does not exist, and for one asked for of which no node is before the receiver.
        """
        receiver = None if self.receiver is None else Receiver.parse(self.receiver)
        if receiver is not None:
            receiver.check(shape)
        found = {}
        for layer in range(shape.n_layers) if self.layers is None else sorted(set(self.layers)):
            shape.check_layer(layer)
            nodes: list[Node] = [*(Head(layer, head) for head in range(shape.n_heads)), Mlp(layer)]
            if receiver is not None:
                nodes = [node for node in nodes if receiver.hears(node, shape.parallel)]
            if nodes:
                found[layer] = nodes
            elif self.layers is not None:
                raise UserError(
                    f"layer {layer} is not before the receiver {receiver}: a sender after it cannot reach it; name"
                    " earlier layers, or leave `layers` out for all of them"
                )
        if not found:
            raise UserError(f"nothing is before the receiver {receiver}; name a node of a later layer")
        return found

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The pairs, attribution, then files of whole layers with 16 nodes and more; layer l costs L - l.

        The distractors' files, if there are distractors, are cut alike. Raises UserError for a distractor that is not
        told from the answer at END. Under ``decide``: the pairs alone, and no distractors later.
        """
        check_distractors(prompts)
        if (growing := self.growing(shape, prompts)) is not None:
            return growing.first()
        pieces = [Shard("path_pairs", 0, cost=0.1)] if self.reused is None else []
        if self.attributes:
            pieces.append(Shard("attribution_scan", 0, cost=float(3 * shape.n_layers)))
        files: list[dict[int, list[Node]]] = [{}]
        for layer, nodes in self.nodes(shape).items():
            if sum(map(len, files[-1].values())) >= FEWEST_NODES:
                files.append({})
            files[-1][layer] = nodes
        for index, layers in enumerate(files):
            cost = float(sum(len(nodes) * (shape.n_layers - layer) for layer, nodes in layers.items()))
            work = {"layers": list(layers), "nodes": sum(map(len, layers.values()))}
            if self.reused is None:
                pieces.append(Shard("path_scan", index, work, cost))
            if any(item.distractor is not None for item in prompts):
                pieces.append(Shard("path_distractors", index, work, cost))
        return [*pieces, *(self.reused.shards if self.reused is not None else ())]

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (node, pair) that is not taken over; for the other tables one per pair."""
        if "stored" in shard.work:
            return 0
        start, stop = shard.work.get("prompts", (0, len(prompts)))
        return int(stop - start) * int(shard.work.get("nodes", 1))

    def weights(self, prompts: Sequence[TokenizedPrompt]) -> np.ndarray:
        """Those of the unweighted mean over operations, as in path_effects."""
        return accuracy_weights([1] * len(prompts), [item.prompt.operation or "none" for item in prompts])

    def population(self, rows: pa.Table, prompts: Sequence[TokenizedPrompt]) -> list[TokenizedPrompt]:
        """The kept pairs."""
        kept = set(rows.filter(rows["kept"])["prompt_id"].to_pylist())
        return [item for item in prompts if item.prompt.prompt_id in kept]

    def decided_nodes(self, shape: ModelShape) -> list[adaptive.Node]:
        """Heads and MLPs, layer by layer."""
        nodes = [node for members in self.nodes(shape).values() for node in members]
        return [(node.layer, node.head if isinstance(node, Head) else None) for node in nodes]

    def files(self, nodes: Sequence[adaptive.Node]) -> list[list[adaptive.Node]]:
        """16 nodes and more a file, whole layers."""
        files: list[list[adaptive.Node]] = []
        for _, members in itertools.groupby(nodes, key=lambda node: node[0]):
            if not files or len(files[-1]) >= FEWEST_NODES:
                files.append([])
            files[-1] += members
        return files

    def named(self, nodes: Sequence[adaptive.Node]) -> dict[str, Any]:
        """``patched``."""
        return {"patched": [list(node) for node in nodes], "nodes": len(nodes)}

    def nodes_in(self, shard: Shard) -> list[adaptive.Node]:
        """Of ``patched``."""
        return [(layer, head) for layer, head in shard.work["patched"]]

    def drops(
        self, rows: pa.Table, baseline: pa.Table | None, nodes: Sequence[adaptive.Node], prompt_ids: Sequence[str]
    ) -> np.ndarray:
        """Minus the effect, between -1 and 1: a pair counts no more than a whole logit (probability, nat)."""
        return adaptive.losses(rows, "effect", nodes, prompt_ids)

    def prepare(self, subject: Subject) -> PathState:
        """Clean passes over X_r and X_c, the choice of pairs, and the engine."""
        from mathinterp.experiments.paths.rows import prepare

        return prepare(self, subject)

    def cells(self, state: PathState, subject: Subject) -> Cells:
        """The model's own, and the engine's baseline, which went through every layer in the shape of patched rows."""
        from mathinterp.engine.cells import Cells

        baseline = state.engine.baseline
        logit, logprob, centred = baseline.numpy()
        passes = Cells.of([logit, logprob, centred], baseline.predicted.cpu().numpy())
        return Cells.joined([super().cells(state, subject), passes])

    def run(self, state: PathState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers; or the pairs; or attribution of the asked layers' nodes."""
        from mathinterp.experiments.paths.rows import attribution_rows, block_rows, distractor_rows, layer_rows

        if shard.table == "path_pairs":
            return state.pairs_table
        if "patched" in shard.work:
            return block_rows(self, state, shard)
        nodes = self.nodes(state.anatomy.shape)
        if shard.table == "attribution_scan":
            return attribution_rows(self, state, nodes)
        parts = []
        for layer in shard.work["layers"]:
            if shard.table == "path_distractors":
                parts.append(distractor_rows(self, state, nodes[layer]))
                continue
            patched = state.engine.patched(nodes[layer], self.freeze)
            parts.append(layer_rows(self, state, nodes[layer], patched))
        return pa.concat_tables(parts)

    @classmethod
    def summarize(cls, results: Results, shown: ShownNodes) -> Summary:
        """Decisions of an adaptive scan; else see summary.py."""
        if not decided(results):
            return with_reused(results, super().summarize(results, shown))
        from mathinterp.experiments.paths.summary import MEASURES

        (run,) = results.rows("SELECT parameters ->> 'effect' AS effect FROM runs WHERE run_id = $run")
        return summarize_decisions(results, "path_decisions", "node", MEASURES[run["effect"]])
