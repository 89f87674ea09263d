"""Pools of ranks that the whole run shares: starting ranks is what costs time here, not using them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.state import rank_state

pytest.register_assert_rewrite("tests.contract")

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors on two cores: torch's own threads would only get in the way of the ranks."""
    torch.set_num_threads(1)


def without_traces(fn: Callable[..., Any], *args: Any) -> Any:
    """Run fn and forget the rank's current mesh, as the ranks live on to the next test."""
    try:
        return fn(*args)
    finally:
        state = rank_state()
        state.mesh = state.mesh_world = state.chain = None


@pytest.fixture(scope="session")
def threads() -> Iterator[Callable[[int], Run]]:
    """`threads(n)(fn, *args)` runs fn on n ranks that are threads, and returns their results."""
    pools: dict[int, gm.Ranks] = {}

    def pool(n: int) -> Run:
        if n not in pools:
            pools[n] = gm.Ranks(n, backend="threads", timeout=120)
        return functools.partial(pools[n].run, without_traces)

    yield pool
    for ranks in pools.values():
        ranks.close()


@pytest.fixture(scope="session", params=["gloo", "shm"])
def processes(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Run]]:
    """`processes(n)(fn, *args)` runs fn on n processes, of both backends in turn, and returns their results."""
    pools: dict[int, gm.Ranks] = {}

    def pool(n: int) -> Run:
        if n not in pools:
            pools[n] = gm.Ranks(n, backend=request.param, timeout=240)
        return functools.partial(pools[n].run, without_traces)

    yield pool
    for ranks in pools.values():
        ranks.close()
