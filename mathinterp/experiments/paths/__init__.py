"""Path scan: patch one head or MLP at END with its counterfactual output (paper B, Algorithm 1; method.md section 3).

One row per (node, pair): how the logit of the answer's first digit moves when the node reads as on X_c and the rest, as
``freeze`` says, stays as on X_r. Beside it, first-order attribution and direct logit shares of all nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from mathinterp.engine.cells import Cells
from mathinterp.engine.pairs import Ends, Pairs, chosen, ends_of, pairs_of
from mathinterp.engine.paths.attribution import direct_shares, first_order
from mathinterp.engine.paths.frozen import FREEZES, MLP, Measures, PathEngine, Scorer
from mathinterp.engine.paths.patching import EndPatching, EverywherePatching
from mathinterp.engine.paths.receivers import Receiver, ReceiverEngine
from mathinterp.errors import UserError
from mathinterp.experiments.base import Experiment, Shard, Subject
from mathinterp.experiments.costs import Cost
from mathinterp.experiments.paths.tables import ATTRIBUTION_SCAN, PATH_PAIRS, PATH_SCAN, TABLES
from mathinterp.experiments.table import Table
from mathinterp.models.anatomy import Anatomy, ModelShape
from mathinterp.prompts.pairs import first_digit
from mathinterp.prompts.prompt import TokenizedPrompt

EFFECTS = ("logit", "centred", "probability", "logprob")
DENOMINATORS = ("absolute", "paper")
POSITIONS = ("end", "all")
FEWEST_NODES = 16  # in a file


@dataclass
class PathState:
    """What a replica keeps between shards: of the kept pairs, but for ``pairs_table``."""

    anatomy: Anatomy
    names: pa.Array  # prompt ids
    original: Ends
    engine: PathEngine | EndPatching | EverywherePatching | ReceiverEngine
    pairs_table: pa.Table
    notes: dict[str, Any]


@dataclass(frozen=True)
class Paths(Experiment):
    """Patch every head and MLP of ``layers`` (all if None), one at a time.

    freeze: "heads" (other heads keep their X_r outputs, MLPs run), "all" or "none"; see forward/paths.py.
    effect: the measure in column ``effect``: "logit" and "centred" relative to the original value, "probability" and
        "logprob" as the change itself (so that -0.05 is 5 points, or 5 % of the probability).
    denominator: of relative effects: "absolute" divides by |original|, "paper" by the original value.
    positions: tokens at which the node is patched, "end" or "all"; with frozen heads both are the same.
    keep_all: keep pairs whose X_r the model answers wrongly, too.
    receiver: the node that alone passes the change on: "17.22.q" (or .k, .v) or "17.mlp"; None = every later node.
    attribution: also fill attribution_scan (not with a receiver or at all positions).
    """

    freeze: str = "heads"
    effect: str = "logit"
    denominator: str = "absolute"
    positions: str = "end"
    keep_all: bool = False
    layers: tuple[int, ...] | None = None
    receiver: str | None = None
    attribution: bool = True

    name: ClassVar[str] = "paths"
    tables: ClassVar[Mapping[str, Table]] = TABLES

    def __post_init__(self) -> None:
        for name, value, known in (
            ("freeze", self.freeze, FREEZES),
            ("effect", self.effect, EFFECTS),
            ("denominator", self.denominator, DENOMINATORS),
            ("positions", self.positions, POSITIONS),
        ):
            if value not in known:
                raise UserError(f"--{name} '{value}' is not known; take one of {', '.join(known)}")
        if self.layers == ():
            raise UserError("no layers to patch; name at least one, or leave --layers out for all")
        if self.positions == "all" and self.freeze != "none":
            raise UserError(
                f"with --freeze {self.freeze} no token but END reaches the logits, so --positions all changes nothing;"
                " leave it out, or take --freeze none"
            )
        if self.receiver is not None:
            Receiver.parse(self.receiver)
            if self.freeze == "none":
                raise UserError("with --receiver the rest is frozen: take --freeze heads or all")

    @property
    def needs_counterfactuals(self) -> bool:
        """Every node takes its output on X_c."""
        return True

    @property
    def measure(self) -> str:
        """The unit of 100 * ``effect``, in words."""
        return {
            "logit": "% of the logit",
            "centred": "% of the centred logit",
            "probability": "points of probability",
            "logprob": "hundredths of a nat",
        }[self.effect]

    @property
    def attributes(self) -> bool:
        """Whether attribution_scan is filled."""
        return self.attribution and self.receiver is None and self.positions == "end"

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
        }

    def nodes(self, shape: ModelShape) -> dict[int, list[int]]:
        """Layer -> its nodes: heads, then the MLP.

        Raises UserError for a layer that does not exist, and for one asked for of which no node is before the receiver.
        """
        receiver = None if self.receiver is None else Receiver.parse(self.receiver)
        if receiver is not None:
            receiver.check(shape)
        found = {}
        for layer in range(shape.n_layers) if self.layers is None else sorted(set(self.layers)):
            shape.check_layer(layer)
            nodes = [*range(shape.n_heads), MLP]
            if receiver is not None:
                nodes = [node for node in nodes if receiver.hears(layer, node, shape.parallel)]
            if nodes:
                found[layer] = nodes
            elif self.layers is not None:
                raise UserError(
                    f"layer {layer} is not before the receiver {receiver}: a sender after it cannot reach it; name"
                    " earlier layers, or leave --layers out for all of them"
                )
        if not found:
            raise UserError(f"nothing is before the receiver {receiver}; name a node of a later layer")
        return found

    def shards(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt]) -> list[Shard]:
        """The pairs, attribution, then files of whole layers with 16 nodes and more; layer l costs L - l.

        Raises UserError for an answer without a digit, on which a pair could be scored.
        """
        for item in prompts:
            first_digit(item)
        pieces = [Shard("path_pairs", 0, cost=0.1)]
        if self.attributes:
            pieces.append(Shard("attribution_scan", 0, cost=float(3 * shape.n_layers)))
        files: list[dict[int, list[int]]] = [{}]
        for layer, nodes in self.nodes(shape).items():
            if sum(map(len, files[-1].values())) >= FEWEST_NODES:
                files.append({})
            files[-1][layer] = nodes
        for index, layers in enumerate(files):
            cost = float(sum(len(nodes) * (shape.n_layers - layer) for layer, nodes in layers.items()))
            work = {"layers": list(layers), "nodes": sum(map(len, layers.values()))}
            pieces.append(Shard("path_scan", index, work, cost))
        return pieces

    def evaluations(self, shard: Shard, prompts: Sequence[TokenizedPrompt]) -> int:
        """One for each (node, pair); for the other tables one a pair."""
        return len(prompts) * int(shard.work.get("nodes", 1))

    def cost(self, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
        """See cost.py."""
        from mathinterp.experiments.paths.cost import cost_of

        return cost_of(self, shape, prompts, shards)

    def prepare(self, subject: Subject) -> PathState:
        """Clean passes over X_r and X_c, the choice of pairs, and the engine."""
        anatomy = subject.anatomy
        pairs = pairs_of(subject.prompts)
        ends = [ends_of(anatomy, side, subject.max_tokens) for side in (pairs.original, pairs.counterfactual)]
        gold_P = torch.from_numpy(pairs.gold_P).to(anatomy.device)
        with torch.no_grad():
            original, counterfactual = (Scorer(anatomy)(side.final_PD, gold_P) for side in ends)
        correct_P = (original.predicted == gold_P).cpu().numpy()
        kept_P = np.ones_like(correct_P) if self.keep_all else correct_P
        keep = np.flatnonzero(kept_P)
        if not len(keep):
            raise UserError(
                f"the model answers none of the {len(pairs)} prompts right (first digit), so no pair is kept; take"
                " prompts that it can answer, or --keep-all"
            )
        names = pa.array([prompt.prompt.prompt_id for prompt in subject.prompts])
        table = _pairs_table(names, correct_P, kept_P, original, counterfactual)
        own, other = (chosen(side, keep) for side in ends)
        engine = self._engine(anatomy, pairs.chosen(keep), own, other, subject.max_tokens)
        notes = {
            "pairs": len(pairs),
            "pairs_kept": len(keep),
            "forward_deviation": engine.deviation(),
            "noise_floor": engine.noise_floor(),
        }
        return PathState(anatomy, names.take(pa.array(keep)), own, engine, table, notes)

    def cells(self, state: PathState, subject: Subject) -> Cells:
        """The model's own, and the engine's baseline, which went through every layer in the shape of patched rows."""
        baseline = state.engine.baseline
        logit, logprob, centred = baseline.numpy()
        passes = Cells.of([logit, logprob, centred], baseline.predicted.cpu().numpy())
        return Cells.joined([super().cells(state, subject), passes])

    def _engine(
        self, anatomy: Anatomy, pairs: Pairs, original: Ends, counterfactual: Ends, max_tokens: int | None
    ) -> PathEngine | EndPatching | EverywherePatching | ReceiverEngine:
        if self.receiver is not None:
            receiver = Receiver.parse(self.receiver)
            return ReceiverEngine(anatomy, pairs, original, counterfactual, receiver, max_rows=max_tokens)
        if self.positions == "all":
            return EverywherePatching(anatomy, pairs, original, max_tokens)
        engine = EndPatching if self.freeze == "none" else PathEngine
        return engine(anatomy, pairs, original, counterfactual, max_rows=max_tokens)

    def run(self, state: PathState, shard: Shard) -> pa.Table:
        """Rows of the shard's layers; or the pairs; or attribution of the asked layers' nodes."""
        if shard.table == "path_pairs":
            return state.pairs_table
        nodes = self.nodes(state.anatomy.shape)
        if shard.table == "attribution_scan":
            return self._attribution(state, nodes)
        parts = []
        for layer in shard.work["layers"]:
            patched = state.engine.patched(layer, nodes[layer], self.freeze)
            parts.append(self._rows(state, layer, nodes[layer], patched))
        return pa.concat_tables(parts)

    def _rows(self, state: PathState, layer: int, nodes: Sequence[int], patched: Measures) -> pa.Table:
        before, after = (m.numpy() for m in (state.engine.baseline, patched))
        logit, logprob, centred = (a - b for a, b in zip(after, before, strict=True))
        probability = np.exp(after[1]) - np.exp(before[1])
        relative = dict(zip(("logit", "logprob", "centred"), before, strict=True))
        change = {"logit": logit, "logprob": logprob, "centred": centred, "probability": probability}[self.effect]
        if self.effect in ("logit", "centred"):
            scale = relative[self.effect]
            change = change / (np.abs(scale) if self.denominator == "absolute" else scale)
        columns = {
            "logit_original": np.broadcast_to(before[0], logit.shape),
            "logit_patched": after[0],
            "effect": change,
            "logprob_change": logprob,
            "probability_change": probability,
            "centred_change": centred,
        }
        return _node_table(PATH_SCAN, state.names, [(layer, node) for node in nodes], columns)

    def _attribution(self, state: PathState, nodes: dict[int, list[int]]) -> pa.Table:
        engine = state.engine
        assert isinstance(engine, PathEngine | EndPatching)
        estimated = first_order(engine, self.freeze)
        direct, _ = direct_shares(state.anatomy, state.original, engine.gold_P)
        places = [(layer, node) for layer, members in nodes.items() for node in members]
        columns = {
            name: np.stack(
                [
                    (shares.mlps_LP[layer] if node == MLP else shares.heads_LHP[layer, node]).cpu().numpy()
                    for layer, node in places
                ]
            )
            for name, shares in (("first_order", estimated), ("direct", direct))
        }
        return _node_table(ATTRIBUTION_SCAN, state.names, places, columns)

    def notes(self, state: PathState) -> dict[str, Any]:
        """How many pairs were kept, and how far the engine strays from full passes and from itself."""
        return state.notes


def _node_table(
    schema: pa.Schema, names: pa.Array, places: Sequence[tuple[int, int]], columns: dict[str, np.ndarray]
) -> pa.Table:
    """Rows of ``schema``, node by node: N * P of them, from columns of N P."""
    pairs = len(names)
    layers, nodes = (np.repeat(values, pairs) for values in zip(*places, strict=True))
    filled: dict[str, Any] = {name: values.ravel().astype(np.float32) for name, values in columns.items()}
    filled["node"] = np.where(nodes == MLP, "mlp", "head")
    filled["layer"] = layers
    filled["head"] = pa.array(nodes, mask=nodes == MLP)
    filled["prompt_id"] = names.take(pa.array(np.tile(np.arange(pairs), len(places))))
    return pa.Table.from_arrays([pa.array(filled[f.name]).cast(f.type) for f in schema], schema=schema)


def _pairs_table(
    names: pa.Array, correct_P: np.ndarray, kept_P: np.ndarray, original: Measures, counterfactual: Measures
) -> pa.Table:
    own, other = original.numpy(), counterfactual.numpy()
    columns = [names, correct_P, kept_P, own[0], other[0], own[1], other[1], original.predicted.cpu().numpy()]
    schema = PATH_PAIRS
    return pa.Table.from_arrays([pa.array(c).cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
