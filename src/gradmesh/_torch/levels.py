"""The level of forward-mode AD, per thread.

C++ has one level for the whole process, and Python tracks it in globals of two modules. While thread ranks run, those
globals are replaced by thread-local values, and the C++ level stays open as long as any thread is inside one. If this
torch tracks it differently, forward mode raises on thread ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, SupportsInt

import torch
from torch.autograd import forward_ad

from gradmesh._torch.names import RELIED_ON, calls, find, gone, refuse, there
from gradmesh._util.call_sites import PARSING

__all__ = ["level_is_known", "of_thread", "shared_level"]

of_thread = threading.local()  # .world: a rank thread's groups; .in_level: whether it is inside a dual level

_REFUSED = "forward-mode AD raises on thread ranks"
_LEVEL = "torch.autograd.forward_ad._current_level"
level_is_known = there(
    _LEVEL,
    without="an open forward-mode level is detected by creating a dual tensor, which takes longer; forward-mode AD "
    "raises on thread ranks",
)
_ENTER, _EXIT = "torch._C._enter_dual_level", "torch._C._exit_dual_level"
_TRANSFORMS = "torch._functorch.eager_transforms"
_NESTING = f"{_TRANSFORMS}.JVP_NESTING"

_enter_level, _exit_level = find(_ENTER, without=_REFUSED), find(_EXIT, without=_REFUSED)
if there(_NESTING, without=_REFUSED):
    from torch._functorch import eager_transforms
calls("torch.autograd.forward_ad.dual_level.__enter__", "enter_dual_level", without=_REFUSED)
calls("torch.autograd.forward_ad.dual_level.__exit__", "exit_dual_level", without=_REFUSED)
calls(f"{_TRANSFORMS}.enter_jvp_nesting", "JVP_NESTING", without=_REFUSED)
_NEEDED = [path for path in RELIED_ON if path == _LEVEL or RELIED_ON[path] == _REFUSED]

_LOCK = "torch._functorch.predispatch.DECOMPOSITIONS_LOCK"
if there(_LOCK, without="a launch of thread ranks calls torch.func.vmap first, which takes longer"):
    from torch._functorch import predispatch


def _load_vmap() -> None:
    """Create the lock under which vmap loads its rules; torch creates it lazily, which is not thread-safe."""
    if _LOCK in gone:
        torch.func.vmap(torch.sin)(torch.ones(1))
    elif predispatch.DECOMPOSITIONS_LOCK is None:
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
                refuse("forward-mode AD on a thread rank", *_NEEDED)
            return theirs(*args, **kwargs)

        return entered


shared_level = _SharedLevel() if set(gone).isdisjoint(_NEEDED) else _RefusedLevel()
