"""One neuron's card: what a neuron scan stored about it, and the tokens that its value vector raises.

Knows the store's views and the lens; knows nothing about how the stored rows were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.engine.lens.top_tokens import top_tokens, value_directions
from mathinterp.errors import UserError
from mathinterp.experiments.neurons.stored import check_model, neuron_run
from mathinterp.experiments.options import read_neurons
from mathinterp.experiments.results import Results, Row
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import LoadedModel, ModelSpec, load, resolve
from mathinterp.models.units import Neuron

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.store import Store

SHOWN_PROMPTS = 5
Tokens = list[Row]  # token: its text; value: coefficient times W_U (g v), a logit but for the final norm's scale


@dataclass(frozen=True)
class NeuronCard:
    """What is known of one neuron.

    run_id, against: the neuron scan, and what it compared the model with, for people; None if nothing.
    operations: one row an operation, 'all' first: mean and spread (standard deviation over prompts) of coefficient,
        importance and change; rank among all neurons of the run by what it ranks by, of the means; in_top: share of
        prompts that have it among their first.
    prompts: the prompts that rank it highest.
    tokens: "v" and "-v", and one entry "c v, OPERATION" for each operation's mean coefficient c.
    """

    run_id: str
    model: str
    neuron: str
    against: str | None
    operations: list[Row]
    prompts: list[Row]
    tokens: dict[str, Tokens]
    verdict: str
    queries: list[str]


def neuron_card(
    neuron: str | tuple[int, int], model: ModelSpec, store: "Store", neurons_from: str | None = None, count: int = 10
) -> NeuronCard:
    """The card of one neuron; loads the model on this machine, without Ray.

    Args:
        neuron: "layer.neuron", or the two numbers.
        neurons_from: the neuron scan's run; None: the model's only one in the store.
        count: tokens of each list.
    Raises:
        UserError: a neuron that cannot be read or that the model has not, no such run or several, a run of another
            model, or a layer that the run did not look at.
    """
    chosen, resolved = one_neuron(neuron), resolve(model)
    if neurons_from is None:
        run = only_run(store, resolved.fingerprint, resolved.label)
    else:
        run = neuron_run(store, neurons_from)
        check_model(run, resolved.fingerprint, resolved.label)
    resolved.shape.check_neuron(*chosen)
    return card_of(store, run, chosen, load(model), resolved.label, count)


def one_neuron(given: str | tuple[int, int]) -> Neuron:
    """The one neuron that is named; raises UserError."""
    if not isinstance(given, str):
        return Neuron(*given)
    try:
        neurons = read_neurons(given) or ()
    except UserError:
        raise UserError(f"neuron '{given}' cannot be read; write layer.neuron, like 28.3696") from None
    if len(neurons) != 1:
        raise UserError(f"neuron '{given}' names {len(neurons)}; a card is of one")
    return neurons[0]


def only_run(store: "Store", fingerprint: str, label: str) -> Row:
    """The one finished neuron scan of a model; raises UserError if there is none, or more than one."""
    runs = store.rows(
        "SELECT run_id FROM runs WHERE scan = 'neurons' AND status = 'finished'"
        " AND model_fingerprint = $fingerprint ORDER BY started_at",
        {"fingerprint": fingerprint},
    )
    if len(runs) != 1:
        found = ", ".join(row["run_id"] for row in runs)
        raise UserError(
            f"{store.url} has several neuron scans of {label}: {found}; choose one with `neurons_from`"
            if runs
            else f"{store.url} has no finished neuron scan of {label}; run 'mathinterp scan neurons' first"
        )
    return neuron_run(store, runs[0]["run_id"])


def card_of(store: "Store", run: Row, neuron: Neuron, loaded: LoadedModel, label: str, count: int) -> NeuronCard:
    """The card of one neuron of a model in memory.

    Args:
        run: from ``neuron_run`` or ``only_run``.
        label: the model's name, for people.
        count: tokens of each list.
    Raises UserError for a layer that the run did not look at.
    """
    results = Results(store, run["run_id"])
    where = f"run_id = $run AND layer = {neuron.layer:d} AND neuron = {neuron.neuron:d}"
    operations = results.rows(
        f"""SELECT * EXCLUDE (run_id, layer, neuron) FROM (
                SELECT run_id, layer, neuron, coalesce(operation, 'none') AS operation, n,
                       row_number() OVER (ranked ORDER BY ranked_by DESC, layer, neuron) AS rank,
                       count(*) OVER ranked AS neurons, in_top,
                       coefficient, coefficient_std, intervened_coefficient, importance, importance_std,
                       intervened_importance, change, change_std
                FROM neuron_summary WHERE run_id = $run WINDOW ranked AS (PARTITION BY operation)
            ) WHERE {where} ORDER BY operation = 'all' DESC, operation"""
    )
    if not operations:
        raise UserError(
            f"run {run['run_id']} did not look at layer {neuron.layer}; scan neurons with that layer among its `layers`"
        )
    prompts = results.rows(
        f"""SELECT rank, prompt_id, text, answer, c.coefficient, c.intervened_coefficient, c.importance, c.change
            FROM neuron_changes AS c JOIN prompts AS p USING (prompt_id)
            WHERE {where} AND in_top AND p.prompts_fingerprint = $prompts
            ORDER BY rank, prompt_id LIMIT {SHOWN_PROMPTS}""",
        prompts=run["prompts_fingerprint"],
    )
    direction_V = value_directions(loaded.anatomy, [neuron])[0]
    signs = {"v": 1.0, "-v": -1.0, **{f"c v, {row['operation']}": row["coefficient"] for row in operations}}
    tokens = {name: _named(top_tokens(direction_V, sign, count), loaded.tokenizer) for name, sign in signs.items()}
    return NeuronCard(
        run_id=run["run_id"],
        model=label,
        neuron=str(neuron),
        against=run["against_label"],
        operations=operations,
        prompts=prompts,
        tokens=tokens,
        verdict=_verdict(str(neuron), operations, tokens),
        queries=[
            results.query(f"SELECT * FROM neuron_summary WHERE {where}"),
            results.query(f"SELECT * FROM neuron_changes WHERE {where} ORDER BY rank LIMIT 20"),
        ],
    )


def written_tokens(
    rows: Sequence[Row], anatomy: Anatomy, tokenizer: "PreTrainedTokenizerBase", count: int
) -> list[Row]:
    """For rows with a neuron ("28.3696") and its coefficient c: the tokens that c v raises, and those it lowers."""
    directions = value_directions(anatomy, [Neuron.read(row["neuron"]) for row in rows])
    found = []
    for row, direction_V in zip(rows, directions, strict=True):
        raised, lowered = (
            _named(top_tokens(direction_V, sign * row["coefficient"], count), tokenizer) for sign in (1, -1)
        )
        shown = {"operation": row["operation"], "neuron": row["neuron"], "coefficient": row["coefficient"]}
        found.append({**shown, "c v raises": listed(raised), "c v lowers": listed(lowered)})
    return found


def listed(tokens: Tokens) -> str:
    """Tokens on one line, quoted so that spaces show."""
    return " ".join(repr(token["token"]) for token in tokens)


def _named(tokens: Sequence[tuple[int, float]], tokenizer: "PreTrainedTokenizerBase") -> Tokens:
    return [{"token": str(tokenizer.decode([token_id])), "value": value} for token_id, value in tokens]


def _verdict(neuron: str, operations: Sequence[dict[str, Any]], tokens: dict[str, Tokens]) -> str:
    """The operation that ranks the neuron highest, and what it writes there."""
    single = [row for row in operations if row["operation"] != "all"]
    best = min(single, key=lambda row: (row["rank"], -row["in_top"]))
    others = ", ".join(f"{row['operation']} {row['rank']:,}" for row in single if row is not best)
    return (
        f"Neuron {neuron} ranks highest for {best['operation']}: {best['rank']:,} of {best['neurons']:,}, among the"
        f" first of {100 * best['in_top']:.0f} % of the prompts{f' ({others})' if others else ''}. Its coefficient"
        f" there is {best['coefficient']:.3g} (+- {best['coefficient_std']:.2g}), so it raises"
        f" {listed(tokens['c v, ' + best['operation']][:5])}."
    )
