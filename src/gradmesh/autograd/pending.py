"""`Pending`: the handle of an async collective.

A call on CPU tensors runs on a communication thread, one on device tensors on a communication stream.

Autograd nodes of an async collective: one that starts it and one that waits for it, forward and backward.
`started` makes a node that takes the operand and returns a ticket, a dummy tensor of one element; `finished` makes
one that takes the ticket and returns the result. In backward the node of the wait runs first: it starts the adjoint and
passes its ticket to the node of the start, which waits for it. What the program computes between the two in forward has
its backward between the two in backward. Both halves of the backward are made of the same nodes, so derivatives of
every order work.

The rest is as in `gradmesh.autograd`: both nodes return an ordering token, and both are ordered ops in `ordered()`.

Async `recv`: messages are received by `wait()`, in any order of the waits.
Messages between two ranks arrive in the order in which they were sent, so waiting for the second one receives the first
one too.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import (
    backward_pass,
    checkpoint_region,
    in_backward,
    is_legacy_batched,
    tracing,
    transforms_active,
)
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh._util.structure import leaves, rebuilt
from gradmesh.autograd.rule import (
    DETACHED_TOKEN,
    apply,
    apply_ordered,
    apply_unordered,
    attach_backward,
    dense_gradient,
    next_token,
    on_device_of,
    recorded,
    refuse_dropped,
    token_after,
    token_of,
    zero_for,
)
from gradmesh.dims import known_names, with_names
from gradmesh.errors import OrderError, message, refused_wait
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.pair import Receive
from gradmesh.runtime.state import INSTALLED, UnwaitedCalls, instruments, rank_state
from gradmesh.transport import compiling, run
from gradmesh.transport.call_checks import BACKWARD, CAN_BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord
from gradmesh.transport.comm_thread import AsyncAxis, StreamItem, WorkItem, has_comm_stream, in_then_callback


@dataclass(slots=True, eq=False)
class AsyncCollective:
    """A started collective of this rank."""

    op: Op  # the op; on an `AsyncAxis`, if its operands are on the CPU
    x: Tensor | None  # the operand, where this rank has no node for the call
    call: CallRecord  # its metadata
    # dummy tensor that links the start node to the wait node; None: this rank has no node for the call
    ticket: Tensor | None = None
    job: WorkItem[Tensor] | StreamItem | None = None  # the pending call
    held: Tensor | None = None  # its result, where it ran synchronously
    # the started adjoint, by backward pass
    adjoints: dict[int, AsyncCollective] = field(default_factory=dict)

    def start(self, x: Tensor) -> None:
        """Queue the call on the communication thread, or launch it on the communication stream."""
        axis: Any = self.op.axis
        op, call, given = self.op, self.call, x.detach()
        call.site = call_site()
        if type(axis) is not AsyncAxis:
            self.job = StreamItem(lambda: run.apply(op, given, call), axis, given)
            return
        if INSTALLED[0]:
            for each in instruments():
                each.queued(op, given, call)
        self.job = WorkItem(lambda: run.apply(op, given, call))
        axis.comm_thread.submit(self.job)

    def result(self) -> Tensor:
        """Wait for the result."""
        if self.held is not None:
            return self.held
        return self.job.wait()  # type: ignore[union-attr]  # it is pending


def runs_async(op: Op, x: Tensor) -> bool:
    """Whether an op with this operand can run while its rank computes."""
    return type(op.axis) is AsyncAxis or has_comm_stream(op.axis, x)


def started(
    op: Op, x: Tensor, call: CallRecord | None = None, token: Tensor | None = None
) -> AsyncCollective:
    """Start a call; as `gradmesh.autograd.apply_unordered`."""
    call, token, needs_backward = recorded(op, x, call, token)
    made = AsyncCollective(op, None if needs_backward else x, call)
    if needs_backward:
        made.ticket, _ = _start_now(made, x, DETACHED_TOKEN if token is None else token)
    else:
        made.start(x)
    return made


def finished(made: AsyncCollective, ticket: Tensor | None = None) -> Tensor:
    """Wait for the result of a call; `ticket` is the input of its wait node, by default that of its start node."""
    if made.ticket is not None:
        y, _ = _wait(made, made.ticket if ticket is None else ticket, DETACHED_TOKEN)
        return y
    y = made.result()
    return (
        attach_backward(made.op, made.x, y, made.call)
        if made.call.others_need_backward and made.x is not None
        else y
    )


def start_ordered(
    op: LinearOp, x: Tensor, token: Tensor, role: str = "", origin: CallRecord | None = None
) -> tuple[AsyncCollective, Tensor]:
    """Start a call as an ordered op; as `gradmesh.autograd.apply_ordered`."""
    made = AsyncCollective(op, None, CallRecord(role, origin, NEEDS_BACKWARD | CAN_BACKWARD, ordered=True))
    made.ticket, token = _start_now(made, x, on_device_of(x, token))
    return made, token


def finish_ordered(made: AsyncCollective, ticket: Tensor | None, token: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for its result, as another ordered op."""
    linked: Any = made.ticket if ticket is None else ticket
    return _wait(made, linked, on_device_of(linked, token))


