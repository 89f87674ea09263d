"""A collective in two halves for autograd: it is begun, and later ended, and so is its backward, the other way round.

`begun` makes a node that takes the operand and gives a ticket, one number that means nothing; `ended` makes another one
that takes the ticket and gives the result. So the backward of the end comes first: it begins the adjoint, and hands the
ticket of that to the backward of the beginning, which ends it. What the program does between the two in forward has its
backward between the two in backward. Since both halves of the backward are made of these same nodes, every order of
derivative comes by itself.

The rest is as in `gradmesh.autograd`: both nodes have a thread for a second output, and both are links in `ordered()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import backward_pass, is_legacy_batched, transforms_active
from gradmesh.autograd import LOOSE, differentiable, join_late, leaf, linked, thread_of, unlinked
from gradmesh.call_sites import call_site
from gradmesh.errors import OrderError, message
from gradmesh.ops.base import LinearOp, Op
from gradmesh.state import FOLLOWED, rank_state
from gradmesh.wire.claims import BACKWARD, CAN_JOIN, JOINS, NOTHING, Recorded
from gradmesh.wire.courier import Aside, Job

__all__ = ["Begun", "begun", "begun_linked", "ended", "ended_linked"]


@dataclass(slots=True, eq=False)
class Begun:
    """A call that was begun on this rank.

    Attributes:
        op: the op, on an `Aside`.
        x: the operand, where this rank has no node for the call.
        call: what autograd remembers of it.
        ticket: what the end is tied to the beginning with, until then; None: this rank has no node for the call.
        job: the call on its way.
        held: its result, where it was made at once.
        backs: by the number of each backward pass, its adjoint, which was begun there and is to be ended.
    """

    op: Op
    x: Tensor | None
    call: Recorded
    ticket: Tensor | None = None
    job: Job[Tensor] | None = None
    held: Tensor | None = None
    backs: dict[int, Begun] = field(default_factory=dict)

    def start(self, x: Tensor) -> None:
        """Hand the call to the courier."""
        axis: Aside = self.op.axis  # type: ignore[assignment]  # on no other is a call begun
        op, call, given = self.op, self.call, x.detach()
        call.site = call_site()
        if FOLLOWED[0] and (follower := rank_state().follower) is not None:
            follower.begins(op, given, call)
        self.job = Job(lambda: op.apply(given, call))
        axis.courier.begin(self.job)

    def result(self) -> Tensor:
        """Wait for the result."""
        if self.held is not None:
            return self.held
        return self.job.wait()  # type: ignore[union-attr]  # it is on its way


def begun(op: Op, x: Tensor, call: Recorded | None = None, thread: Tensor | None = None) -> Begun:
    """Begin a call; as `gradmesh.autograd.unlinked`."""
    recording = torch.is_grad_enabled()
    if recording and op.rooted and not x.requires_grad and thread is None and differentiable(x):
        thread = leaf()
    joins = recording and (x.requires_grad or (thread is not None and thread.requires_grad))
    call = Recorded() if call is None else call
    call.flags |= (JOINS if joins else 0) | (CAN_JOIN if recording else 0)
    made = Begun(op, None if joins else x, call)
    if joins:
        made.ticket, _ = _begin(made, x, LOOSE if thread is None else thread)
    else:
        made.start(x)
    return made


def ended(made: Begun, ticket: Tensor | None = None) -> Tensor:
    """Wait for the result of a call.

    Args:
        made: the call.
        ticket: what its end is tied to; None: the ticket of its beginning.
    """
    if made.ticket is not None:
        y, _ = _end(made, made.ticket if ticket is None else ticket, LOOSE)
        return y
    y = made.result()
    return join_late(made.op, made.x, y, made.call) if made.call.others_join and made.x is not None else y


def begun_linked(
    op: LinearOp, x: Tensor, thread: Tensor, role: str = "", origin: Recorded | None = None
) -> tuple[Begun, Tensor]:
    """Begin a call as a link of the chain; as `gradmesh.autograd.linked`."""
    made = Begun(op, None, Recorded(role, origin, JOINS | CAN_JOIN, linked=True))
    made.ticket, thread = _begin(made, x, thread)
    return made, thread


def ended_linked(made: Begun, ticket: Tensor | None, thread: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for its result, as another link of the chain."""
    return _end(made, made.ticket if ticket is None else ticket, thread)  # type: ignore[arg-type]  # a link has one


