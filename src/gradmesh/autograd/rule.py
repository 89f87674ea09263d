"""The autograd rule of all ops: backward applies the adjoint, forward mode applies the op, vmap moves a dimension.

An adjoint is an op itself and is applied by the same rule, so derivatives of every order work.

A node has a second output beside the op's result: an ordering token, a tensor with one zero. Inside `ordered()` each
collective takes the token of the previous one. Elsewhere only its own backward takes it, under create_graph=True: then
a gradient depends on its forward call in the graph, even where its value is constant, and a further backward pass runs
the backward of both on every rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch import (
    dispatch_modes,
    enters_graphs,
    forward_level,
    forward_level_open,
    functorch_active,
    is_fake,
    is_legacy_batched,
    on_legacy_batch,
    outside_modes,
    saves_for_a_checkpoint,
    script_state,
    tracing,
    unwrap_if_dead,
)
from gradmesh._util.call_sites import call_site
from gradmesh.autograd.traced import Encoded, Traced, decode, encode
from gradmesh.errors import OrderError
from gradmesh.ops.base import LinearOp, Op
from gradmesh.runtime.checking import FULL
from gradmesh.runtime.state import Chain, check_level, rank_state
from gradmesh.transport import compiling, run
from gradmesh.transport.call_checks import (
    BACKWARD,
    CAN_BACKWARD,
    NEEDS_BACKWARD,
    TANGENT,
    ZERO_GRAD,
    CallRecord,
)
from gradmesh.types import I

T = TypeVar("T")

DETACHED_TOKEN = outside_modes(lambda: torch.zeros(1, device="cpu"))
"""The token of a call that depends on no earlier call."""


def refuse_dropped(op: Op, x: Tensor) -> None:
    """Raise the error of async calls that were never waited for, if there are any."""
    try:
        rank_state().started.check()
    except OrderError as error:
        run.abort(op, x, error)
        raise


def recorded(
    op: Op, x: Tensor, call: CallRecord | None, token: Tensor | None
) -> tuple[CallRecord, Tensor | None, bool]:
    """The record of a call outside of the order with its flags, its token, and whether this rank needs a backward."""
    call = CallRecord() if call is None else call
    if not torch.is_grad_enabled():
        return call, token, False
    transformed = functorch_active()
    if op.rooted and not (x.requires_grad or transformed) and token is None and differentiable(x):
        # Only the root's operand counts; the other ranks have to run the backward too.
        token = grad_token()
    needs_backward = x.requires_grad or (token is not None and token.requires_grad)
    if needs_backward:
        call.flags |= NEEDS_BACKWARD
    if not transformed:
        call.flags |= CAN_BACKWARD
    return call, token, needs_backward


def apply_ordered(
    op: LinearOp, x: Tensor, token: Tensor, role: str = "", origin: CallRecord | None = None
) -> tuple[Tensor, Tensor]:
    """Run an op as an ordered op: its backward runs even where its result is not used.

    It returns a token that requires grad; the op that takes it runs its backward first. Inside a forward-mode level the
    op on the tangent is an ordered op too, on every rank, with zeros where there is no tangent. The argument `token` is
    that of the previous ordered op; `role` and `origin` are those of `CallRecord`.
    """
    token = on_device_of(x, token)
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
    """Run an op outside of the order of `ordered()`.

    Without a derivative no graph node is built, as that takes longer than a small collective on fast backends. `token`
    is that of a call that has to precede this one in the graph.
    """
    if compiling() and type(op) is not Traced:
        return _compiled(op, x)
    if is_legacy_batched(x):
        return on_legacy_batch(x, lambda whole: apply_unordered(op.batched(), whole, call, token))
    if type(op) is Traced and script_state() is not None:
        return op.run(x, call)  # a node would be recorded as a Python call, which cannot be saved
    transforms = functorch_active() or forward_level() >= 0
    if call is None and not transforms and not torch.is_grad_enabled():
        return _run(op, x)
    call, token, needs_backward = recorded(op, x, call, token)
    if needs_backward or transforms:
        if token is None:  # a tracer accepts only its own tensors
            own = type(op) is Traced or ((x.is_meta or type(x) is not Tensor) and is_fake(x))
            token = torch.zeros(1, device="cpu") if own else DETACHED_TOKEN
        y = _apply_node(op, x, token, call)[0]
    else:
        y = _run(op, x, call)
    if call.peer_flags is not None and call.others_need_backward:
        return attach_backward(op, x, y, call)
    return y


@overload
def apply(op: Op, x: Tensor) -> Tensor: ...
@overload
def apply(
    op: Op, x: Tensor, make: Callable[[Op, Tensor], T], ordered: Callable[[Any, Any, Tensor], T]
) -> T: ...
def apply(
    op: Op,
    x: Tensor,
    make: Callable[[Op, Tensor], Any] = apply_unordered,
    ordered: Callable[[Chain, Any, Tensor], Any] = lambda chain, op, x: chain.link(op, x),
) -> Any:
    """Make a call, differentiably; inside `ordered()` as the next ordered op.

    The entry of every node that communicates: it raises for async calls that were never waited for, keeps the order of
    `ordered()`, and notifies the other ranks where that raises.

    Args:
        op: the op; of a node that makes several calls, the first one.
        x: its operand.
        make: makes the call outside of the order; defaults to that of the op.
        ordered: makes the call as the next ordered op of a `Chain`; as well.
    """
    if make is apply_unordered and compiling():
        return _compiled(op, x)
    state = rank_state()
    if state.started.dropped:
        refuse_dropped(op, x)
    chain, original = state.of_thread.chain, op
    if (dispatch_modes() or script_state() is not None) and tracing():
        op = Traced(op)
    if chain is None:
        return make(op, x)
    try:
        if torch.is_grad_enabled() and isinstance(original, LinearOp) and differentiable(x):
            return ordered(chain, op, x)
        chain.refuse_reentrant(op)
    except OrderError as error:  # of ordered(): nothing was sent
        run.abort(op, x, error)
        raise
    y = make(op, x)
    if saves_for_a_checkpoint():
        chain.keep_place(x.device)
    return y


def attach_backward(op: Op, x: Tensor, y: Tensor, call: CallRecord) -> Tensor:
    """Attach a backward node to a finished result because other ranks will run its backward."""
    if not forward_level_open():
        return _apply_node(_FinishedCall(op, y), x, grad_token(), call)[0]
    (x, _), (y, moved) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(y)
    joined = _apply_node(_FinishedCall(op, y), x, grad_token(), call)[0]
    return joined if moved is None else forward_ad.make_dual(joined, moved)


def _apply_node(op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
    """Run an op as a node of the graph, in a Python frame that profile functions see, unlike an `apply` in C++."""
    made: tuple[Tensor, Tensor]
    if functorch_active():
        made = _Rule.apply(op, x, token, call)  # type: ignore[no-untyped-call]
    elif (deferred := rank_state().of_thread.deferred) is not None:
        made = deferred.recorded(op, x, call, lambda: _Node.apply(op, x, token, call))  # type: ignore[no-untyped-call]
    elif unwrap_if_dead is None or _FUNCTION.get("apply") is not _TORCHS_APPLY:  # or a tool has replaced it
        made = _Node.apply(op, x, token, call)  # type: ignore[no-untyped-call]
    else:
        made = _apply_in_c(op, unwrap_if_dead(x), token, call)
    return made


def token_of(ctx: Any) -> Tensor | None:
    """The token of a node; None if the graph was freed.

    Read only under create_graph=True: a graph that saves nothing else can run again without retain_graph, where its
    token is gone.
    """
    try:
        token: Tensor = ctx.saved_tensors[0]
    except RuntimeError:
        return None
    return token


def next_token(ctx: Any, following: Tensor | None) -> Tensor:
    """In the backward of an ordered op, the token to go on with: that of the op which followed it in forward."""
    # Read on every rank even if unused: inside a checkpoint, reading it triggers the recomputation.
    (token,) = ctx.saved_tensors
    # Of the last ordered op, the token itself: a new zero would lose the order of further passes.
    return token.clone() if following is None else following


def dense_gradient(ctx: Any, grad: Tensor | None) -> Tensor:
    """The gradient of a node's result as a strided tensor, zeros if there is none."""
    return torch.zeros(ctx.result, dtype=ctx.dtype, device=ctx.device) if grad is None else grad.to_dense()


