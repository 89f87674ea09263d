"""The contract of every op, as functions that run on one rank of an axis.

The law tests run them on simulated ranks for each op; the process tests run the same functions on real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import gradmesh as gm
from gradmesh.autograd.rule import apply
from gradmesh.ops.base import LinearOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.registry import REGISTRY
from gradmesh.transport import transport
from gradmesh.types import I, P, R
from gradmesh.verify import laws

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
ROUNDING = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}

Check = Callable[[LinearOp, Sequence[int]], None]


def axis_of(place: str) -> gm.Axis | None:
    """The axis that a place stands for: the world, or two of its ranks that are not 0 and 1."""
    if place == "world":
        return gm.axis()
    group = dist.new_group([1, 3])
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else gm.axis(group)


def on_examples(check: Check, rows: Sequence[int], place: str = "world") -> int:
    """Put every example of the rows to a check, on this rank; returns how many there were."""
    return on_examples_of(axis_of(place), check, rows)


def on_examples_of(axis: gm.Axis | None, check: Check, rows: Sequence[int]) -> int:
    """The same on an axis, or None on a rank that is not on it."""
    count = 0
    if axis is None:
        return count
    for index in rows:
        for op, shape in REGISTRY[index].examples(axis):
            check(op, shape)
            count += 1
    return count


def row_ids() -> list[str]:
    return [row.call for row in REGISTRY]


def keeps_the_law(op: LinearOp, shape: Sequence[int]) -> None:
    for dtype in DTYPES:
        assert laws.inner_product_error(op, shape, dtype) < ROUNDING[dtype], (op, dtype)


def is_its_adjoints_adjoint(op: LinearOp, shape: Sequence[int]) -> None:
    op = replace_precision(op)
    assert op.adjoint.adjoint == op
    assert (op.adjoint.src, op.adjoint.dst) == (op.dst.dual, op.src.dual)


def replace_precision(op: LinearOp) -> LinearOp:
    """The op with precisions that differ, so that a lost or unswapped one shows."""
    if isinstance(op, Mean):
        return Mean(replace_precision(op.op))
    return replace(op, comm_dtype=torch.float32, backward_dtype=torch.float64)


def has_its_transpose_as_adjoint(op: LinearOp, shape: Sequence[int]) -> None:
    assert laws.adjoint_matrix_error(op, shape) < 1e-15


def gives_the_same_on_every_rank_where_its_type_says_so(op: LinearOp, shape: Sequence[int]) -> None:
    if op.dst in (R, I):
        for dtype in DTYPES:
            y = op.apply(laws.sample(op.src, shape, dtype, op.axis))
            every = (
                transport(op.axis).gather(y.reshape(-1), [y.numel()] * op.axis.size).view(op.axis.size, -1)
            )
            assert bool((every == every[0]).all())


def tells_its_result_shape(op: LinearOp, shape: Sequence[int]) -> None:
    y = op.apply(laws.sample(op.src, shape, torch.float32, op.axis))
    assert tuple(y.shape) == op.out_shape(shape)
    assert op.adjoint.out_shape(y.shape) == tuple(shape)


def returns_fresh_memory_and_only_reads(op: LinearOp, shape: Sequence[int]) -> None:
    x = laws.sample(op.src, shape, torch.float32, op.axis)
    before = x.clone()
    y = op.apply(x)
    y.fill_(7)
    assert torch.equal(x, before)
    # A result that is a view inside the rule could not be written in place under autograd.
    y = apply(op, x.requires_grad_())
    y.mul_(2).sum().backward()
    assert torch.equal(x, before)


def takes_any_strides(op: LinearOp, shape: Sequence[int]) -> None:
    x = laws.sample(op.src, shape, torch.float32, op.axis)
    expected = op.apply(x)
    if x.dim() > 1:
        assert torch.equal(op.apply(x.mT.contiguous().mT), expected)
    spread = torch.empty((*shape, 2)).select(-1, 0).copy_(x)
    assert torch.equal(op.apply(spread), expected)
    constant = torch.ones(()).expand(tuple(shape))
    assert torch.equal(op.apply(constant), op.apply(constant.contiguous()))


def takes_pending_conjugation_and_sign(op: LinearOp, shape: Sequence[int]) -> None:
    z = laws.sample(op.src, shape, torch.complex64, op.axis)
    assert torch.equal(op.apply(z.conj()), op.apply(z.conj().resolve_conj()))
    assert torch.equal(op.apply(z.conj().imag), op.apply(z.conj().imag.resolve_neg()))


def moves_integers_and_bools(op: LinearOp, shape: Sequence[int]) -> None:
    x = (10 * laws.sample(op.src, shape, torch.float32, op.axis)).round()
    if isinstance(op, Mean):
        return
    expected = op.apply(x)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        y = op.apply(x.to(dtype))
        assert y.dtype is dtype
        assert torch.equal(y.float(), expected), dtype
    if not op.sums:
        assert torch.equal(op.apply(x > 0), op.apply((x > 0).float()).bool())


def has_its_adjoint_as_backward(op: LinearOp, shape: Sequence[int]) -> None:
    for dtype in (torch.float64, torch.complex128):
        x = laws.sample(op.src, shape, dtype, op.axis).requires_grad_()
        y = apply(op, x)
        g = laws.sample(op.dst.dual, y.shape, dtype, op.axis, seed=3)
        kept = g.clone()
        y.backward(g)
        assert x.grad is not None
        assert torch.equal(x.grad, op.adjoint.apply(g))
        assert torch.equal(g, kept)
        x.grad.fill_(7)
        assert torch.equal(g, kept)


def has_itself_as_forward_derivative(op: LinearOp, shape: Sequence[int]) -> None:
    x = laws.sample(op.src, shape, torch.float64, op.axis, seed=1)
    t = laws.sample(op.src, shape, torch.float64, op.axis, seed=2)
    value, tangent = torch.func.jvp(lambda x: apply(op, x), (x,), (t,))
    assert torch.equal(value, op.apply(x))
    assert torch.equal(tangent, op.apply(t))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        out = forward_ad.unpack_dual(apply(op, dual))
        assert out.tangent is not None
        assert torch.equal(out.primal, op.apply(x))
        assert torch.equal(out.tangent, op.apply(t))


def is_a_loop_under_vmap(op: LinearOp, shape: Sequence[int]) -> None:
    for at in range(len(shape) + 1):
        x = torch.stack([laws.sample(op.src, shape, torch.float64, op.axis, seed=s) for s in range(3)], at)
        expected = torch.stack([op.apply(part) for part in x.unbind(at)])
        # Where an element stands may decide in which order a backend adds its terms.
        mapped = torch.func.vmap(lambda x: apply(op, x), in_dims=at)(x)
        torch.testing.assert_close(mapped, expected, rtol=1e-14, atol=1e-14)
    nested = torch.stack([x, 2 * x])
    twice = torch.func.vmap(torch.func.vmap(lambda x: apply(op, x), in_dims=len(shape)))(nested)
    torch.testing.assert_close(twice, torch.stack([expected, 2 * expected]), rtol=1e-14, atol=1e-14)


def numels(x: Tensor, axis: gm.Axis) -> list[int]:
    counts: list[int] = transport(axis).gather(torch.tensor([x.numel()]), [1] * axis.size).tolist()
    return counts


def matches_dense_autograd_to_third_order(
    op: LinearOp, shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> None:
    """Gradient, Hessian times a vector, and the derivative of that along another, against one dense program."""
    axis = op.axis
    x = laws.sample(op.src, shape, dtype, axis, seed=1)
    directions = [laws.sample(op.src, shape, dtype, axis, seed=s) for s in (2, 3)]
    y_shape = op.out_shape(shape)
    weight = laws.sample(I if op.dst is I else gm.V, y_shape, dtype, axis, seed=4)

    def terms(weight: Tensor, y: Tensor) -> Tensor:
        """Real, and of complex values no part of an analytic function."""
        return (weight * torch.sin(y) * (1 + y.conj())).real

    def distributed(x: Tensor) -> Tensor:
        y = apply(op, x)
        if op.dst is P:
            y = gm.all_reduce(y, axis, dst=R)
        return terms(weight, y).sum()

    matrix = laws.matrix(op, shape).to(dtype)
    counts = numels(weight, axis)
    weights = transport(axis).gather(weight.reshape(-1), counts)

    def dense(flat: Tensor) -> Tensor:
        y = matrix @ flat
        if op.dst is P:
            y = y.view(axis.size, -1).sum(0).repeat(axis.size)
        return terms(weights, y).sum() / (axis.size if op.dst is I else 1)

    alike = op.src in (R, I)
    sizes = numels(x, axis)

    def whole(t: Tensor) -> Tensor:
        return t.reshape(-1) if alike else transport(axis).gather(t.reshape(-1), sizes)

    def spread(flat: Tensor) -> Tensor:
        return flat.repeat(axis.size) if alike else flat

    def derivatives(f: Callable[[Tensor], Tensor], x: Tensor, along: list[Tensor]) -> Iterator[Tensor]:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        yield g
        for v in along:
            (g,) = torch.autograd.grad((g * v).real.sum(), x, create_graph=True)
            yield g

    got = list(derivatives(distributed, x, directions))
    expected = list(derivatives(lambda flat: dense(spread(flat)), whole(x), [whole(v) for v in directions]))
    for g, e in zip(got, expected, strict=True):
        total = transport(axis).sum(g.detach()) if op.src is R else g.detach()
        mine = total.reshape(-1) if alike else transport(axis).gather(total.reshape(-1), sizes)
        torch.testing.assert_close(mine, e.detach(), rtol=1e-12, atol=1e-12)


def has_conjugate_wirtinger_gradients_to_third_order(op: LinearOp, shape: Sequence[int]) -> None:
    """Of complex values, the gradients that torch gives them in one process."""
    matches_dense_autograd_to_third_order(op, shape, torch.complex128)


LAWS: tuple[Check, ...] = (
    keeps_the_law,
    is_its_adjoints_adjoint,
    has_its_transpose_as_adjoint,
    gives_the_same_on_every_rank_where_its_type_says_so,
    tells_its_result_shape,
    returns_fresh_memory_and_only_reads,
    takes_any_strides,
    takes_pending_conjugation_and_sign,
    moves_integers_and_bools,
    has_its_adjoint_as_backward,
    has_itself_as_forward_derivative,
    is_a_loop_under_vmap,
    matches_dense_autograd_to_third_order,
    has_conjugate_wirtinger_gradients_to_third_order,
)
