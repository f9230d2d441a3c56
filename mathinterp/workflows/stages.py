"""What is run for the papers' tables and figures: each stage is one run in the store, some follow from others.

Knows experiments, prompts and their order; knows nothing about numbers that papers print.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.chain import Chain
from mathinterp.experiments.chosen_heads import chosen_heads
from mathinterp.experiments.concepts import Concepts
from mathinterp.experiments.gender_neurons import SHOWN, GenderNeurons
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.mask_keep import MaskKeep
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.neuron_edit import NeuronEdit
from mathinterp.experiments.neuron_graph import NeuronGraph
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.against import Against
from mathinterp.experiments.paths import Paths
from mathinterp.experiments.results import Results
from mathinterp.models.catalog import ResolvedModel
from mathinterp.models.reading import model_passages
from mathinterp.models.units import Head, Neuron
from mathinterp.prompts import load_prompts
from mathinterp.prompts.gender import bias_prompts, contrast_prompts
from mathinterp.prompts.given import Prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.spread import even_spread
from mathinterp.store import Store

if TYPE_CHECKING:
    from mathinterp.experiments.concept_zeroing import ConceptZeroing

KNOCKED_OUT = (1, 2, 4, 8, 10, 16, 32, 64)  # as usual, and the paper's 10
LOOKED_AT = 8  # heads whose attention is read


@dataclass(frozen=True)
class Asked:
    """What all stages are made from.

    own: the paper's model that this one is taken for, or "".
    runs: stage -> its run, of those that are done; a stage reads those it needs.
    data: public file of word problems, by its name here ("svamp"), where the user gives it.
    """

    model: ResolvedModel
    own: str
    store: Store
    limit: int | None = None
    seed: int = 0
    data: Path | None = None
    runs: dict[str, str] = field(default_factory=dict)

    def rows(self, stage: str, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Rows of a query in which ``$run`` is the stage's run."""
        return Results(self.store, self.runs[stage]).rows(sql, **values)

    def costly_head(self, operations: Sequence[str], published: str) -> Head:
        """The head that costs these one-digit operations most; on the paper's own model the one that it takes."""
        if self.own == "Llama-7B":
            return Head(*map(int, published.split(".")))
        [row] = self.rows(
            "heads_1d",
            """SELECT layer, head FROM head_effects WHERE run_id = $run AND list_contains($operations, operation)
               GROUP BY layer, head ORDER BY round(avg(drop), 12) DESC, avg(logprob_change), layer, head LIMIT 1""",
            operations=list(operations),
        )
        return Head(row["layer"], row["head"])


@dataclass(frozen=True)
class Stage:
    """One run. needs: stages whose runs it reads. stand_in: what costs as much, for a plan before those are done."""

    name: str
    prompts: Callable[[Asked], Prompts]
    experiment: Callable[[Asked], Experiment]
    needs: tuple[str, ...] = ()
    stand_in: Callable[[Asked], Experiment] | None = None


def named(name: str, operations: Sequence[str] = ()) -> Callable[[Asked], Prompts]:
    """A prompt set, or its prompts of some operations."""

    def made(asked: Asked) -> Prompts:
        every = load_prompts(name, seed=asked.seed)
        chosen = [prompt for prompt in every if not operations or prompt.operation in operations]
        label = " ".join([name, *operations, *([f"limit={asked.limit}"] if asked.limit else [])])
        return Prompts(tuple(even_spread(chosen, asked.limit)), label)

    return made


def _word_problems(asked: Asked) -> Prompts:
    if asked.data is None:
        raise UserError("needs the public file SVAMP.json (`data`)")
    return named(f"svamp:{asked.data / 'svamp' / 'SVAMP.json'}")(asked)


def _sentence(asked: Asked) -> Prompts:
    """Paper A's "3+5="; models that were not trained on it are asked with spaces."""
    text, separator = ("3+5=", "") if asked.own in ("Llama-7B", "GPT-J-6B") else ("3 + 5 =", " ")
    return Prompts((Prompt("3+5", text, "8", "add", "3", "5", "symbols", separator=separator),), text)


def _knockout(ablation: str) -> tuple[Callable[[Asked], Experiment], Callable[[Asked], Experiment]]:
    def ks(asked: Asked) -> tuple[int, ...]:
        most = asked.model.shape.n_layers * asked.model.shape.n_heads // 2
        return tuple(k for k in KNOCKED_OUT if k <= most) or (1,)

    return (
        lambda asked: Knockout(ablation=ablation, rank_from=asked.runs["paths"], ks=ks(asked)),
        lambda asked: Knockout(
            ablation=ablation, heads=tuple(chosen_heads(asked.model.shape, None, None)), key=(), ks=ks(asked)
        ),
    )


def _against(head: Head) -> Neurons:
    return Neurons(Against.read(f"head:{head}"))


