"""The modes: in what way a case is run and differentiated, on ranks and in the dense program by the same code.

The objective is the sum over the ranks of <w, op(sin x)^2>, where the weights w differ from rank to rank; an I result
has one objective, the same on every rank, which counts once. A P result is a pending sum, so that its gradient is the
same on every rank, and its objective is linear, <w, op(sin x)>.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from benchmarks.systems.cases import RANKS, Case
from benchmarks.systems.system import Grad, Op, torch_grad
from gradmesh import I, P, R, Type, V

__all__ = ["MODES", "Found", "Mode", "expected", "measured", "no_meaning"]

BATCH = 3
Found = dict[str, list[Tensor]]
"""What a mode gives: value, gradient, second derivative or tangent, one tensor for each operand."""


@dataclass(frozen=True)
class Mode:
    """A column of the table.

    Attributes:
        name: as the table shows it.
        text: what is run, for the docs.
        layout: the sizes: "even", "uneven" or "zero".
        dtype: of the operands.
        world: the number of ranks that are started; where there are more than take part, ranks 1 and 3 of 4 do.
    """

    name: str
    text: str
    layout: str = "even"
    dtype: torch.dtype = torch.float64
    world: int = RANKS

    @property
    def members(self) -> list[int]:
        """The ranks of the world that take part."""
        return [1, 3] if self.world > RANKS else list(range(RANKS))


_ALL = (
    Mode("reverse", "value, and gradient by `torch.autograd.grad`"),
    Mode(
        "second order",
        "gradient with `create_graph=True`, and its product with a vector differentiated again",
    ),
    Mode("forward", "value and tangent of dual numbers, `torch.autograd.forward_ad`"),
    Mode("vmap", "`torch.func.vmap` of the verb over a batch of 3, and the gradient through it"),
    Mode("compile", "value and gradient under `torch.compile(fullgraph=True, backend='aot_eager')`"),
    Mode(
        "compile, second order",
        "gradient by `torch.func.grad` inside such a function, and its product with a vector differentiated outside",
    ),
    Mode("complex", "value and gradient in complex128", dtype=torch.complex128),
    Mode(
        "uneven", "value and gradient, sizes 3 and 2 along dim 0 (all_to_all: 1, 2, 3 and 1)", layout="uneven"
    ),
    Mode(
        "zero-size", "value and gradient, sizes 1 and 0 along dim 0; (0, 2) where all sizes are equal", "zero"
    ),
    Mode("subgroup", "value and gradient on a group of ranks 1 and 3 of 4", world=2 * RANKS),
    Mode("unused output", "gradient where the loss of one rank does not use its result"),
)
MODES = {mode.name: mode for mode in _ALL}


def no_meaning(case: Case, mode: Mode) -> str:
    """Why a mode has no meaning for a case; empty where it has one."""
    if mode.layout == "uneven" and not case.ragged:
        return "the operands have one shape on all ranks by definition"
    if mode.name == "unused output" and case.dst is I:
        return "an I result is by definition used alike on every rank"
    if mode.name == "unused output" and case.dst is P:
        return "the gradient of a P result is by definition the same on every rank"
    return ""


def measured(op: Op, case: Case, mode: Mode, rank: int, grad: Grad) -> Found:
    """Run a case on this rank of the group."""
    x, v = (_sample(case.src, case, mode, rank, tag) for tag in ("operand", "direction"))
    weight, linear = _weights(case, mode)[rank], case.dst is P
    if mode.name == "unused output":
        y = op(x.requires_grad_().sin())
        loss = 0 * x.sum() if weight is None else _loss(y, weight, linear)
        return {"gradient": list(grad(loss, [x], False))}
    batched = torch.func.vmap(op) if mode.name == "vmap" else op

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = batched(x.sin())
        return _loss(y, weight, linear), y

    if mode.name == "compile, second order":
        return _second_outside(program, x, v, grad)
    if mode.name == "compile":
        torch._dynamo.reset()
        program = torch.compile(program, fullgraph=True, backend="aot_eager")

    def listed(xs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        loss, y = program(xs[0])
        return loss, [y]

    return _derivatives(listed, [x], [v], mode, grad)


def _second_outside(
    program: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, v: Tensor, grad: Grad
) -> Found:
    torch._dynamo.reset()
    taken = torch.compile(torch.func.grad(program, has_aux=True), fullgraph=True, backend="aot_eager")
    gradient, y = taken(x.requires_grad_())
    second = grad((gradient * v).sum(), [x], False)
    found = {"value": [y], "gradient": [gradient], "second derivative": list(second)}
    return {name: [t.detach() for t in tensors] for name, tensors in found.items()}


def expected(case: Case, mode: Mode) -> Found:
    """Run a case densely: the same for all ranks at once, in this process."""
    xs, vs = (_samples(case, mode, tag) for tag in ("operand", "direction"))
    weights = _weights(case, mode)

    def program(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        ys = _dense([x.sin() for x in leaves], case, mode)
        used = [rank for rank in range(RANKS) if weights[rank] is not None]
        losses = [_loss(ys[rank], weights[rank], case.dst is P) for rank in used]
        return torch.stack(losses[:1] if case.dst is I else losses).sum(), ys

    found = _derivatives(program, xs, vs, mode, torch_grad)
    return {"gradient": found["gradient"]} if mode.name == "unused output" else found


def _dense(operands: list[Tensor], case: Case, mode: Mode) -> list[Tensor]:
    """All ranks' results; an operand that is the same on every rank is given once."""
    operands = operands * (RANKS // len(operands))
    if mode.name != "vmap":
        return case.dense(operands, mode.layout)
    each = [case.dense([x[at] for x in operands], mode.layout) for at in range(BATCH)]
    return [torch.stack([out[rank] for out in each]) for rank in range(RANKS)]


def _derivatives(
    program: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]],
    xs: list[Tensor],
    vs: list[Tensor],
    mode: Mode,
    grad: Grad,
) -> Found:
    if mode.name == "forward":
        with forward_ad.dual_level():
            _, ys = program([forward_ad.make_dual(x, v) for x, v in zip(xs, vs, strict=True)])
            duals = [forward_ad.unpack_dual(y) for y in ys]
            tangents = [torch.zeros_like(p) if t is None else t for p, t in duals]
            return {"value": [p.detach() for p, _ in duals], "tangent": [t.detach() for t in tangents]}
    for x in xs:
        x.requires_grad_()
    loss, ys = program(xs)
    again = mode.name in ("second order", "compile, second order")
    grads = grad(loss, xs, again)
    found = {"value": [y.detach().clone() for y in ys], "gradient": [g.detach() for g in grads]}
    if again:
        along = torch.stack([(g * v).sum() for g, v in zip(grads, vs, strict=True)]).sum()
        found["second derivative"] = [g.detach() for g in grad(along, xs, False)]
    return found


