"""Work side by side: in order, shared inputs ready, exceptions told; on a GPU from several threads."""

import threading

import pytest
import torch

from mathinterp.engine.side_by_side import SideBySide

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_results_come_in_order_and_of_shared_inputs_that_are_ready(device: str) -> None:
    workers, threads = SideBySide(torch.device(device)), set()

    def work(piece: int) -> float:
        threads.add(threading.get_ident())
        return float((piece * shared).sum())

    for _ in range(5):
        shared = torch.ones(2**20, device=device)
        for _ in range(30):  # still under way when the pieces start
            shared = shared * 1.0
        assert workers.map(work, range(8)) == [piece * 2.0**20 for piece in range(8)]
    assert (threading.get_ident() in threads) == (device == "cpu")


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_an_exception_of_a_piece_is_raised(device: str) -> None:
    def work(piece: int) -> int:
        if piece == 2:
            raise FloatingPointError("piece 2 is NaN")
        return piece

    with pytest.raises(FloatingPointError, match="piece 2 is NaN"):
        SideBySide(torch.device(device)).map(work, range(4))