def grad_token(device: torch.device | str = "cpu") -> Tensor:
    """A token that requires grad, so that the op that takes it runs its backward even if its operand does not."""
    return torch.zeros(1, device=device, requires_grad=True)


def token_device(x: Tensor) -> torch.device:
    """The device of the token that goes with an operand."""
    return torch.device("cpu") if x.is_meta or is_fake(x) else x.device


_GRAD_TOKEN = outside_modes(grad_token)
"""A token for compiled programs, where only tensors from outside can require grad."""


def on_device_of(x: Tensor, token: Tensor) -> Tensor:
    """The token on the operand's device.

    Autograd runs a node on the thread of its gradients' device; two threads may not recompute a checkpoint at once.
    """
    device = token_device(x)
    if device == token.device or is_fake(token) or is_fake(x):
        return token
    moved: Tensor = _Moved.apply(token, device)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    """A token on another device, without a copy, for which the host would wait."""

    generate_vmap_rule = True

    @staticmethod
    def forward(token: Tensor, device: torch.device) -> Tensor:
        return zero_for(token, device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.device], output: Tensor) -> None:  # noqa: ARG004
        ctx.device = inputs[0].device

    @staticmethod
    def backward(ctx: Any, following: Tensor) -> tuple[Tensor, None]:
        return _Moved.apply(following, ctx.device), None  # type: ignore[no-untyped-call]


