"""benchmarks/tensor_parallel.py: two processes with half a model each give the rows of one with all of it."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.tensor_parallel import CARDS, Work, elsewhere, in_one_process, in_parallel
from tests.job_service import free_ports


@pytest.mark.slow
def test_halves_of_a_model_score_zeroed_heads_as_the_whole():
    work = Work("llama-tiny", "cpu", limit=8, layers=(0, 3), heads=4, rounds=1, compiled=False)
    [(_, expected, about)] = elsewhere(in_one_process, (work, 1))
    [port] = free_ports(1)
    for _, found, _ in elsewhere(in_parallel, *((work, rank, port) for rank in range(CARDS))):
        assert np.abs(found.logprob_EA - expected.logprob_EA).max() < 1e-10
        assert (found.predicted_EA == expected.predicted_EA).all()
    logprobs_HA = expected.logprob_EA[:4]  # of the heads of layer 0, two in each half
    assert all(np.abs(one - other).max() > 1e-2 for one, other in combinations(logprobs_HA, 2))
    assert about["tokens"] > 8
