"""Thread isolation: makes torch's process-wide state thread-local, for thread ranks.

Four kinds of state are per process in torch: the registry of process groups in Python (`distributed_c10d._world`), the
one in C++ (which has a thread isolation mode), the level of forward-mode AD (`gradmesh._torch.levels`), and the default
random generator. Within `thread_isolation` each of them is thread-local.

A separate default random generator for each thread rank.
torch has one default CPU generator per process, in C++, so that ranks would draw from each other's sequence. So the CPU
kernels that draw random numbers are wrapped: without a generator argument they use that of the rank on a rank's thread,
and the process's generator on any other thread. The functions of `torch.random` (`manual_seed`, `get_rng_state`, ...)
use the same generators through a replacement of `torch.random.default_generator`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from gradmesh._torch.levels import of_thread, shared_level
from gradmesh._torch.names import find, gone, refuse, there

_SHARED = "thread ranks share torch's default random generator"
_get_kernel = find("torch.library.get_kernel", without=_SHARED)
_has_default = there("torch.random.default_generator", without=_SHARED)

DRAWING = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli.out",
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "multinomial.out",
    "normal.Tensor_Tensor",
    "normal.Tensor_Tensor_out",
    "normal.Tensor_float",
    "normal.Tensor_float_out",
    "normal.float_Tensor",
    "normal.float_Tensor_out",
    "normal_",
    "poisson",
    "random_",
    "random_.from",
    "random_.to",
    "randperm.generator_out",
    "rrelu_with_noise",
    "rrelu_with_noise.out",
    "rrelu_with_noise_",
    "uniform_",
)
"""The operators whose CPU kernels draw from a generator; all other random operators call these."""

_MARK = 0x6772_6164_6D65_7368
"""The seed of the replacement generator, which is never drawn from, by which kernels recognize it."""


class _DefaultGenerator(torch.Generator):
    """Replaces `torch.random.default_generator`: delegates to the generator of the calling rank, or the process's."""

    process: torch.Generator

    def of_thread(self) -> torch.Generator:
        """The generator of the calling thread."""
        found: torch.Generator = getattr(of_thread, "generator", self.process)
        return found

    def manual_seed(self, seed: int) -> torch.Generator:
        return self.of_thread().manual_seed(seed)

    def seed(self) -> int:
        return self.of_thread().seed()

    def initial_seed(self) -> int:
        return self.of_thread().initial_seed()

    def get_state(self) -> torch.Tensor:
        return self.of_thread().get_state()

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        return self.of_thread().set_state(state)


@functools.cache
def generator_per_rank() -> None:
    """Wrap the kernels, once per process and permanently, since unwrapping would race with drawing threads."""
    if _get_kernel is None or not _has_default:
        return
    default = _DefaultGenerator()
    torch.Generator.manual_seed(default, _MARK)
    default.process = torch.random.default_generator  # type: ignore[attr-defined]
    torch.random.default_generator = default  # type: ignore[attr-defined]
    generator_per_rank.library = library = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about a replaced kernel
        for name in DRAWING:
            with contextlib.suppress(RuntimeError, AttributeError):  # an operator that this torch lacks
                original = _get_kernel(f"aten::{name}", "CPU")
                library.impl(name, _drawing(original, default), "CPU", with_keyset=True)


def _drawing(original: Any, default: _DefaultGenerator) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        if generator is None:
            generator = getattr(of_thread, "generator", None)
        elif generator.initial_seed() == _MARK:  # a copy of the replacement
            generator = default.of_thread()
        return original.call_boxed(keyset, *args, generator=generator, **kwargs)

    return kernel


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
