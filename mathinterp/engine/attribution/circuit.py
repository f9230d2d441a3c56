"""Circuits: m of each pair while all but some nodes are replaced, as MIB evaluates them (arXiv 2504.13151).

A node in the circuit computes from what it reads under the circuit; every other one has, at every token, what it has on
X_c ("resample"), zero, or its mean over all tokens of all X_c ("mean"). Nodes are heads, MLPs and the input (the token
embeddings). Of any of them single coordinates of what it writes into the residual stream may be in, and neurons of an
MLP. What a head or MLP writes is taken before a norm that may follow it; biases of o_proj stay.

Shape legend: C circuit, P pair, B pair of one batch, T token, H query head, D model width, K neurons, Z width of a
site.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch

from mathinterp.engine.attribution.pairs import Place, Values, activations, metric, pair_batches
from mathinterp.engine.batching import free_memory
from mathinterp.engine.hooks import edited_output, edited_site, watched
from mathinterp.engine.in_flight import turns
from mathinterp.engine.lens.lens import wide_dtype
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

ABLATIONS = ("resample", "zero", "mean")
# Place -> what is in the circuit: of a "head" site H or H D, of "mlp" and "input" 1 or D, of "neuron" K. Places that
# are not named are in.
Circuit = Mapping[Place, np.ndarray]
WHOLE: Circuit = {}


@torch.no_grad()
def circuit_metrics(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    circuits: Sequence[Circuit],
    ablation: str,
    means: Values,
    max_tokens: int | None = None,
) -> np.ndarray:
    """m of every pair under every circuit: C P, float64.

    Args:
        prompts: each with its counterfactual and a distractor.
        ablation: of ABLATIONS.
        means: from ``mean_activations``, of the places that the circuits name; only read under "mean".
    Raises:
        torch.cuda.OutOfMemoryError: a single pair does not fit.
        FloatingPointError: m is NaN or infinite; names the prompt.
    """
    try:
        found_CP = _metrics(anatomy, prompts, circuits, ablation, means, max_tokens)
    except torch.cuda.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    else:
        return found_CP
    free_memory()
    half = len(prompts) // 2
    parts = (prompts[:half], prompts[half:])
    return np.hstack([circuit_metrics(anatomy, part, circuits, ablation, means, max_tokens) for part in parts])


@torch.no_grad()
def mean_activations(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], places: Sequence[Place], max_tokens: int | None = None
) -> Values:
    """The mean over all tokens up to END of the X_c of all prompts, at each place: 1 1 Z."""
    totals, tokens = _sums(anatomy, prompts, places, max_tokens)
    return {place: (total_Z / tokens).to(anatomy.dtype)[None, None] for place, total_Z in totals.items()}


def _sums(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], places: Sequence[Place], max_tokens: int | None
) -> tuple[Values, int]:
    """Sums over the tokens of all X_c, and how many these are; in halves where memory runs out."""
    try:
        return _sums_at_once(anatomy, prompts, places, max_tokens)
    except torch.cuda.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    free_memory()
    half = len(prompts) // 2
    (totals, tokens), (others, more) = (
        _sums(anatomy, part, places, max_tokens) for part in (prompts[:half], prompts[half:])
    )
    return {place: total_Z + others[place] for place, total_Z in totals.items()}, tokens + more


def _sums_at_once(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], places: Sequence[Place], max_tokens: int | None
) -> tuple[Values, int]:
    wide = wide_dtype(anatomy.dtype)
    totals: Values = {}
    tokens = 0
    for batch in pair_batches(prompts, anatomy, max_tokens):
        length = batch.other.token_ids.shape[1]
        read_BT1 = (torch.arange(length, device=anatomy.device) <= batch.other.ends[:, None])[..., None]
        tokens += int(read_BT1.sum())
        for place, values_BTZ in activations(anatomy, batch, batch.other, places).items():
            total_Z = values_BTZ.to(wide).masked_fill(~read_BT1, 0).sum((0, 1))
            totals[place] = totals[place] + total_Z if place in totals else total_Z
    return totals, tokens


def places_in(circuits: Sequence[Circuit]) -> list[Place]:
    """The places at which one of the circuits leaves something out."""
    return list(dict.fromkeys(place for circuit in circuits for place, kept in circuit.items() if not kept.all()))


def _metrics(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    circuits: Sequence[Circuit],
    ablation: str,
    means: Values,
    max_tokens: int | None,
) -> np.ndarray:
    found_CP = np.full((len(circuits), len(prompts)), np.nan)
    places = places_in(circuits)
    for batch in pair_batches(prompts, anatomy, max_tokens):
        rows = batch.clean.rows.cpu().numpy()
        given = activations(anatomy, batch, batch.other, places) if ablation == "resample" and places else means
        metric_CB = []
        for circuit in turns(anatomy.cards, circuits):
            with _replaced(anatomy, circuit, given if ablation != "zero" else None):
                metric_CB.append(metric(anatomy, batch.forward(anatomy, batch.clean), batch))
        found_CP[:, rows] = torch.stack(metric_CB).double().cpu().numpy()
    bad = np.argwhere(~np.isfinite(found_CP))
    if len(bad):
        name = prompts[int(bad[0, 1])].prompt.prompt_id
        raise FloatingPointError(f"the logit difference under a circuit is {found_CP[tuple(bad[0])]} on prompt {name}")
    return found_CP


@contextmanager
def _replaced(anatomy: Anatomy, circuit: Circuit, given: Values | None) -> Iterator[None]:
    """Within the block what is not in the circuit has the given values; None: zeros."""
    with ExitStack() as hooks:
        for place, kept in circuit.items():
            if kept.all():
                continue
            kept_mask = torch.from_numpy(kept).to(anatomy.device)
            hooks.enter_context(_one_replaced(anatomy, place, kept_mask, None if given is None else given[place]))
        yield


def _one_replaced(
    anatomy: Anatomy, place: Place, kept: torch.Tensor, given_BTZ: torch.Tensor | None
) -> AbstractContextManager[None]:
    site, layer = place
    if site == "head" and kept.ndim == 2:
        return _written_replaced(anatomy, layer, kept, given_BTZ)
    kept_Z = kept.repeat_interleave(anatomy.shape.d_head) if site == "head" else kept

    def edit(own_BTZ: torch.Tensor) -> torch.Tensor:
        return torch.where(kept_Z, own_BTZ, torch.zeros_like(own_BTZ) if given_BTZ is None else given_BTZ)

    return edited_site(anatomy, site, layer, edit)


@contextmanager
def _written_replaced(
    anatomy: Anatomy, layer: int, kept_HD: torch.Tensor, given_BTZ: torch.Tensor | None
) -> Iterator[None]:
    """Coordinates of what each head writes: o_proj's output moves by what the replaced ones of each head differ by."""
    wide = wide_dtype(anatomy.dtype)  # the parts of all heads are summed in it: in bf16 their roundings would add up
    projection, weight_ZD = anatomy.output_projection(layer), anatomy.output_weight(layer).to(wide)
    read: list[torch.Tensor] = []

    def edit(written_BTD: torch.Tensor) -> torch.Tensor:
        own_BTZ = read.pop()
        change_BTZ = (torch.zeros_like(own_BTZ) if given_BTZ is None else given_BTZ).to(wide) - own_BTZ.to(wide)
        total_BTD = written_BTD.to(wide)
        for head in (~kept_HD).any(1).nonzero().flatten().tolist():
            part = anatomy.head_slice(head)
            total_BTD = total_BTD + (change_BTZ[..., part] @ weight_ZD[part]) * ~kept_HD[head]
        return total_BTD.to(written_BTD.dtype)

    with watched(projection, True, read.append), edited_output(projection, edit):
        yield
