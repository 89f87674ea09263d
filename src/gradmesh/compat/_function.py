"""Ops as `torch.autograd.Function` classes, for drop-ins whose originals are such classes.

Callers can use them like the originals: call `apply`; call `forward` and `backward` directly with any object as
context; call them from a custom Function; subclass them. `forward` saves the op on the context, and `backward` applies
the op's adjoint.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.autograd.function import Function, FunctionMeta

from gradmesh.autograd.rule import apply
from gradmesh.errors import ArgumentError, message
from gradmesh.ops.base import LinearOp

__all__ = ["OpFunction", "adjoint", "again", "run", "with_nones"]

_TORCHS = frozenset({"backward", "forward", "jvp", "setup_context", "vjp", "vmap"})
"""Methods of a Function; a subclass that defines one of them becomes an ordinary Function."""


class _OpFunctionMeta(FunctionMeta):
    """The type of Functions with a custom `apply`.

    torch.compile treats classes whose type is exactly `FunctionMeta` specially: it traces `forward` and `backward`
    instead of `apply`, rejects `jvp`, and up to torch 2.13 rejects a Function that calls another's `backward`. It
    traces other classes normally. Subclasses that define `forward` or `backward` get torch's type back.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:  # noqa: N805
        super().__init__(name, bases, namespace)  # type: ignore[no-untyped-call]
        if cls.is_ordinary:  # type: ignore[attr-defined]
            cls.__class__ = FunctionMeta  # type: ignore[assignment]


class OpFunction(Function, metaclass=_OpFunctionMeta):
    """An autograd Function that applies an op; base class of the drop-ins, each of which defines `forward`.

    `apply` runs `forward` without a context, as a verb does: all derivatives, forward mode, `torch.func` and
    `torch.compile`.

    A subclass of a drop-in that defines `forward`, `backward` or another method of Function becomes an ordinary
    Function with torch's `apply`. It does not inherit `jvp` and `vjp`, which belong to the original op.
    """

    is_ordinary: ClassVar[bool] = False
    """True if `apply` is torch's."""

    is_traceable: ClassVar[bool] = False
    """An attribute of torch's Function in older versions."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined = _TORCHS & vars(cls).keys()
        if cls.__module__.startswith("gradmesh.compat."):
            cls.vjp = staticmethod(cls.backward)
            return
        if not defined:
            return
        cls.is_ordinary = True
        for name in {"jvp", "vjp"} - defined:
            setattr(cls, name, staticmethod(getattr(Function, name)))

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Apply the op, differentiably; takes the arguments of `forward` without the context."""
        if cls.is_ordinary:
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return cls.forward(None, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Apply the adjoint of the op that `forward` saved on `ctx`, differentiably.

        Returns:
            The gradient of the tensor; in a tuple with None for each further argument of `forward`, if there are any.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return with_nones(ctx, adjoint(ctx, grad_output))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        """Apply the op, which is linear, to the tangent.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return again(ctx, tangent)


def run(ctx: Any, op: LinearOp, x: Tensor, others: int = 0) -> Tensor:
    """Apply an op, differentiably, and save it on the context, if any; `forward` has `others` further arguments."""
    if ctx is not None:
        ctx.gradmesh_call = op, others
    return apply(op, x)


def adjoint(ctx: Any, grad: Tensor) -> Tensor:
    """Apply the adjoint of the op on the context."""
    return apply(_kept(ctx)[0].adjoint, grad)


def again(ctx: Any, tangent: Tensor) -> Tensor:
    """Apply the op on the context to another operand."""
    return apply(_kept(ctx)[0], tangent)


def with_nones(ctx: Any, grad: Tensor) -> Any:
    """The gradient, and None for each further argument of `forward`."""
    others = _kept(ctx)[1]
    return (grad, *[None] * others) if others else grad


def _kept(ctx: Any) -> tuple[LinearOp, int]:
    found: tuple[LinearOp, int] | None = getattr(ctx, "gradmesh_call", None)
    if found is None:
        raise ArgumentError(
            message(
                "forward was not called with this context",
                op="compat",
                expected="the ctx that forward was called with",
                got=type(ctx).__name__ if ctx is not None else "None",
                remedy="call forward(ctx, ...) first, with the same ctx",
            )
        )
    return found