def token_after(token: Tensor) -> Tensor:
    """The token of a node with the argument `token`, in memory of its own, as hooks get what a node saves."""
    return token.new_zeros(1) if token.is_cpu else zero_for(token)


def zero_for(x: Tensor, device: torch.device | None = None) -> Tensor:
    """A zero on the device of a tensor, or on another; without a kernel for each, and fake beside a fake tensor."""
    device = device or x.device
    return torch.zeros(1, device=device) if device.type == "cpu" or is_fake(x) else _zero(device).detach()


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return outside_modes(lambda: torch.zeros(1, device=device))


class _FinishedCall:
    """An op that ran before this rank learned that another rank needs its backward."""

    def __init__(self, op: Op, y: Tensor) -> None:
        self.op, self.y = op, y

    def run(self, x: Tensor, call: CallRecord | None) -> Tensor:  # noqa: ARG002 - as of `Traced`
        """Return the stored result."""
        return self.y


def _run(op: Op | _FinishedCall, x: Tensor, call: CallRecord | None = None) -> Tensor:
    """Run an op without a node; exact types, since isinstance is slow on abstract classes."""
    own = type(op) is Traced or type(op) is _FinishedCall
    y: Tensor = op.run(x, call) if own else run.apply(op, x, call)  # type: ignore[union-attr, arg-type]
    return y


def _compiled(op: Op, x: Tensor) -> Tensor:
    """Run an op inside a program that is being compiled."""
    if forward_level_open():
        _refuse(
            op,
            "forward mode is not supported inside torch.compile",
            "call the uncompiled function in forward mode",
        )
    state = rank_state()
    chain = state.of_thread.chain
    if chain is not None and torch.is_grad_enabled() and isinstance(op, LinearOp) and differentiable(x):
        return chain.link(op, x)
    _hold_for_this_rank(op)
    needs_backward = op.rooted and torch.is_grad_enabled() and not x.requires_grad and differentiable(x)
    return _in_graph(x, _GRAD_TOKEN if needs_backward else None, state.reorderable, *encode(op))


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
    return _ordered_in_graph(x, token, rank_state().reorderable, *encode(op))


def _in_graph(x: Tensor, token: Tensor | None, reorderable: bool, *code: Any) -> Tensor:
    """Run an op in Dynamo's graph, where autograd traces it."""
    return apply_unordered(_decoded(reorderable, code), x, token=None if functorch_active() else token)


