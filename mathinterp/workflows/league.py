"""The league as one function: exact patching of every head and MLP, every method's estimate of it, their agreement, and
the circuits that each of them ranks.

Each stage is a run of its own in the store, so that the same call again goes on where it stopped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.ranking import MASK_SIZE
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.league.measures import agreements
from mathinterp.experiments.league.summary import summarize
from mathinterp.experiments.league.tables import COMPARED, LEAGUE_SCORES
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.results import Results, Summary
from mathinterp.frame import Frame
from mathinterp.models.catalog import ModelSpec, ResolvedModel, resolve
from mathinterp.models.handle import Model, model_of
from mathinterp.models.reading import read_prompts
from mathinterp.prompts.given import Prompts, prompts_of
from mathinterp.prompts.mib import fitting
from mathinterp.prompts.prompt import Prompt
from mathinterp.service.attached import HERE, Workers
from mathinterp.store import Store
from mathinterp.versions import code_version
from mathinterp.workflows.pipeline import Told, run_stage

if TYPE_CHECKING:
    from mathinterp.experiments.figures import Figure

TABLE = "league_scores"
DRAWS = 200  # bootstrap draws of prompts
NODE = "node, layer, coalesce(head, -1) AS head"
Nodes = tuple[list[tuple[str, int, int]], list[str]]  # nodes in order, and prompt ids


@dataclass(frozen=True)
class League:
    """A finished league. id: of the run that has the measures; runs: stage -> its run."""

    id: str
    runs: dict[str, str]
    store: Store = field(repr=False)

    @property
    def results(self) -> Results:
        """To ask about in SQL; ``$run`` is the league's own."""
        return Results(self.store, self.id)

    @property
    def summary(self) -> Summary:
        """The table of methods."""
        return summarize(self.results)

    @property
    def table(self) -> Frame:
        """The league's rows of ``method_league``."""
        return self.store.sql("SELECT * FROM method_league WHERE run_id = $run", run=self.id)

    def figure(self) -> "Figure":
        """Methods by measures."""
        from mathinterp.experiments.league.figure import draw

        return draw(self.results)


def league(
    model: Model | ModelSpec | str,
    prompts: Any = None,
    *,
    methods: Sequence[str] = COMPARED,
    steps: int = 5,
    store: str = "results",
    workers: Workers = HERE,
    told: Told = lambda title, run: None,
) -> League:
    """Run, or resume, exact patching, every method and the circuits that each ranks on the same prompts; compare them.

    Args:
        model: from ``load`` or ``wrap``, or a name.
        prompts: as for ``mathinterp.prompts``, each with a distractor; None: the set operand_pairs.
        methods: of ``scan attribution``, and "mask" for ``scan mask``.
        steps: of the eap-ig methods.
        workers: where shards are computed; None everywhere: in this process. See ``connect`` for a service.
        told: called after each stage with its title and how it went.
    Raises:
        UserError: a prompt has no distractor, or a method does not fit the model; before anything runs.
        StageUnfinished: shards of a stage were given up.

    >>> import mathinterp as mi
    >>> found = mi.league(mi.load("bundled"), mi.prompts("operand_pairs", limit=8), methods=["atp"])
    >>> sorted(found.table["method"])
    ['atp', 'exact']
    """
    workers = workers.attached()
    model = model if isinstance(model, ModelSpec) else model_of(model)
    given = "operand_pairs" if prompts is None else prompts
    read = given if isinstance(given, Prompts) else prompts_of(given)
    described = resolve(model) if isinstance(model, ModelSpec) else model.described
    asked = Prompts(tuple(fitting(read, described.tokenizer)), read.label, read.columns)
    stages: dict[str, Experiment] = {
        "heads": Heads(ablation="resample", positions="all"),
        "mlps": Mlps(ablation="resample", positions="all"),
        **{name: Mask() if name == "mask" else Attribution(method=name, steps=steps) for name in methods},
    }
    _check(described, stages, asked)
    runs: dict[str, str] = {}
    with workers.connected():
        for title, experiment in stages.items():
            runs[title] = run_stage(title, experiment, model, asked, store, workers, told)
        circuits = {name: Circuit((runs["heads"], runs["mlps"]) if name == "exact" else (runs[name],))
                    for name in ("exact", *methods)}  # fmt: skip
        ranked = {
            f"circuits of {name}": run_stage(f"circuits of {name}", circuit, model, asked, store, workers, told)
            for name, circuit in circuits.items()
        }
    opened = Store(store)
    return League(compare(opened, runs), {**runs, **ranked}, opened)