def _weights(case: Case, mode: Mode) -> list[Tensor | None]:
    """The weights of each rank's objective; None on a rank that does not use its result."""
    kind = I if case.dst in (I, P) else V
    users = (RANKS - 1,) if mode.name == "unused output" else case.users
    # Real operands, as the dense program itself is not defined for all complex ones.
    operands = [x.abs() for x in _samples(case, mode, "operand")]
    shapes = [tuple(y.shape) for y in _dense(operands, case, mode)]
    return [
        _sample(kind, case, mode, rank, "weight", shape) if rank in users else None
        for rank, shape in enumerate(shapes)
    ]


def _loss(y: Tensor, weight: Tensor | None, linear: bool) -> Tensor:
    """A rank's objective; one that does not use its result takes part with weight zero."""
    if weight is None or weight.shape != y.shape:  # a wrong shape is reported when the values are compared
        return (0 * y * y).sum().real
    return (weight * (y if linear else y * y)).sum().real


def _samples(case: Case, mode: Mode, tag: str) -> list[Tensor]:
    """Every rank's sample, or the one that is the same on all."""
    ranks = range(1 if case.src in (R, I) else RANKS)
    return [_sample(case.src, case, mode, rank, tag) for rank in ranks]


def _sample(
    kind: Type, case: Case, mode: Mode, rank: int, tag: str, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Random numbers, the same at every call: alike on all ranks for R and I, different on each for V and P."""
    if shape is None:
        shape = case.shape(rank, mode.layout)
        shape = (BATCH, *shape) if mode.name == "vmap" else shape
    owner = 0 if kind in (R, I) else 1 + rank
    seed = zlib.crc32(f"{case.name} {tag} {owner}".encode())
    return torch.randn(shape, dtype=mode.dtype, generator=torch.Generator().manual_seed(seed))
