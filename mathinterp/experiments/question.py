"""One question, answered at once: named heads, MLPs and neurons replaced together, nothing stored.

Knows ablations and scores; knows nothing about stores or clusters. The same numbers as a scan that asks for one of
these units: the same engines, replacements and rules of what counts as right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mathinterp.engine.intervention import Tokens, label, site_of
from mathinterp.engine.scores import Scores
from mathinterp.errors import UserError
from mathinterp.experiments.ablated import AblationState, ablated, engines_of
from mathinterp.experiments.ablation import ABLATIONS
from mathinterp.experiments.base import Subject
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.options import read_heads, read_layers, read_neurons
from mathinterp.experiments.own_value import Chosen, engine_for, is_intervention, own_intervention, tokens_of
from mathinterp.frame import Frame
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.handle import Model, model_of
from mathinterp.models.reading import read_prompts
from mathinterp.models.units import Head, Mlp, Neuron
from mathinterp.prompts.given import Prompts, prompts_of
from mathinterp.prompts.pairs import with_counterfactuals
from mathinterp.prompts.prompt import with_distractors

Named = tuple[Sequence[Head], Sequence[int], Sequence[Neuron]]  # heads, layers of MLPs, neurons


@dataclass(frozen=True)
class Answered:
    """What became of the answers.

    what: the units that were replaced, and by what.
    rows: a row per scored answer token: prompt_id, operation, position, and correct, logprob, logit, predicted_id (of
        ``baseline`` and of the tables of scans) with the units replaced and, as ``baseline_...``, without.
    effects: a row per operation, ``all`` first: n, baseline_accuracy, accuracy, drop (fractions, as in
        ``head_effects``) and logprob_change (nats per unit).
    """

    what: str
    rows: Frame
    effects: Frame

    @property
    def accuracy(self) -> float:
        """The mean over operations with the units replaced; a fraction."""
        return float(self.effects["accuracy"].iloc[0])

    @property
    def baseline_accuracy(self) -> float:
        """The mean over operations of the unedited model."""
        return float(self.effects["baseline_accuracy"].iloc[0])

    @property
    def drop(self) -> float:
        """``baseline_accuracy - accuracy``."""
        return float(self.effects["drop"].iloc[0])

    def __str__(self) -> str:
        return f"{self.what}\n{self.effects.to_string(index=False)}"

    __repr__ = __str__


def ablate(
    model: Model | str,
    prompts: Any,
    *,
    heads: str | Iterable[Any] | None = None,
    mlps: str | Iterable[int] | None = None,
    neurons: str | Iterable[Any] | None = None,
    value: Any = "zero",
    positions: str | None = None,
    tokens: Chosen = None,
    scoring: str | None = None,
) -> Answered:
    """Replace the named units together and answer all prompts again; nothing is stored.

    Args:
        model: from ``load`` or ``wrap``, or a name.
        prompts: as for ``mathinterp.prompts``.
        heads: for example ["0.6", "0.1"], "0.6,0.1" or [(0, 6)].
        mlps: layers whose whole MLP is replaced, for example [3].
        neurons: for example ["5.17"].
        value: "zero", "mean" over the counterfactual prompts, "resample" from the paired counterfactual, or
            "dataset_mean" over the prompts themselves. Or one's own: a number that activations are multiplied by; a
            vector (of the site's width; for heads also of one head's, which each gets); ``mathinterp.prompts(...)``,
            one for each prompt, whose activations are taken; a ``Value``, or an ``Intervention``, which names its units
            itself (mathinterp.engine.intervention).
        positions: tokens that are edited, "all" or "end"; None: all for zero, else end.
        tokens: where, for "zero" and values of one's own: "all", "end", indices of tokens like [0, 3], or token types
            like ["operand_a"]; None: all, but END for activations of other prompts.
        scoring: "token", "first_token" or "exact_match"; None: token, but first_token when only END is edited.
    Raises:
        UserError: nothing is named, a unit or token does not exist, a vector has another width, or a prompt cannot be
            read.

    >>> import mathinterp as mi
    >>> model = mi.load("bundled")
    >>> answer = mi.ablate(model, mi.prompts("two_digit", limit=40), heads=["0.6"])
    >>> answer.drop > 0.1
    True
    >>> list(answer.effects["operation"])
    ['all', 'add', 'div', 'mul', 'sub']

    Half of the head at the first word, a vector in its place, and what it says on other prompts at END:

    >>> plus, times = ([f"{a} {sign} 31 =" for a in (12, 45)] for sign in ("+", "*"))
    >>> asked = mi.prompts([{"text": text, "answer": str(sum)} for text, sum in zip(plus, (43, 76))])
    >>> other = mi.prompts([{"text": text, "answer": str(product)} for text, product in zip(times, (372, 1395))])
    >>> mi.ablate(model, asked, heads=["0.6"], value=0.5, tokens=["first"]).what
    'head 0.6 replaced (times 0.5, first)'
    >>> mi.ablate(model, asked, heads=["0.6"], value=[0.0] * 32).drop == mi.ablate(model, asked, heads=["0.6"]).drop
    True
    >>> mi.ablate(model, asked, heads=["0.6"], value=other).what
    'head 0.6 replaced (other prompts, end)'
    """
    model = model_of(model)
    chosen = read_heads(heads) or (), read_layers(mlps, "mlps") or (), read_neurons(neurons) or ()
    if tokens is None and isinstance(value, str):
        return _named_value(model, prompts, value, chosen, positions, scoring)
    if positions is not None:
        raise UserError("`positions` belongs to the named values; say in `tokens` where")
    if not is_intervention(value):
        return _own(model, prompts, value, _units(model.described.shape, *chosen), tokens, scoring)
    if any(chosen) or tokens is not None:
        raise UserError("an intervention names its units and tokens itself; leave out the others")
    return _own(model, prompts, value, [], None, scoring)


def _named_value(
    model: Model, prompts: Any, value: str, chosen: Named, positions: str | None, scoring: str | None
) -> Answered:
    """The answers under one of ABLATIONS; see ``ablate``."""
    if value not in ABLATIONS:
        raise UserError(f"`value` '{value}' is not known; take one of {', '.join(ABLATIONS)}")
    scan = Heads(value, positions=positions, scoring=scoring)
    units = _units(model.described.shape, *chosen)
    given: Sequence[Any] = prompts if isinstance(prompts, Prompts) else prompts_of(prompts)
    if scan.needs_counterfactuals:
        given = with_counterfactuals(given, model.tokenizer)
    tokenized = read_prompts(given, model.described)
    what = f"{_named(units)} replaced ({value}, {scan.edited_positions})"
    with model.lent() as loaded:
        state = engines_of(scan, Subject(loaded.anatomy, tokenized, tokenizer=loaded.tokenizer), 1, 1)
        rows = _rows(state, state.engine.baseline(), state.engine.run([ablated(scan, state, units)]))
    return Answered(what, Frame(rows), Frame(_effects(rows, scan.parameters()["scoring"])))


def _own(
    model: Model, prompts: Any, value: Any, units: list[Head | Mlp | Neuron], tokens: Chosen, scoring: str | None
) -> Answered:
    """The answers under an intervention of one's own; see ``ablate``."""
    if isinstance(value, str) and value != "zero":
        raise UserError(f"`tokens` belongs to zero and to values of one's own, not to `value` '{value}'")
    patches = isinstance(value, Prompts)
    where = "end" if patches and tokens is None else tokens
    tokenized = read_prompts(prompts if isinstance(prompts, Prompts) else prompts_of(prompts), model.described)
    others = read_prompts(value, model.described) if patches else None
    scoring = Heads(positions="end" if where == "end" else "all", scoring=scoring).parameters()["scoring"]
    with model.lent() as loaded:
        asked = with_distractors(tokenized)
        places = tokens_of(where, asked, loaded.tokenizer)
        changes = own_intervention(value, units, places, loaded.anatomy, asked, others)
        engine = engine_for(changes, loaded.anatomy, asked)
        state = AblationState(loaded.anatomy, asked, engine, None, {})
        rows = _rows(state, engine.baseline(), engine.run([changes]))
    what = f"{_named(units) or label(changes)} replaced ({_told(value)}, {_told_tokens(where)})"
    return Answered(what, Frame(rows), Frame(_effects(rows, scoring)))


