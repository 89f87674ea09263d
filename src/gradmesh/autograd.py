"""The one autograd rule: backward applies the adjoint, forward mode applies the op, vmap moves a dimension.

Since an adjoint is an op itself and is applied by the same rule, every order of derivative comes by itself.

A node of the graph has a second output of one zero beside the op's result: a thread, which ties later nodes to it.
Inside `ordered()` each collective takes the thread of the one before. Elsewhere only its own backward takes it, where
that is recorded itself. So a gradient depends on the call that it is the gradient of, also where it is a constant, and
a further backward pass runs the backward of both on every rank that ran the first.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch import (
    enters_graphs,
    forward_level_open,
    functorch_active,
    is_fake,
    is_legacy_batched,
    on_legacy_batch,
    outside_modes,
    saves_for_a_checkpoint,
    tracing,
    tracing_script,
    transforms_active,
)
from gradmesh.call_sites import call_site
from gradmesh.checking import FULL, check_level
from gradmesh.errors import OrderError
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.encoding import Encoded, decode, encode
from gradmesh.ops.opaque import Traced
from gradmesh.state import rank_state
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import (
    BACKWARD,
    CAN_BACKWARD,
    NEEDS_BACKWARD,
    TANGENT,
    ZERO_GRAD,
    CallRecord,
)
from gradmesh.types import I
from gradmesh.unsummed import compare_after_pass

__all__ = [
    "DETACHED_TOKEN",
    "apply",
    "apply_ordered",
    "apply_unordered",
    "attach_backward",
    "compiled_ordered",
    "differentiable",
    "grad_token",
    "refuse_dropped",
    "token_of",
]


DETACHED_TOKEN = outside_modes(lambda: torch.zeros(1, device="cpu"))
"""The thread of a call that is tied to none before it. Only the edges of threads count."""


def apply(op: Op, x: Tensor) -> Tensor:
    """Run an op on this rank's tensor, differentiably; inside `ordered()`, as the next link of the chain."""
    if compiling():
        return _compiled(op, x)
    state = rank_state()
    if state.started.dropped:
        refuse_dropped(op, x)
    chain, linear = state.chain, isinstance(op, LinearOp)
    if tracing():
        op = Traced(op)
    if chain is None:
        return apply_unordered(op, x)
    try:
        if torch.is_grad_enabled() and linear and differentiable(x):
            return chain.link(op, x)
        chain.refuse_reentrant(op)
    except OrderError as error:  # of the chain: nothing was sent
        op.withdraw(x, error)
        raise
    y = apply_unordered(op, x)
    if saves_for_a_checkpoint():
        chain.keep_place()
    return y


def refuse_dropped(op: Op, x: Tensor) -> None:
    """Raise the error of calls that were begun and never waited for."""
    try:
        rank_state().started.check()
    except OrderError as error:
        op.withdraw(x, error)
        raise


def apply_ordered(
    op: LinearOp, x: Tensor, token: Tensor, role: str = "", origin: CallRecord | None = None
) -> tuple[Tensor, Tensor]:
    """Run an op, and pass on a thread that requires grad, so that the op's backward runs whoever uses its result.

    The backward of what takes the next thread runs first, since this one waits for that thread's gradient. Inside a
    forward-mode level the op on the tangent is a link too, on every rank, with zeros where there is none.

    Args:
        op: the op.
        x: this rank's operand.
        token: that of the previous ordered op.
        role: what the call is to the one that it comes from.
        origin: that call.
    """
    if not forward_level_open() or functorch_active():
        return _apply_node(
            op, x, token, CallRecord(role, origin, NEEDS_BACKWARD | CAN_BACKWARD, ordered=True)
        )
    primal, tangent = forward_ad.unpack_dual(x)
    call = CallRecord(role, origin, NEEDS_BACKWARD | CAN_BACKWARD, ordered=True)
    y, token = _apply_node(op, primal, token, call)
    moved, token = _apply_node(
        op,
        torch.zeros_like(primal) if tangent is None else tangent,
        token,
        CallRecord(TANGENT, call, NEEDS_BACKWARD | CAN_BACKWARD, ordered=True),
    )
    return forward_ad.make_dual(y, moved), token


