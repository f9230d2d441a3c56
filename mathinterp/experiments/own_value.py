"""An intervention of one's own, for ``ablate``: what named units become, and at which tokens.

Knows the engine's vocabulary (engine/intervention.py); knows no experiment.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mathinterp.engine.choose import Engine, build_engine, packing_deviation
from mathinterp.engine.intervention import Change, Intervention, Tokens, Value, intervention, site_width
from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Unit
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import scheme_of, type_names, typed_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chosen = str | int | Iterable[Any] | Tokens | None


def is_intervention(given: Any) -> bool:
    """Whether it says by itself which units change: a tuple of ``Change``."""
    return isinstance(given, tuple) and bool(given) and all(isinstance(each, Change) for each in given)


def tokens_of(asked: Chosen, prompts: Sequence[TokenizedPrompt], tokenizer: "PreTrainedTokenizerBase") -> Tokens | None:
    """Where to intervene; None: at every token.

    Args:
        asked: None or "all", "end", indices counted from 0 (the BOS, where there is one), names of token types, or
            Tokens.
    Raises:
        UserError: a token that a prompt does not have, or a type that no token has.
    """
    if asked is None or asked == "all":
        return None
    if asked == "end":
        return Tokens.ends(prompts)
    if isinstance(asked, Tokens):
        return asked
    chosen: list[Any] = [asked] if isinstance(asked, str | int) else list(asked)
    if chosen and all(isinstance(each, str) for each in chosen):
        return _of_types(chosen, prompts, tokenizer)
    if not chosen or not all(isinstance(each, int) and not isinstance(each, bool) for each in chosen):
        raise UserError('`tokens` cannot be read; give "all", "end", indices like [0, 3], or token types')
    for item in prompts:
        if not 0 <= min(chosen) <= max(chosen) < len(item.fed):
            raise UserError(f"`tokens` {chosen}: prompt '{item.prompt.prompt_id}' has tokens 0 to {len(item.fed) - 1}")
    places = [(number, token) for number in range(len(prompts)) for token in sorted(set(chosen))]
    return Tokens(*np.array(places, np.int64).T)


def _of_types(
    chosen: Sequence[str], prompts: Sequence[TokenizedPrompt], tokenizer: "PreTrainedTokenizerBase"
) -> Tokens:
    scheme = scheme_of([item.prompt for item in prompts])
    known = type_names(prompts, scheme)
    for name in chosen:
        if name not in known:
            raise UserError(f"`tokens` '{name}' is no type of these prompts' tokens; take of {', '.join(known)}")
    found = Tokens.of_types([typed.types for typed in typed_tokens(prompts, tokenizer, scheme)], *chosen)
    if not len(found.prompt_n):
        raise UserError(f"`tokens` {', '.join(chosen)}: no prompt has such a token")
    return found


def own_intervention(
    given: Any,
    units: Sequence[Unit],
    tokens: Tokens | None,
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    others: Sequence[TokenizedPrompt] | None,
) -> Intervention:
    """The units changed together at ``tokens``.

    Args:
        given: "zero", a number that activations are multiplied by, a vector, a ``Value``, a function of site and layer
            that gives one, or an intervention; ignored where ``others`` are given.
        others: prompts whose activations are taken, one for each prompt.
    Raises:
        UserError: a vector of another width, or other prompts that do not match.
    """
    if is_intervention(given):
        return tuple(given)
    if others is not None:
        return intervention(units, _patched(anatomy, prompts, others, tokens), tokens)
    return intervention(units, _value(given, anatomy), tokens)


def _value(given: Any, anatomy: Anatomy) -> Value | Callable[[str, int], Value]:
    if isinstance(given, Value):
        return given
    if callable(given):
        return lambda site, layer: given(site, layer)
    if isinstance(given, str):
        return lambda site, layer: Value.zero(anatomy, site, layer)
    if isinstance(given, int | float):
        if not np.isfinite(given):
            raise UserError(f"`value` {given}: give a finite number")
        return Value(factor=float(given))
    try:
        vector = torch.as_tensor(given, dtype=anatomy.dtype, device=anatomy.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"`value` cannot be read as a vector: {error}") from error
    if vector.ndim != 1 or not vector.isfinite().all():
        raise UserError("`value` must be a vector of finite numbers")

    def fitted(site: str, layer: int) -> Value:
        width, d_head = site_width(anatomy, site), anatomy.shape.d_head
        if site == "head" and len(vector) == d_head:
            return Value(vector.repeat(width // d_head))
        if len(vector) != width:
            wanted = f"{d_head} (each head alike) or {width}" if site == "head" else str(width)
            raise UserError(f"`value` has {len(vector)} numbers; the site {site} of this model takes {wanted}")
        return Value(vector)

    return fitted


def _patched(
    anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], others: Sequence[TokenizedPrompt], tokens: Tokens | None
) -> Callable[[str, int], Value]:
    """The activations of other prompts: END's at END, else those of the token of the same index."""
    if len(others) != len(prompts):
        raise UserError(f"`value` has {len(others)} prompts to take activations from, not {len(prompts)}")
    to = Tokens.every(prompts) if tokens is None else tokens
    end_P, other_P = (np.array([item.end for item in group]) for group in (prompts, others))
    at_end = to.token_n == end_P[to.prompt_n]
    source_n = np.where(at_end, other_P[to.prompt_n], to.token_n)
    for number, token, ends in zip(to.prompt_n, to.token_n, at_end, strict=True):
        one, other = prompts[number], others[number]
        if not ends and (one.end != other.end or token >= len(other.fed)):
            raise UserError(
                f"prompt '{one.prompt.prompt_id}' and the one whose activations it takes have not the same number of"
                ' tokens; give such prompts, or `tokens` "end"'
            )
    engine = build_engine(anatomy, others, edits_in_all=1)

    def value(site: str, layer: int) -> Value:
        return Value(engine.activations(site, layer, Tokens(to.prompt_n, source_n)), to)

    return value


def engine_for(changes: Intervention, anatomy: Anatomy, prompts: Sequence[TokenizedPrompt]) -> Engine:
    """An engine whose prompts share no token that is changed for one of them alone, checked against prompts alone."""
    first_P = np.array([len(item.fed) for item in prompts])
    for change in changes:
        tokens = change.value.tokens if change.tokens is None else change.tokens
        if isinstance(change.units, torch.Tensor) and change.units.ndim > 1:
            first_P[:] = 0
        elif tokens is not None:
            np.minimum.at(first_P, tokens.prompt_n, tokens.token_n)
    engine = build_engine(anatomy, prompts, private_from=first_P.tolist(), edits_per_batch=1, edits_in_all=1)
    packing_deviation(engine, anatomy, prompts)
    return engine