def compare(store: Store, runs: dict[str, str]) -> str:
    """Measure the agreement of finished runs with the exact ones "heads" and "mlps"; the id of the run that has it."""
    exact = {name: runs[name] for name in ("heads", "mlps")}
    methods = {name: run for name, run in runs.items() if name not in exact}
    (about,) = store.rows(
        "SELECT model, model_fingerprint, prompts, prompts_fingerprint, dtype FROM runs WHERE run_id = $run",
        {"run": exact["heads"]},
    )
    parameters = {**exact, "methods": methods, "draws": DRAWS}
    run = store.open_run(
        scan="league", parameters=parameters, code_version=code_version(), shards=[f"{TABLE}/00000"], **about
    )
    if run.missing_shards():
        store.write_shard(run.run_id, TABLE, 0, _rows(store, exact, methods), {"scan": "league", **parameters})
        run.finish()
    return run.run_id


def _rows(store: Store, exact: dict[str, str], methods: dict[str, str]) -> pa.Table:
    """The league's rows, the exact effects among them."""
    nodes, exact_NP = _effects(store, "exact_node_effects", exact.values())
    same = {"nodes": exact_NP.shape[0], "prompts": exact_NP.shape[1]}
    rows: list[dict[str, Any]] = []
    for method, run in {"exact": exact["heads"], **methods}.items():
        own, other = (nodes, exact_NP) if method == "exact" else _of_method(store, method, run, nodes)
        assert own == nodes, f"run {run} of {method} has other nodes or prompts than the exact runs"
        rows += [
            {"method": method, "ranking_run": run, **same, **vars(found)}
            for found in agreements(exact_NP, other, draws=DRAWS)
        ]
    return pa.Table.from_pylist(rows, LEAGUE_SCORES)


def _of_method(store: Store, method: str, run: str, nodes: Nodes) -> tuple[Nodes, np.ndarray]:
    """Its effects, N P; of a mask, which has one score a node and no prompts, N."""
    if method != "mask":
        return _effects(store, "node_attributions", [run])
    rows = store.rows(
        f"SELECT {NODE}, {MASK_SIZE} AS size FROM mask_scores WHERE run_id = $run ORDER BY ALL", {"run": run}
    )
    return ([(row["node"], row["layer"], row["head"]) for row in rows], nodes[1]), np.array(
        [row["size"] for row in rows]
    )


def _effects(store: Store, view: str, runs: Iterable[str]) -> tuple[Nodes, np.ndarray]:
    """Nodes and prompts, and their effects: N P."""
    names = ", ".join(f"'{run}'" for run in runs)
    found = store.dataframe(
        f"""SELECT {NODE}, prompt_id, effect::DOUBLE AS effect FROM {view}
            WHERE run_id IN ({names}) AND node <> 'neuron'"""
    )
    wide = found.pivot(index=["node", "layer", "head"], columns="prompt_id", values="effect").sort_index()
    values_NP = wide.to_numpy(float)
    assert np.isfinite(values_NP).all(), f"runs {names} lack effects of some node on some prompt"
    return ([(str(node), int(layer), int(head)) for node, layer, head in wide.index], list(wide.columns)), values_NP


def _check(described: ResolvedModel, stages: dict[str, Experiment], prompts: Sequence[Prompt]) -> None:
    """Cut every stage into shards; raises UserError for what one of them would refuse."""
    from mathinterp.prompts.pairs import with_counterfactuals

    tokenized = read_prompts(with_counterfactuals(prompts, described.tokenizer), described)
    if len(stages) < 3:
        raise UserError("no `methods` to compare with exact patching; name at least one")
    for experiment in stages.values():
        experiment.shards(described.shape, tokenized)
