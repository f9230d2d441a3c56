"""Prefix trees: every token is there once, with its own ancestors, and shared exactly as far as allowed."""

import numpy as np
import pytest

from mathinterp.engine.tree.forest import Forest, count_nodes, plant

Prefixes = set[tuple[int, ...]]


def random_sequences(seed: int, count: int = 40) -> list[tuple[int, ...]]:
    """Sequences of 1 to 12 tokens over few ids: many shared prefixes, many duplicates, many that extend others."""
    rng = np.random.default_rng(seed)
    stems = [tuple(rng.integers(1, 4, size=rng.integers(1, 7)).tolist()) for _ in range(5)]
    tails = [tuple(rng.integers(1, 4, size=rng.integers(0, 6)).tolist()) for _ in range(count)]
    return [stems[rng.integers(5)] + tail for tail in tails]


def trie(sequences: list[tuple[int, ...]]) -> Prefixes:
    """The slow twin: a trie is the set of all prefixes, one node each."""
    return {sequence[: depth + 1] for sequence in sequences for depth in range(len(sequence))}


def path_to(forest: Forest, flat: int) -> list[int]:
    """Flat indices from the root to a node, by following parents."""
    pack, node = divmod(flat, forest.pack_size)
    path = []
    while node >= 0:
        path.append(pack * forest.pack_size + node)
        node = int(forest.parents_PN[pack, node])
    return path[::-1]


def members(forest: Forest) -> list[list[int]]:
    """Indices of the sequences of each pack."""
    packs: list[list[int]] = [[] for _ in range(forest.n_packs)]
    for index, nodes in enumerate(forest.node_of):
        packs[int(nodes[0]) // forest.pack_size].append(index)
    return packs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pack_size", [8, 24, 64, 1000])
def test_every_token_has_a_node_whose_ancestors_are_the_tokens_before_it(seed: int, pack_size: int) -> None:
    sequences = random_sequences(seed)
    forest = plant(sequences, pack_size=pack_size)
    tokens, depths = forest.token_ids_PN.ravel(), forest.depths_PN.ravel()
    for sequence, nodes in zip(sequences, forest.node_of, strict=True):
        assert len(nodes) == len(sequence)
        assert path_to(forest, int(nodes[-1])) == nodes.tolist()
        assert tokens[nodes].tolist() == list(sequence)
        assert depths[nodes].tolist() == list(range(len(sequence)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pack_size", [8, 24, 64, 1000])
def test_each_pack_is_the_trie_of_its_sequences(seed: int, pack_size: int) -> None:
    sequences = random_sequences(seed)
    forest = plant(sequences, pack_size=pack_size)
    for pack, indices in enumerate(members(forest)):
        used = int(forest.used_P[pack])
        spelled = [
            tuple(int(forest.token_ids_PN.ravel()[n]) for n in path_to(forest, pack * forest.pack_size + node))
            for node in range(used)
        ]
        assert set(spelled) == trie([sequences[i] for i in indices])
        assert len(spelled) == len(set(spelled)), "a prefix stands in the pack twice"


@pytest.mark.parametrize("seed", range(5))
def test_one_large_pack_has_the_nodes_of_the_whole_trie(seed: int) -> None:
    sequences = random_sequences(seed)
    forest = plant(sequences, pack_size=1000)
    assert forest.n_packs == 1
    assert forest.n_nodes == count_nodes(sequences) == len(trie(sequences))


@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_a_node_sees_itself_and_its_ancestors_within_the_window(window: int | None) -> None:
    forest = plant(random_sequences(3), pack_size=24)
    assert forest.n_packs > 1
    size = forest.pack_size
    for pack in range(forest.n_packs):
        expected = np.eye(size, dtype=bool)  # padding sees itself alone, and nothing sees it
        for node in range(int(forest.used_P[pack])):
            path = [flat % size for flat in path_to(forest, pack * size + node)]
            expected[node, path if window is None else path[-window:]] = True
        np.testing.assert_array_equal(forest.ancestors(pack, window), expected)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pack_size", [24, 1000])
def test_private_tokens_belong_to_one_sequence_alone(seed: int, pack_size: int) -> None:
    sequences = random_sequences(seed)
    rng = np.random.default_rng(100 + seed)
    limits = [int(rng.integers(0, len(s) + 1)) for s in sequences]
    forest = plant(sequences, pack_size=pack_size, private_from=limits)
    users: dict[int, set[int]] = {}
    for index, nodes in enumerate(forest.node_of):
        for node in nodes:
            users.setdefault(int(node), set()).add(index)
    for index, (nodes, limit) in enumerate(zip(forest.node_of, limits, strict=True)):
        assert all(users[int(node)] == {index} for node in nodes[limit:])
        assert path_to(forest, int(nodes[-1])) == nodes.tolist()
        assert forest.token_ids_PN.ravel()[nodes].tolist() == list(sequences[index])


def test_wholly_private_sequences_share_nothing_even_if_equal() -> None:
    sequences = [(1, 2, 3)] * 5
    assert plant(sequences, pack_size=100).n_nodes == 3
    forest = plant(sequences, pack_size=100, private_from=[0] * 5)
    assert forest.n_nodes == 15
    assert len({int(node) for nodes in forest.node_of for node in nodes}) == 15


def test_equal_sequences_share_up_to_their_private_tokens() -> None:
    forest = plant([(1, 2, 3, 4)] * 3, pack_size=100, private_from=[2] * 3)
    assert forest.n_nodes == 2 + 3 * 2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("pack_size", "multiple"), [(24, 1), (40, 1), (40, 3), (64, 4)])
@pytest.mark.parametrize("alignment", [1, 8])
def test_packs_are_even(seed: int, pack_size: int, multiple: int, alignment: int) -> None:
    """No smaller packs would do with as many of them; their number is the multiple asked for, the last ones empty."""
    sequences = random_sequences(seed, count=120)
    forest = plant(sequences, pack_size=pack_size, packs_multiple_of=multiple, alignment=alignment)
    assert forest.pack_size % alignment == 0
    assert (forest.used_P <= forest.pack_size).all()
    fewest = plant(sequences, pack_size=pack_size, alignment=alignment).n_packs
    assert forest.n_packs == -(-fewest // multiple) * multiple
    in_use = int((forest.used_P > 0).sum())
    assert (forest.used_P[:in_use] > 0).all()
    longest = max(map(len, sequences))
    if forest.pack_size - alignment >= longest:
        smaller = plant(sequences, pack_size=forest.pack_size - alignment, alignment=alignment)
        assert smaller.n_packs > forest.n_packs


def test_a_sequence_longer_than_the_pack_size_makes_packs_larger() -> None:
    forest = plant([tuple(range(30)), (1, 2)], pack_size=8)
    assert forest.pack_size >= 30
    assert forest.token_ids_PN.ravel()[forest.node_of[0]].tolist() == list(range(30))


def test_padding_is_marked() -> None:
    forest = plant([(5, 6, 7)], pack_size=64, alignment=8)
    used = int(forest.used_P[0])
    assert (forest.pack_size, used) == (8, 3)
    assert (forest.parents_PN[0, used:] == -1).all()
    assert (forest.depths_PN[0, used:] == 0).all()
    assert (forest.token_ids_PN[0, used:] == 0).all()
    assert not forest.ancestors(0)[:used, used:].any()
    assert not forest.ancestors(0)[used:, :used].any()
