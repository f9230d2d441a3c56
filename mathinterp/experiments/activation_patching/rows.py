"""How the rows of activation patching are computed: both sentences of every pair, and one token after another.

All tokens of a layer are one batch, which runs from that layer on. Shape legend: P kept pair, T token index, n (pair,
token), A = P answer token (the first digit), E = T intervention.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from mathinterp.engine.choose import Engine, build_engine, many_layers, packing_deviation
from mathinterp.engine.intervention import CLEAN, Change, Tokens, Value
from mathinterp.engine.scores import Scores
from mathinterp.experiments.activation_patching import ActivationPatching
from mathinterp.experiments.activation_patching.tables import DIRECTIONS, PATCHING_PAIRS, PATCHING_SCAN
from mathinterp.experiments.answered import kept_pairs
from mathinterp.experiments.base import Subject
from mathinterp.experiments.columns import cast_table
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.pairs import first_digit
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import typed_tokens


@dataclass
class Side:
    """X_r or X_c of all kept pairs."""

    engine: Engine
    baseline: Scores  # in the batch shape of patched passes


@dataclass
class PatchingState:
    """What a replica keeps between shards."""

    names: pa.Array  # P prompt ids
    types: list[tuple[str, ...]]  # of each prompt's tokens
    first: int  # the first token that differs in any pair: a patch before it changes nothing
    tokens: Tokens  # all of them
    sides: dict[str, Side]  # direction -> the sentences that run
    pairs: pa.Table
    notes: dict[str, Any]


def prepare(scan: ActivationPatching, subject: Subject) -> PatchingState:
    """Clean passes over X_r and X_c, and the choice of pairs."""
    anatomy, tokenizer = subject.anatomy, subject.tokenizer
    assert tokenizer is not None, "types of tokens need the tokenizer"
    every = [_scored_on_first_digit(prompt) for prompt in subject.prompts]
    found = [build_engine(anatomy, side, asked=scan.engine, max_tokens=subject.max_tokens).baseline() for side in
             zip(*every, strict=True)]  # fmt: skip
    kept_P = kept_pairs(found[0].correct_EA[0], scan.keep_all)
    keep = np.flatnonzero(kept_P)
    originals, counterfactuals = (list(side) for side in zip(*(every[i] for i in keep), strict=True))
    longest = max(len(item.fed) for item in originals)
    running = dict(zip(DIRECTIONS, (counterfactuals, originals), strict=True))
    sides = {name: _side(scan, anatomy, items, longest, subject.max_tokens) for name, items in running.items()}
    types = typed_tokens([subject.prompts[i] for i in keep.tolist()], tokenizer)
    state = PatchingState(
        pa.array([item.prompt.prompt_id for item in originals]),
        [own.types + ("other",) * (len(item.fed) - len(own.types)) for own, item in zip(types, originals, strict=True)],
        min(_first_difference(*pair) for pair in zip(originals, counterfactuals, strict=True)),
        Tokens.every(originals),
        sides,
        _pairs(subject.prompts, kept_P, found, [sides["noising"].baseline, sides["denoising"].baseline]),
        {"pairs": len(every), "pairs_kept": len(keep), "engine": sides["noising"].engine.name},
    )
    deviations = [packing_deviation(sides[name].engine, anatomy, items) for name, items in running.items()]
    state.notes |= {"packing_deviation": max(deviations), "noise_floor": _noise_floor(state, anatomy)}
    return state


def _scored_on_first_digit(prompt: TokenizedPrompt) -> tuple[TokenizedPrompt, TokenizedPrompt]:
    """X_r and X_c, read up to the token whose logits predict the answer's first digit."""
    scored = first_digit(prompt)
    assert prompt.counterfactual_ids is not None, f"prompt {prompt.prompt.prompt_id} has no counterfactual"
    assert len(prompt.counterfactual_ids) == len(prompt.input_ids), "positions of a pair do not align"
    cut, only = slice(scored.index + 1), (replace(scored, position=0),)
    return (
        replace(prompt, input_ids=prompt.input_ids[cut], scored=only, counterfactual_ids=None),
        replace(prompt, input_ids=prompt.counterfactual_ids[cut], scored=only, counterfactual_ids=None),
    )


