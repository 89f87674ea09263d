"""Thread isolation: makes torch's process-wide state thread-local, for thread ranks.

Four kinds of state are per process in torch: the registry of process groups in Python (`distributed_c10d._world`), the
one in C++ (which has a thread isolation mode), the level of forward-mode AD, and the default random generator. Within
`thread_isolation` each of them is thread-local.

**Forward mode.** C++ has one level for the whole process, and Python tracks it in globals of two modules. While thread
ranks run, those globals are replaced by thread-local values, and the C++ level stays open as long as any thread is
inside one. If this torch tracks it differently, forward mode raises on thread ranks.

**Random numbers.** torch has one default CPU generator per process, in C++, so that ranks would draw from each other's
sequence. So the CPU kernels that draw random numbers are wrapped: without a generator argument they use that of the
rank on a rank's thread, and the process's generator on any other thread. The functions of `torch.random`
(`manual_seed`, `get_rng_state`, ...) use the same generators through a replacement of
`torch.random.default_generator`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, SupportsInt

import torch
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d

from gradmesh._torch.names import RELIED_ON, calls, find, gone, refuse, there
from gradmesh._util.call_sites import PARSING

of_thread = threading.local()  # .world: a rank thread's groups; .in_level: whether it is inside a dual level

_NO_FORWARD = "forward-mode AD raises on thread ranks"
LEVEL = "torch.autograd.forward_ad._current_level"
level_is_known = there(LEVEL, without="a collective raises an error")
_ENTER, _EXIT = "torch._C._enter_dual_level", "torch._C._exit_dual_level"
_TRANSFORMS = "torch._functorch.eager_transforms"
_NESTING = f"{_TRANSFORMS}.JVP_NESTING"

_enter_level, _exit_level = find(_ENTER, without=_NO_FORWARD), find(_EXIT, without=_NO_FORWARD)
if there(_NESTING, without=_NO_FORWARD):
    from torch._functorch import eager_transforms
calls("torch.autograd.forward_ad.dual_level.__enter__", "enter_dual_level", without=_NO_FORWARD)
calls("torch.autograd.forward_ad.dual_level.__exit__", "exit_dual_level", without=_NO_FORWARD)
calls(f"{_TRANSFORMS}.enter_jvp_nesting", "JVP_NESTING", without=_NO_FORWARD)
_FORWARD_NAMES = [path for path in RELIED_ON if path == LEVEL or RELIED_ON[path] == _NO_FORWARD]


def _load_vmap() -> None:
    """Create the lock under which vmap loads its rules; torch creates it lazily, which is not thread-safe."""
    if predispatch.DECOMPOSITIONS_LOCK is None:
        predispatch.DECOMPOSITIONS_LOCK = threading.Lock()


@functools.cache
def _load_forward_mode() -> None:
    """Create a first dual tensor, for which torch compiles code, while no other rank parses source code."""
    with PARSING:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


class _NestingOfThread:
    """Replaces `eager_transforms.JVP_NESTING`, which torch increments, decrements, and compares with 1."""

    def __init__(self, of_this_thread: int) -> None:
        self._local = threading.local()
        self._local.depth = of_this_thread

    def __int__(self) -> int:
        return getattr(self._local, "depth", 0)

    def __iadd__(self, by: int) -> _NestingOfThread:
        self._local.depth = int(self) + by
        return self

    def __isub__(self, by: int) -> _NestingOfThread:
        return self.__iadd__(-by)

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    __hash__ = None  # type: ignore[assignment]


class _LevelOfThread(int):
    """Replaces `forward_ad._current_level`: 0 in a thread that has entered a level, -1 in any other.

    Its int value is 0, the level that all threads share, because C++ reads that.
    """

    def __eq__(self, other: object) -> bool:
        return _level_of_thread() == other

    def __ne__(self, other: object) -> bool:
        return _level_of_thread() != other

    def __lt__(self, other: SupportsInt) -> bool:
        return _level_of_thread() < int(other)

    def __le__(self, other: SupportsInt) -> bool:
        return _level_of_thread() <= int(other)

    def __gt__(self, other: SupportsInt) -> bool:
        return _level_of_thread() > int(other)

    def __ge__(self, other: SupportsInt) -> bool:
        return _level_of_thread() >= int(other)

    def __hash__(self) -> int:
        return hash(_level_of_thread())


def _level_of_thread() -> int:
    return 0 if getattr(of_thread, "in_level", False) else -1


class _SharedLevel:
    """The single level of forward-mode AD in C++, open as long as any thread is inside one.

    After a thread leaves, tangents of its tensors remain until the last thread leaves; they are not accessible, since
    `unpack_dual` finds no level.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.saved: tuple[Any, Any, Any] | None = None

    def install(self) -> None:
        if self.saved is not None:  # a thread that could not be stopped is still inside a level
            return
        self.saved = forward_ad.enter_dual_level, forward_ad.exit_dual_level, eager_transforms.JVP_NESTING
        if forward_ad._current_level >= 0:
            of_thread.in_level = True
            self.holders = 1
            forward_ad._current_level = _LevelOfThread(0)
        forward_ad.enter_dual_level = self.enter
        forward_ad.exit_dual_level = self.leave
        eager_transforms.JVP_NESTING = _NestingOfThread(eager_transforms.JVP_NESTING)  # type: ignore[assignment]
        _load_vmap()

    def uninstall(self) -> None:
        with self.lock:
            inside = getattr(of_thread, "in_level", False)
            if self.saved is None or self.holders > int(inside):
                return
            forward_ad.enter_dual_level, forward_ad.exit_dual_level, _ = self.saved
            forward_ad._current_level = 0 if inside else -1
            eager_transforms.JVP_NESTING = int(eager_transforms.JVP_NESTING)
            of_thread.in_level = False
            self.holders, self.saved = 0, None

    def enter(self) -> int:
        """Replace `forward_ad.enter_dual_level`."""
        with self.lock:
            if getattr(of_thread, "in_level", False):
                raise RuntimeError("Nested forward mode AD is not supported at the moment")
            if self.holders == 0:
                _enter_level()
                forward_ad._current_level = _LevelOfThread(0)
            self.holders += 1
            of_thread.in_level = True
            _load_forward_mode()
        return 0

    def leave(self, *, level: int | None = None) -> None:
        """Replace `forward_ad.exit_dual_level`."""
        with self.lock:
            if not getattr(of_thread, "in_level", False) or level not in (None, 0):
                raise RuntimeError(
                    "Trying to exit a forward AD level that was not the last one that was created. "
                    "This is not supported."
                )
            of_thread.in_level = False
            self.holders -= 1
            if self.holders == 0:
                forward_ad._current_level = -1
                _exit_level(level=0)