def _neurons(operations: Sequence[str], published: str) -> tuple[Callable[[Asked], Experiment], ...]:
    return (
        lambda asked: _against(asked.costly_head(operations, published)),
        lambda asked: _against(Head(0, 0)),
    )


def _zeroing(asked: Asked) -> "ConceptZeroing":
    results = Results(asked.store, asked.runs["concepts"])
    found = Concepts().follow_up(results, Concepts.show_options())
    if found is None:
        raise UserError("the concept scan keeps no neuron at any level")
    return found


def _looked_at(asked: Asked) -> Attention:
    rows = asked.rows(
        "paths",
        """SELECT layer, head FROM path_effects WHERE run_id = $run AND operation = 'all' AND node = 'head'
           ORDER BY mean, layer, head LIMIT $most""",
        most=LOOKED_AT,
    )
    return Attention(heads=tuple(Head(row["layer"], row["head"]) for row in rows))


def _gender_edit(asked: Asked) -> NeuronEdit:
    rows = asked.rows(
        "gender",
        "SELECT layer, neuron FROM gender_neurons WHERE run_id = $run AND rank <= $top ORDER BY rank",
        top=SHOWN,
    )
    neurons = tuple(Neuron(row["layer"], row["neuron"]) for row in rows)
    return NeuronEdit(neurons, passages=model_passages(None, asked.model))


def _cna(name: str, operations: tuple[str, ...], head: str, digits: str = "one_digit") -> tuple[Stage, ...]:
    """Comparative neuron analysis on some operations, and what follows from it."""
    prompts, (experiment, stand_in) = named(digits, operations), _neurons(operations, head)
    neurons = f"neurons_{name}"
    return (
        Stage(neurons, prompts, experiment, ("heads_1d",), stand_in),
        Stage(f"maskkeep_{name}", prompts, lambda asked: MaskKeep(neurons_from=asked.runs[neurons]), (neurons,)),
        Stage(f"graph_{name}", prompts, lambda asked: NeuronGraph(neurons_from=asked.runs[neurons]), (neurons,)),
        Stage(f"zeroing_{name}", prompts, _zeroing, ("concepts",)),
    )


def _on_gpt_j() -> tuple[Stage, ...]:
    """Paper A's appendix C: two-digit subtraction and GPT-J's head 13.9."""
    return tuple(
        replace(stage, needs=tuple(need for need in stage.needs if need != "heads_1d"))
        if stage.name != "neurons_sub"
        else replace(stage, experiment=lambda asked: _against(Head(13, 9)), needs=())
        for stage in _cna("sub", ("sub",), "13.9", "two_digit")
    )


def _made(stage: str, prompts: str, ablation: str = "mean") -> Stage:
    experiment, stand_in = _knockout(ablation)
    return Stage(stage, named(prompts), experiment, ("paths",), stand_in)


def _svamp() -> Stage:
    return replace(_made("knockout_svamp", "pairs", "zero"), prompts=_word_problems)


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("heads_2d", named("two_digit"), lambda asked: Heads()),
        Stage("heads_1d", named("one_digit"), lambda asked: Heads()),
        Stage("heads_3d", named("three_digit"), lambda asked: Heads()),
        Stage("chain", _sentence, lambda asked: Chain(heads=(Head(17, 22),)) if asked.own == "Llama-7B" else Chain()),
        Stage("concepts", lambda asked: Prompts(tuple(named("one_digit")(asked)[:1]), "one_digit"),
        lambda asked: Concepts()),
        *_cna("1d", ("add", "sub"), "17.22"),
        *_cna("div", ("div",), "14.19"),
        *_on_gpt_j(),
        Stage("gender", lambda asked: Prompts(tuple(contrast_prompts()), "gender"), lambda asked: GenderNeurons()),
        Stage("gender_edit", lambda asked: Prompts(tuple(bias_prompts()), "gender bias"), _gender_edit, ("gender",)),
        Stage("paths", named("pairs"), lambda asked: Paths()),
        _made("knockout", "pairs"),
        _made("knockout_multi_digit", "multi_digit"),
        _made("knockout_rationals", "rationals"),
        _made("knockout_year_spans", "year_spans", "zero"),
        _svamp(),
        Stage("attention", named("pairs"), _looked_at, ("paths",)),
        Stage("probe", named("pairs"), lambda asked: MlpProbe()),
    )
}  # fmt: skip


def in_order(names: Sequence[str]) -> list[Stage]:
    """These stages and all that they need, each after what it needs."""
    found: dict[str, Stage] = {}

    def add(name: str) -> None:
        if name in STAGES and name not in found:
            for need in STAGES[name].needs:
                add(need)
            found[name] = STAGES[name]

    for name in names:
        add(name)
    return list(found.values())
