"""Backward rules of Layer-wise Relevance Propagation, as gradients: values stay, derivatives are replaced.

Within ``relevance_rules`` a backward pass gives, instead of the gradient of m, the coefficients that relevance takes
(RelP, arXiv 2508.21258): of m they are linear, so that the sum of (value x coefficient) over any cut of the model is m
itself, but for biases. Rules:

- LN-rule: a norm's scale is a constant; its gain, and LayerNorm's centring, stay.
- AH-rule: attention weights are constants; heads are linear in the values.
- Identity-rule: an activation function is a multiplication by the constant f(x) / x; so is a final soft-cap.
- Half-rule: each factor of a gated product gets half.
- 0-rule: linear maps keep their gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from mathinterp.engine.attribution.pairs import Rule
from mathinterp.engine.hooks import edited_input, edited_output
from mathinterp.engine.lens.lens import norm_parts
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, ModelShape, Multiplied
from mathinterp.models.split import at_home


def check_rules(shape: ModelShape) -> None:
    """Raise UserError where the rules do not reach the products inside the MLPs."""
    if shape.n_experts:
        raise UserError(
            f"`method` relp: model family '{shape.model_type}' has mixtures of experts for MLPs, whose gated products"
            " no rule reaches; take another `method`"
        )


@contextmanager
def relevance_rules(anatomy: Anatomy) -> Iterator[None]:
    """Within the block forward passes are made, whose backward passes follow the rules; a soft-cap is ``metric``'s."""
    check_rules(anatomy.shape)
    with ExitStack() as hooks:
        for norm in _norms(anatomy):
            hooks.enter_context(_ruled(norm, _frozen_scale(anatomy, norm)))
        for layer in range(anatomy.shape.n_layers):
            for projection in (anatomy.query(layer), anatomy.key(layer)):
                hooks.enter_context(edited_output(projection.module, _constant(projection.features)))
            hooks.enter_context(_ruled(getattr(anatomy.mlp(layer), anatomy.family.activation), identity))
            if anatomy.shape.gated_mlp:
                hooks.enter_context(edited_input(anatomy.down_projection(layer), halved))
        yield


def identity(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The output as the input times a constant; 0 where the input is 0."""
    constant = torch.where(given == 0, 0, output / torch.where(given == 0, 1, given)).detach()
    return _valued(given * constant, output)


def halved(value: torch.Tensor) -> torch.Tensor:
    """The value, with half its gradient."""
    return _valued(value / 2, value)


def _valued(gradient_of: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return gradient_of + (value - gradient_of).detach()


def _norms(anatomy: Anatomy) -> list[nn.Module]:
    """The norms on the residual stream that the model calls, each once."""
    found: list[nn.Module | None] = [anatomy.final_norm]
    for layer in range(anatomy.shape.n_layers):
        found += [anatomy.attention_norm(layer), anatomy.mlp_norm(layer)]
        found += [anatomy.attention_post_norm(layer), anatomy.mlp_post_norm(layer)]
    norms = [norm for norm in found if norm is not None and not isinstance(norm, nn.Identity | Multiplied)]
    return list(dict.fromkeys(norms))


def _frozen_scale(anatomy: Anatomy, norm: nn.Module) -> Rule:
    parts = norm_parts(anatomy, norm)

    def rule(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        rows = parts.centre(given.to(parts.gain_D.dtype)) / parts.scale(given)[..., None].detach()
        return _valued((rows * parts.gain_D).to(output.dtype), output)

    return rule


def _constant(features: slice | torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(output: torch.Tensor) -> torch.Tensor:
        edited = output.clone()
        edited[..., features] = output[..., features].detach()
        return edited

    return edit


@contextmanager
def _ruled(module: nn.Module, rule: Rule) -> Iterator[None]:
    """Within the block, each of ``module``'s outputs is ``rule(input, output)``."""
    fired = 0

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        nonlocal fired
        fired += 1
        return rule(at_home(module, args[0]), at_home(module, output)).to(output.device)

    handle = module.register_forward_hook(hook)
    try:
        yield
        assert fired > 0, f"the hook on {type(module).__name__} never fired"
    finally:
        handle.remove()
