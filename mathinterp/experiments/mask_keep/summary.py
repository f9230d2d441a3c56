"""What a finished mask/keep run says, from the stored rows alone; and each prompt's first neurons from a neuron scan.

Knows the store's views; knows nothing about models or how rows were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mathinterp.errors import UserError
from mathinterp.experiments.mask_keep import RankedNeurons
from mathinterp.experiments.neurons.stored import check_prompts
from mathinterp.prompts import Prompt
from mathinterp.store import Store
from mathinterp.store.query import arrow

CASES = ("correct", "flipped", "all")
SCORINGS = ("token", "first_token", "exact_match")


@dataclass(frozen=True)
class MaskKeepSummary:
    """The answer of a mask/keep run under one choice of cases and scoring; decreases in % of the original accuracy.

    table: one row a k, over all operations: mask, keep (each with its interval, random neurons and the least and most
        of the random draws) and coef.
    operations: one row an operation and k: mask, keep, their random controls, coef (rows of paper_a_table5).
    """

    table: list[dict[str, Any]]
    operations: list[dict[str, Any]]
    verdict: str
    queries: list[str]


def neurons_from(store: Store, run: dict[str, Any], prompts: Sequence[Prompt], count: int) -> RankedNeurons:
    """Each prompt's first ``count`` neurons of a neuron scan, all layers together, ties by (layer, neuron).

    Args:
        run: from ``neuron_run``.
    Raises UserError if the run ranks fewer neurons or did not see one of the prompts.
    """
    connection, run_id = store.connect("neuron_changes"), run["run_id"]
    check_prompts(store, run, prompts)
    rows = arrow(
        connection,
        f"SELECT prompt_id, layer, neuron FROM neuron_changes WHERE run_id = '{run_id}' AND rank <= {count}"
        " ORDER BY prompt_id, rank",
    )
    prompt_ids, counts = np.unique(rows["prompt_id"].to_numpy(), return_counts=True)
    if not len(counts) or counts.min() < count:
        raise UserError(
            f"run {run_id} ranks {counts.min() if len(counts) else 0} neurons of a prompt, and {count} are asked for;"
            f" give smaller --ks, or scan neurons with --keep topk:{count}"
        )
    layers, neurons = (rows[name].to_numpy().reshape(len(prompt_ids), count) for name in ("layer", "neuron"))
    row_of = {str(prompt_id): row for row, prompt_id in enumerate(prompt_ids)}
    wanted = [row_of[prompt.prompt_id] for prompt in prompts]
    return RankedNeurons(run_id, tuple(prompt.prompt_id for prompt in prompts), layers[wanted], neurons[wanted])


def summarize_maskkeep(store: Store, run_id: str, cases: str = "correct", scoring: str = "token") -> MaskKeepSummary:
    """Summarize a finished mask/keep run."""
    connection = store.connect("paper_a_table5", "maskkeep_effects")
    chosen = f"run_id = '{run_id}' AND cases = '{cases}' AND scoring = '{scoring}'"
    table = arrow(connection, f"SELECT * FROM paper_a_table5 WHERE {chosen} ORDER BY operation, k DESC").to_pylist()
    effects = arrow(connection, f"SELECT * FROM maskkeep_effects WHERE {chosen} AND operation = 'all'").to_pylist()
    shown = ("operation", "k", "prompts", "mask", "mask_random", "keep", "keep_random", "coef")
    where = f"WHERE {chosen} AND operation = 'all'"
    return MaskKeepSummary(
        table=[_row(row, effects) for row in table if row["operation"] == "all"],
        operations=[{name: row[name] for name in shown} for row in table if row["operation"] != "all"],
        verdict=_verdict(effects, cases),
        queries=[
            f"SELECT * FROM paper_a_table5 {where} ORDER BY k DESC",
            f"SELECT mode, ranking, seed, k, accuracy, decrease, low, high FROM maskkeep_effects {where}"
            " ORDER BY mode, k, ranking, seed",
            f"SELECT * FROM maskkeep_neurons WHERE run_id = '{run_id}' AND ranking = 'top' AND place <= 10 LIMIT 20",
        ],
    )


def _row(found: dict[str, Any], effects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"k": found["k"], "prompts": found["prompts"]}
    for mode in ("mask", "keep"):
        low, high = found[f"{mode}_low"], found[f"{mode}_high"]
        draws = [
            100 * effect["decrease"]
            for effect in effects
            if (effect["mode"], effect["ranking"], effect["k"]) == (mode, "random", found["k"])
            and effect["seed"] is not None
            and effect["decrease"] is not None
        ]
        row[mode] = found[mode]
        row[f"{mode} 95 %"] = None if low is None or high is None else f"{low:.4g} to {high:.4g}"
        row[f"{mode} random"] = found[f"{mode}_random"]
        row[f"{mode} least-most"] = f"{min(draws):.4g}-{max(draws):.4g}" if draws else None
    return {**row, "coef": found["coef"]}


def _verdict(effects: Sequence[dict[str, Any]], cases: str) -> str:
    """What the fewest neurons masked and the most neurons kept cost, beside random ones."""
    found = {
        (row["mode"], row["ranking"], row["k"]): row
        for row in effects
        if row["ranking"] != "random" or row["seed"] is None
    }
    ks = sorted({row["k"] for row in effects})
    if not ks:
        return f"No prompt counts: there are no cases '{cases}'."
    if found["mask", "top", ks[0]]["decrease"] is None:
        return "The unchanged model is never right: there is no accuracy to lose."
    parts = []
    for mode, k, said in (
        ("mask", ks[0], f"Zeroing each prompt's first {ks[0]} neurons"),
        ("keep", ks[-1], f"keeping only its first {ks[-1]} in the deep layers"),
    ):
        words = f"{said} costs {100 * found[mode, 'top', k]['decrease']:.1f} % of the accuracy"
        if (mode, "random", k) in found:
            excess = found[mode, "excess", k]
            words += f" ({100 * found[mode, 'random', k]['decrease']:.1f} % with random ones of the same layers"
            if excess["low"] is not None:
                words += f"; 95 % interval of the difference {100 * excess['low']:.1f} to {100 * excess['high']:.1f}"
            words += ")"
        parts.append(words)
    return "; ".join(parts) + "."