class _RefusedLevel:
    """Used if levels cannot be kept per thread: raises on thread ranks, and uses torch's level on other threads."""

    def __init__(self) -> None:
        self.saved: tuple[Any, Any] | None = None

    def install(self) -> None:
        _load_vmap()
        self.saved = forward_ad.enter_dual_level, forward_ad.make_dual
        forward_ad.enter_dual_level = self._unless_a_rank(forward_ad.enter_dual_level)
        forward_ad.make_dual = self._unless_a_rank(forward_ad.make_dual)

    def uninstall(self) -> None:
        if self.saved is not None:
            forward_ad.enter_dual_level, forward_ad.make_dual = self.saved

    def _unless_a_rank(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if hasattr(of_thread, "world"):
                refuse("forward-mode AD on a thread rank", *_FORWARD_NAMES)
            return theirs(*args, **kwargs)

        return entered


shared_level = _SharedLevel() if set(gone).isdisjoint(_FORWARD_NAMES) else _RefusedLevel()


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
_ISOLATION = "torch._C._distributed_c10d._set_thread_isolation_mode"
_LOCK = "torch._functorch.predispatch.DECOMPOSITIONS_LOCK"
_NEEDED = f"{_C10D}._world", f"{_C10D}._World", _LOCK, _ISOLATION
for _path in _NEEDED[:2]:
    there(_path, without=_REFUSED)
if there(_LOCK, without=_REFUSED):
    from torch._functorch import predispatch
_isolate_threads = find(_ISOLATION, without=_REFUSED)

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
    with _isolation_lock:
        _prepare_fake_mode()
        generator_per_rank()
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
