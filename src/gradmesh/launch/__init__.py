"""Start ranks on this host, run a function on each, and return their results or raise the first error.

`launch` starts ranks, runs one function and stops them; `Ranks` keeps them running for several functions.

**Ranks.** The parent is the process that calls `launch`. With `backend="threads"` a rank is a thread of the parent
(`thread_ranks`), and the process groups are those of `gradmesh.backends.threads`. With any other backend a rank is a
process (`process_ranks`) that runs `process_ranks.main` and never imports the parent's main module: a fresh interpreter
with the parent's flags, environment and `sys.path`, or forked from one. The ranks rendezvous through a file that only
they can open. A rank joins the default process group once and serves calls until the parent ends it.

**Functions and results.** A thread gets the function and arguments as the same objects, and returns its result as the
same object. A process gets them pickled through a pipe: by name if a fresh interpreter can import that name
(`pickling`), else by value with cloudpickle, together with the globals that the code names and
source lines that are not in a file, such as those of a notebook cell. Results and exceptions are returned by pickle.

**Output.** Lines that ranks print reach the parent's `sys.stdout` and `sys.stderr` complete and prefixed with the rank
(`output`). For processes the parent reads file descriptors 1 and 2 through pipes; for threads
`sys.stdout` and `sys.stderr` are replaced while they run. If the parent's stream is broken, the
ranks are stopped and the caller gets the error; a thread that printed gets it too.

**Errors.** The first rank that fails ends the run. The others have half a second to report their failures; errors that
only report a lost peer are skipped when choosing the first failure. `RankError` has that rank, its traceback as text,
and its exception as the cause if it can be pickled (`outcomes`). A failure stops all ranks, and the next run of `Ranks`
starts new ones.

**Crashes.** A process that exits or is killed by a signal is a failure of its rank, with the exit code or signal. A
process whose parent is gone exits immediately.

**Returned ranks.** A rank that has returned no longer takes part in collectives. The shm and threads backends detect
this and end the wait of other ranks; for other backends `hang_detector` checks whether all remaining ranks wait.

**Timeouts.** After the timeout each late rank reports its stack for the error; then all ranks are stopped.

**Ctrl-C.** Only the parent receives it: rank processes are in separate sessions and ignore SIGINT. The parent stops the
ranks, and `KeyboardInterrupt` propagates to the caller.

**Shutdown.** Processes have ten seconds to exit; then they and their child processes are killed. In threads an
exception is raised; a thread inside C code cannot be stopped and remains as a daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch.distributed as dist

from gradmesh._util.call_sites import install_excepthook
from gradmesh.backends import threads
from gradmesh.errors import ArgumentError

if TYPE_CHECKING:
    from gradmesh.launch.outcomes import Outcome
    from gradmesh.launch.process_ranks import ProcessRanks
    from gradmesh.launch.thread_ranks import ThreadRanks

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
    """Run `fn(*args, **kwargs)` on `nprocs` ranks of one host, and return each rank's result.

    Every rank joins the process group before `fn` runs and leaves it afterwards. The first failure stops all ranks; no
    process or thread remains after success, failure, timeout or Ctrl-C.

    Processes that do not import the main module again: a script does not need
    `if __name__ == "__main__"`. A function that cannot be imported by name (from a script, a notebook cell, a closure)
    is sent by value, which requires `pip install 'gradmesh[notebook]'`; the globals that its code names, and no others,
    are sent with it. Without that extra, a top-level function of a script that calls `launch` under
    `if __name__ == "__main__":` is sent by name, and each rank runs the rest of the script, as with `multiprocessing`.
    Results and exceptions are returned by pickle. Threads get and return the same objects.

    Output of the ranks is written to this process's `sys.stdout` and `sys.stderr`, in complete lines prefixed with the
    rank: `[rank 1] text`. For processes these are pipes: output of C code and child processes is included, and
    `isatty()` is False. An incomplete last line is written when `fn` returns.

    Args:
        fn: the function that each rank runs.
        nprocs: the number of ranks.
        backend: "threads" for threads of this process, for CPU tensors; any other backend of torch.distributed ("shm",
            "gloo", "nccl", "cpu:gloo,cuda:nccl") for processes. With NCCL rank i uses CUDA device i; ranks that
            are more than the GPUs share them, for tests. Defaults to "shm", or "gloo" on systems without shm.
        args: positional arguments, the same for every rank.
        kwargs: keyword arguments, the same for every rank.
        timeout: seconds that the ranks may take to return, not counting the start of processes. Defaults to no limit.
            A collective waits 300 s for the other ranks, or `timeout` if that is longer. A thread that is inside C code
            after the timeout cannot be stopped and remains as a daemon thread.
        prefix: whether printed lines start with the rank. Defaults to True for more than one rank. False with several
            ranks keeps lines complete without a prefix; the output of a single rank is then passed on unchanged.

    Raises:
        ArgumentError: `fn` is not callable, `nprocs` is not a positive integer, torch has no such backend, or `args`,
            `kwargs`, `timeout` or `prefix` is invalid.
        MissingExtraError: the function must be sent by value and cloudpickle is not installed.
        RankError: a rank raised, died, timed out, or returned while others wait for it. The message has the rank and
            its traceback; the cause is the rank's exception, if it can be pickled. If a function that was sent by value
            lacks a global that its code does not name, the message says so.

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
        raise _argument_error("args", "a tuple or list of positional arguments", args, "pass e.g. args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _argument_error(
            "kwargs", "a mapping of names to arguments", kwargs, 'pass e.g. kwargs={"lr": 0.1}'
        )
    with Ranks(nprocs, backend=backend, timeout=timeout, prefix=prefix) as ranks:
        return ranks.run(fn, *args, **(kwargs or {}))


