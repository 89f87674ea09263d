"""Pools of ranks that the whole run shares: starting ranks is what costs time here, not using them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradmesh.launch import process_ranks
from gradmesh.launch.outcomes import Outcome
from gradmesh_pytest.running import Pools, World
from gradmesh_pytest.settings import Where
from tests.forking import Forking
from tests.warm_ranks import Processes, read_at_import

pytest.register_assert_rewrite("tests.contract")

LONGEST = (
    "test_objective",
    "test_shm_backend",
    "test_laws",
    "test_docs",
    "test_torch_lacks_a_name",
    "test_contract_on_processes",
    "test_own_backends",
    "test_transport",
    "test_direct_calls",
    "test_typing",
    "test_compat_function",
    "test_contrastive",
    "test_simulated_device",
    "test_no_sync",
    "test_scripts",
    "test_graph_plan",
    "test_clipping",
    "test_zoo",
    "test_compile",
)
"""The files that take longest, in the order in which they begin: one that began last would keep one core alone."""

Run = Callable[..., list[Any]]
Worlds = Callable[..., World]


@pytest.hookimpl(trylast=True)  # after pytest has ordered them by the parameters of fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the workers take files in this order. What compares times has three attempts.

    These are some time apart, so that one of them does not run beside the same other test.
    """
    for item in items:
        for version, reason in (mark.args for mark in item.iter_markers("torch_at_least")):
            if torch.__version__ < version:
                item.add_marker(pytest.mark.skip(reason=f"torch before {version}: {reason}"))
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=15))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors on two cores: torch's own threads would only get in the way of the ranks."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[Processes]:
    """Ranks that are processes are forked from one that has imported torch."""
    warm = Processes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            process_ranks, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm.popen})
        )
        yield warm
    warm.close()


@pytest.fixture(scope="session", autouse=True)
def _idle_ranks_stop() -> Iterator[None]:
    """Ranks of a pool stop while no test uses them: the threads of their Gloo groups wake 100 times a second each."""
    attempt, end = Pools.attempt, Pools._end
    used: list[Pools] = []

    def attempted(self: Pools, where: Where, *args: Any) -> Outcome:
        used[:] = [*{*used, self}]
        _signal(self, (where.size, where.backend), signal.SIGCONT)
        try:
            return attempt(self, where, *args)
        finally:
            _signal(self, (where.size, where.backend), signal.SIGSTOP)

    def ended(self: Pools, key: tuple[int, str]) -> None:
        _signal(self, key, signal.SIGCONT)
        end(self, key)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pools, "attempt", attempted)
        patched.setattr(Pools, "_end", ended)
        yield
    for pools in used:  # which are asked to end, and waited for
        for key in pools._pools:
            _signal(pools, key, signal.SIGCONT)


def _signal(pools: Pools, key: tuple[int, str], number: signal.Signals) -> None:
    """Send a signal to the processes of a pool."""
    pool = pools._pools.get(key)
    for rank, template in enumerate(getattr(pool and pool._ranks, "_templates", ())):
        if template.exit_code(rank) is None:
            template.kill(rank, number)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A variable that torch sets, as for inductor's cache, would have every later rank start as a new interpreter."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if read_at_import(name):
            del os.environ[name]


@pytest.fixture(autouse=True)
def _fresh_where_asked(request: pytest.FixtureRequest, _warm: Processes) -> None:
    on_gpus = os.environ.get("GRADMESH_TEST_DEVICE") == "cuda"  # CUDA may not be used in a forked process
    _warm.fresh = on_gpus or request.node.get_closest_marker("fresh_ranks") is not None


@pytest.fixture(autouse=True)
def _a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that a test puts into sys.path is not searched by the next test's processes."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def _no_world_is_left() -> Iterator[None]:
    """A world that a test leaves behind would be the next test's, in whichever file that is."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind: destroy it")


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Runs programs that import gradmesh, in processes that have imported torch."""
    made = Forking()
    yield made
    made.close()


@pytest.fixture(scope="session")
def threads(worlds: Worlds) -> Callable[[int], Run]:
    """`threads(n)(fn, *args)` runs fn on n ranks that are threads, and returns their results."""
    return lambda n: worlds(n, "threads").run


@pytest.fixture(scope="session", params=[pytest.param("gloo", marks=pytest.mark.slow), "shm"])
def compiling(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[[int], Run]:
    """`processes` for what compiles for long: on gloo in the sweep only."""
    return lambda n: worlds(n, request.param, 240).run


@pytest.fixture(scope="session", params=["gloo", "shm"])
def processes(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[[int], Run]:
    """`processes(n)(fn, *args)` runs fn on n processes, of both backends in turn, and returns their results."""
    return lambda n: worlds(n, request.param, 240).run


@pytest.fixture(scope="session")
def simulated(worlds: Worlds) -> Callable[[int], Run]:
    """`simulated(n)(fn, *args, delay=0.002)` runs fn on n processes with a simulated device, or on GPUs."""
    from tests import simulated_device

    def ranks(n: int) -> Run:
        reason = simulated_device.why_not()
        if reason is not None:
            pytest.skip(reason)
        return partial(worlds(n, simulated_device.POOL, 240).run, simulated_device.on_device)

    if not simulated_device.ON_CUDA and simulated_device.why_not() is None:
        simulated_device.build.module()  # before a rank has to wait for it
    return ranks