def apply_unordered(op: Op, x: Tensor, call: CallRecord | None = None, token: Tensor | None = None) -> Tensor:
    """Run an op by itself.

    Where no derivative can be asked for, the op is run bare: building a graph node costs more than a small
    collective on fast backends.

    Args:
        op: the op.
        x: this rank's operand.
        call: what the call comes from, and what is to be remembered of it.
        token: that of a call that has to precede this one in the graph.
    """
    if compiling() and not isinstance(op, Traced):
        return _compiled(op, x)
    if is_legacy_batched(x):
        return on_legacy_batch(x, lambda whole: apply_unordered(op.batched(), whole, call, token))
    if isinstance(op, Traced) and tracing_script():
        return op.apply(x, call)  # a node would be recorded as a call of Python's, which no file can hold
    recording, transforms = torch.is_grad_enabled(), transforms_active()
    if recording and op.rooted and not x.requires_grad and token is None and differentiable(x):
        # Only the root's operand counts, and a rank whose own does not require grad would miss the backward.
        token = None if functorch_active() else grad_token()
    needs_backward = recording and (x.requires_grad or (token is not None and token.requires_grad))
    if not recording and call is None and not transforms:
        return op.apply(x)
    call = CallRecord() if call is None else call
    if needs_backward:
        call.flags |= NEEDS_BACKWARD
    if recording and not (transforms and functorch_active()):
        call.flags |= CAN_BACKWARD
    if needs_backward or transforms:
        if token is None:  # a tracer takes no tensor that is not its own
            token = torch.zeros(1, device="cpu") if isinstance(op, Traced) or is_fake(x) else DETACHED_TOKEN
        y = _apply_node(op, x, token, call)[0]
    else:
        y = op.apply(x, call)
    return attach_backward(op, x, y, call) if call.others_need_backward else y


def attach_backward(op: Op, x: Tensor, y: Tensor, call: CallRecord) -> Tensor:
    """The result of a call that has been made, tied to a node of its own, to take part in a backward of others."""
    if not forward_level_open():
        return _apply_node(_FinishedCall(op, y), x, grad_token(), call)[0]
    (x, _), (y, moved) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(y)
    joined = _apply_node(_FinishedCall(op, y), x, grad_token(), call)[0]
    return joined if moved is None else forward_ad.make_dual(joined, moved)


