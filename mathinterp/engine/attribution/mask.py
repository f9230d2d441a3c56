"""A learned mask: which heads and MLPs must stay as on X_r for m to stay as it is, all others as on X_c.

Each node n has z_n in [0, 1]: its output is a_c + z_n (a - a_c), a what it computes under the mask, a_c that on X_c. z
is drawn from hard-concrete distributions (arXiv 1712.01312: beta 2/3, gamma -.1, zeta 1.1) whose locations log alpha
are trained by Adam on

    mean over the step's pairs of (m(z) - m(X_r))^2 / mean over all pairs of (m(X_r) - m(X_c))^2
        + penalty * max(0, open - allowed)

with open the mean over nodes of P(z_n > 0), the expected L0 norm, and ``allowed`` falling from 1 to the budget over the
first half of the steps. Subnetwork probing (arXiv 2104.03514) at nodes.

Shape legend: N node, B pair of one batch.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from mathinterp.engine.attribution.pairs import (
    PairBatch,
    Passes,
    Values,
    activations,
    metric,
    pair_batches,
    places_of,
)
from mathinterp.engine.hooks import Edit, edited_site
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
START = 2.0  # log alpha before training: P(open) = .97


@dataclass(frozen=True)
class MaskSettings:
    """steps of Adam at ``learning_rate``, each on ``batch`` pairs; ``budget``: share of nodes that may be open."""

    steps: int
    learning_rate: float
    budget: float
    penalty: float
    batch: int
    seed: int

    def allowed(self, step: int) -> float:
        """Share of nodes that may be open without a penalty, in a step counted from 0."""
        return self.budget + (1 - self.budget) * max(0.0, 1 - 2 * (step + 1) / self.steps)


@dataclass(frozen=True)
class Learned:
    """log alpha of every node (layer by layer: heads, then the MLP), and the course of the training.

    steps: a row a step: loss, squared relative change of m, and mean P(open), before the step.
    """

    location_N: torch.Tensor
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)


def open_probability(location_N: torch.Tensor) -> torch.Tensor:
    """P(z > 0)."""
    return torch.sigmoid(location_N - BETA * math.log(-GAMMA / ZETA))


def drawn(location_N: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """z of hard-concrete distributions, from uniform numbers."""
    stretched = torch.sigmoid((torch.logit(uniform_N) + location_N) / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched.clamp(0, 1)


def masked_metric(anatomy: Anatomy, batch: PairBatch, other: Values, mask_N: torch.Tensor) -> torch.Tensor:
    """m of each pair under a mask: B."""
    width = anatomy.shape.n_heads + 1
    with ExitStack() as hooks:
        for (site, layer), given in other.items():
            of_layer = mask_N[layer * width : (layer + 1) * width].to(given.dtype)
            own = of_layer[:-1].repeat_interleave(anatomy.shape.d_head) if site == "head" else of_layer[-1]
            hooks.enter_context(edited_site(anatomy, site, layer, _between(given, own)))
        normed_BD = batch.forward(anatomy, batch.clean)
    return metric(anatomy, normed_BD, batch)


@torch.enable_grad()
def learn(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], settings: MaskSettings, max_tokens: int | None = None
) -> Learned:
    """Train the mask; on a CPU the same seed gives the same numbers.

    Raises:
        FloatingPointError: the loss is NaN or infinite.
    """
    real = torch.float64 if anatomy.dtype == torch.float64 else torch.float32
    nodes = anatomy.shape.n_layers * (anatomy.shape.n_heads + 1)
    location_N = torch.full((nodes,), START, dtype=real, device=anatomy.device, requires_grad=True)
    learned = Learned(location_N)
    clean_P, scale = _sides(anatomy, prompts, max_tokens, learned.passes)
    optimizer = torch.optim.Adam([location_N], lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed)  # on the CPU: draws do not depend on the device
    for step in range(settings.steps):
        uniform_N = torch.rand(nodes, generator=generator, dtype=real).clamp(1e-6, 1 - 1e-6).to(anatomy.device)
        chosen = torch.randperm(len(prompts), generator=generator)[: settings.batch]
        optimizer.zero_grad()
        share = open_probability(location_N).mean()
        cost = settings.penalty * torch.relu(share - settings.allowed(step))
        cost.backward()
        change = _change(anatomy, prompts, chosen, clean_P, scale, (location_N, uniform_N), max_tokens, learned.passes)
        optimizer.step()
        learned.steps.append((change + float(cost.detach()), change, float(share.detach())))
        if not math.isfinite(change):
            raise FloatingPointError(f"the mask's loss is {change} in step {step + 1}; lower `learning_rate`")
    return Learned(location_N.detach().cpu(), learned.steps, learned.passes)


def _change(
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    chosen: torch.Tensor,
    clean_P: torch.Tensor,
    scale: float,
    mask: tuple[torch.Tensor, torch.Tensor],
    max_tokens: int | None,
    passes: Passes,
) -> float:
    """The squared relative change of m, mean over the chosen pairs; adds its gradient to the locations'."""
    total = 0.0
    expected_P = clean_P[chosen.to(clean_P.device)]
    for batch in pair_batches([prompts[int(i)] for i in chosen], anatomy, max_tokens):
        other = activations(anatomy, batch, batch.other, places_of(anatomy))
        metric_B = masked_metric(anatomy, batch, other, drawn(*mask))
        part = (metric_B - expected_P[batch.clean.rows]).square().sum() / (scale * len(chosen))
        part.backward()
        total += float(part.detach())
        passes.forwards += batch.passes.forwards
        passes.backwards += len(batch)
    return total


@torch.no_grad()
def _sides(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], max_tokens: int | None, passes: Passes
) -> tuple[torch.Tensor, float]:
    """m of every pair on X_r, and the mean squared difference to that on X_c."""
    found_P2 = None
    for batch in pair_batches(prompts, anatomy, max_tokens):
        both = torch.stack([metric(anatomy, batch.forward(anatomy, s), batch) for s in (batch.clean, batch.other)], 1)
        found_P2 = both.new_empty(len(prompts), 2) if found_P2 is None else found_P2
        found_P2[batch.clean.rows] = both
        passes.forwards += batch.passes.forwards
    assert found_P2 is not None
    return found_P2[:, 0], float((found_P2[:, 0] - found_P2[:, 1]).square().mean())


def _between(other: torch.Tensor, share: torch.Tensor) -> Edit:
    return lambda own: other + share * (own - other)
