"""Ring attention as one autograd node that saves only this rank's shard; backward sends the blocks around again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import is_fake, is_legacy_batched, saves_for_a_checkpoint, tracing, transforms_active
from gradmesh.autograd.rule import (
    DETACHED_TOKEN,
    apply,
    apply_ordered,
    apply_unordered,
    grad_token,
    refuse_dropped,
)
from gradmesh.errors import OrderError
from gradmesh.nn.attention import composed
from gradmesh.nn.attention.blocks import exact
from gradmesh.nn.attention.ring import Ring, backward, forward
from gradmesh.ops.permute import Shift
from gradmesh.runtime.state import must_decompose, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import BACKWARD, CAN_BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord

__all__ = ["attend"]


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention output of this rank's queries; inside `ordered()`, as the next ordered op."""
    traced = compiling() or tracing() or is_fake(q)
    if traced or transforms_active() or must_decompose() or any(is_legacy_batched(x) for x in (q, k, v)):
        return composed.attention(ring, q, k, v, apply)
    recording = torch.is_grad_enabled()
    requires = recording and (q.requires_grad or k.requires_grad or v.requires_grad)

    def run(token: Tensor | None) -> tuple[Tensor, Tensor]:
        needed = requires or token is not None
        call = CallRecord(flags=NEEDS_BACKWARD * needed | CAN_BACKWARD * recording, ordered=token is not None)
        with torch.no_grad():
            out, lse = forward(ring, q, k, v, call)
        if token is None:
            if not requires and not call.others_need_backward:
                return out, DETACHED_TOKEN
            token = DETACHED_TOKEN if requires else grad_token()
        y, _, token = _Node.apply(_Result(ring, call, out, lse), q, k, v, token)  # type: ignore[no-untyped-call]
        return y, token

    state, op = rank_state(), ring.op(0)
    if ring.axis.size == 1:
        return run(None)[0]
    if state.started.dropped:
        refuse_dropped(op, k)
    chain = state.chain
    if chain is None:
        return run(None)[0]
    try:
        if recording:
            y: Tensor = chain.node(op, run)
            return y
        chain.refuse_reentrant(op)
    except OrderError as error:  # raised before anything was sent
        op.withdraw(k, error)
        raise
    y = run(None)[0]
    if saves_for_a_checkpoint():
        chain.keep_place()
    return y


@dataclass(slots=True)
class _Result:
    """A forward result: whether it needs a node is only known after the exchange."""

    ring: Ring
    call: CallRecord
    out: Tensor
    lse: Tensor


class _Node(torch.autograd.Function):
    """Returns the output, the logsumexp (which double backward needs) and an ordering token."""

    @staticmethod
    def forward(
        ctx: Any, result: _Result, q: Tensor, k: Tensor, v: Tensor, token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ring, ctx.call, following = result.ring, result.call, torch.zeros_like(token)
        ctx.save_for_backward(token if result.call.ordered else following, q, k, v, result.out, result.lse)
        ctx.set_materialize_grads(False)
        return result.out, result.lse, following

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, following: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        token, *saved = ctx.saved_tensors  # read once: activation checkpointing allows one read
        with exact(saved[0].device):
            return _gradients(ctx, token, tuple(saved), grad, grad_lse, following)


def _gradients(
    ctx: Any,
    token: Tensor,
    saved: Any,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    following: Tensor | None,
) -> tuple[Tensor | None, ...]:
    ring: Ring = ctx.ring
    nothing = grad is None and grad_lse is None
    if grad is None:
        grad = torch.zeros_like(saved[3])
    if following is None and ctx.call.ordered:
        following = token.clone()
    call = CallRecord(BACKWARD, ctx.call, ZERO_GRAD * nothing)
    if torch.is_grad_enabled() or is_legacy_batched(grad) or transforms_active():
        calls = _OrderedCalls(call, following if ctx.call.ordered else token)
        grads = composed.gradients(ring, saved, grad, grad_lse, calls.run)
        return None, *grads, calls.token if ctx.call.ordered else None
    grads = backward(ring, saved, grad, grad_lse, call)
    # If no rank has a gradient, return None: zeros times an infinite derivative would be NaN.
    if nothing and not ctx.call.ordered and (ring.axis.size == 1 or call.all_zero):
        return None, None, None, None, None
    return None, *grads, following


class _OrderedCalls:
    """The calls of a differentiable backward: ordered ops, or only the first one depends on the forward call."""

    def __init__(self, call: CallRecord, token: Tensor | None) -> None:
        self._call, self._linked = call, call.origin is not None and call.origin.ordered
        self.token = token

    def run(self, op: Shift, x: Tensor) -> Tensor:
        call, self._call = self._call, self._call.sibling()
        if self._linked:
            y, self.token = apply_ordered(op, x, self.token, call.role, call.origin)  # type: ignore[arg-type]  # not None
            return y
        token, self.token = self.token, None
        return apply_unordered(op, x, call, token if torch.is_grad_enabled() else None)