def _begin(made: Begun, x: Tensor, thread: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Begin.apply(made, x, thread)  # type: ignore[no-untyped-call]
    return result


def _end(made: Begun, ticket: Tensor, thread: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _End.apply(made, ticket, thread)  # type: ignore[no-untyped-call]
    return result


class _Begin(torch.autograd.Function):
    """The beginning: in backward, the end of the adjoint."""

    @staticmethod
    def forward(ctx: Any, made: Begun, x: Tensor, thread: Tensor) -> tuple[Tensor, Tensor]:
        made.start(x)
        ctx.made, following = made, torch.zeros_like(thread)
        ctx.save_for_backward(thread if made.call.linked else following)
        ctx.set_materialize_grads(False)
        return torch.zeros(1, device="cpu"), following

    @staticmethod
    def backward(ctx: Any, ticket: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        made: Begun = ctx.made
        back = made.backs.pop(backward_pass(), None)
        if back is None:
            raise OrderError(
                message(
                    "the backward of a call that was begun, without that of its end",
                    op=made.op.verb,
                    axis=str(made.op.axis),
                    expected="backward through what wait() returned",
                    got=f"no such pass, for {made.call.told()}",
                    remedy="wait for the call before the loss is made",
                )
            )
        if not made.call.linked:
            gradient = ended(back, ticket)
            nothing = back.call.flags & NOTHING and (back.call.all_nothing or not back.op.sends)
            return None, None if nothing else gradient, None
        (thread,) = ctx.saved_tensors
        if following is None:
            following = thread.clone()
        if back.held is None and torch.is_grad_enabled():
            gradient, following = ended_linked(back, ticket, following)
            return None, gradient, following
        return None, back.result(), following


class _End(torch.autograd.Function):
    """The end: in backward, the beginning of the adjoint."""

    @staticmethod
    def forward(ctx: Any, made: Begun, ticket: Tensor, thread: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        y = made.result()
        ctx.made, following = made, torch.zeros_like(thread)
        ctx.result, ctx.dtype, ctx.device = y.shape, y.dtype, y.device
        ctx.save_for_backward(thread if made.call.linked else following)
        ctx.set_materialize_grads(False)
        made.job = None  # and with it the result, which is its receiver's
        made.ticket = None  # which would hold the graph that holds this
        return y, following

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        made: Begun = ctx.made
        op: LinearOp = made.op  # type: ignore[assignment]  # no other has a backward
        nothing = grad is None
        if grad is None:
            grad = torch.zeros(ctx.result, dtype=ctx.dtype, device=ctx.device)
        elif grad.layout is not torch.strided:
            grad = grad.to_dense()
        recording, at_once = torch.is_grad_enabled(), is_legacy_batched(grad) or transforms_active()
        ticket = torch.zeros(1, device="cpu")
        if not made.call.linked:
            call = Recorded(BACKWARD, made.call, NOTHING if nothing else 0)
            thread = thread_of(ctx) if recording else None
            if at_once:
                back = Begun(op.back, None, call, held=unlinked(op.back, grad, call, thread))
            else:
                back = begun(op.back, grad, call, thread)
            made.backs[backward_pass()] = back
            return None, ticket if back.ticket is None else back.ticket, None
        (thread,) = ctx.saved_tensors
        if following is None:
            following = thread.clone()
        if at_once:
            held, following = linked(op.back, grad, following, BACKWARD, made.call)
            back = Begun(op.back, None, Recorded(linked=True), held=held)
        elif recording:
            back, following = begun_linked(op.back, grad, following, BACKWARD, made.call)
            ticket = back.ticket  # type: ignore[assignment]  # a link has one
        else:
            back = Begun(op.back, None, Recorded(BACKWARD, made.call))
            back.start(grad)
        made.backs[backward_pass()] = back
        return None, ticket, following
