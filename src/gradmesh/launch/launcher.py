"""`launch` and `Ranks`: the arguments are checked here, and the ranks are made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist

from gradmesh.backends import shm, threads
from gradmesh.errors import ArgumentError, message
from gradmesh.launch.outcomes import Outcome
from gradmesh.launch.process_ranks import ProcessRanks
from gradmesh.launch.thread_ranks import ThreadRanks
from gradmesh.tracebacks import install

__all__ = ["Ranks", "launch"]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    nprocs: int,
    *,
    backend: str | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float | None = None,
    prefix: bool | None = None,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `nprocs` ranks of one machine, and return each rank's result.

    Every rank has joined the process group when `fn` begins, and leaves it when `fn` is over. The first
    failure ends all ranks; nothing is left behind on success, failure, timeout or Ctrl-C.

    Processes are fresh interpreters, which do not import the main module again: a script needs no
    `if __name__ == "__main__"`. A function that cannot be imported by name (from a script, a notebook cell,
    a closure) is sent by value, which needs `pip install 'gradmesh[notebook]'`; with it go the globals that
    its code names, and no others. Without that extra, a top-level function of a script that launches under
    `if __name__ == "__main__":` is sent by name, and each rank runs the rest of the script, as with
    `multiprocessing`. Results and exceptions come back by pickle. Threads get and return the objects themselves.

    What the ranks print comes to this process's `sys.stdout` and `sys.stderr`, in whole lines that start with
    the rank: `[rank 1] text`. On processes these are pipes: C code and the rank's own child processes print
    there too, and `isatty()` is False. What has no end of line yet is shown when `fn` is over.

    Args:
        fn: what each rank runs.
        nprocs: the number of ranks.
        backend: "threads" for threads of this process, which take CPU tensors; any other backend of
            torch.distributed ("shm", "gloo", "nccl", "cpu:gloo,cuda:nccl") for processes. Under NCCL, rank i has
            CUDA device i. By default "shm", and "gloo" on systems that do not have it.
        args: positional arguments, the same for every rank.
        kwargs: keyword arguments, the same for every rank.
        timeout: seconds that the ranks may take to return, not counting the start of the processes. By
            default there is no limit, and a collective waits 300 s for the other ranks; with a timeout it waits as
            long, if that is more. A thread that is inside C code at the
            end cannot be ended: it stays behind as a daemon thread.
        prefix: whether printed lines start with the rank. By default they do where there is more than one rank.
            False with more ranks keeps lines whole without a mark; one rank's text then passes as it is written.

    Raises:
        ArgumentError: `fn` cannot be called, `nprocs` is no positive integer, torch has no such backend, or
            `args`, `kwargs`, `timeout` or `prefix` is not one of their values.
        MissingExtraError: the function has to be sent by value and cloudpickle is not installed.
        RankError: a rank failed, died, did not return in time, or returned while others wait for it. Its text has
            the rank and the rank's traceback; its cause is the rank's exception, where that can be pickled. Where a
            function that was sent by value missed a global that its code does not name, the text says so.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total(start):
        ...     x = torch.tensor(start + dist.get_rank())
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> launch(total, 3, backend="threads", args=(10,))
        [33, 33, 33]
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise _argument_error("args", "a tuple or list of positional arguments", args, "a single one is (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _argument_error("kwargs", "a mapping of names to arguments", kwargs, "pass a dict")
    with Ranks(nprocs, backend=backend, timeout=timeout, prefix=prefix) as ranks:
        return ranks.run(fn, *args, **(kwargs or {}))


class Ranks:
    """Ranks that stay alive to run one function after another: starting processes takes seconds.

    A context manager. The ranks start at the first `run`; they keep their process groups, and processes keep
    their modules' state, from one `run` to the next. A run that fails ends them, and the next one starts new
    ones.

    Args:
        nprocs: the number of ranks.
        backend: as for `launch`.
        timeout: as for `launch`, for each run.
        prefix: as for `launch`.

    Raises:
        ArgumentError: `nprocs` is no positive integer, torch has no such backend, or `timeout` or `prefix` is
            not one of their values.

    Example:
        >>> import torch.distributed as dist
        >>> with Ranks(2, backend="threads") as ranks:
        ...     ranks.run(dist.get_rank), ranks.run(max, 3, 4)
        ([0, 1], [4, 4])
    """

    def __init__(
        self,
        nprocs: int,
        backend: str | None = None,
        timeout: float | None = None,
        *,
        prefix: bool | None = None,
    ) -> None:
        threads.register()
        install()
        backend = shm.default() if backend is None else backend
        if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
            raise _argument_error("nprocs", "an integer, 1 or more", nprocs, "say how many ranks to start")
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise _argument_error("timeout", "a positive number of seconds", timeout, "use None for no limit")
        if prefix is not None and not isinstance(prefix, bool):
            raise _argument_error(
                "prefix", "True, False or None", prefix, "the text itself is always [rank i]"
            )
        known = sorted({*dist.Backend.backend_list, "threads"} - {"undefined"})
        names = (
            [part.rpartition(":")[2] for part in backend.split(",")] if isinstance(backend, str) else [None]
        )
        if not set(names) <= set(known) or ("threads" in names and backend != "threads"):
            expected = (
                f"{', '.join(known)}; or a combination of processes' backends such as 'cpu:gloo,cuda:nccl'"
            )
            raise _argument_error("backend", expected, backend, "register_backend makes others known")
        self.nprocs = nprocs
        self.backend = backend
        self.timeout = timeout
        self.prefix = prefix
        self._ranks: ProcessRanks | ThreadRanks | None = None

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank, and return each rank's result.

        Raises:
            ArgumentError: `fn` cannot be called.
            MissingExtraError: the function has to be sent by value and cloudpickle is not installed.
            RankError: a rank failed, died, or did not return in time.
        """
        return cast("list[T]", self.attempt(fn, args, kwargs).values())

    def attempt(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Outcome:
        """Run a function as `run` does, and tell how it ended on every rank instead of raising the first error.

        The time that the ranks may take is that of `timeout` at the call.

        Raises:
            ArgumentError: `fn` cannot be called.
            MissingExtraError: the function has to be sent by value and cloudpickle is not installed.
        """
        if not callable(fn):
            raise _argument_error(
                "fn", "a function", fn, "pass the function itself, and its arguments as args"
            )
        if self._ranks is None or not self._ranks.alive:
            if self.backend == "threads":
                self._ranks = ThreadRanks(self.nprocs, self.timeout, self.prefix)
            else:
                self._ranks = ProcessRanks(self.nprocs, self.backend, self.timeout, self.prefix)
        self._ranks.timeout = self.timeout
        return self._ranks.run(fn, args, kwargs)

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _argument_error(name: str, expected: str, got: object, remedy: str) -> ArgumentError:
    return ArgumentError(
        message(f"{name} is not usable", op="launch", expected=expected, got=f"{name}={got!r}", remedy=remedy)
    )
