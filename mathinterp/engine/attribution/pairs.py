"""Pairs of sentences with an answer and a distractor: batches, activations at nodes, and gradients of the metric.

The metric of a pair is m = logit(answer) - logit(distractor) at END of X_r. A node is a head (its slice of o_proj's
input), an MLP (its output) or a neuron (its coefficient, down_proj's input). The sentences end at END.

Shape legend: B pair of one batch, T token, D model width, Z width of a site, U units of a site (heads, 1 or neurons).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from mathinterp.engine.hooks import Edit, edited_input, edited_site
from mathinterp.engine.lens.lens import wide_dtype
from mathinterp.engine.pairs import Batch, batches_of
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

CPU_TOKENS, GPU_TOKENS = 2048, 4096  # of one backward pass, padding included
Place = tuple[str, int]  # site (engine/intervention.py) and layer
Values = dict[Place, torch.Tensor]
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # input and output -> the output, with another gradient


@dataclass
class Passes:
    """Forward and backward passes that were made, counted per pair."""

    forwards: int = 0
    backwards: int = 0


@dataclass(frozen=True)
class PairBatch:
    """Pairs of like length: X_r and X_c, token by token, and the two tokens that the metric compares."""

    clean: Batch
    other: Batch  # the same rows and ENDs
    answer_B: torch.Tensor
    distractor_B: torch.Tensor
    passes: Passes = field(default_factory=Passes)

    def __len__(self) -> int:
        return len(self.answer_B)

    def forward(self, anatomy: Anatomy, side: Batch) -> torch.Tensor:
        """One pass over a side: the normed residual stream at END, B D."""
        self.passes.forwards += len(self)
        return side.at_end(anatomy.decoder(input_ids=side.token_ids, use_cache=False).last_hidden_state)

    def gradients(
        self, metric_B: torch.Tensor, values: Sequence[torch.Tensor], *, keep: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Those of each pair's metric; ``keep``: the graph, for another backward pass."""
        self.passes.backwards += len(self)
        return torch.autograd.grad(metric_B.sum(), list(values), retain_graph=keep)


def pair_batches(
    prompts: Sequence[TokenizedPrompt], anatomy: Anatomy, max_tokens: int | None = None
) -> Iterator[PairBatch]:
    """The pairs in batches; every prompt must have its counterfactual and a distractor of the first scored token."""
    max_tokens = max_tokens or (GPU_TOKENS if anatomy.device.type == "cuda" else CPU_TOKENS)
    clean, other, answers, distractors = [], [], [], []
    for item in prompts:
        assert item.counterfactual_ids is not None
        assert item.distractor is not None
        clean.append(item.input_ids[: item.end + 1])
        other.append(item.counterfactual_ids[: item.end + 1])
        answers.append(item.scored[0].token_id)
        distractors.append(item.distractor.token_id)
    answer_P, distractor_P = (torch.from_numpy(np.array(ids)).to(anatomy.device) for ids in (answers, distractors))
    both = zip(batches_of(clean, anatomy, max_tokens), batches_of(other, anatomy, max_tokens), strict=True)
    for one, two in both:
        assert torch.equal(one.rows, two.rows), "X_c has as many tokens as X_r"
        yield PairBatch(one, two, answer_P[one.rows], distractor_P[one.rows])


def places_of(anatomy: Anatomy, neurons: bool = False) -> list[Place]:
    """All heads and MLPs, layer by layer, and their neurons if asked for."""
    sites = ("head", "mlp", "neuron") if neurons else ("head", "mlp")
    return [(site, layer) for layer in range(anatomy.shape.n_layers) for site in sites]


def metric(anatomy: Anatomy, normed_BD: torch.Tensor, batch: PairBatch, cap: Rule | None = None) -> torch.Tensor:
    """m of each pair from the final norm's output at END: B; ``cap``: how a final soft-cap passes gradients on."""
    answer, distractor = (token_logits(anatomy, normed_BD, ids, cap) for ids in (batch.answer_B, batch.distractor_B))
    return answer - distractor


def token_logits(
    anatomy: Anatomy, normed_RD: torch.Tensor, token_R: torch.Tensor, cap: Rule | None = None
) -> torch.Tensor:
    """The logit of one token a row, of the final norm's output: R, in the wide dtype."""
    wide = wide_dtype(anatomy.dtype)
    weight_RD = anatomy.unembedding.get_parameter("weight")[token_R].to(wide)
    logits = (normed_RD.to(wide) * weight_RD).sum(-1)
    bias = getattr(anatomy.unembedding, "bias", None)
    logits = (logits if bias is None else logits + bias[token_R].to(wide)) / anatomy.shape.logits_divisor
    capped = anatomy.capped(logits)
    return capped if cap is None else cap(logits, capped)


@contextmanager
def caught(anatomy: Anatomy, places: Sequence[Place]) -> Iterator[Values]:
    """Within the block one pass runs; at its end the values at the places are known, each from one call."""
    found: Values = {}
    lists: dict[Place, list[torch.Tensor]] = {place: [] for place in places}

    def keep(place: Place) -> Edit:
        def edit(value: torch.Tensor) -> torch.Tensor:
            lists[place].append(value)
            return value.clone() if place[0] == "mlp" else value  # Falcon adds into what an MLP gave

        return edit

    with ExitStack() as hooks:
        for place in lists:
            hooks.enter_context(edited_site(anatomy, *place, keep(place)))
        yield found
        for place, values in lists.items():
            assert len(values) == 1, f"the {place[0]} hook of layer {place[1]} fired {len(values)} times, not once"
            found[place] = values[0]


def embedding(anatomy: Anatomy, edit: Edit) -> AbstractContextManager[None]:
    """Within the block the residual stream that layer 0 reads is edited; whatever follows has gradients to it."""
    return edited_input(anatomy.layers[0], lambda hidden: edit(hidden).detach().requires_grad_())


@torch.no_grad()
def activations(anatomy: Anatomy, batch: PairBatch, side: Batch, places: Sequence[Place]) -> Values:
    """Activations of one side at the places, without gradients."""
    with caught(anatomy, places) as found:
        batch.forward(anatomy, side)
    return {place: value.detach() for place, value in found.items()}


def changes(clean: Values, other: Values, batch: PairBatch, positions: str) -> Values:
    """X_c - X_r at every token, or (positions "end") at END and 0 elsewhere."""
    found = {place: other[place] - clean[place] for place in clean if place in other}
    if positions == "all":
        return found
    rows = torch.arange(len(batch), device=batch.clean.ends.device)
    for place, change_BTZ in found.items():
        kept = torch.zeros_like(change_BTZ)
        kept[rows, batch.clean.ends] = change_BTZ[rows, batch.clean.ends]
        found[place] = kept
    return found


def products(anatomy: Anatomy, change: Values, gradient: Mapping[Place, torch.Tensor]) -> Values:
    """sum over tokens of change x gradient, unit by unit: B U (heads; one number an MLP; neurons)."""
    wide = wide_dtype(anatomy.dtype)
    found = {}
    for (site, layer), gradient_BTZ in gradient.items():
        whole_BZ = (change[site, layer].to(wide) * gradient_BTZ.to(wide)).sum(1)
        if site == "head":
            whole_BZ = whole_BZ.unflatten(1, (anatomy.shape.n_heads, anatomy.shape.d_head)).sum(-1)
        elif site != "neuron":
            whole_BZ = whole_BZ.sum(-1, keepdim=True)
        found[site, layer] = whole_BZ
    return found
