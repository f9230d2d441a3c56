"""Estimates of one method for a set of pairs: batches, halved where memory runs out, and the passes they took.

Shape legend: P pair, U units of a site.
"""

from collections.abc import Sequence

import torch

from mathinterp.engine.attribution.methods import METHODS
from mathinterp.engine.attribution.pairs import Passes, Place, Values, pair_batches
from mathinterp.engine.batching import free_memory
from mathinterp.engine.in_flight import turns
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@torch.enable_grad()
def estimate(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    places: Sequence[Place],
    *,
    method: str,
    steps: int = 5,
    positions: str = "all",
    max_tokens: int | None = None,
) -> tuple[Values, Passes]:
    """The method's D of every node and pair: at each place P U on the CPU; and the passes made, summed over pairs.

    Args:
        prompts: each with its counterfactual and a distractor.
        steps: of integrated gradients.
        positions: tokens at which a node is patched, "all" or "end".
    Raises:
        torch.cuda.OutOfMemoryError: a single pair does not fit.
        FloatingPointError: an estimate is NaN or infinite; names the node and the prompt.
    """
    try:
        return _estimate(anatomy, prompts, places, method, steps, positions, max_tokens)
    except torch.cuda.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    free_memory()
    half = len(prompts) // 2
    (one, first), (two, second) = (
        estimate(anatomy, part, places, method=method, steps=steps, positions=positions, max_tokens=max_tokens)
        for part in (prompts[:half], prompts[half:])
    )
    passes = Passes(first.forwards + second.forwards, first.backwards + second.backwards)
    return {place: torch.cat([one[place], two[place]]) for place in one}, passes


def _estimate(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    places: Sequence[Place],
    method: str,
    steps: int,
    positions: str,
    max_tokens: int | None,
) -> tuple[Values, Passes]:
    found: Values = {}
    passes = Passes()
    parts = [
        (batch, METHODS[method](anatomy, batch, places, positions, steps))
        for batch in turns(anatomy.cards, pair_batches(prompts, anatomy, max_tokens))
    ]
    for batch, of_batch in parts:
        rows = batch.clean.rows.cpu()
        for place, values_BU in of_batch.items():
            values = values_BU.detach().cpu()
            found.setdefault(place, values.new_full((len(prompts), values.shape[1]), torch.nan))[rows] = values
        passes.forwards += batch.passes.forwards
        passes.backwards += batch.passes.backwards
    _check_finite(found, prompts, method)
    return found, passes


def _check_finite(found: Values, prompts: Sequence[TokenizedPrompt], method: str) -> None:
    for (site, layer), values_PU in found.items():
        bad = (~values_PU.isfinite()).nonzero()
        if len(bad):
            pair, unit = (int(i) for i in bad[0])
            raise FloatingPointError(
                f"{method}: the estimate of {site} {unit} of layer {layer} is {float(values_PU[pair, unit])} on prompt"
                f" {prompts[pair].prompt.prompt_id}"
            )
