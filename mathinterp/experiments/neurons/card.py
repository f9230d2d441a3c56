"""One neuron's card: what a neuron scan stored about it, and the tokens that its value vector raises.

Knows the store's views and the lens; knows nothing about how the stored rows were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mathinterp.engine.lens.top_tokens import top_tokens, value_directions
from mathinterp.engine.neuron_sets import Neuron
from mathinterp.errors import UserError
from mathinterp.experiments.neurons.stored import neuron_run
from mathinterp.models.anatomy import Anatomy
from mathinterp.store import Store
from mathinterp.store.query import arrow, json_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_PROMPTS = 5
Tokens = list[tuple[str, float]]  # text, and coefficient times W_U (g v): a logit but for the final norm's scale


@dataclass(frozen=True)
class NeuronCard:
    """What is known of one neuron.

    operations: one row an operation, 'all' first: mean and spread (standard deviation over prompts) of coefficient,
        importance and change; rank among all neurons of the run by what it ranks by, of the means; in_top: % of prompts
        that have it among their first.
    prompts: the prompts that rank it highest.
    against: what the scan compared the model with, for people; None if nothing.
    tokens: "v" and "-v", and one entry "c v, OPERATION" for each operation's mean coefficient c.
    """

    neuron: str
    against: str | None
    operations: list[dict[str, Any]]
    prompts: list[dict[str, Any]]
    tokens: dict[str, Tokens]
    verdict: str
    queries: list[str]


def only_run(store: Store, fingerprint: str, label: str) -> dict[str, Any]:
    """The one finished neuron scan of a model; raises UserError if there is none, or more than one."""
    runs = store.rows(
        "SELECT run_id FROM runs WHERE scan = 'neurons' AND status = 'finished'"
        f" AND model_fingerprint = '{fingerprint}' ORDER BY started_at"
    )
    if len(runs) != 1:
        found = ", ".join(row["run_id"] for row in runs)
        raise UserError(
            f"{store.url} has several neuron scans of {label}: {found}; choose one with --neurons-from"
            if runs
            else f"{store.url} has no finished neuron scan of {label}; run 'mathinterp scan neurons' first"
        )
    return neuron_run(store, runs[0]["run_id"])


def neuron_card(
    store: Store, run: dict[str, Any], neuron: Neuron, anatomy: Anatomy, tokenizer: "PreTrainedTokenizerBase",
    count: int,
) -> NeuronCard:  # fmt: skip
    """The card of one neuron.

    Args:
        run: from ``neuron_run`` or ``only_run``.
        count: tokens of each list.
    Raises UserError for a neuron that the model has not, or a layer that the run did not look at.
    """
    layer, number = neuron
    check_neuron(anatomy, neuron)
    connection, run_id = store.connect("neuron_summary", "neuron_changes", "prompts"), run["run_id"]
    where = f"run_id = '{run_id}' AND layer = {layer} AND neuron = {number}"

    def rows(sql: str) -> list[dict[str, Any]]:
        return json_rows(arrow(connection, sql))

    operations = rows(
        f"""SELECT * EXCLUDE (run_id, layer, neuron) FROM (
                SELECT run_id, layer, neuron, coalesce(operation, 'none') AS operation, n,
                       row_number() OVER (ranked ORDER BY ranked_by DESC, layer, neuron) AS rank,
                       count(*) OVER ranked AS neurons, 100 * in_top AS in_top,
                       coefficient, coefficient_std, intervened_coefficient, importance, importance_std,
                       intervened_importance, change, change_std
                FROM neuron_summary WHERE run_id = '{run_id}' WINDOW ranked AS (PARTITION BY operation)
            ) WHERE {where} ORDER BY operation = 'all' DESC, operation"""
    )
    if not operations:
        raise UserError(f"run {run_id} did not look at layer {layer}; scan neurons with that layer among its --layers")
    prompts = rows(
        f"""SELECT rank, prompt_id, text, answer, c.coefficient, c.intervened_coefficient, c.importance, c.change
            FROM neuron_changes AS c JOIN prompts AS p USING (prompt_id)
            WHERE {where} AND in_top AND p.prompts_fingerprint = '{run["prompts_fingerprint"]}'
            ORDER BY rank, prompt_id LIMIT {SHOWN_PROMPTS}"""
    )
    direction_V = value_directions(anatomy, [neuron])[0]
    signs = {"v": 1.0, "-v": -1.0, **{f"c v, {row['operation']}": row["coefficient"] for row in operations}}
    tokens = {name: _named(top_tokens(direction_V, sign, count), tokenizer) for name, sign in signs.items()}
    return NeuronCard(
        f"{layer}.{number}",
        run["against_label"],
        operations,
        prompts,
        tokens,
        _verdict(f"{layer}.{number}", operations, tokens),
        [
            f"SELECT * FROM neuron_summary WHERE {where}",
            f"SELECT * FROM neuron_changes WHERE {where} ORDER BY rank LIMIT 20",
        ],
    )


def check_neuron(anatomy: Anatomy, neuron: Neuron) -> None:
    """Raise UserError unless the model has the neuron."""
    layer, number = neuron
    anatomy.shape.check_layer(layer)
    if not 0 <= number < anatomy.shape.n_neurons:
        raise UserError(
            f"neuron {layer}.{number} does not exist: each layer has neurons 0 to {anatomy.shape.n_neurons - 1}"
        )


def written_tokens(
    rows: Sequence[dict[str, Any]], anatomy: Anatomy, tokenizer: "PreTrainedTokenizerBase", count: int
) -> list[dict[str, Any]]:
    """For rows with a neuron ("28.3696") and its coefficient c: the tokens that c v raises, and those it lowers."""
    neurons = [(int(layer), int(number)) for layer, number in (row["neuron"].split(".") for row in rows)]
    found = []
    for row, direction_V in zip(rows, value_directions(anatomy, neurons), strict=True):
        raised, lowered = (
            _named(top_tokens(direction_V, sign * row["coefficient"], count), tokenizer) for sign in (1, -1)
        )
        shown = {"operation": row["operation"], "neuron": row["neuron"], "coefficient": row["coefficient"]}
        found.append({**shown, "c v raises": listed(raised), "c v lowers": listed(lowered)})
    return found


def listed(tokens: Tokens) -> str:
    """Tokens on one line, quoted so that spaces show."""
    return " ".join(repr(text) for text, _ in tokens)


def _named(tokens: Sequence[tuple[int, float]], tokenizer: "PreTrainedTokenizerBase") -> Tokens:
    return [(str(tokenizer.decode([token_id])), value) for token_id, value in tokens]


def _verdict(neuron: str, operations: Sequence[dict[str, Any]], tokens: dict[str, Tokens]) -> str:
    """The operation that ranks the neuron highest, and what it writes there."""
    single = [row for row in operations if row["operation"] != "all"]
    best = min(single, key=lambda row: (row["rank"], -row["in_top"]))
    others = ", ".join(f"{row['operation']} {row['rank']:,}" for row in single if row is not best)
    return (
        f"Neuron {neuron} ranks highest for {best['operation']}: {best['rank']:,} of {best['neurons']:,}, among the"
        f" first of {best['in_top']:.0f} % of the prompts{f' ({others})' if others else ''}. Its coefficient there is"
        f" {best['coefficient']:.3g} (+- {best['coefficient_std']:.2g}), so it raises"
        f" {listed(tokens['c v, ' + best['operation']][:5])}."
    )
