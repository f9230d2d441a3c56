"""Which heads and neurons train: named, taken from a ranking or from SQL; or a control of as many other heads."""

from collections.abc import Callable, Sequence

from mathinterp.errors import UserError
from mathinterp.experiments.finished_run import key_heads_from, ranking_from
from mathinterp.models.catalog import ResolvedModel
from mathinterp.models.units import Head, Neuron
from mathinterp.store import Store
from mathinterp.tuning.controls import control_heads
from mathinterp.tuning.precise import PreciseJob, Selection, heads_that_move_along
from mathinterp.tuning.settings import DEFAULT_TOP, Choice


def ranking_of(choice: Choice, store: Store) -> tuple[Head, ...]:
    """The heads in the order given or found; empty if none are asked for."""
    if choice.heads_from is not None:
        return ranking_from(store, choice.heads_from)
    if choice.heads_sql is not None:
        return tuple(Head(*pair) for pair in _pairs_of("heads_sql", choice.heads_sql, "head", store))
    return choice.heads or ()


def neurons_of(choice: Choice, store: Store) -> tuple[Neuron, ...]:
    """The neurons given or found."""
    if choice.neurons_sql is not None:
        return tuple(Neuron(*pair) for pair in _pairs_of("neurons_sql", choice.neurons_sql, "neuron", store))
    return choice.neurons or ()


def precise_job(choice: Choice, base: ResolvedModel, store: Store, say: Callable[[str], None]) -> PreciseJob:
    """The heads (or their control) and neurons that train; ``say`` gets their names.

    Raises UserError for a ranking that is not there or too short, and for what the model does not have.
    """
    ranking = ranking_of(choice, store)
    top = DEFAULT_TOP if choice.top is None and choice.heads_from is not None else choice.top
    chosen: Sequence[Head] = first(ranking, top)
    if choice.control is not None:
        never = () if choice.heads_from is None else key_heads_from(store, choice.heads_from)
        chosen = control_heads(choice.control, chosen, ranking, base.shape, choice.control_seed, never)
    selection = Selection(tuple(chosen), neurons_of(choice, store), choice.mlps or (), choice.with_groups)
    drawn = (
        choice.control if choice.control in (None, "bottom") else f"{choice.control} heads, seed {choice.control_seed}"
    )
    job = PreciseJob(selection, drawn)
    job.check(base.shape)
    if choice.heads_from is not None:
        say_whose_ranking(store, choice.heads_from, base, say)
    if chosen:
        say(f"heads that train: {', '.join(map(str, chosen))}")
    if choice.with_groups and (moved := heads_that_move_along(base.shape, chosen)):
        say(f"they share keys and values with {', '.join(map(str, moved))}, which move along")
    return job


def first(ranking: Sequence[Head], top: int | None) -> tuple[Head, ...]:
    """The first heads of a ranking, None: all; raises UserError if it has not as many."""
    if len(ranking) < (top or 0):
        raise UserError(f"`top` {top}: the ranking has only {len(ranking)} heads; give `top` {len(ranking)}")
    return tuple(ranking[:top])


def say_whose_ranking(store: Store, run_id: str, base: ResolvedModel, say: Callable[[str], None]) -> None:
    """A line where the heads were ranked on another model: that may be meant, or not."""
    [run] = store.rows("SELECT model, model_fingerprint FROM runs WHERE run_id = $run", {"run": run_id})
    if run["model_fingerprint"] != base.fingerprint:
        say(f"run {run_id} ranked the heads of another model, {run['model']}")


def _pairs_of(field: str, sql: str, unit: str, store: Store) -> list[tuple[int, int]]:
    """Layer and head (neuron) of every row that a query on the store returns."""
    rows = store.rows(sql)
    if not rows:
        raise UserError(f"`{field}` returns no rows")
    if not all(isinstance(row.get(name), int) for row in rows for name in ("layer", unit)):
        raise UserError(f"`{field}` must return whole numbers layer and {unit}; it returns {', '.join(rows[0])}")
    return [(row["layer"], row[unit]) for row in rows]
