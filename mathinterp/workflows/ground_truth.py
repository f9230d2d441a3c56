"""Every method on models whose circuit is known: does it rank what was planted above all that was not?

The models are those of models/ground_truth/. Each method runs as its experiment does, with a store of its own for the
time, so that engines, rows and SQL are all held against the truth.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch

from mathinterp.cluster.run import run_scan
from mathinterp.engine.choose import build_engine
from mathinterp.engine.intervention import zeroed
from mathinterp.errors import UserError
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.ranking import node_scores
from mathinterp.experiments.attribution.tables import METHODS
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.head_pairs import HeadPairs
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.paths import Paths
from mathinterp.models.catalog import DTYPES
from mathinterp.models.ground_truth import PLANTED, Planted
from mathinterp.models.reading import read_prompts
from mathinterp.models.units import Head, Mlp, Neuron, Unit
from mathinterp.models.wrapped import WrappedModel
from mathinterp.prompts.given import Prompts
from mathinterp.prompts.prompt import with_distractors
from mathinterp.prompts.spread import even_spread
from mathinterp.store import Store

LIMIT = 40  # prompts of each model
MASK_STEPS = 60
ZERO, MEAN, RESAMPLE, PATHS = "zero ablation", "mean ablation", "resample ablation", "path patching"
EXACT: dict[str, tuple[Experiment, ...]] = {
    ZERO: (Heads(), Mlps()),
    MEAN: (Heads(ablation="mean"), Mlps(ablation="mean")),
    RESAMPLE: tuple(kind(ablation="resample", positions="all") for kind in (Heads, Mlps)),
    PATHS: (Paths(attribution=False),),
}
ESTIMATES: dict[str, tuple[Experiment, ...]] = {
    **{name: (Attribution(method=name, neurons=True),) for name in METHODS}, "mask": (Mask(steps=MASK_STEPS),),
}  # fmt: skip
ALONE, FROZEN = "a backup head is hidden", "frozen heads pass nothing on"
INDIRECT = "neurons that add write no answer"
DOCUMENTED: dict[tuple[str, str], str] = {  # exact methods that cannot find all, and why
    **{("backup", name): ALONE for name in EXACT}, ("pointer", PATHS): FROZEN,
}  # fmt: skip
Scores = dict[Unit, float]


@dataclass(frozen=True)
class Recovery:
    """How well one method's ranking tells what was planted from what was not.

    planted: what counts as planted.
    auroc: the probability that one planted unit has a larger absolute score than one that is not; ties count half.
    weakest: the planted unit of smallest score.
    margin: that score over the largest of those not planted, above 1 iff the AUROC is 1; None: that largest one is 0.
    expected: 1, below 1 with the reason, or None: whatever is found.
    """

    model: str
    method: str
    planted: str
    auroc: float
    weakest: str
    margin: float | None
    expected: str | None

    @property
    def holds(self) -> bool:
        """Whether it is as expected."""
        return self.expected is None or (self.auroc == 1) == (self.expected == "1")


def recoveries(models: Sequence[str] | None = None, dtype: str = "float32", device: str = "cpu") -> Iterator[Recovery]:
    """Each method on each model.

    Args:
        models: of ``PLANTED``; None: all.
        dtype: float32 or float64, in which what was planted holds.
    Raises:
        UserError: another dtype, or no such model.
    """
    if dtype not in ("float32", "float64"):
        raise UserError(f"the written models hold in float32 and float64, not in {dtype}; give `dtype` float32")
    for name in PLANTED if models is None else models:
        if name not in PLANTED:
            raise UserError(f"there is no written model '{name}'; take one of {', '.join(PLANTED)}")
        planted = PLANTED[name]()
        lent = WrappedModel(planted.model(DTYPES[dtype], device), planted.tokenizer, name)
        yield from _of_model(planted, lent, Prompts(tuple(even_spread(planted.prompts, LIMIT)), name))


def auroc(scores: Mapping[Unit, float], planted: Collection[Unit]) -> float:
    """The probability that the absolute score of one that is planted is above that of one that is not (ties: half)."""
    ranks = pd.Series([abs(score) for score in scores.values()]).rank()
    inside = np.array([unit in planted for unit in scores])
    positives, others = int(inside.sum()), int((~inside).sum())
    assert positives == len(planted), "every planted unit has a score"
    return float((ranks[inside].sum() - positives * (positives + 1) / 2) / (positives * others))


def _of_model(planted: Planted, model: WrappedModel, prompts: Prompts) -> Iterator[Recovery]:
    def recovery(method: str, scores: Scores, units: Collection[Unit], what: str, expected: str | None) -> Recovery:
        sizes = {unit: abs(score) for unit, score in scores.items()}
        weakest = min(units, key=lambda unit: sizes[unit])
        largest = max(size for unit, size in sizes.items() if unit not in units)
        margin = sizes[weakest] / largest if largest else None
        found = auroc(scores, units)
        return Recovery(planted.name, method, f"{len(units)} {what}", found, str(weakest), margin, expected)

    neurons = frozenset[Unit](planted.neurons)
    with TemporaryDirectory() as folder:

        def run(experiments: Sequence[Experiment]) -> list[str]:
            return [run_scan(each, model, prompts, folder, progress=False).run_id for each in experiments]

        runs = {method: run(experiments) for method, experiments in {**EXACT, **ESTIMATES}.items()}
        (cna,) = run([Neurons()]) if neurons else [""]
        pairs = {given: run([HeadPairs(given=(given,))])[0] for given in planted.stand_ins.values()}
        store = Store(folder)
        with store.held():
            for method, made in runs.items():
                why = DOCUMENTED.get((planted.name, method))
                expected = None if method in ESTIMATES else "1" if why is None else f"below 1: {why}"
                yield recovery(method, _ranked(store, made), planted.circuit, "heads and MLPs", expected)
                if neurons and method in METHODS:
                    yield recovery(method, _ranked(store, made, neurons=True), neurons, "neurons", None)
            for stand_in, given in planted.stand_ins.items():
                yield recovery(
                    f"head pairs, given {given}", _interactions(store, pairs[given]), {stand_in}, "head", "1"
                )
            if neurons:
                yield recovery(ZERO, _neurons_out(model, prompts), neurons, "neurons", "1")
                importances, writers = _importances(store, cna), frozenset[Unit](planted.writers)
                yield recovery("CNA importance", importances, writers, "neurons that answer", "1")
                yield recovery("CNA importance", importances, neurons, "neurons", f"below 1: {INDIRECT}")


def _ranked(store: Store, runs: Sequence[str], *, neurons: bool = False) -> Scores:
    """Mean effect on the logit difference of all heads and MLPs, or of all neurons: as keys, 0.1 and 0.1 are equal."""
    found: Scores = {}
    for run in runs:
        for node, layer, unit, score in node_scores(store, run).itertuples(index=False):
            if (node == "neuron") == neurons:
                kind = Neuron if neurons else Head
                found[Mlp(int(layer)) if node == "mlp" else kind(int(layer), int(unit))] = float(score)
    return found


def _interactions(store: Store, run: str) -> Scores:
    """How much more each head costs with the given ones out than alone."""
    rows = store.rows(
        "SELECT layer, head, interaction FROM head_pairs WHERE run_id = $run AND operation = 'all'", {"run": run}
    )
    return {Head(row["layer"], row["head"]): row["interaction"] for row in rows}


def _importances(store: Store, run: str) -> Scores:
    """Mean importance of each neuron for the predicted answer."""
    rows = store.rows(
        "SELECT layer, neuron, importance FROM neuron_summary WHERE run_id = $run AND operation = 'all'", {"run": run}
    )
    return {Neuron(row["layer"], row["neuron"]): row["importance"] for row in rows}


@torch.inference_mode()
def _neurons_out(model: WrappedModel, prompts: Prompts) -> Scores:
    """Mean change of the logit difference with each neuron zeroed."""
    with model.lent() as loaded:
        anatomy = loaded.anatomy
        engine = build_engine(anatomy, with_distractors(read_prompts(prompts, model.described)))
        positions = engine.answers.position_A

        def differences(logit_EA: np.ndarray) -> np.ndarray:
            means_E: np.ndarray = (logit_EA[:, positions == 0] - logit_EA[:, positions == -1]).mean(1)
            return means_E

        clean = float(differences(engine.baseline().logit_EA)[0])
        found: Scores = {}
        for layer in range(anatomy.shape.n_layers):
            neurons = [Neuron(layer, neuron) for neuron in range(anatomy.shape.n_neurons)]
            scores = engine.run([zeroed(anatomy, [neuron]) for neuron in neurons])
            found.update(zip(neurons, (differences(scores.logit_EA) - clean).tolist(), strict=True))
        return found
