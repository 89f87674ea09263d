"""Ops as real `torch.autograd.Function` classes, for the drop-ins whose originals are such classes.

What a caller may do with the original works: call `apply`; call `forward` and `backward` by hand with any object as
context; call them from a Function of one's own; subclass. No derivative is written for any of it: `forward` keeps the
op on the context, and `backward` applies the adjoint that the op itself names.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.autograd.function import Function, FunctionMeta

from gradmesh.autograd import apply
from gradmesh.errors import ArgumentError, message
from gradmesh.ops.base import LinearOp

__all__ = ["OpFunction", "adjoint", "again", "run", "with_nones"]

_TORCHS = frozenset({"backward", "forward", "jvp", "setup_context", "vjp", "vmap"})
"""What a Function may define; a subclass that defines one of them means torch to call it."""


class _OpFunctionMeta(FunctionMeta):
    """The type of the classes whose `apply` is not torch's.

    torch.compile takes every class whose type is exactly `FunctionMeta` in its own hands: it traces `forward` and
    `backward` in the place of `apply`, refuses a `jvp`, and up to torch 2.13 refuses a Function that calls another's
    `backward`. A class of another type it reads like any class. So a subclass that defines a `forward` or `backward`
    of its own, and is meant to be traced as torch's Functions are, gets torch's type back.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:  # noqa: N805
        super().__init__(name, bases, namespace)  # type: ignore[no-untyped-call]
        if cls.torchs:  # type: ignore[attr-defined]
            cls.__class__ = FunctionMeta  # type: ignore[assignment]


class OpFunction(Function, metaclass=_OpFunctionMeta):
    """An autograd Function that is an op; base of the drop-ins, each of which defines `forward`.

    `apply` runs `forward` without a context, which is the op under the one autograd rule: every order of derivative,
    forward mode, `torch.func` and `torch.compile`.

    A subclass of a drop-in that defines `forward`, `backward` or another method of torch's becomes an ordinary
    Function: `apply` is torch's own and calls what is defined. It has those modes that an ordinary Function has, the
    second derivative among them. `jvp` and `vjp` are not inherited by it, since they would be those of another map.
    """

    torchs: ClassVar[bool] = False
    """Whether `apply` is torch's own."""

    is_traceable: ClassVar[bool] = False
    """A name that torch's Function had when the originals' documents were written."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined = _TORCHS & vars(cls).keys()
        if cls.__module__.startswith("gradmesh.compat."):
            cls.vjp = staticmethod(cls.backward)
            return
        if not defined:
            return
        cls.torchs = True
        for name in {"jvp", "vjp"} - defined:
            setattr(cls, name, staticmethod(getattr(Function, name)))

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the op, differentiably; the arguments are those of `forward` after the context."""
        if cls.torchs:
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return cls.forward(None, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Apply the adjoint of the op that `forward` kept on `ctx`, differentiably.

        Returns:
            The gradient of the tensor; in a tuple with a None for each further argument that `forward` takes, if it
            takes any.

        Raises:
            ArgumentError: `forward` did not run with this context.
        """
        return with_nones(ctx, adjoint(ctx, grad_output))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        """Apply the op itself to a tangent: it is linear.

        Raises:
            ArgumentError: `forward` did not run with this context.
        """
        return again(ctx, tangent)


def run(ctx: Any, op: LinearOp, x: Tensor, others: int = 0) -> Tensor:
    """Run an op, differentiably, and keep it on the context, if there is one.

    Args:
        ctx: the context that `forward` was called with.
        op: the op.
        x: its operand.
        others: how many arguments of `forward` follow the tensor, for `backward` to say None to.
    """
    if ctx is not None:
        ctx.gradmesh_call = op, others
    return apply(op, x)


def adjoint(ctx: Any, grad: Tensor) -> Tensor:
    """Apply the adjoint of the op on the context."""
    return apply(_kept(ctx)[0].adjoint, grad)


def again(ctx: Any, tangent: Tensor) -> Tensor:
    """Apply the op on the context once more."""
    return apply(_kept(ctx)[0], tangent)


def with_nones(ctx: Any, grad: Tensor) -> Any:
    """What `backward` returns: the gradient, and None for each further argument of `forward`."""
    others = _kept(ctx)[1]
    return (grad, *[None] * others) if others else grad


def _kept(ctx: Any) -> tuple[LinearOp, int]:
    found: tuple[LinearOp, int] | None = getattr(ctx, "gradmesh_call", None)
    if found is None:
        raise ArgumentError(
            message(
                "the context holds no op",
                op="compat",
                expected="the object that forward was called with",
                got=type(ctx).__name__ if ctx is not None else "None",
                remedy="call forward(ctx, ...) first, with the same ctx",
            )
        )
    return found
