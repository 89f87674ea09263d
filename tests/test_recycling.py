"""Blocks of memory that come back to the pool at any moment, as the garbage collector may free a result anywhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import gradmesh as gm
from gradmesh.transport import packing

MOMENTS = 40
"""More than there are places in a call at which the collector may begin."""


class Node:
    """Part of a reference cycle, as an exception with its traceback is."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result
        self.me = self


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.disable()
    # What other tests have left is a large heap, through which each collection would go.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.enable()
    packing.release()


@pytest.mark.usefixtures("collector")
def test_a_result_that_the_collector_frees_may_come_back_at_any_moment_of_a_call() -> None:
    shape, cpu = (packing.SMALLEST,), torch.device("cpu")
    live = [packing.empty(shape, torch.uint8, cpu) for _ in range(60)]
    del live
    came_back = 0
    for moment in range(1, MOMENTS):
        gc.collect()
        node = Node(packing.empty(shape, torch.uint8, cpu))
        del node
        idle = packing.idle_bytes()
        gc.set_threshold(gc.get_count()[0] + moment, 1000, 1000)
        gc.enable()
        taken = packing.empty(shape, torch.uint8, cpu)
        gc.disable()
        came_back += packing.idle_bytes() >= idle  # one was taken, and one was freed meanwhile
        taken.fill_(moment)
        assert taken[0] == taken[-1] == moment
    assert came_back


def test_a_result_of_one_mebibyte_is_in_the_memory_of_an_earlier_one() -> None:
    def on_each_rank() -> list[bool]:
        x, again, taken = torch.ones(1 << 17), [], []
        for _ in range(4):
            y = gm.all_gather(x)
            place = y.data_ptr()
            del y
            taken.append(torch.empty(1 << 18))  # the C library would give that memory to the next tensor
            again.append(gm.all_gather(x).data_ptr() == place)
        return again

    assert gm.launch(on_each_rank, 2, backend="shm") == [[True] * 4] * 2