def _start_now(made: AsyncCollective, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _StartNode.apply(made, x, token)  # type: ignore[no-untyped-call]
    return result


def _wait(made: AsyncCollective, ticket: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _WaitNode.apply(made, ticket, token)  # type: ignore[no-untyped-call]
    return result


class _StartNode(torch.autograd.Function):
    """Starts the op; its backward waits for the adjoint."""

    @staticmethod
    def forward(ctx: Any, made: AsyncCollective, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        made.start(x)
        ctx.made, following = made, token_after(token)
        ctx.save_for_backward(token if made.call.ordered else following)
        ctx.set_materialize_grads(False)
        # On the operand's device: autograd runs the nodes of a device on one thread, in the reverse order of forward.
        # This node on another thread would let other work be queued before the next adjoint is started.
        return zero_for(x), following

    @staticmethod
    def backward(ctx: Any, ticket: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        made: AsyncCollective = ctx.made
        back = made.adjoints.pop(backward_pass(), None)
        if back is None:
            made.op.fail(
                "backward ran through an async collective but not through the result of its wait()",
                expected="a loss computed from the result of wait()",
                got=f"no gradient of that result, for {made.call.describe()}",
                remedy="call y = pending.wait() before the loss is computed, and use y in it",
                kind=OrderError,
            )
        if not made.call.ordered:
            gradient = finished(back, ticket)
            nothing = back.call.flags & ZERO_GRAD and (back.call.all_zero or not back.op.sends)
            return None, None if nothing else gradient, None
        following = next_token(ctx, following)
        if back.held is None and torch.is_grad_enabled():
            gradient, following = finish_ordered(back, ticket, following)
            return None, gradient, following
        return None, back.result(), following


class _WaitNode(torch.autograd.Function):
    """Waits for the op; its backward starts the adjoint."""

    @staticmethod
    def forward(ctx: Any, made: AsyncCollective, ticket: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        y = made.result()
        ctx.made, following = made, token_after(token)
        ctx.op, ctx.call = made.op, made.call  # where the node of a synchronous call has them
        ctx.result, ctx.dtype, ctx.device = y.shape, y.dtype, y.device
        ctx.save_for_backward(token if made.call.ordered else following)
        ctx.set_materialize_grads(False)
        made.job = None  # frees its reference to the result
        made.ticket = None  # breaks a reference cycle with the graph
        return y, following

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        made: AsyncCollective = ctx.made
        op: LinearOp = made.op  # type: ignore[assignment]  # other ops have no backward
        nothing = grad is None
        if grad is None or grad.layout is not torch.strided:
            grad = dense_gradient(ctx, grad)
        recording, at_once = torch.is_grad_enabled(), is_legacy_batched(grad) or transforms_active()
        ticket = zero_for(grad)
        if not made.call.ordered:
            call = CallRecord(BACKWARD, made.call, ZERO_GRAD if nothing else 0)
            token = token_of(ctx) if recording else None
            if at_once:
                back = AsyncCollective(op.back, None, call, held=apply_unordered(op.back, grad, call, token))
            else:
                back = started(op.back, grad, call, token)
            made.adjoints[backward_pass()] = back
            return None, ticket if back.ticket is None else back.ticket, None
        following = next_token(ctx, following)
        if at_once:
            held, following = apply_ordered(op.back, grad, following, BACKWARD, made.call)
            back = AsyncCollective(op.back, None, CallRecord(ordered=True), held=held)
        elif recording:
            back, following = start_ordered(op.back, grad, following, BACKWARD, made.call)
            ticket = back.ticket  # type: ignore[assignment]  # is set
        else:
            back = AsyncCollective(op.back, None, CallRecord(BACKWARD, made.call))
            back.start(grad)
        made.adjoints[backward_pass()] = back
        return None, ticket, following


T = TypeVar("T")

_numbers = itertools.count()


class Pending(Generic[T]):
    """The handle that a verb returns with `async_op=True`; `wait()` returns the result.

    Between the verb and `wait()` this rank can compute. In backward the roles swap: the gradient collective is started
    at the point of `wait()` and waited for at the point of the verb, so the same computation overlaps in backward too,
    at every order. In `ordered()` both points are ordered ops. The async calls of an axis use a separate process group
    and are sent in the order in which they were started; that order has to be the same on every rank, and so has the
    order of the waits of differentiable calls.

    Do not modify the operand in place before `wait()` has returned: it may not have been read yet.

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
        """Created by the verbs.

        Args:
            verb: the verb.
            axis: the axis, for error texts.
            finish: waits and returns the result.
            future: creates a future; None: futures are not supported.
            over: whether `wait` would return without blocking; None: this cannot be polled.
            operand: the tensor that must not be modified in place before `wait`.
            tied: whether the call has a backward on this rank even where the operand does not require grad.
            recording: whether the result requires grad, so that `future` does not replace `wait`; the default is
                derived from the operand.
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
        if compiling():  # compiled programs have no call sites or version counters
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
        # A checkpoint may stop a recomputation early, before wait().
        if self._region is None or not in_backward():
            self._unwaited.open[self._number] = self._description()

    def wait(self) -> T:
        """The result, as the verb without `async_op` returns it. A second call returns the same.

        Raises:
            OrderError: the call was started in another checkpointed region, in another grad mode, or in an `ordered()`
                block that was joined since; or its operand was modified in place meanwhile.
            MismatchError: the ranks' calls do not match. Other errors are those of the verb.
        """
        if self._lock is None:
            return self._finish_once()
        # The program may hold the lock while it waits for the callback of `then` that calls this.
        if not self._lock.acquire(blocking=not in_then_callback()):
            return self._future_value()
        try:
            return self._finish_once()
        finally:
            self._lock.release()

    def _future_value(self) -> T:
        """The value of the future, for a callback of `then` while the program waits for the call."""
        future = None if self._future is None else self._future()
        if future is None or not future.done():
            raise self._order_error(
                "wait() in a future().then(...) callback would deadlock: the call runs after the callback has returned",
                "wait() on a thread of the program",
                "wait() inside future().then(callback), for a call that is still pending",
                "call wait() before then(...), or torch.futures.collect_all([a.future(), b.future()])",
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
        except BaseException:  # Ctrl-C, for example: the call is still pending
            self._finish = finish
            raise
        self._mark_waited()
        self._operand = None
        # From here on only the result is referenced.
        self._over, result = (lambda: True), self._result
        if self._future is not None:
            self._future = lambda: _completed(result)
        return result

    def done(self) -> bool:
        """Whether `wait` would return or raise without blocking.

        Raises:
            OrderError: the call is `recv`, which cannot be polled.
        """
        if self._finish is None:
            return True
        if self._over is None:
            raise self._order_error(
                "recv() cannot be polled", "wait()", "done()", "call wait(), which receives the message"
            )
        return self._over()

    def drop(self) -> None:
        """Discard the result without `wait()`, for example after an error in user code.

        The collective still runs, because the other ranks wait for it.
        """
        self._mark_waited()

    def future(self) -> torch.futures.Future[T]:
        """A `torch.futures.Future` of the detached value, for `then`, `torch.futures.collect_all` and `wait_all`.

        The communication thread completes it, so its value is detached, and callbacks of `then` must not call
        collectives. When `wait` returns or `done` is True, the future is done and its callbacks have returned. If the
        operand requires grad, `wait` still has to be called.

        Raises:
            OrderError: the call needs several steps, which only `wait` runs (`all_reduce` with "max", "min" or
                "logsumexp", `recv`).
        """
        if self._future is None:
            raise self._order_error(
                "this call has no future, because it needs several steps that only wait() runs",
                "wait()",
                "future()",
                "call y = pending.wait() where the result is needed",
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
        """Raise if the backward of this wait could not be paired with that of the start."""
        operand = self._operand
        if compiling() or operand is None:
            return
        if self._tied and torch.is_grad_enabled() != self._mode:
            modes = {True: "gradients recorded", False: "torch.no_grad()"}
            raise self._order_error(
                "wait() is called in another grad mode than the collective",
                f"{modes[self._mode]}, as at the collective",
                modes[not self._mode],
                "call both inside the same torch.no_grad() block, or both outside of it",
            )
        if checkpoint_region() is not self._region:
            raise self._order_error(
                "the collective and its wait() are in different checkpointed regions",
                "both inside one function passed to torch.utils.checkpoint, or both outside",
                "one inside and one outside; recomputation would repeat only one of them",
                "move both into the checkpointed function, or both out of it",
            )
        if version(operand) != self._version:
            raise self._order_error(
                "the operand was modified in place before wait()",
                "an operand that is only read until wait() returns",
                "an in-place write, possibly before the operand was sent",
                "pass a copy, x.clone(), or write to x after wait()",
            )

    def _order_error(self, problem: str, expected: str, got: str, remedy: str) -> OrderError:
        got += f"; started {show_site(self._site)}"
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
            found = [*(found[0] if isinstance(found[0], (list, tuple)) else ()), *found[1:]]
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
    """Start an op on this rank's tensor, differentiably; inside `ordered()` as the next ordered op.

    Args:
        op: the op; on a CPU it runs synchronously on any axis but an `AsyncAxis`.
        x: the operand.
        then: computes the return value of `wait` from the op's result; defaults to the identity.
        steps: whether `then` makes further calls, so that only `wait` can run it.
    """
    axis, finish = str(op.axis), then if then is not None else lambda y: y
    apart = not compiling() and not tracing() and runs_async(op, x)
    if not apart or transforms_active() or is_legacy_batched(x):
        y = finish(apply(op, x))
        return Pending(op.verb, axis, lambda: y, future=lambda: _completed(y))
    here = rank_state().of_thread
    if here.coalescing is not None and not steps and here.coalescing.takes(op):
        refuse_dropped(op, x)
        added: Pending[Any] = here.coalescing.add(op, x, finish)
        return added
    chain = here.chain
    made = apply(op, x, started, lambda chain, op, x: chain.begin(op, x))
    result = finished if chain is None else chain.end
    job: Any = made.job
    return Pending(
        op.verb,
        axis,
        lambda: finish(result(made)),
        future=None if steps else lambda: _future_of(job, finish),
        over=lambda: job.over,
        operand=x,
        tied=made.ticket is not None,
    )


def combined(parts: Sequence[Pending[Any]], finish: Callable[[list[Any]], T]) -> Pending[T]:
    """Several calls, at least one, as one; `finish` computes the return value of `wait` from their results."""
    first = parts[0]
    for part in parts:
        part._mark_waited()  # the combined call is waited for instead
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


def _completed(value: T) -> torch.futures.Future[T]:
    future: torch.futures.Future[T] = torch.futures.Future()
    found = [with_names(leaf.detach(), known_names(leaf)) for _, leaf in leaves(value, "future", "")]
    future.set_result(rebuilt(value, iter(found)))
    return future


def _future_of(job: WorkItem[Tensor] | StreamItem, finish: Callable[[Tensor], T]) -> torch.futures.Future[T]:
    """A future of `finish` of a call's result; on a device it is done at once, and its `wait` makes a stream wait."""
    future: torch.futures.Future[T] = torch.futures.Future(
        devices=[job.device] if isinstance(job, StreamItem) else None
    )

    def complete(over: Any) -> None:
        try:
            future.set_result(finish(over.wait().detach()))
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub asks for a result

    job.then(complete)
    return future


def version(x: Tensor | None) -> int:
    """A tensor's version counter; 0 for inference tensors, which have none."""
    return 0 if x is None or x.is_inference() else x._version


@dataclass(slots=True)
class _Expected:
    """A message to receive later."""

    op: Receive
    x: Tensor
    y: Tensor | None = None
    error: Exception | None = None


@dataclass
class _Inbox:
    """The expected messages of this rank, by group and sender, in order."""

    expected: dict[tuple[dist.ProcessGroup, int], deque[_Expected]] = field(default_factory=dict)

    def take(self, key: tuple[dist.ProcessGroup, int], until: _Expected | None = None) -> None:
        """Receive all expected messages of a rank, or those up to `until`."""
        while queue := self.expected.get(key):
            message = queue.popleft()
            if not queue:
                del self.expected[key]
            try:
                message.y = apply(message.op, message.x)
            except Exception as error:
                message.error = error
            if message is until:
                return


def receive(op: Receive, x: Tensor, then: Callable[[Tensor], Any], *, later: bool) -> Any:
    """Receive a message, now or, as a `Pending`, when it is waited for; `then` computes the returned value."""
    inbox, key = rank_state().get_or_create(_Inbox), (op.axis.group, op.peer)
    if not later:
        inbox.take(key)
        return then(apply(op, x))
    message = _Expected(op, x)
    inbox.expected.setdefault(key, deque()).append(message)

    def wait() -> Any:
        if message.y is None and message.error is None:
            inbox.take(key, message)
        if message.error is not None:
            raise message.error
        return then(message.y)  # type: ignore[arg-type]  # it is one or the other

    return Pending(op.verb, str(op.axis), wait, over=None)
