"""Ranks as threads: what torch keeps once per process, kept per thread.

torch keeps four things once per process that a rank needs for itself: the registry of process groups in Python
(`distributed_c10d._world`), the one in C++ (which has a thread isolation mode of its own), the level of forward-mode AD
(`gradmesh._torch.levels`), and the default random generator (`gradmesh._torch.generators`). While `thread_isolation` is
open each of them is kept per thread.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from gradmesh._torch.generators import generator_per_rank
from gradmesh._torch.levels import of_thread, shared_level
from gradmesh._torch.names import find, gone, refuse, there

__all__ = ["adopt_thread", "stand_in", "thread_isolation"]

_REFUSED = "the threads backend is refused"
_C10D = "torch.distributed.distributed_c10d"
_NEEDED = f"{_C10D}._world", f"{_C10D}._World", "torch._C._distributed_c10d._set_thread_isolation_mode"
for _path in _NEEDED[:2]:
    there(_path, without=_REFUSED)
_isolate_threads = find(_NEEDED[2], without=_REFUSED)

# What init_process_group writes besides; it wraps sys.excepthook once more at every call.
_WRITTEN = [
    name
    for name in ("_backend", "_default_pg_init_method")
    if there(f"{_C10D}.{name}", without="what a launch of threads wrote there stays after it")
]

_fake_mode = find(
    "torch._subclasses.FakeTensorMode",
    without="the first DTensor on ranks that are threads may crash torch 2.11 with CUDA's parts and no GPU",
)

_isolation_lock = threading.Lock()


@functools.cache
def _prepare_fake_mode() -> None:
    """Have torch do on this thread what it does once in the process for tensors without values, as DTensor uses them.

    A torch with CUDA's parts and no GPU puts a stand-in for CUDA then; 2.11 crashes when another thread does it.
    """
    if _fake_mode is not None and torch.backends.cuda.is_built() and torch.cuda.device_count() == 0:
        with _fake_mode():
            pass


class _RankWorld(getattr(c10d, "_World", object)):  # type: ignore[misc]
    """The process groups of one rank thread. `_World` keeps most of its fields in globals of its module."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map = {}
        self.pg_names = {}
        self.pg_group_ranks = {}
        self.pg_backend_config = {}
        self.tags_to_pg = {}
        self.pg_to_tag = {}


class _WorldOfThread:
    """Stands in for `distributed_c10d._world`: a rank thread's own world, or the process's for any other."""

    def __init__(self, outer: c10d._World) -> None:
        self.__dict__["outer"] = outer

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(of_thread, "world", self.__dict__["outer"]), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(of_thread, "world", self.__dict__["outer"]), name, value)


class _Isolation:
    """What `thread_isolation` replaced, and how many have it open."""

    opened = 0
    saved: Any = None


def adopt_thread(seed: int) -> None:
    """Give the calling thread a torch.distributed world of its own, seen while `thread_isolation` is open.

    It also gets a default random generator of its own, with that seed.
    """
    of_thread.world = _RankWorld()
    of_thread.generator = torch.Generator().manual_seed(seed)


def stand_in() -> Callable[[], None]:
    """What gives another thread the torch.distributed world of the calling one, when it is called there."""
    world, generator = of_thread.world, of_thread.generator

    def adopt() -> None:
        of_thread.world, of_thread.generator = world, generator

    return adopt


@contextlib.contextmanager
def thread_isolation() -> Iterator[None]:
    """Keep torch's process groups and forward-mode levels per thread, until the last who opened it closes.

    Raises:
        TorchVersionError: this torch has no world that could be replaced, or no thread isolation mode.
    """
    if not set(gone).isdisjoint(_NEEDED):
        refuse("the threads backend", *_NEEDED)
    _prepare_fake_mode()
    generator_per_rank()
    with _isolation_lock:
        _Isolation.opened += 1
        if _Isolation.opened == 1:
            _Isolation.saved = {name: getattr(c10d, name) for name in ("_world", *_WRITTEN)}, sys.excepthook
            c10d._world = _WorldOfThread(c10d._world)  # type: ignore[assignment]
            _isolate_threads(True)
            shared_level.install()
    try:
        yield
    finally:
        with _isolation_lock:
            _Isolation.opened -= 1
            if _Isolation.opened == 0:
                shared_level.uninstall()
                _isolate_threads(False)
                before, sys.excepthook = _Isolation.saved
                for name, value in before.items():
                    setattr(c10d, name, value)
                _Isolation.saved = None
