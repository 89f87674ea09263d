"""The one autograd rule: backward applies the adjoint, forward mode applies the op, vmap moves a dimension.

Since an adjoint is an op itself and is applied by the same rule, every order of derivative comes by itself.
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
    is_legacy_batched,
    on_legacy_batch,
    saves_for_a_checkpoint,
    tracing,
    transforms_active,
)
from gradmesh.errors import OrderError
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.encoding import Encoded, decode, encode
from gradmesh.ops.opaque import Traced
from gradmesh.state import rank_state
from gradmesh.wire import compiling

__all__ = ["apply", "compiled_link", "linked", "unlinked"]


def apply(op: Op, x: Tensor) -> Tensor:
    """Run an op on this rank's tensor, differentiably; inside `ordered()`, as the next link of the chain."""
    if compiling():
        return _compiled(op, x)
    chain, linear = rank_state().chain, isinstance(op, LinearOp)
    if tracing():
        op = Traced(op)
    if chain is not None and torch.is_grad_enabled() and linear and _differentiable(x):
        try:
            return chain.link(op, x)
        except OrderError as error:  # of the chain: nothing was sent
            op.withdraw(x, error)
            raise
    return unlinked(op, x)


def linked(op: LinearOp, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Run an op, and pass on a token that requires grad, so that the op's backward runs whoever uses its result.

    The backward of what takes the next token runs first, since this one waits for that token's gradient.
    """
    rule = _Rule if functorch_active() else _Node
    result: tuple[Tensor, Tensor] = rule.apply(op, x, token)  # type: ignore[no-untyped-call]
    return result


def unlinked(op: Op, x: Tensor) -> Tensor:
    """Run an op by itself.

    Where no derivative can be asked for, the op is run bare: building a graph node costs more than a small
    collective on fast backends.
    """
    if compiling() and not isinstance(op, Traced):
        return _compiled(op, x)
    if is_legacy_batched(x):
        return on_legacy_batch(x, lambda whole: unlinked(op.batched(), whole))
    recording = torch.is_grad_enabled()
    if recording and op.rooted and not x.requires_grad:
        x = _take_part(x)
    if (recording and x.requires_grad) or transforms_active():
        rule = _Rule if functorch_active() else _Node
        result: Tensor = rule.apply(op, x)  # type: ignore[no-untyped-call]
        return result
    return op.apply(x)


def _compiled(op: Op, x: Tensor) -> Tensor:
    """Run an op inside a program that is being compiled."""
    if forward_level_open():
        _refuse(
            op, "a compiled program has no forward mode", "call the function uncompiled inside forward mode"
        )
    state = rank_state()
    if (
        state.chain is not None
        and torch.is_grad_enabled()
        and isinstance(op, LinearOp)
        and _differentiable(x)
    ):
        return state.chain.link(op, x)
    tell_dynamo()
    return _in_graph(x, *encode(op), state.reorderable)


def compiled_link(op: LinearOp, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """As `linked`, inside a program that is being compiled."""
    tell_dynamo()
    return _linked_in_graph(x, token, *encode(op), rank_state().reorderable)


def _in_graph(
    x: Tensor, words: str, numbers: list[int], tensors: list[Tensor], group: str, reorderable: bool
) -> Tensor:
    """Run an op in the graph that Dynamo has made: from here on autograd follows it, and not Dynamo."""
    op = decode(Encoded(words, numbers, tensors, group))
    return unlinked(Traced(op, reorderable=reorderable), x)


def _linked_in_graph(
    x: Tensor,
    token: Tensor,
    words: str,
    numbers: list[int],
    tensors: list[Tensor],
    group: str,
    reorderable: bool,
) -> tuple[Tensor, Tensor]:
    op = decode(Encoded(words, numbers, tensors, group))
    return linked(Traced(op, reorderable=reorderable), x, token)


tell_dynamo = enters_graphs(_in_graph, _linked_in_graph)


def _refuse(op: Op, problem: str, remedy: str) -> NoReturn:
    op.fail(
        problem,
        expected="an uncompiled call",
        got="a call under torch.compile",
        remedy=remedy,
        kind=OrderError,
    )


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _take_part(x: Tensor) -> Tensor:
    """`x` as a leaf that requires grad, so that this rank joins the backward collective of a rooted op.

    Only the root's operand counts, and a rank whose own does not require grad would stay away while the root
    waits. Inside a torch.func transform this is for the caller to see to: no new leaf can be made there.
    """
    if functorch_active() or not _differentiable(x):
        return x
    if not transforms_active():
        return (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    primal, tangent = forward_ad.unpack_dual(x)
    leaf: Tensor = primal.detach().requires_grad_()
    if tangent is None:
        return leaf
    dual: Tensor = forward_ad.make_dual(leaf, tangent)
    return dual


def _like(x: Tensor) -> dict[str, Any]:
    return {"size": x.shape, "dtype": x.dtype, "device": x.device}


class _Rule(torch.autograd.Function):
    """The law of `gradmesh.ops.base`, told to autograd; with a token, it is also a link of a chain."""

    @staticmethod
    def forward(op: Op, x: Tensor, token: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y = op.apply(x)
        return y if token is None else (y, token.clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Op, Tensor, Tensor | None], output: Any) -> None:
        ctx.op, x, token = inputs
        ctx.linked = token is not None
        if token is None and saves_for_a_checkpoint():
            # What a link saves, so that a checkpoint saves alike inside of ordered() and outside.
            ctx.save_for_backward(torch.zeros(()))
        if token is not None:
            ctx.operand, ctx.result = _like(x), _like(output[0])
            ctx.save_for_backward(token)
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        op: LinearOp = ctx.op
        grad, following = grads[0], grads[-1]
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()
        if not ctx.linked:
            return None, None if grad is None else unlinked(op.back, grad), None
        # Read also where it is not needed: inside a checkpoint this is what makes every rank recompute here, and
        # not some of them elsewhere or never.
        (token,) = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros(**ctx.result)
        if following is None:
            # The end of the chain. The backward pass goes on with the token itself, as a zero would come from
            # nowhere and lose the order of the passes to come.
            following = token.clone()
        if torch.is_grad_enabled():
            return None, *linked(op.back, grad, following)
        return None, unlinked(op.back, grad), following

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor | None, token: Tensor | None = None) -> Any:
        if not ctx.linked:
            return None if tangent is None else unlinked(ctx.op, tangent)
        out = unlinked(ctx.op, torch.zeros(**ctx.operand) if tangent is None else tangent)
        return out, torch.zeros(()) if token is None else token.clone()

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, ...], op: Op, x: Tensor, token: Tensor | None = None) -> Any:
        dim = in_dims[1]
        if dim is None:  # only the token's gradient is batched
            return _Rule.apply(op, x, token), (None, in_dims[2])  # type: ignore[no-untyped-call]
        moved = x.movedim(dim, 0)
        if token is None:
            return unlinked(op.batched(), moved), 0
        return linked(op.batched(), moved, token), (0, in_dims[2])  # type: ignore[arg-type]


# Function.apply asks for the signature at every call; computing it anew takes longer than the rest of the rule.
_Rule.forward.__signature__ = inspect.signature(_Rule.forward)  # type: ignore[attr-defined]


class _Node(torch.autograd.Function):
    """The same rule where no torch.func transform is on: in torch's older form, which takes 12 us less of a call."""

    @staticmethod
    def forward(ctx: Any, op: Op, x: Tensor, token: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        output = _Rule.forward(op, x, token)
        _Rule.setup_context(ctx, (op, x, token), output)
        return output

    backward, jvp = _Rule.backward, _Rule.jvp
