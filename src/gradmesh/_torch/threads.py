"""Thread isolation: makes torch's process-wide state thread-local, for thread ranks.

Four kinds of state are per process in torch: the registry of process groups in Python (`distributed_c10d._world`), the
one in C++ (which has a thread isolation mode), the level of forward-mode AD (`gradmesh._torch.levels`), and the default
random generator (`gradmesh._torch.generators`). Within `thread_isolation` each of them is thread-local.
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

_REFUSED = "the threads backend raises"
_C10D = "torch.distributed.distributed_c10d"
_NEEDED = f"{_C10D}._world", f"{_C10D}._World", "torch._C._distributed_c10d._set_thread_isolation_mode"
for _path in _NEEDED[:2]:
    there(_path, without=_REFUSED)
_isolate_threads = find(_NEEDED[2], without=_REFUSED)

# Other globals that init_process_group writes; it also wraps sys.excepthook at every call.
_WRITTEN = [
    name
    for name in ("_backend", "_default_pg_init_method")
    if there(f"{_C10D}.{name}", without="a launch of thread ranks does not restore it")
]

_fake_mode = find(
    "torch._subclasses.FakeTensorMode",
    without="the first DTensor on thread ranks may crash torch 2.11 built with CUDA, without a GPU",
)

_isolation_lock = threading.Lock()


@functools.cache
def _prepare_fake_mode() -> None:
    """Run torch's one-time initialization of fake tensors, which DTensor uses, on this thread.

    A CUDA build without a GPU installs a fake CUDA device then; torch 2.11 crashes if another thread does it.
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
    """Replaces `distributed_c10d._world`: the world of the rank's thread, or the process's for other threads."""

    def __init__(self, outer: c10d._World) -> None:
        self.__dict__["outer"] = outer

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(of_thread, "world", self.__dict__["outer"]), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(of_thread, "world", self.__dict__["outer"]), name, value)


class _Isolation:
    """The state that `thread_isolation` replaced, and its number of users."""

    opened = 0
    saved: Any = None


def adopt_thread(seed: int) -> None:
    """Give the calling thread a separate torch.distributed world and default random generator with that seed.

    Effective within `thread_isolation`.
    """
    of_thread.world = _RankWorld()
    of_thread.generator = torch.Generator().manual_seed(seed)


def stand_in() -> Callable[[], None]:
    """Returns a function that gives another thread the torch.distributed world of the calling thread."""
    world, generator = of_thread.world, of_thread.generator

    def adopt() -> None:
        of_thread.world, of_thread.generator = world, generator

    return adopt


@contextlib.contextmanager
def thread_isolation() -> Iterator[None]:
    """Make torch's process groups and forward-mode levels thread-local until the last user exits the block.

    Raises:
        TorchVersionError: this torch lacks the required private names.
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
