"""What holds for whatever is drawn: readers of options, planting of trees, cutting of heads, run ids."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mathinterp.engine.tree.forest import Planter, count_nodes, plant
from mathinterp.errors import UserError
from mathinterp.experiments.chosen_heads import FEWEST_HEADS, MOST_HEADS, cut_heads, most_at_once
from mathinterp.experiments.options import MOST_LAYERS, read_counts, read_heads, read_layers, read_neurons
from mathinterp.models.units import Head, Neuron
from mathinterp.store.manifest import run_id

settings.register_profile("mathinterp", deadline=None, derandomize=True)  # the same examples on every machine
settings.load_profile("mathinterp")

SMALL = st.integers(0, 99_999)
READERS = (read_heads, read_neurons, read_layers, read_counts)


# ---- readers of options ----


@pytest.mark.slow
@given(st.lists(st.tuples(SMALL, SMALL), min_size=1), st.sampled_from((" ", "")))
def test_units_are_read_as_they_are_written_in_their_order(pairs, space):
    for read, kind in ((read_heads, Head), (read_neurons, Neuron)):
        units = tuple(kind(*pair) for pair in pairs)
        assert read(f",{space}".join(map(str, units))) == units
        assert read([str(unit) for unit in units]) == read(pairs) == read(units) == units
    assert read_neurons(",".join(f"{layer}_{neuron}" for layer, neuron in pairs)) == tuple(map(tuple, pairs))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 30)), min_size=1))
def test_layers_are_the_union_of_their_ranges(ranges):
    text = ",".join(str(low) if not more else f"{low}-{low + more}" for low, more in ranges)
    expected = sorted({layer for low, more in ranges for layer in range(low, low + more + 1)})
    assert read_layers(text) == tuple(expected) == read_layers(expected[::-1])


@given(st.lists(SMALL, min_size=1), st.integers(0, 5))
def test_counts_keep_their_order_and_their_least(numbers, least):
    text = ", ".join(map(str, numbers))
    if min(numbers) >= least:
        assert read_counts(text, least=least) == tuple(numbers)
    else:
        with pytest.raises(UserError, match="`ks`"):
            read_counts(text, least=least)
    assert read_counts("none") == ()


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_in_one_line_that_names_the_field(text):
    for read in READERS:
        refusal = ""
        try:
            read(text, "field")
        except UserError as error:
            refusal = str(error)
        assert not refusal or "`field`" in refusal


@given(st.integers(MOST_LAYERS, 10**30), st.integers(0, 10))
def test_a_range_of_layers_that_no_model_has_is_refused_at_once(high, low):
    with pytest.raises(UserError, match="no model has a layer"):
        read_layers(f"{low}-{high}")


# ---- planting of trees ----

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple)  # few tokens, so that prefixes are shared
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=12)


def path_of(forest, pack, node):
    """Tokens from the root to a node."""
    tokens = []
    while node >= 0:
        tokens.append(int(forest.token_ids_PN[pack, node]))
        node = int(forest.parents_PN[pack, node])
    return tuple(reversed(tokens))


@given(SEQUENCES, st.integers(1, 40), st.integers(1, 3), st.integers(1, 4))
def test_every_token_of_a_planted_sequence_sees_its_own_prefix_alone(sequences, pack_size, multiple, alignment):
    forest = plant(sequences, pack_size=pack_size, packs_multiple_of=multiple, alignment=alignment)
    assert forest.pack_size % alignment == 0
    assert forest.n_packs % multiple == 0
    for sequence, nodes in zip(sequences, forest.node_of, strict=True):
        packs = nodes // forest.pack_size
        assert len(set(packs.tolist())) == 1
        assert len(nodes) == len(sequence)
        for depth, node in enumerate(nodes % forest.pack_size):
            assert path_of(forest, packs[0], int(node)) == sequence[: depth + 1]
            assert forest.depths_PN[packs[0], node] == depth
    assert count_nodes(sequences) <= forest.n_nodes <= sum(map(len, sequences))


@given(SEQUENCES)
def test_one_pack_for_all_has_the_fewest_nodes(sequences):
    total = sum(map(len, sequences))
    forest = Planter(sequences).build(total)
    assert forest.n_packs == 1
    assert forest.n_nodes == count_nodes(sequences) == len({s[: t + 1] for s in sequences for t in range(len(s))})


@pytest.mark.slow
@given(SEQUENCES, st.integers(1, 40))
def test_subtrees_say_the_same_as_ancestors(sequences, pack_size):
    forest = plant(sequences, pack_size=pack_size)
    nodes = np.arange(forest.pack_size)
    for pack in range(forest.n_packs):
        ends = forest.subtree_ends(pack)
        sees = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < ends[None, :])
        np.testing.assert_array_equal(forest.ancestors(pack), sees)


@pytest.mark.slow
@given(st.data())
def test_private_nodes_and_other_kinds_are_never_shared(data):
    sequences = data.draw(SEQUENCES)
    private = [data.draw(st.integers(0, len(sequence))) for sequence in sequences]
    kinds = [data.draw(st.integers(0, 1)) for _ in sequences]
    forest = plant(sequences, pack_size=30, private_from=private, kinds=kinds)
    owners: dict[int, set[int]] = {}
    for index, nodes in enumerate(forest.node_of):
        assert {int(forest.kinds_P[node // forest.pack_size]) for node in nodes} == {kinds[index]}
        for node in nodes:
            owners.setdefault(int(node), set()).add(index)
    for index, nodes in enumerate(forest.node_of):
        assert all(owners[int(node)] == {index} for node in nodes[private[index] :])


# ---- cutting of heads ----


@given(st.integers(1, 12), st.integers(1, 100), st.data())
def test_cut_heads_are_all_there_once_in_order_and_files_are_of_a_size(n_layers, n_heads, data):
    every = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    chosen = data.draw(st.one_of(st.just(every), st.lists(st.sampled_from(every), unique=True, min_size=1).map(sorted)))
    files = cut_heads(chosen)
    assert [head for file in files for head in file] == chosen
    assert all(len(file) >= FEWEST_HEADS for file in files[:-1])
    assert all(len(file) < FEWEST_HEADS + MOST_HEADS for file in files)
    at_once = max(sum(head[0] == layer for head in file) for file in files for layer in {head[0] for head in file})
    whole_layers = len(chosen) == len(every)  # some heads of a wide layer may be more than a whole layer's even part
    assert at_once <= (most_at_once(n_heads) if whole_layers else MOST_HEADS) <= MOST_HEADS


# ---- run ids ----

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.dictionaries(st.text(), PLAIN, max_size=5)


@pytest.mark.slow
@given(PARAMETERS, st.randoms())
def test_run_ids_depend_on_values_and_not_on_their_order(parameters, shuffle: random.Random):
    items = list(parameters.items())
    shuffle.shuffle(items)
    assert run_id("heads", dict(items), "m", "p") == run_id("heads", parameters, "m", "p")
    stored = json.loads(json.dumps(parameters))  # as the run's record has them
    assert run_id("heads", stored, "m", "p") == run_id("heads", parameters, "m", "p")


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(), PARAMETERS, st.text(), st.text()), min_size=2, max_size=6))
def test_runs_that_differ_have_different_ids(identities):
    ids = {json.dumps(identity, sort_keys=True): run_id(*identity) for identity in identities}
    assert len(set(ids.values())) == len(ids)
    assert all(found.isalnum() for found in ids.values())


@given(st.lists(st.tuples(SMALL, SMALL), min_size=2))
def test_units_sort_as_pairs_do(pairs):
    assert sorted(Head(*pair) for pair in pairs) == sorted(pairs)
    assert all(a <= b for a, b in pairwise(sorted(Neuron(*pair) for pair in pairs)))