def _ordered_in_graph(x: Tensor, token: Tensor, reorderable: bool, *code: Any) -> tuple[Tensor, Tensor]:
    return apply_ordered(_decoded(reorderable, code), x, token)


def _decoded(reorderable: bool, code: tuple[Any, ...]) -> Traced:
    return Traced(decode(Encoded(*code)), reorderable=reorderable, followed=not torch.compiler.is_exporting())


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
    """autograd.Function for LinearOp. In ordered mode it also takes and returns the ordering token."""

    @staticmethod
    def forward(op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
        return _run(op, x, call), torch.zeros_like(token)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Op | _FinishedCall, Tensor, Tensor, CallRecord], output: tuple[Tensor, Tensor]
    ) -> None:
        op, x, token, ctx.call = inputs
        ctx.op = op.op if isinstance(op, _FinishedCall) else op
        ctx.operand, ctx.result = x.shape, output[0].shape
        ctx.dtype, ctx.device = x.dtype, x.device
        # The deferred check has looked already. Five: `call_site`, this, and three that have called it.
        ctx.call.site = ctx.call.site or call_site(5)
        # One tensor in both cases: a checkpoint counts saved tensors, and may recompute outside of ordered().
        ctx.save_for_backward(token if ctx.call.ordered else output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, following: Tensor | None) -> tuple[Tensor | None, ...]:
        op: LinearOp = ctx.op
        nothing = grad is None
        if grad is None or grad.layout is not torch.strided:
            grad = dense_gradient(ctx, grad)
        if check_level() == FULL and type(op) is not Traced and op.dst is I and grad.numel() == 1:
            from gradmesh.autograd.missing_sums import compare_after_pass

            compare_after_pass(op, ctx, ctx.call)
        kept = ctx.call.deferral is not None and ctx.call.deferral.defers(ctx, None if nothing else grad)
        if not ctx.call.ordered:
            if kept:
                return None, None, None, None
            call = CallRecord(BACKWARD, ctx.call, ZERO_GRAD if nothing else 0)
            back = apply_unordered(op.back, grad, call, token_of(ctx) if torch.is_grad_enabled() else None)
            alone = op.axis.size == 1 or not op.back.sends
            # None if no rank has a gradient: zeros would give NaN behind an infinite derivative.
            return None, None if nothing and (alone or call.all_zero) else back, None, None
        following = next_token(ctx, following)
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
        _: Any, in_dims: tuple[int | None, ...], op: Op, x: Tensor, token: Tensor, call: CallRecord
    ) -> Any:
        dim = in_dims[1]
        if dim is None:  # only the token's gradient is batched
            return _apply_node(op, x, token, call), (None, in_dims[2])
        batched, x = op.batched(), x.movedim(dim, 0)
        if (
            call.ordered and isinstance(batched, LinearOp) and forward_level_open()
        ):  # the tangent is a separate ordered op
            return apply_ordered(batched, x, token, call.role, call.origin), (0, in_dims[2])
        return _apply_node(batched, x, token, call), (0, in_dims[2])


# Function.apply reads the signature at every call, and computing it takes longer than the rest of the rule.
_Rule.forward.__signature__ = inspect.signature(_Rule.forward)  # type: ignore[attr-defined]


class _Node(torch.autograd.Function):
    """The same rule without torch.func transforms: torch's older form saves 12 us per call."""

    @staticmethod
    def forward(
        ctx: Any, op: Op | _FinishedCall, x: Tensor, token: Tensor, call: CallRecord
    ) -> tuple[Tensor, Tensor]:
        output = _run(op, x, call), token_after(token)
        _Rule.setup_context(ctx, (op, x, token, call), output)
        return output

    backward, jvp = _Rule.backward, _Rule.jvp


# In C: before torch 2.15, `_Node.apply` does more in Python, for transforms and dead wrappers.
_apply_in_c: Any = super(torch.autograd.Function, _Node).apply
_TORCHS_APPLY: Any = (_FUNCTION := vars(torch.autograd.Function)).get("apply")
