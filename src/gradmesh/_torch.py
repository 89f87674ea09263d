"""Every private name of torch that gradmesh relies on, in one place.

Private names change under us. `tests/test_torch_private.py` states what is relied on for each, so that a
new torch release fails there, by name, and not somewhere in a training run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, SupportsInt, TypeVar

import torch
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch._functorch import eager_transforms, predispatch
from torch._library.effects import EffectType
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.autograd import profiler as autograd_profiler
from torch.distributed import distributed_c10d as c10d
from torch.profiler import record_function
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "adopt_thread",
    "functional",
    "functorch_active",
    "in_backward",
    "in_plain_mode",
    "in_reentrant_checkpoint",
    "is_fake",
    "is_legacy_batched",
    "modes_active",
    "named_range",
    "on_legacy_batch",
    "only_vmap_active",
    "ordered_effect",
    "profiler_on",
    "resolve_group",
    "saves_for_a_checkpoint",
    "thread_isolation",
    "transforms_active",
    "without_autograd",
]

T = TypeVar("T")


def transforms_active() -> bool:
    """Whether a tensor may carry more than its values: a torch.func transform or a forward-mode level is on.

    >>> transforms_active()
    False
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def functorch_active() -> bool:
    """Whether a torch.func transform is running."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def without_autograd(work: Callable[[], T]) -> T:
    """Run `work` with neither backward nor forward mode recording: a communication kernel only moves values."""
    grad, forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    torch._C._set_grad_enabled(False)
    torch._C._set_fwd_grad_enabled(False)
    try:
        return work()
    finally:
        torch._C._set_fwd_grad_enabled(forward)
        torch._C._set_grad_enabled(grad)


def in_plain_mode(work: Callable[[], T]) -> T:
    """Run `work` as C++ would: autograd does not record it, and no mode of the caller's sees or changes its ops."""
    if not modes_active():
        return without_autograd(work)
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return without_autograd(work)


def modes_active() -> bool:
    """Whether a dispatch mode or a torch-function mode of the caller's would see torch's ops.

    >>> modes_active()
    False
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


# ---- Ranks as threads -------------------------------------------------------------------------------------
#
# torch keeps three things once per process that a rank needs for itself: the registry of process groups in
# Python (`distributed_c10d._world`), the one in C++ (which has a thread isolation mode of its own), and the
# level of forward-mode AD. While `thread_isolation` is open each of them is kept per thread.

_of_thread = threading.local()  # .world: a rank thread's groups; .in_level: whether it is inside a dual level
_isolation_lock = threading.Lock()


class _RankWorld(c10d._World):
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
        return getattr(getattr(_of_thread, "world", self.__dict__["outer"]), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(getattr(_of_thread, "world", self.__dict__["outer"]), name, value)


class _NestingOfThread:
    """Stands in for `eager_transforms.JVP_NESTING`, which torch counts up, down, and compares with 1."""

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
    """Stands in for `forward_ad._current_level`: 0 in a thread that entered a level, -1 in any other.

    An int of value 0 underneath, the level that all threads share, because C++ reads that.
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
    return 0 if getattr(_of_thread, "in_level", False) else -1