class Ranks:
    """Ranks that stay alive to run several functions, because starting processes takes seconds.

    A context manager. The ranks start at the first `run`; they keep their process groups, and processes keep their
    module state, between runs. A failed run stops them, and the next run starts new ones.

    Args:
        nprocs: the number of ranks.
        backend: as for `launch`.
        timeout: as for `launch`, for each run.
        prefix: as for `launch`.

    Raises:
        ArgumentError: `nprocs` is not a positive integer, torch has no such backend, or `timeout` or `prefix` is
            invalid.

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
        from gradmesh.backends import shm

        threads.register()
        install_excepthook()
        backend = shm.default() if backend is None else backend
        if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
            raise _argument_error("nprocs", "an int >= 1", nprocs, "pass the number of ranks, e.g. nprocs=2")
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise _argument_error(
                "timeout",
                "a positive number of seconds",
                timeout,
                "pass e.g. timeout=60, or None for no limit",
            )
        if prefix is not None and not isinstance(prefix, bool):
            raise _argument_error(
                "prefix", "True, False or None", prefix, "pass prefix=False for lines without [rank i]"
            )
        known = sorted({*dist.Backend.backend_list, "threads"} - {"undefined"})
        names = (
            [part.rpartition(":")[2] for part in backend.split(",")] if isinstance(backend, str) else [None]
        )
        if not set(names) <= set(known) or ("threads" in names and backend != "threads"):
            expected = (
                f"{', '.join(known)}; or a combination of process backends such as 'cpu:gloo,cuda:nccl'"
            )
            raise _argument_error(
                "backend",
                expected,
                backend,
                "register others with torch.distributed.Backend.register_backend",
            )
        self.nprocs = nprocs
        self.backend = backend
        self.timeout = timeout
        self.prefix = prefix
        self._ranks: ProcessRanks | ThreadRanks | None = None

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank, and return each rank's result.

        Raises:
            ArgumentError: `fn` is not callable.
            MissingExtraError: the function must be sent by value and cloudpickle is not installed.
            RankError: a rank raised, died, or timed out.
        """
        return cast("list[T]", self.attempt(fn, args, kwargs).values())

    def attempt(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Outcome:
        """Run a function as `run` does, but return each rank's outcome instead of raising the first error.

        The limit is the value of `timeout` at the call.

        Raises:
            ArgumentError: `fn` is not callable.
            MissingExtraError: the function must be sent by value and cloudpickle is not installed.
        """
        if not callable(fn):
            raise _argument_error(
                "fn",
                "a callable",
                fn,
                "pass the function and its arguments separately: launch(fn, 2, args=(x,))",
            )
        if self._ranks is None or not self._ranks.alive:
            if self.backend == "threads":
                from gradmesh.launch.thread_ranks import ThreadRanks

                self._ranks = ThreadRanks(self.nprocs, self.timeout, self.prefix)
            else:
                from gradmesh.launch.process_ranks import ProcessRanks

                self._ranks = ProcessRanks(self.nprocs, self.backend, self.timeout, self.prefix)
        self._ranks.timeout = self.timeout
        return self._ranks.run(fn, args, kwargs)

    def close(self) -> None:
        """Stop the ranks; the next `run` starts new ones."""
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
    return ArgumentError.of(
        f"invalid {name}", op="launch", expected=expected, got=f"{name}={got!r}", remedy=remedy
    )
