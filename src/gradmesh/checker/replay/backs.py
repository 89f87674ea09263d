"""Backwards and hooks that send nothing, as the program wrote them: the gradient goes through them as it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradmesh.checker.recording.tape import Back, Op, ProgramInput, Ref

__all__ = ["Unclear", "hook_of", "named_operator", "scale_of", "through"]

_NEAR = 1e-5


class Unclear:
    """The names of backwards of which it is not known what they make of a gradient, since the last `clear`."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _Through(torch.autograd.Function):
    """Results of a call, whose gradient goes back as the program's own backward passed it."""

    @staticmethod
    def forward(
        ctx: Any, back: Back, name: str, unclear: Unclear, outs: tuple[Tensor, ...], *ins: Tensor
    ) -> Any:
        ctx.back, ctx.name, ctx.unclear = back, name, unclear
        ctx.shapes = [(x.shape, x.dtype) for x in ins]
        return tuple(x.detach().clone() for x in outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gave = _passed(ctx.back, gradients, ctx.name, ctx.unclear)
        fitting = [
            None if g is None or g.shape != shape else g.to(dtype)
            for g, (shape, dtype) in zip(gave, ctx.shapes, strict=False)
        ]
        return None, None, None, None, *fitting, *([None] * (len(ctx.shapes) - len(fitting)))


def through(back: Back, name: str, unclear: Unclear, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Any:
    """The results of a call, connected with its operands by the backward that the program ran."""
    return _Through.apply(back, name, unclear, tuple(outs), *ins)  # type: ignore[no-untyped-call]


def hook_of(back: Back, name: str, unclear: Unclear) -> Callable[[Tensor], Tensor | None]:
    """A hook of a tensor, as the program's own hook was."""

    def hook(gradient: Tensor) -> Tensor | None:
        passed = _passed(back, (gradient,), name, unclear)[0]
        return passed if passed is not None and passed.shape == gradient.shape else None

    return hook


def scale_of(back: Back) -> float | None:
    """The number by which a backward multiplies its gradient; None where it does anything else."""
    met, gave = back.met[0], back.gave[0]
    return None if met is None or gave is None else _ratio([gave], [met])


def _passed(
    back: Back, gradients: Sequence[Tensor | None], name: str, unclear: Unclear
) -> Sequence[Tensor | None]:
    """What a backward makes of gradients, which are other ones than those it met.

    Of a multiple of what it met it makes that multiple of what it gave, whatever it does. Else it is run again, which
    says nothing where it is not linear.
    """
    times = _ratio(gradients, back.met)
    if times is not None:
        return [None if x is None else x * times for x in back.gave]
    made = _run(back, gradients)
    twice = _run(back, [None if x is None else 2 * x for x in gradients])
    if made is None or twice is None or not all(_is_twice(a, b) for a, b in zip(twice, made, strict=True)):
        unclear.names.append(name)
        return back.gave
    return made


def _is_twice(x: Tensor | None, of: Tensor | None) -> bool:
    if x is None or of is None:
        return x is of
    return torch.allclose(x, 2 * of, rtol=1e-4, atol=_NEAR * float(of.abs().max()) if of.numel() else 0.0)


def _ratio(xs: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> float | None:
    pairs = [(x, y) for x, y in zip(xs, of, strict=False) if x is not None or y is not None]
    if any(x is not None and y is not None and x.shape != y.shape for x, y in pairs):
        return None
    full = [
        (torch.zeros_like(y) if x is None else x, torch.zeros_like(x) if y is None else y)  # type: ignore[arg-type]
        for x, y in pairs
    ]
    if not full:
        return 1.0
    a = torch.cat([x.detach().flatten().double() for x, _ in full])
    b = torch.cat([y.detach().flatten().double() for _, y in full])
    square = float(b @ b)
    if square == 0:
        return 1.0 if not bool(a.any()) else None
    ratio = float(a @ b) / square
    return ratio if float((a - ratio * b).norm()) <= _NEAR * float(a.norm()) else None


def _run(back: Back, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The operators of a backward on other gradients; None where they do not run, or draw at random."""
    if not back.repeats:
        return None
    tensors: dict[int, Tensor] = {}
    for number, x, met in zip(back.ins, gradients, back.met, strict=False):
        if number is not None and met is not None:
            tensors[number] = torch.zeros_like(met) if x is None else x.detach().clone().to(met.dtype)

    def valued(value: Any) -> Any:
        if isinstance(value, Ref):
            return tensors[value.id]
        if isinstance(value, (list, tuple)):
            return type(value)(valued(part) for part in value)
        if isinstance(value, dict):
            return {key: valued(part) for key, part in value.items()}
        return value

    try:
        with torch.no_grad():
            for each in back.ops:
                if isinstance(each, ProgramInput):
                    tensors[each.id] = each.value.clone()
                elif isinstance(each, Op):
                    result = named_operator(each.name)(*valued(each.args), **valued(each.kwargs))
                    made = (
                        [result]
                        if isinstance(result, Tensor)
                        else [x for x in result or () if isinstance(x, Tensor)]
                    )
                    tensors.update(zip(each.outs, made, strict=False))
        return [None if number is None else tensors[number] for number in back.outs]
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError):
        return None


def named_operator(name: str) -> Any:
    """An operator by its name, as "aten.mul.Tensor"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