class _SharedLevel:
    """The one level of forward-mode AD that C++ allows, open as long as any thread is inside one.

    A thread that leaves keeps the tangents of tensors it still holds until the last thread leaves; torch
    alone drops them at once. Nobody reads them then, since `unpack_dual` sees no level.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.saved: tuple[Any, Any, Any] | None = None

    def install(self) -> None:
        if self.saved is not None:  # a thread that could not be ended was still inside a level
            return
        self.saved = forward_ad.enter_dual_level, forward_ad.exit_dual_level, eager_transforms.JVP_NESTING
        if forward_ad._current_level >= 0:
            _of_thread.in_level = True
            self.holders = 1
            forward_ad._current_level = _LevelOfThread(0)
        forward_ad.enter_dual_level = self.enter
        forward_ad.exit_dual_level = self.leave
        eager_transforms.JVP_NESTING = _NestingOfThread(eager_transforms.JVP_NESTING)  # type: ignore[assignment]
        if predispatch.DECOMPOSITIONS_LOCK is None:  # made lazily, so that two threads could make two
            predispatch.DECOMPOSITIONS_LOCK = threading.Lock()

    def uninstall(self) -> None:
        with self.lock:
            inside = getattr(_of_thread, "in_level", False)
            if self.saved is None or self.holders > int(inside):
                return
            forward_ad.enter_dual_level, forward_ad.exit_dual_level, _ = self.saved
            forward_ad._current_level = 0 if inside else -1
            eager_transforms.JVP_NESTING = int(eager_transforms.JVP_NESTING)
            _of_thread.in_level = False
            self.holders, self.saved = 0, None

    def enter(self) -> int:
        """Replace `forward_ad.enter_dual_level`."""
        with self.lock:
            if getattr(_of_thread, "in_level", False):
                raise RuntimeError("Nested forward mode AD is not supported at the moment")
            if self.holders == 0:
                torch._C._enter_dual_level()
                forward_ad._current_level = _LevelOfThread(0)
            self.holders += 1
            _of_thread.in_level = True
        return 0

    def leave(self, *, level: int | None = None) -> None:
        """Replace `forward_ad.exit_dual_level`."""
        with self.lock:
            if not getattr(_of_thread, "in_level", False) or level not in (None, 0):
                raise RuntimeError(
                    "Trying to exit a forward AD level that was not the last one that was created. "
                    "This is not supported."
                )
            _of_thread.in_level = False
            self.holders -= 1
            if self.holders == 0:
                forward_ad._current_level = -1
                torch._C._exit_dual_level(level=0)


_shared_level = _SharedLevel()


class _Isolation:
    """What `thread_isolation` replaced, and how many have it open."""

    opened = 0
    saved: Any = None


def adopt_thread() -> None:
    """Give the calling thread a torch.distributed world of its own, seen while `thread_isolation` is open."""
    _of_thread.world = _RankWorld()


@contextlib.contextmanager
def thread_isolation() -> Iterator[None]:
    """Keep torch's process groups and forward-mode levels per thread, until the last who opened it closes."""
    with _isolation_lock:
        _Isolation.opened += 1
        if _Isolation.opened == 1:
            _Isolation.saved = (
                c10d._world,
                c10d._backend,
                c10d._default_pg_init_method,
                # init_process_group wraps the hook once more at every call
                sys.excepthook,
            )
            c10d._world = _WorldOfThread(c10d._world)  # type: ignore[assignment]
            _set_thread_isolation_mode(True)
            _shared_level.install()
    try:
        yield
    finally:
        with _isolation_lock:
            _Isolation.opened -= 1
            if _Isolation.opened == 0:
                _shared_level.uninstall()
                _set_thread_isolation_mode(False)
                c10d._world, c10d._backend, c10d._default_pg_init_method, sys.excepthook = _Isolation.saved
                _Isolation.saved = None


def is_legacy_batched(x: torch.Tensor) -> bool:
    """Whether `x` is batched by `torch.autograd.grad(is_grads_batched=True)`, which is older than torch.func."""
    batched: bool = torch._C._functorch.is_legacy_batchedtensor(x)
    return batched


def on_legacy_batch(x: torch.Tensor, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run `work` on the whole of such a tensor, its batch as the first dimension, and batch the result again."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    whole = torch._remove_batch_dim(x, level, 0, 0)
    return torch._add_batch_dim(work(whole), 0, level)


def in_backward() -> bool:
    """Whether the calling thread runs a backward pass, as a checkpoint's recomputation does."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def profiler_on() -> bool:
    """Whether a profiler of torch runs in this process: a flag in Python, a tenth of the cost of asking C++."""
    return autograd_profiler._is_profiler_enabled


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in a profile.

    `record_function` also marks the kernels on a GPU, but is an op itself, which a mode sees: a selective checkpoint
    would miss it if the profiler ran in only one of the two passes. The range for such a mode is no op.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        fast: contextlib.AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(name)
        return fast
    return record_function(name)


def saves_for_a_checkpoint() -> bool:
    """Whether saved tensors are being packed by hooks, as a non-reentrant checkpoint does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def in_reentrant_checkpoint() -> bool:
    """Whether the calling code is being recomputed by `torch.utils.checkpoint(use_reentrant=True)`."""
    again = checkpoint.CheckpointFunction.backward.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is again:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def only_vmap_active() -> bool:
    """Whether no torch.func transform but vmap is running."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(layer.key() == torch._C._functorch.TransformType.Vmap for layer in stack)


def functional(name: str, group: torch.distributed.ProcessGroup, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """A collective as a functional op, which a compiler can see, move and bucket; the result is fresh."""
    op = getattr(torch.ops._c10d_functional, name)
    done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(op(x, *args, group.group_name))
    return done


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values: a fake one, or one on the meta device."""
    return x.is_meta or (type(x) is not torch.Tensor and isinstance(x, FakeTensor))


def resolve_group(name: str) -> torch.distributed.ProcessGroup:
    """The process group of a name, on the calling rank."""
    group: torch.distributed.ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def ordered_effect(op: Any) -> None:
    """Have compilers keep every call of a custom op, in order."""
    op.register_effect(EffectType.ORDERED)