def _apply_node(op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
    """Run an op as a node of the graph."""
    rule: Any = _Rule if functorch_active() else _Node

    def run() -> tuple[Tensor, Tensor]:
        # Called by Python itself: where torch has `apply` in C++, a profile function sees no other call of it.
        result: tuple[Tensor, Tensor] = rule.apply(op, x, token, call)
        return result

    deferred = None if rule is _Rule else rank_state().deferred
    return run() if deferred is None else deferred.recorded(op, x, call, run)


def token_of(ctx: Any) -> Tensor | None:
    """The thread of a node.

    It is asked for only where the backward is recorded: a graph that saves nothing else can be run through again, also
    where it was not retained, and then it has no thread any more.
    """
    try:
        token: Tensor = ctx.saved_tensors[0]
    except RuntimeError:
        return None
    return token


def grad_token() -> Tensor:
    """A thread that requires grad, so that what takes it takes part in backward, whatever its operand."""
    return torch.zeros(1, device="cpu", requires_grad=True)


_GRAD_TOKEN = outside_modes(grad_token)
"""A leaf for compiled programs: what does not come from outside of one requires no gradient in it."""


class _FinishedCall:
    """An op that ran before it was known that another rank takes part in its backward, and so has this one."""

    def __init__(self, op: Op, y: Tensor) -> None:
        self.op, self.y = op, y

    def apply(self, x: Tensor, call: CallRecord) -> Tensor:  # noqa: ARG002 - as an op has them
        """What it returned."""
        return self.y


def _compiled(op: Op, x: Tensor) -> Tensor:
    """Run an op inside a program that is being compiled."""
    if forward_level_open():
        _refuse(
            op, "a compiled program has no forward mode", "call the function uncompiled inside forward mode"
        )
    state = rank_state()
    if state.chain is not None and torch.is_grad_enabled() and isinstance(op, LinearOp) and differentiable(x):
        return state.chain.link(op, x)
    _hold_for_this_rank(op)
    needs_backward = op.rooted and torch.is_grad_enabled() and not x.requires_grad and differentiable(x)
    return _in_graph(x, _GRAD_TOKEN if needs_backward else None, *encode(op), state.reorderable)


def _hold_for_this_rank(op: Op) -> None:
    """Prepare Dynamo for a call, and have it guard the rank, whose shapes the program has.

    Ranks that are threads share compiled programs, and no other guard distinguishes the ranks.
    """
    allow_in_dynamo()
    # Dynamo needs an index as a number, so it guards it.
    _ = ((None,) * op.axis.size)[op.axis.rank]


def compiled_ordered(op: LinearOp, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """As `apply_ordered`, inside a program that is being compiled."""
    _hold_for_this_rank(op)
    return _ordered_in_graph(x, token, *encode(op), rank_state().reorderable)


def _in_graph(
    x: Tensor,
    token: Tensor | None,
    words: str,
    numbers: list[int],
    tensors: list[Tensor],
    group: str,
    reorderable: bool,
) -> Tensor:
    """Run an op in the graph that Dynamo has made: from here on autograd follows it, and not Dynamo."""
    op = decode(Encoded(words, numbers, tensors, group))
    traced = Traced(op, reorderable=reorderable, followed=not torch.compiler.is_exporting())
    return apply_unordered(traced, x, token=None if functorch_active() else token)


def _ordered_in_graph(
    x: Tensor,
    token: Tensor,
    words: str,
    numbers: list[int],
    tensors: list[Tensor],
    group: str,
    reorderable: bool,
) -> tuple[Tensor, Tensor]:
    op = decode(Encoded(words, numbers, tensors, group))
    return apply_ordered(
        Traced(op, reorderable=reorderable, followed=not torch.compiler.is_exporting()), x, token
    )


allow_in_dynamo = enters_graphs(_in_graph, _ordered_in_graph)


def _refuse(op: Op, problem: str, remedy: str) -> NoReturn:
    op.fail(
        problem,
        expected="an uncompiled call",
        got="a call under torch.compile",
        remedy=remedy,
        kind=OrderError,
    )


def differentiable(x: Tensor) -> bool:
    """Whether a dtype has derivatives."""
    return x.is_floating_point() or x.is_complex()


class _Rule(torch.autograd.Function):
    """The law of `gradmesh.ops.base`, told to autograd; with a thread of the chain, it is also a link of it."""

    @staticmethod
    def forward(op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
        return op.apply(x, call), torch.zeros_like(token)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Op | _FinishedCall, Tensor, Tensor, CallRecord], output: tuple[Tensor, Tensor]
    ) -> None:
        op, x, token, ctx.call = inputs
        ctx.op = op.op if isinstance(op, _FinishedCall) else op
        ctx.operand, ctx.result = x.shape, output[0].shape
        ctx.dtype, ctx.device = x.dtype, x.device
        ctx.call.site = call_site()
        # One tensor either way: a checkpoint counts them, and what is recomputed may be outside of ordered().
        ctx.save_for_backward(token if ctx.call.ordered else output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        op: LinearOp = ctx.op
        nothing = grad is None
        if grad is None:
            grad = torch.zeros(ctx.result, dtype=ctx.dtype, device=ctx.device)
        elif grad.layout is not torch.strided:
            grad = grad.to_dense()
        if check_level() == FULL and not isinstance(op, Traced) and op.dst is I and grad.numel() == 1:
            compare_after_pass(op, ctx, ctx.call)
        kept = ctx.call.deferral is not None and ctx.call.deferral.defers(ctx, None if nothing else grad)
        if not ctx.call.ordered:
            if kept:
                return None, None, None, None
            call = CallRecord(BACKWARD, ctx.call, ZERO_GRAD if nothing else 0)
            back = apply_unordered(op.back, grad, call, token_of(ctx) if torch.is_grad_enabled() else None)
            alone = op.axis.size == 1 or not op.back.sends
            # No gradient on any rank gives none, and not zeros, which are NaN behind an infinite derivative.
            return None, None if nothing and (alone or call.all_zero) else back, None, None
        # Read also where it is not needed: inside a checkpoint this is what makes every rank recompute here, and
        # not some of them elsewhere or never.
        (token,) = ctx.saved_tensors
        if following is None:
            # The end of the chain. The backward pass goes on with the thread itself, as a zero would come from
            # nowhere and lose the order of the passes to come.
            following = token.clone()
        if kept:
            return None, None, following, None
        if torch.is_grad_enabled() or forward_level_open():
            back, following = apply_ordered(op.back, grad, following, BACKWARD, ctx.call)
            return None, back, following, None
        return None, apply_unordered(op.back, grad, CallRecord(BACKWARD, ctx.call)), following, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor | None, token: Tensor | None, *__: None) -> Any:
        if tangent is None:
            tangent = torch.zeros(ctx.operand, dtype=ctx.dtype, device=ctx.device)
        moved = apply_unordered(ctx.op, tangent, CallRecord(TANGENT, ctx.call))
        return moved, torch.zeros(1, device="cpu") if token is None else torch.zeros_like(token)

    @staticmethod
    def vmap(
        _: Any,
        in_dims: tuple[int | None, ...],
        op: Op,
        x: Tensor,
        token: Tensor,
        call: CallRecord,
    ) -> Any:
        dim = in_dims[1]
        if dim is None:  # only the thread's gradient is batched
            return _apply_node(op, x, token, call), (None, in_dims[2])
        batched, x = op.batched(), x.movedim(dim, 0)
        if (
            call.ordered and isinstance(batched, LinearOp) and forward_level_open()
        ):  # the tangent is a link of its own
            return apply_ordered(batched, x, token, call.role, call.origin), (0, in_dims[2])
        return _apply_node(batched, x, token, call), (0, in_dims[2])


# Function.apply asks for the signature at every call; computing it anew takes longer than the rest of the rule.
_Rule.forward.__signature__ = inspect.signature(_Rule.forward)  # type: ignore[attr-defined]


class _Node(torch.autograd.Function):
    """The same rule where no torch.func transform is on: in torch's older form, which takes 12 us less of a call."""

    @staticmethod
    def forward(
        ctx: Any, op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord
    ) -> tuple[Tensor, Tensor]:
        output = _Rule.forward(op, x, token, call)
        _Rule.setup_context(ctx, (op, x, token, call), output)
        return output

    backward, jvp = _Rule.backward, _Rule.jvp
