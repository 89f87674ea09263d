"""Ring attention as one node of the graph, which keeps this rank's part alone: backward has the blocks come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import is_fake, is_legacy_batched, saves_for_a_checkpoint, tracing, transforms_active
from gradmesh.autograd import (
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
from gradmesh.state import must_decompose, rank_state
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import BACKWARD, CAN_BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord

__all__ = ["attend"]


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What this rank's rows see, differentiably; inside `ordered()`, as the next link of the chain."""
    traced = compiling() or tracing() or is_fake(q)
    if traced or transforms_active() or must_decompose() or any(is_legacy_batched(x) for x in (q, k, v)):
        return composed.attention(ring, q, k, v, apply)
    recording = torch.is_grad_enabled()
    requires = recording and (q.requires_grad or k.requires_grad or v.requires_grad)

    def run(token: Tensor | None) -> tuple[Tensor, Tensor]:
        joins = requires or token is not None
        call = CallRecord(flags=NEEDS_BACKWARD * joins | CAN_BACKWARD * recording, ordered=token is not None)
        with torch.no_grad():
            out, lse = forward(ring, q, k, v, call)
        if token is None:
            if not requires and not call.others_need_backward:
                return out, DETACHED_TOKEN
            token = DETACHED_TOKEN if requires else grad_token()
        y, _, token = _Node.apply(_Made(ring, call, out, lse), q, k, v, token)  # type: ignore[no-untyped-call]
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
    except OrderError as error:  # of the chain: nothing was sent
        op.withdraw(k, error)
        raise
    y = run(None)[0]
    if saves_for_a_checkpoint():
        chain.keep_place()
    return y


@dataclass(slots=True)
class _Made:
    """What was computed before its node is made, as it was not known whether there would be one."""

    ring: Ring
    call: CallRecord
    out: Tensor
    lse: Tensor


class _Node(torch.autograd.Function):
    """Its outputs are what was seen, the logsumexp, which the gradient's own gradient needs, and a thread."""

    @staticmethod
    def forward(ctx: Any, made: _Made, q: Tensor, k: Tensor, v: Tensor, token: Tensor) -> tuple[Tensor, ...]:
        ctx.ring, ctx.call, following = made.ring, made.call, torch.zeros_like(token)
        ctx.save_for_backward(token if made.call.ordered else following, q, k, v, made.out, made.lse)
        ctx.set_materialize_grads(False)
        return made.out, made.lse, following

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, following: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        token, *saved = ctx.saved_tensors  # once: a checkpoint hands them out once
        with exact(saved[0].device):
            return _slopes(ctx, token, tuple(saved), grad, grad_lse, following)


def _slopes(
    ctx: Any,
    token: Tensor,
    saved: Any,
    grad: Tensor | None,
    grad_lse: Tensor | None,
    following: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """What the node's backward returns."""
    ring: Ring = ctx.ring
    nothing = grad is None and grad_lse is None
    if grad is None:
        grad = torch.zeros_like(saved[3])
    if following is None and ctx.call.ordered:
        following = token.clone()
    call = CallRecord(BACKWARD, ctx.call, ZERO_GRAD * nothing)
    if torch.is_grad_enabled() or is_legacy_batched(grad) or transforms_active():
        links = _Links(call, following if ctx.call.ordered else token)
        slopes = composed.gradients(ring, saved, grad, grad_lse, links.run)
        return None, *slopes, links.token if ctx.call.ordered else None
    slopes = backward(ring, saved, grad, grad_lse, call)
    # No gradient on any rank gives none, and not zeros, which are NaN behind an infinite derivative.
    if nothing and not ctx.call.ordered and (ring.axis.size == 1 or call.all_zero):
        return None, None, None, None, None
    return None, *slopes, following


class _Links:
    """The calls of a backward that is recorded itself: links of the chain, or the first is tied to the forward call."""

    def __init__(self, call: CallRecord, token: Tensor | None) -> None:
        self._call, self._linked = call, call.origin is not None and call.origin.ordered
        self.token = token

    def run(self, op: Shift, x: Tensor) -> Tensor:
        """Make the next call."""
        call, self._call = self._call, self._call.sibling()
        if self._linked:
            y, self.token = apply_ordered(op, x, self.token, call.role, call.origin)  # type: ignore[arg-type]  # a link has one
            return y
        token, self.token = self.token, None
        return apply_unordered(op, x, call, token if torch.is_grad_enabled() else None)
