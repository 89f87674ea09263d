"""Autograd nodes of an async collective: one that starts it and one that waits for it, forward and backward.

`started` makes a node that takes the operand and returns a ticket, a dummy tensor of one element; `finished` makes
one that takes the ticket and returns the result. In backward the node of the wait runs first: it starts the adjoint and
passes its ticket to the node of the start, which waits for it. What the program computes between the two in forward has
its backward between the two in backward. Both halves of the backward are made of the same nodes, so derivatives of
every order work.

The rest is as in `gradmesh.autograd`: both nodes return an ordering token, and both are ordered ops in `ordered()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import backward_pass, is_legacy_batched, transforms_active
from gradmesh.autograd import (
    DETACHED_TOKEN,
    apply_ordered,
    apply_unordered,
    attach_backward,
    differentiable,
    grad_token,
    token_of,
)
from gradmesh.call_sites import call_site
from gradmesh.errors import OrderError, message
from gradmesh.ops.base import LinearOp, Op
from gradmesh.state import ACTIVE_TRACERS, rank_state
from gradmesh.transport.call_checks import BACKWARD, CAN_BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord
from gradmesh.transport.comm_thread import AsyncAxis, WorkItem

__all__ = ["AsyncCollective", "finish_ordered", "finished", "start_ordered", "started"]


@dataclass(slots=True, eq=False)
class AsyncCollective:
    """A started collective of this rank.

    Attributes:
        op: the op, on an `AsyncAxis`.
        x: the operand, where this rank has no node for the call.
        call: its metadata.
        ticket: dummy tensor that links the start node to the wait node; None: this rank has no node for the call.
        job: the pending call.
        held: its result, where it ran synchronously.
        adjoints: the started adjoint, by backward pass.
    """

    op: Op
    x: Tensor | None
    call: CallRecord
    ticket: Tensor | None = None
    job: WorkItem[Tensor] | None = None
    held: Tensor | None = None
    adjoints: dict[int, AsyncCollective] = field(default_factory=dict)

    def start(self, x: Tensor) -> None:
        """Queue the call on the communication thread."""
        axis: AsyncAxis = self.op.axis  # type: ignore[assignment]  # async calls have no other
        op, call, given = self.op, self.call, x.detach()
        call.site = call_site()
        if ACTIVE_TRACERS[0] and (tracer := rank_state().tracer) is not None:
            tracer.begins(op, given, call)
        self.job = WorkItem(lambda: op.apply(given, call))
        axis.comm_thread.submit(self.job)

    def result(self) -> Tensor:
        """Wait for the result."""
        if self.held is not None:
            return self.held
        return self.job.wait()  # type: ignore[union-attr]  # it is pending


def started(
    op: Op, x: Tensor, call: CallRecord | None = None, token: Tensor | None = None
) -> AsyncCollective:
    """Start a call; as `gradmesh.autograd.apply_unordered`."""
    recording = torch.is_grad_enabled()
    if recording and op.rooted and not x.requires_grad and token is None and differentiable(x):
        token = grad_token()
    needs_backward = recording and (x.requires_grad or (token is not None and token.requires_grad))
    call = CallRecord() if call is None else call
    call.flags |= (NEEDS_BACKWARD if needs_backward else 0) | (CAN_BACKWARD if recording else 0)
    made = AsyncCollective(op, None if needs_backward else x, call)
    if needs_backward:
        made.ticket, _ = _start(made, x, DETACHED_TOKEN if token is None else token)
    else:
        made.start(x)
    return made


def finished(made: AsyncCollective, ticket: Tensor | None = None) -> Tensor:
    """Wait for the result of a call.

    Args:
        made: the call.
        ticket: the input of its wait node; None: the ticket of its start node.
    """
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
    made.ticket, token = _start(made, x, token)
    return made, token


def finish_ordered(made: AsyncCollective, ticket: Tensor | None, token: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for its result, as another ordered op."""
    return _wait(made, made.ticket if ticket is None else ticket, token)  # type: ignore[arg-type]  # is set


def _start(made: AsyncCollective, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
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
        ctx.made, following = made, torch.zeros_like(token)
        ctx.save_for_backward(token if made.call.ordered else following)
        ctx.set_materialize_grads(False)
        return torch.zeros(1, device="cpu"), following

    @staticmethod
    def backward(ctx: Any, ticket: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        made: AsyncCollective = ctx.made
        back = made.adjoints.pop(backward_pass(), None)
        if back is None:
            raise OrderError(
                message(
                    "backward ran through an async collective but not through the result of its wait()",
                    op=made.op.verb,
                    axis=str(made.op.axis),
                    expected="a loss computed from the result of wait()",
                    got=f"no gradient of that result, for {made.call.describe()}",
                    remedy="call y = pending.wait() before the loss is computed, and use y in it",
                )
            )
        if not made.call.ordered:
            gradient = finished(back, ticket)
            nothing = back.call.flags & ZERO_GRAD and (back.call.all_zero or not back.op.sends)
            return None, None if nothing else gradient, None
        (token,) = ctx.saved_tensors
        if following is None:
            following = token.clone()
        if back.held is None and torch.is_grad_enabled():
            gradient, following = finish_ordered(back, ticket, following)
            return None, gradient, following
        return None, back.result(), following


class _WaitNode(torch.autograd.Function):
    """Waits for the op; its backward starts the adjoint."""

    @staticmethod
    def forward(ctx: Any, made: AsyncCollective, ticket: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        y = made.result()
        ctx.made, following = made, torch.zeros_like(token)
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
        if grad is None:
            grad = torch.zeros(ctx.result, dtype=ctx.dtype, device=ctx.device)
        elif grad.layout is not torch.strided:
            grad = grad.to_dense()
        recording, at_once = torch.is_grad_enabled(), is_legacy_batched(grad) or transforms_active()
        ticket = torch.zeros(1, device="cpu")
        if not made.call.ordered:
            call = CallRecord(BACKWARD, made.call, ZERO_GRAD if nothing else 0)
            token = token_of(ctx) if recording else None
            if at_once:
                back = AsyncCollective(op.back, None, call, held=apply_unordered(op.back, grad, call, token))
            else:
                back = started(op.back, grad, call, token)
            made.adjoints[backward_pass()] = back
            return None, ticket if back.ticket is None else back.ticket, None
        (token,) = ctx.saved_tensors
        if following is None:
            following = token.clone()
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
