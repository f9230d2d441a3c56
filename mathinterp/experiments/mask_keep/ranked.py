"""Each prompt's first neurons, from a stored neuron scan; and random neurons of the same layers beside them.

Knows the store's views, and numbers of layers and neurons; knows nothing about models.

Shape legend: P prompt, R place in the prompt's ranking.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mathinterp.errors import UserError
from mathinterp.experiments.neurons.stored import check_prompts
from mathinterp.experiments.results import Row
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt

if TYPE_CHECKING:
    from mathinterp.store import Store


@dataclass(frozen=True, eq=False)
class RankedNeurons:
    """Each prompt's neurons, most important first. Travels inside the scan; the run's parameters hold its fingerprint.

    source: the neuron scan's run.
    """

    source: str
    prompt_ids: tuple[str, ...]
    layer_PR: np.ndarray
    neuron_PR: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the prompts and their neurons in order."""
        digest = hashlib.sha256(json.dumps(self.prompt_ids).encode())
        for values_PR in (self.layer_PR, self.neuron_PR):
            digest.update(np.ascontiguousarray(values_PR, "<i4").tobytes())
        return digest.hexdigest()[:16]

    def of(self, prompts: Sequence[TokenizedPrompt]) -> tuple[np.ndarray, np.ndarray]:
        """layer_PR and neuron_PR of these prompts, in their order; raises UserError for a prompt without neurons."""
        row_of = {prompt_id: row for row, prompt_id in enumerate(self.prompt_ids)}
        for prompt in prompts:
            if prompt.prompt.prompt_id not in row_of:
                raise UserError(
                    f"run {self.source} ranked no neurons for prompt '{prompt.prompt.prompt_id}'; give the `prompts`,"
                    " `limit` and `seed` that it was given"
                )
        rows = [row_of[prompt.prompt.prompt_id] for prompt in prompts]
        return self.layer_PR[rows], self.neuron_PR[rows]


def neurons_from(store: "Store", run: Row, prompts: Sequence[Prompt], count: int) -> RankedNeurons:
    """Each prompt's first ``count`` neurons of a neuron scan, all layers together, ties by (layer, neuron).

    Args:
        run: from ``neuron_run``.
    Raises UserError if the run ranks fewer neurons or did not see one of the prompts.
    """
    check_prompts(store, run, prompts)
    run_id = run["run_id"]
    rows = store.arrow(
        """SELECT prompt_id, layer, neuron FROM neuron_changes WHERE run_id = $run AND rank <= $count
           ORDER BY prompt_id, rank""",
        {"run": run_id, "count": count},
    )
    prompt_ids, counts = np.unique(rows["prompt_id"].to_numpy(), return_counts=True)
    if not len(counts) or counts.min() < count:
        raise UserError(
            f"run {run_id} ranks {counts.min() if len(counts) else 0} neurons of a prompt, and {count} are asked for;"
            f" give smaller `ks`, or scan neurons with `keep` topk:{count}"
        )
    layers, neurons = (rows[name].to_numpy().reshape(len(prompt_ids), count) for name in ("layer", "neuron"))
    row_of = {str(prompt_id): row for row, prompt_id in enumerate(prompt_ids)}
    wanted = [row_of[prompt.prompt_id] for prompt in prompts]
    return RankedNeurons(run_id, tuple(prompt.prompt_id for prompt in prompts), layers[wanted], neurons[wanted])


def check_room(layer_PR: np.ndarray, n_neurons: int, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raise UserError where a prompt's neurons leave fewer others in a layer: there would be no random ones for all."""
    for layer in np.unique(layer_PR):
        taken_P = (layer_PR == layer).sum(axis=1)
        worst = int(taken_P.argmax())
        if 2 * taken_P[worst] > n_neurons:
            raise UserError(
                f"prompt '{prompts[worst].prompt.prompt_id}' has {taken_P[worst]} of the {n_neurons} neurons of layer"
                f" {layer} among its first: too few others are left for random controls; give smaller `ks` or"
                " `control_seeds` 0"
            )


def random_neurons(layer_PR: np.ndarray, neuron_PR: np.ndarray, n_neurons: int, seed: int) -> np.ndarray:
    """For each neuron another of its layer, none of the prompt's own and none twice in a prompt: P R.

    Places keep their layer, so the first k stand for the first k. The draw of prompt number p depends on (seed, p).
    """
    drawn_PR = np.empty_like(neuron_PR)
    for p, (layers, own) in enumerate(zip(layer_PR, neuron_PR, strict=True)):
        rng = np.random.default_rng([seed, p])
        for layer in np.unique(layers):
            places = np.flatnonzero(layers == layer)
            others = np.delete(np.arange(n_neurons), own[places])
            drawn_PR[p, places] = rng.choice(others, len(places), replace=False)
    return drawn_PR
