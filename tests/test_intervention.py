"""The vocabulary of interventions against hooks written by hand: one prompt alone, in float64, on every tiny family."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mathinterp.engine.hooks import edited_input, edited_output
from mathinterp.engine.intervention import (
    Change,
    Intervention,
    Tokens,
    Value,
    differing_layers,
    intervention,
    label,
    site_width,
    zeroed,
)
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import AttentionOutput, Head, Mlp, Neuron, ResidualStream, Unit
from tests.exact import EXACT, random_prompts
from tests.tiny import MIXTURES, TINY_FAMILIES

PROMPTS, OTHERS = random_prompts(8), random_prompts(8, seed=1)
SITES = ("head", "attention", "mlp", "residual", "neuron")
Edit = Callable[[torch.Tensor], torch.Tensor]


def hook(anatomy: Anatomy, site: str, layer: int, edit: Edit):
    """A hook by hand on the modules themselves."""
    block = anatomy.layers[layer]
    if site == "residual":
        return edited_input(block, edit)
    if site == "mlp":
        return edited_output(getattr(block, anatomy.family.mlp), edit)
    projection = getattr(getattr(block, anatomy.family.attention), anatomy.family.output_projection)
    if site == "neuron":
        return edited_input(getattr(getattr(block, anatomy.family.mlp), anatomy.family.down_projection), edit)
    return (edited_input if site == "head" else edited_output)(projection, edit)


def alone(anatomy: Anatomy, edits: Callable[[int], list[tuple[str, int, Edit]]]) -> np.ndarray:
    """Log-probabilities of all scored tokens; ``edits``: prompt -> site, layer and what its activations T Z become."""
    values = []
    for number, prompt in enumerate(PROMPTS):
        with ExitStack() as hooks:
            for site, layer, edit in edits(number):
                hooks.enter_context(hook(anatomy, site, layer, edit))
            logprobs = anatomy.model(torch.tensor([prompt.fed])).logits[0].log_softmax(-1)
        values += [float(logprobs[token.index - 1, token.token_id]) for token in prompt.scored]
    return np.array(values)


def put(columns: slice | list[int], token: int | slice, new: Edit) -> Edit:
    def edit(clean_1TZ: torch.Tensor) -> torch.Tensor:
        clean_1TZ = clean_1TZ.clone()
        clean_1TZ[:, token, columns] = new(clean_1TZ)[:, token, columns]
        return clean_1TZ

    return edit


def engines(anatomy: Anatomy) -> list[PackedEngine | PlainEngine]:
    """Both, several groups and batches; every token has a node of its own."""
    private = [0] * len(PROMPTS)
    packed = PackedEngine(anatomy, PROMPTS, private_from=private, max_tokens=120, edits_per_batch=2)
    return [packed, PlainEngine(anatomy, PROMPTS, batch_size=3)]


def check(anatomy: Anatomy, made: list[Intervention], expected: list[np.ndarray]) -> None:
    for engine in engines(anatomy):
        found = engine.run(made)
        for row, logprobs in enumerate(expected):
            np.testing.assert_allclose(found.logprob_EA[row], logprobs, **EXACT)
        assert np.abs(found.logprob_EA - engine.baseline().logprob_EA).max() > 1e-7, "nothing was changed"


def unit_of(site: str, layer: int) -> tuple[Unit, list[int] | None]:
    """One unit, and which neurons or head it is."""
    units: dict[str, tuple[Unit, list[int] | None]] = {
        "head": (Head(layer, 2), [2]), "neuron": (Neuron(layer, 1), [1]), "mlp": (Mlp(layer), None),
        "attention": (AttentionOutput(layer), None), "residual": (ResidualStream(layer), None),
    }  # fmt: skip
    return units[site]


def columns_of(anatomy: Anatomy, site: str) -> slice | list[int]:
    if site == "head":
        return slice(2 * anatomy.shape.d_head, 3 * anatomy.shape.d_head)
    return [1] if site == "neuron" else slice(None)


FAMILIES_SITES = [(name, site) for name in TINY_FAMILIES for site in SITES if site != "neuron" or name not in MIXTURES]


@pytest.mark.parametrize(("anatomy", "site"), FAMILIES_SITES, indirect=["anatomy"])
def test_values_of_another_run_at_each_token(anatomy: Anatomy, site: str) -> None:
    """A batch of interventions with one value, each at other tokens: activation patching."""
    source, columns = PlainEngine(anatomy, OTHERS), columns_of(anatomy, site)
    lengths = [min(len(mine.fed), len(other.fed)) for mine, other in zip(PROMPTS, OTHERS, strict=True)]
    indices = [1, 3, 4]
    tokens = [Tokens(np.arange(8), np.minimum(index, np.array(lengths) - 1)) for index in indices]
    shared = [Tokens(each.prompt_n, each.token_n) for each in tokens]
    every = Tokens(*(np.concatenate([getattr(t, name) for t in shared]) for name in ("prompt_n", "token_n")))
    for layer in (0, anatomy.shape.n_layers - 1):
        rows = source.activations(site, layer, every)
        value, (unit, _) = Value(rows, every), unit_of(site, layer)
        by_token = rows.unflatten(0, (len(indices), len(PROMPTS)))

        def edit(p: int, i: int, layer: int = layer, rows: torch.Tensor = by_token) -> list[tuple[str, int, Edit]]:
            return [(site, layer, put(columns, int(tokens[i].token_n[p]), lambda clean: rows[i, p].expand_as(clean)))]

        expected = [alone(anatomy, lambda p, i=i, edit=edit: edit(p, i)) for i in range(len(indices))]
        check(anatomy, [intervention([unit], value, each) for each in tokens], expected)


def test_vectors_multiples_and_zeros_of_several_sites_together(anatomy: Anatomy) -> None:
    sites = [site for site in SITES if site != "neuron" or not anatomy.shape.n_experts]
    generator = torch.Generator().manual_seed(0)
    made: list[Intervention] = [(), ()]
    edits: list[list[tuple[str, int, Edit]]] = [[], []]
    for layer, site in enumerate(sites):
        vector = torch.randn(site_width(anatomy, site), generator=generator, dtype=torch.float64)
        columns, (unit, _), layer = columns_of(anatomy, site), unit_of(site, layer % 3), layer % 3
        made[0] += intervention([unit], Value(vector))
        edits[0].append((site, layer, put(columns, slice(None), lambda clean, vector=vector: vector.expand_as(clean))))
        made[1] += intervention([unit], Value(factor=0.5))
        edits[1].append((site, layer, put(columns, slice(None), lambda clean: 0.5 * clean)))
    check(anatomy, made, [alone(anatomy, lambda _, own=own: own) for own in edits])


def test_one_unit_here_and_another_there(anatomy: Anatomy) -> None:
    """Two changes of one site with one value, at END and before it."""
    rows = torch.randn(4 * anatomy.shape.d_head, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends, value, d = Tokens.ends(PROMPTS), Value(rows), anatomy.shape.d_head
    before = Tokens(ends.prompt_n, ends.token_n - 1)
    made = (Change("head", 1, (0,), value, ends), Change("head", 1, (3,), value, before))
    put_in = lambda clean: rows.expand_as(clean)  # noqa: E731
    expected = alone(
        anatomy,
        lambda p: [
            ("head", 1, put(slice(0, d), PROMPTS[p].end, put_in)),
            ("head", 1, put(slice(3 * d, 4 * d), PROMPTS[p].end - 1, put_in)),
        ],
    )
    check(anatomy, [made], [expected])


def test_zeroed_attention_and_mlps_keep_their_biases(anatomy: Anatomy) -> None:
    heads = zeroed(anatomy, [Head(1, head) for head in range(anatomy.shape.n_heads)])
    for engine in engines(anatomy):
        both = engine.run([heads, zeroed(anatomy, [AttentionOutput(1)])])
        np.testing.assert_allclose(both.logprob_EA[0], both.logprob_EA[1], **EXACT)


def test_tokens_by_type_are_those_of_that_type() -> None:
    found = Tokens.of_types([("bos", "operand_a", "other"), ("operand_a", "operand_b")], "operand_a", "operand_b")
    assert list(zip(found.prompt_n.tolist(), found.token_n.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1)]
    assert len(Tokens.of_types([("other",)], "bos").prompt_n) == 0


def test_names_and_layers_of_what_is_changed(anatomy: Anatomy) -> None:
    zero = lambda site, layer: Value.zero(anatomy, site, layer)  # noqa: E731
    made = intervention([Mlp(2), Head(1, 3), Head(0, 1), Head(0, 1)], zero)
    assert label(made) == "heads 0.1, 1.3; mlp 2"
    assert label(made[:1]) == "head 0.1"
    assert label(()) == "nothing"
    assert differing_layers(made, made) == set()
    assert differing_layers(made, made[1:]) == {0}
    assert differing_layers(made, intervention([Head(0, 1)], zero)) == {0, 1, 2}, "values are compared by identity"


def test_hooks_that_do_not_fire_and_exceptions(anatomy: Anatomy) -> None:
    made = [zeroed(anatomy, [Head(0, 1), AttentionOutput(1), Mlp(2), ResidualStream(1)])]
    with pytest.raises(AssertionError, match="never fired"), hooked(everywhere(anatomy), made):
        pass
    with pytest.raises(ZeroDivisionError), hooked(everywhere(anatomy), made):
        raise ZeroDivisionError
    with (
        pytest.raises(AssertionError, match="nothing is known of prompts"),
        hooked(everywhere(anatomy), [intervention([Mlp(1)], Value.zero(anatomy, "mlp", 1), Tokens.ends(PROMPTS))]),
    ):
        anatomy.model(torch.tensor([PROMPTS[0].fed]))
    for module in anatomy.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
