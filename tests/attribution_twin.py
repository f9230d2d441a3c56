"""Pairs with distractors as token ids, and the slow twin of attribution: transformers' own passes with one hook.

The twin knows no gradients: it puts numbers in and reads m = logit(answer) - logit(distractor) at the last token.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from tests.tiny import VOCABULARY, tiny_model

Site = tuple[str, int]


def contrasts(count: int = 4, seed: int = 0) -> list[TokenizedPrompt]:
    """Pairs of 5 to 9 tokens that differ in one or two tokens before END, each with one answer and one distractor."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        ids = [1, *(int(t) for t in rng.integers(4, VOCABULARY, size=int(rng.integers(4, 9))))]
        other = list(ids)
        for place in (-3, -4)[: 1 + i % 2]:
            other[place] = 4 + (ids[place] - 3) % (VOCABULARY - 4)
        answer, wrong = (int(t) for t in rng.choice(np.arange(4, VOCABULARY), size=2, replace=False))
        scored = ScoredToken(0, len(ids), answer, "", "digit", None)
        distractor = ScoredToken(-1, len(ids), wrong, "", "distractor", None)
        prompt = Prompt(f"p{i}", "text", "1", "add", counterfactual="other", distractor="2")
        prompts.append(TokenizedPrompt(prompt, (*ids, answer), (scored,), (*other, answer), distractor))
    return prompts


def precise(family: str, monkeypatch: pytest.MonkeyPatch) -> Anatomy:
    """A tiny model in float64 throughout: as it comes its RMS norms and some softmaxes sum in float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    if family == "mixtral":
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x)  # of its router
    model = tiny_model(family)
    for norm in model.modules():
        if "RMSNorm" in type(norm).__name__:
            norm.forward = partial(_rms_norm, norm)
    return Anatomy(model)


def _rms_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    gain = norm.weight + (1 if "Gemma" in type(norm).__name__ else 0)
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def module_of(anatomy: Anatomy, site: Site) -> tuple[torch.nn.Module, bool]:
    """The module at a site and whether its input is meant."""
    kind, layer = site
    if kind == "embedding":
        return anatomy.layers[0], True
    if kind == "mlp":
        return anatomy.mlp(layer), False
    return (anatomy.output_projection(layer) if kind == "head" else anatomy.down_projection(layer)), True


@contextmanager
def put(anatomy: Anatomy, site: Site, edit: Callable[[torch.Tensor], torch.Tensor]):
    module, is_input = module_of(anatomy, site)

    def on_output(_, args, output):
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    if is_input:
        handle = module.register_forward_pre_hook(lambda _, args: (edit(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(on_output)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def m(anatomy: Anatomy, item: TokenizedPrompt, ids: tuple[int, ...] | None = None) -> float:
    """The metric of one pair on its own tokens (or others), whatever hooks hang on the model."""
    logits = anatomy.model(torch.tensor([(ids or item.input_ids)[: item.end + 1]])).logits[0, -1]
    return float(logits[item.scored[0].token_id] - logits[item.distractor.token_id])


def value(anatomy: Anatomy, item: TokenizedPrompt, site: Site, counterfactual: bool) -> torch.Tensor:
    """1 T Z at a site on X_r or X_c."""
    kept: list[torch.Tensor] = []
    with put(anatomy, site, lambda x: kept.append(x.clone()) or x):
        m(anatomy, item, item.counterfactual_ids if counterfactual else None)
    (only,) = kept
    return only


def columns(anatomy: Anatomy, site: Site, unit: int | None) -> slice:
    """Those of one head or neuron, or all."""
    if unit is None or site[0] == "mlp":
        return slice(None)
    return anatomy.head_slice(unit) if site[0] == "head" else slice(unit, unit + 1)


def change_of(anatomy: Anatomy, item: TokenizedPrompt, site: Site) -> torch.Tensor:
    """1 T Z: X_c - X_r."""
    return value(anatomy, item, site, True) - value(anatomy, item, site, False)


def moved(
    anatomy: Anatomy, item: TokenizedPrompt, site: Site, unit: int | None, change: torch.Tensor, end_only: bool = False
) -> float:
    """m with ``change`` added to one unit of a site (None: all); X_c - X_r is exact patching."""
    picked, tokens = columns(anatomy, site, unit), slice(-1, None) if end_only else slice(None)

    def edit(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, tokens, picked] += change[:, tokens, picked]
        return x

    with put(anatomy, site, edit):
        return m(anatomy, item)


def exact(
    anatomy: Anatomy, item: TokenizedPrompt, site: Site, unit: int | None = None, end_only: bool = False
) -> float:
    """D: the change of m."""
    return moved(anatomy, item, site, unit, change_of(anatomy, item, site), end_only) - m(anatomy, item)


def slope(
    anatomy: Anatomy,
    item: TokenizedPrompt,
    site: Site,
    unit: int | None,
    end_only: bool = False,
    change: torch.Tensor | None = None,
) -> float:
    """The derivative of m along X_c - X_r at X_r, by central differences without their error of second order."""
    change = change_of(anatomy, item, site) if change is None else change

    def central(h: float) -> float:
        up, down = (moved(anatomy, item, site, unit, by * change, end_only) for by in (h, -h))
        return (up - down) / (2 * h)

    return (4 * central(1e-3) - central(2e-3)) / 3
