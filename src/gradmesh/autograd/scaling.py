"""`scale_gradient`: the identity with a scaled derivative."""

from __future__ import annotations

from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradmesh._torch import enters_graphs, forward_level_open
from gradmesh.errors import ArgumentError, GradmeshError, OrderError
from gradmesh.transport import compiling


def scale_gradient(x: Tensor, s: float | Tensor) -> Tensor:
    """Return `x`, and multiply its derivative by a constant: gradients in backward and tangents in forward mode.

    It does not communicate. The type over the ranks is unchanged if `s` is the same on every rank.

    ::

        any type    shape (...) -> (...)    x0 -> x0      s g0 <- g0
                                            x1 -> x1      s g1 <- g1

    The derivative is defined as `s` times the identity in every mode, although the function is the identity. Forward
    and reverse mode agree, and higher derivatives are multiplied by `s` each time they pass through this call.

    `gm.scale_gradient(gm.all_gather(x), 1 / W)` averages the ranks' gradients where `gm.all_gather(x)` sums them;
    `gm.scale_gradient(x, -1)` reverses a gradient.

    Args:
        x: a tensor.
        s: a real number, or a real 0-d tensor, which gets no gradient.

    Returns:
        A copy of `x`.

    Raises:
        ArgumentError: `x` is not a tensor; `s` is not one real number, or requires grad.
        OrderError: forward mode inside a compiled program.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = gm.scale_gradient(x, 0.5)
        >>> y.square().sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([1.0, 2.0], [1.0, 2.0])
    """
    if not isinstance(x, Tensor):
        _refuse(
            "x must be a tensor",
            "a torch.Tensor",
            type(x).__name__,
            "call scale_gradient on each tensor of a structure",
        )
    real = isinstance(s, Real) and not isinstance(s, bool)
    if isinstance(s, Tensor):
        real = not (s.dim() or s.is_complex() or s.dtype is torch.bool)
    if not real:
        got = f"s of {s.dtype} and shape {tuple(s.shape)}" if isinstance(s, Tensor) else f"s={s!r}"
        _refuse("s must be one real number", "a real number, or a real 0-d tensor", got, "pass e.g. s=0.5")
    if isinstance(s, Tensor) and s.requires_grad:
        _refuse(
            "s must not require grad, because scale_gradient treats it as a constant",
            "a constant",
            "a tensor with requires_grad=True",
            "pass s.detach(); to learn a factor, multiply the loss by it",
        )
    if compiling():
        if forward_level_open():
            _refuse(
                "forward mode is not supported inside torch.compile",
                "an uncompiled call",
                "a call under torch.compile",
                "call the uncompiled function in forward mode",
                OrderError,
            )
        allow_in_dynamo()
    return _scaled(x, s)


def _scaled(x: Tensor, s: float | Tensor) -> Tensor:
    y: Tensor = _ScaleGradient.apply(x, s)  # type: ignore[no-untyped-call]
    return y


allow_in_dynamo = enters_graphs(_scaled)


class _ScaleGradient(torch.autograd.Function):
    """The autograd rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, s: float | Tensor) -> Tensor:  # noqa: ARG004 - only the derivative uses it
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:  # noqa: ARG004
        s = inputs[1]
        ctx.s = None if isinstance(s, Tensor) else s
        if isinstance(s, Tensor):  # saved, so that torch detects in-place modification
            ctx.save_for_backward(s)
            ctx.save_for_forward(s)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else _times(ctx, grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, _: None) -> Tensor | None:
        return None if tangent is None else _times(ctx, tangent)


def _times(ctx: Any, derivative: Tensor) -> Tensor:
    s: float | Tensor = ctx.saved_tensors[0] if ctx.s is None else ctx.s
    return derivative * s


def _refuse(
    problem: str, expected: str, got: str, remedy: str, kind: type[GradmeshError] = ArgumentError
) -> NoReturn:
    raise kind.of(problem, op="scale_gradient", expected=expected, got=got, remedy=remedy)
