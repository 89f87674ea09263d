"""`Pending`: a collective that is under way, and what it takes to get its result."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradmesh._torch import (
    checkpoint_region,
    in_backward,
    is_legacy_batched,
    saves_for_a_checkpoint,
    tracing,
    transforms_active,
)
from gradmesh.autograd import apply, differentiable, refuse_dropped
from gradmesh.call_sites import Site, call_site, show_site
from gradmesh.dims import known_names, with_names
from gradmesh.errors import OrderError, message, refused_wait
from gradmesh.ops.base import LinearOp, Op
from gradmesh.overlap.async_nodes import AsyncCollective, finished, started
from gradmesh.state import UnwaitedCalls, rank_state
from gradmesh.structure import leaves, rebuilt
from gradmesh.transport import compiling
from gradmesh.transport.comm_thread import AsyncAxis, WorkItem, in_then_callback

__all__ = ["Pending", "combined", "start_op", "version"]

T = TypeVar("T")

_numbers = itertools.count()


class Pending(Generic[T]):
    """What a verb returns with `async_op=True`: a call that is under way.

    Between the verb and `wait()` this rank can do something else. In backward it is the other way round: the place of
    `wait()` begins the adjoint, and the place of the verb waits for it, so that what is done between the two in
    forward is overlapped in backward too, at every order. In `ordered()` both places are links of the chain. Calls
    begun on an axis travel on a process group of their own, in the order in which they were begun; that order has to be
    the same on every rank, and so has the order of the waits of what is differentiated.

    Until it was waited for, the operand must not be written: it may not have been read yet.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0 + gm.rank()], requires_grad=True)
        ...     pending = gm.all_gather(x, async_op=True)
        ...     y = x.exp()  # meanwhile
        ...     (pending.wait() * (1 + gm.rank())).sum().backward()
        ...     return pending.wait().tolist(), x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1.0, 2.0], [3.0]), ([1.0, 2.0], [3.0])]
    """

    def __init__(
        self,
        verb: str,
        axis: str,
        finish: Callable[[], T],
        *,
        future: Callable[[], torch.futures.Future[T]] | None = None,
        over: Callable[[], bool] | None = lambda: True,
        operand: Tensor | None = None,
        tied: bool = False,
        recording: bool = False,
    ) -> None:
        """Made by verbs.

        Args:
            verb: the verb.
            axis: the axis, for error texts.
            finish: waits, and gives the result.
            future: makes a future; None: there is none.
            over: whether it would wait no more; None: nobody knows.
            operand: what must not be written meanwhile.
            tied: whether the call has a backward on this rank, even where the operand requires no grad.
            recording: whether it has, in which case a future does not stand for `wait`; else the operand tells.
        """
        self._verb, self._axis = verb, axis
        self._finish: Callable[[], T] | None = finish
        self._future, self._over = future, over
        self._result: T
        self._error: BaseException | None = None
        self._operand = operand
        self._unwaited: UnwaitedCalls | None = None
        self._lock: threading.Lock | None = None
        self._site: Site = None
        self._recording = False
        if compiling():  # what is looked after below is the compiler's affair
            return
        self._site = call_site()
        self._lock = threading.Lock()
        self._version = version(operand)
        self._mode = torch.is_grad_enabled()
        requires = operand is not None and operand.requires_grad
        self._recording = recording or (self._mode and requires)
        self._tied = tied or requires
        self._region = checkpoint_region()
        self._number = next(_numbers)
        self._unwaited = rank_state().started
        self._abandoned = self._unwaited.abandoned
        # What is run again for a checkpoint may end as soon as it has saved what backward needs.
        if self._region is None or not in_backward():
            self._unwaited.open[self._number] = self._description()

    def wait(self) -> T:
        """The result, as the verb without `async_op` returns it. A second call returns the same.

        Raises:
            OrderError: the call was begun in another region of a checkpoint, with another grad mode, or in an
                `ordered()` block that was joined since; or its operand was written meanwhile.
            MismatchError: what the ranks called does not fit together; and whatever else the verb raises.
        """
        if self._lock is None:
            return self._finish_once()
        # The program may hold the lock, waiting for a function of `then` in which this is called.
        if not self._lock.acquire(blocking=not in_then_callback()):
            return self._future_value()
        try:
            return self._finish_once()
        finally:
            self._lock.release()

    def _future_value(self) -> T:
        """The value of the future, in a function of `then` while the program waits for the call."""
        future = None if self._future is None else self._future()
        if future is None or not future.done():
            raise self._order_error(
                "a function of future().then(...) waits for a call that is made after it has returned",
                "wait() on a thread of the program",
                "wait() in what then(...) runs",
                "wait for the calls first, or use torch.futures.collect_all",
            )
        return future.value()

    def _finish_once(self) -> T:
        if self._error is not None:
            raise self._error
        if self._finish is None:
            return self._result
        self._check_wait()
        finish, self._finish = self._finish, None
        try:
            self._result = finish()
        except Exception as error:
            if isinstance(error, OrderError) and error.refused_wait:
                self._finish = finish
                raise
            self._mark_waited()
            self._error, self._operand = error, None
            if self._unwaited is not None:
                self._unwaited.abandon()
            raise
        except BaseException:  # Ctrl-C, say: the call is still under way
            self._finish = finish
            raise
        self._mark_waited()
        self._operand = None
        # A call that is kept keeps its result, and nothing else.
        self._over, result = _true, self._result
        if self._future is not None:
            self._future = lambda: _completed(result)
        return result

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once.

        Raises:
            OrderError: the call is `recv`, whose message is taken at the wait.
        """
        if self._finish is None:
            return True
        if self._over is None:
            raise self._order_error(
                "nobody knows of a message before it is taken",
                "wait()",
                "done()",
                "call wait(), which takes it",
            )
        return self._over()

    def drop(self) -> None:
        """Say that nobody will wait, where a program goes on after an error of its own.

        The call is made all the same: the other ranks wait for it.
        """
        self._mark_waited()

    def future(self) -> torch.futures.Future[T]:
        """A future of the value alone, for `then`, `torch.futures.collect_all` and `wait_all`.

        It is completed on a thread of the library, so its value is detached, and what `then` runs must not call
        collectives. It is done, and what `then` runs has returned, when `wait` returns and when `done` is True. A call
        whose operand requires grad has to be waited for all the same.

        Raises:
            OrderError: the call has several steps (`all_reduce` with "max", "min" or "logsumexp", `recv`), which only
                `wait` takes.
        """
        if self._future is None:
            raise self._order_error(
                "a call of several steps has no future",
                "wait()",
                "future()",
                "call wait() where the result is needed",
            )
        if not self._recording:
            self._mark_waited()
        return self._future()

    def _description(self) -> str:
        return f"{self._verb} {show_site(self._site)}"

    def _mark_waited(self) -> None:
        if self._unwaited is not None:
            self._unwaited.open.pop(self._number, None)

    def _check_wait(self) -> None:
        """Refuse a wait whose backward could not meet that of the beginning."""
        operand = self._operand
        if compiling() or operand is None:
            return
        if self._tied and torch.is_grad_enabled() != self._mode:
            modes = {True: "gradients recorded", False: "torch.no_grad()"}
            raise self._order_error(
                "a call was begun with another grad mode than it is waited for with",
                f"{modes[self._mode]}, as at the beginning",
                modes[not self._mode],
                "begin and wait inside the same torch.no_grad() block, or both outside of it",
            )
        if checkpoint_region() is not self._region:
            raise self._order_error(
                "a call was begun in another region of a checkpoint, or in another run of it",
                "the beginning and wait() in one region",
                "one of them alone, which would be recomputed without the other",
                "move both into the checkpointed function, or both out of it",
            )
        if version(operand) != self._version:
            raise self._order_error(
                "the operand was written before the call was waited for",
                "an operand that is only read until then",
                "one that was changed in place, maybe before it was sent",
                "hand in a copy, or write after wait()",
            )

    def _order_error(self, problem: str, expected: str, got: str, remedy: str) -> OrderError:
        got += f"; begun {show_site(self._site)}"
        return refused_wait(
            message(problem, op=self._verb, axis=self._axis, expected=expected, got=got, remedy=remedy)
        )

    def _use_error(self, use: str) -> OrderError:
        return self._order_error(
            "a pending result is used as a tensor",
            "the result, which wait() returns",
            f"{use} of a Pending",
            "call .wait() first, where the result is needed: y = pending.wait()",
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            raise _PendingAttributeError(str(self._use_error(f".{name}")))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a function of torch that takes this for a tensor."""
        found: Any = [*args, *(kwargs or {}).values()]
        while not isinstance(found[0], Pending):
            found = [*(found[0] if isinstance(found[0], list | tuple) else ()), *found[1:]]
        raise found[0]._use_error(getattr(func, "__name__", str(func)))

    def __del__(self) -> None:
        unwaited: UnwaitedCalls | None = getattr(self, "_unwaited", None)
        if unwaited is None or unwaited.open.pop(self._number, None) is None:
            return
        if self._abandoned == unwaited.abandoned:
            unwaited.dropped[self._number] = self._description()


class _PendingAttributeError(OrderError, AttributeError):
    """An attribute of the result; an AttributeError too, for `hasattr`."""


def _refuse_operators() -> None:
    """Refuse a Pending as an operand of Python's operators."""

    def refused(name: str) -> Callable[..., Any]:
        def method(self: Pending[Any], *_: object) -> Any:
            raise self._use_error(name)

        return method

    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    names = [*arithmetic, *(f"r{name}" for name in arithmetic), "lt", "le", "gt", "ge", "neg", "abs"]
    for name in [*names, "getitem", "len", "iter", "float", "int"]:
        setattr(Pending, f"__{name}__", refused(f"__{name}__"))


_refuse_operators()


def start_op(
    op: Op, x: Tensor, then: Callable[[Tensor], Any] | None = None, *, steps: bool = False
) -> Pending[Any]:
    """Begin an op on this rank's tensor, differentiably; inside `ordered()`, as the next link of the chain.

    Args:
        op: the op; on an `AsyncAxis`, or it is made at once.
        x: the operand.
        then: makes what `wait` returns of the op's result; by default that is it.
        steps: whether that needs further calls, which nobody else can make.
    """
    axis, finish = str(op.axis), then if then is not None else _identity
    apart = type(op.axis) is AsyncAxis and not compiling() and not tracing()
    if not apart or transforms_active() or is_legacy_batched(x):
        y = finish(apply(op, x))
        return Pending(op.verb, axis, lambda: y, future=lambda: _completed(y))
    state = rank_state()
    if state.started.dropped:
        refuse_dropped(op, x)
    if state.coalescing is not None and not steps and state.coalescing.takes(op):
        added: Pending[Any] = state.coalescing.add(op, x, finish)
        return added
    made, result = _start(op, x)
    job: WorkItem[Tensor] = made.job  # type: ignore[assignment]  # it is on its way
    return Pending(
        op.verb,
        axis,
        lambda: finish(result(made)),
        future=None if steps else lambda: _future_of(job, finish),
        over=lambda: job.over,
        operand=x,
        tied=made.ticket is not None,
    )


def _start(op: Op, x: Tensor) -> tuple[AsyncCollective, Callable[[AsyncCollective], Tensor]]:
    """A call that was begun, and what ends it."""
    chain = rank_state().chain
    if chain is None:
        return started(op, x), finished
    try:
        if torch.is_grad_enabled() and isinstance(op, LinearOp) and differentiable(x):
            return chain.begin(op, x), chain.end
        chain.refuse_reentrant(op)
    except OrderError as error:  # of the chain: nothing was sent
        op.withdraw(x, error)
        raise
    made = started(op, x)
    if saves_for_a_checkpoint():
        chain.keep_place()
    return made, finished


def combined(parts: Sequence[Pending[Any]], finish: Callable[[list[Any]], T]) -> Pending[T]:
    """Several calls as one.

    Args:
        parts: the calls; at least one.
        finish: makes what `wait` returns of their results.
    """
    first = parts[0]
    for part in parts:
        part._mark_waited()  # as this one has to be, whose parts they are
    return Pending(
        first._verb,
        first._axis,
        lambda: finish([part.wait() for part in parts]),
        future=lambda: torch.futures.collect_all([part.future() for part in parts]).then(
            lambda done: finish([future.value() for future in done.value()])
        ),
        over=lambda: all(part.done() for part in parts),
        recording=not compiling() and any(part._recording for part in parts),
    )


def _true() -> bool:
    return True


def _identity(y: Tensor) -> Tensor:
    return y


def _completed(value: T) -> torch.futures.Future[T]:
    future: torch.futures.Future[T] = torch.futures.Future()
    future.set_result(_detached(value))
    return future


def _future_of(job: WorkItem[Tensor], finish: Callable[[Tensor], T]) -> torch.futures.Future[T]:
    """A future of what is made of a call's result."""
    future: torch.futures.Future[T] = torch.futures.Future()

    def complete(over: WorkItem[Tensor]) -> None:
        try:
            future.set_result(finish(over.wait().detach()))
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub asks for a result

    job.then(complete)
    return future


def _detached(value: Any) -> Any:
    found = [with_names(leaf.detach(), known_names(leaf)) for _, leaf in leaves(value, "future", "")]
    return rebuilt(value, iter(found))


def version(x: Tensor | None) -> int:
    """How often a tensor was written; of one that does not count, always 0."""
    return 0 if x is None or x.is_inference() else x._version