def _first_difference(original: TokenizedPrompt, counterfactual: TokenizedPrompt) -> int:
    """The first token that the two do not share; the last one if they share all."""
    pairs = zip(original.fed, counterfactual.fed, strict=True)
    return next((t for t, (own, other) in enumerate(pairs) if own != other), original.end)


def _side(
    scan: ActivationPatching, anatomy: Anatomy, items: list[TokenizedPrompt], longest: int, max_tokens: int | None
) -> Side:
    """The engine of one sentence of every pair; every token has its own node, as values differ by pair."""
    private = [0] * len(items)
    engine = many_layers(
        build_engine(anatomy, items, asked=scan.engine, private_from=private, edits_per_batch=longest,
                     max_tokens=max_tokens, compiled=False)
    )  # fmt: skip
    return Side(engine, engine.run([CLEAN] * longest).first())


def _patched(state: PatchingState, direction: str, source: Engine, site: str, layer: int) -> Scores:
    """Scores with the site patched from ``source`` at the first token of every prompt, at the second, ..: T x P."""
    side, value = state.sides[direction], Value(source.activations(site, layer, state.tokens), state.tokens)
    reaching = list(enumerate(_reaching(state.types)))[state.first :]
    found = side.engine.run(
        [(Change(site, layer, None, value, Tokens(own, np.full(len(own), t))),) for t, own in reaching]
    )
    parts = zip(*(astuple(part) for part in [side.baseline] * state.first + [found]), strict=True)
    return Scores(*map(np.concatenate, parts))


def _reaching(types: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
    """Token index -> the prompts that have such a token."""
    lengths = np.array([len(own) for own in types])
    return [np.flatnonzero(lengths > t) for t in range(lengths.max())]


def _noise_floor(state: PatchingState, anatomy: Anatomy) -> float:
    """Largest change of a score by patching a sentence's own residual stream, in the middle layer."""
    layer = anatomy.shape.n_layers // 2
    worst = []
    for direction, side in state.sides.items():
        patched = _patched(state, direction, side.engine, "residual", layer)
        worst += [patched.of([t]).difference(side.baseline) for t in range(len(patched.logit_EA))]
    return float(np.max(worst))


def layer_rows(state: PatchingState, site: str, direction: str, layer: int) -> pa.Table:
    """One layer's site patched at each token, on every kept pair."""
    (other,) = (side for name, side in state.sides.items() if name != direction)
    scores = _patched(state, direction, other.engine, site, layer)
    token_n = np.concatenate([np.full(len(own), t) for t, own in enumerate(_reaching(state.types))])
    pair_n = np.concatenate(_reaching(state.types))
    place = (token_n, pair_n)
    columns: dict[str, Any] = {
        "site": [site] * len(token_n),
        "layer": np.full(len(token_n), layer),
        "direction": [direction] * len(token_n),
        "prompt_id": state.names.take(pa.array(pair_n)),
        "token": token_n,
        "token_type": [state.types[p][t] for t, p in zip(*place, strict=True)],
        "at_end": [t == len(state.types[p]) - 1 for t, p in zip(*place, strict=True)],
        "logit": scores.logit_EA[place].astype(np.float32),
        "logprob": scores.logprob_EA[place].astype(np.float32),
        "predicted_id": scores.predicted_EA[place],
    }
    return cast_table(PATCHING_SCAN, columns)


def _pairs(
    prompts: Sequence[TokenizedPrompt], kept_P: np.ndarray, found: Sequence[Scores], kept: Sequence[Scores]
) -> pa.Table:
    """Unpatched scores on X_r and X_c; of kept pairs, those in the batch shape of patched passes."""
    columns: list[Any] = [[prompt.prompt.prompt_id for prompt in prompts], found[0].correct_EA[0], kept_P]
    for name in ("logit_EA", "logprob_EA"):
        for every, own in zip(found, kept, strict=True):
            values_P = getattr(every, name)[0].copy()
            values_P[kept_P] = getattr(own, name)[0]
            columns.append(values_P.astype(np.float32))
    arrays = [pa.array(column).cast(f.type) for column, f in zip(columns, PATCHING_PAIRS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=PATCHING_PAIRS)