def _told(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"times {value:g}"
    return "other prompts" if isinstance(value, Prompts) else "own value"


def _told_tokens(where: Any) -> str:
    if where is None or isinstance(where, str | int):
        return "all" if where is None else str(where)
    return "own tokens" if isinstance(where, Tokens) else ", ".join(map(str, where))


def _units(
    shape: ModelShape, heads: Sequence[Head], mlps: Sequence[int], neurons: Sequence[Neuron]
) -> list[Head | Mlp | Neuron]:
    """What is replaced, layer by layer within its kind; raises UserError for what does not exist."""
    for head in heads:
        shape.check_head(*head)
    for layer in [*(neuron.layer for neuron in neurons), *mlps]:
        shape.check_layer(layer)
    for layer, neuron in neurons:
        if not 0 <= neuron < shape.n_neurons:
            raise UserError(f"neuron {layer}.{neuron} does not exist: each layer has 0 to {shape.n_neurons - 1}")
    units: list[Head | Mlp | Neuron] = [*dict.fromkeys(heads), *dict.fromkeys(neurons), *map(Mlp, dict.fromkeys(mlps))]
    if not units:
        raise UserError("nothing is named to replace; give `heads`, `mlps` or `neurons`")
    return units


def _named(units: Sequence[Head | Mlp | Neuron]) -> str:
    """ "head 0.6, mlp 3"."""
    return ", ".join(str(unit) if isinstance(unit, Mlp) else f"{site_of(unit)} {unit}" for unit in units)


def _rows(state: AblationState, baseline: Scores, edited: Scores) -> pd.DataFrame:
    answers = state.engine.answers
    asked = [state.prompts[prompt].prompt for prompt in answers.prompt_A]
    columns: dict[str, Any] = {
        "prompt_id": [prompt.prompt_id for prompt in asked],
        "operation": [prompt.operation for prompt in asked],
        "position": answers.position_A,
    }
    for prefix, scores in (("", edited), ("baseline_", baseline)):
        columns[f"{prefix}correct"] = scores.correct_EA[0]
        columns[f"{prefix}logprob"] = scores.logprob_EA[0]
        columns[f"{prefix}logit"] = scores.logit_EA[0]
        columns[f"{prefix}predicted_id"] = scores.predicted_EA[0]
    return pd.DataFrame(columns).query("position >= 0").reset_index(drop=True)  # those below are distractors


def _effects(rows: pd.DataFrame, scoring: str) -> pd.DataFrame:
    """As the view ``ablation_effects`` counts, without its intervals."""
    if scoring == "first_token":
        rows = rows[rows["position"] == 0]
    rows = rows.assign(change=rows["logprob"].astype(float) - rows["baseline_logprob"].astype(float))
    rows["operation"] = rows["operation"].fillna("none")
    if scoring == "exact_match":
        right = {"correct": "min", "baseline_correct": "min", "change": "sum"}
        rows = rows.groupby(["operation", "prompt_id"], as_index=False).agg(right)
    grouped = rows.groupby("operation")
    found = pd.DataFrame(
        {
            "n": grouped.size(),
            "baseline_accuracy": grouped["baseline_correct"].mean(),
            "accuracy": grouped["correct"].mean(),
            "drop": grouped["baseline_correct"].mean() - grouped["correct"].mean(),
            "logprob_change": grouped["change"].mean(),
        }
    ).reset_index()
    overall = {"operation": "all", "n": int(found["n"].sum()), **found.drop(columns=["operation", "n"]).mean()}
    return pd.concat([pd.DataFrame([overall]), found], ignore_index=True)
