"""Conformance: prove an op, or a transport, that is defined outside of the package.

`check_op` runs an op's examples on ranks that are threads and holds them to each law in `LAWS`; `check_transport`
compares every primitive of a transport with its contract. Both raise `LawError`, which names the broken law.

Each law is a function of an op and the shape of this rank's operand, which every rank of the op's axis calls. The law
tests of the package run the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh.autograd.rule import apply
from gradmesh.errors import DTypeError, RankError, message
from gradmesh.launch import Ranks
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.mean import Mean
from gradmesh.ops.meaning import meaning
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.mesh import axis as find_axis
from gradmesh.transport import Transport, transport
from gradmesh.types import I, P, R, V
from gradmesh.verbs.collectives import all_reduce
from gradmesh.verify import laws

__all__ = ["LAWS", "LawError", "check_op", "check_transport"]

Examples = Callable[[Axis], Iterable[tuple[LinearOp, Sequence[int]]]]
Law = Callable[[LinearOp, Sequence[int]], None]
Meaning = Callable[[Sequence[LinearOp], Sequence[Tensor]], Sequence[Tensor]]
ROUNDING = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}
"""The relative error of an inner product that counts as rounding, by dtype."""


class LawError(AssertionError):
    """An op or a transport breaks a law.

    Attributes:
        law: the name of the law.
    """

    def __init__(self, law: str, text: str) -> None:
        super().__init__(text)
        self.law = law


def _broken(law: str, subject: str, got: str, remedy: str) -> LawError:
    return LawError(
        law, message(f"{subject} breaks a law", op="testing", expected=law, got=got, remedy=remedy)
    )


_TRANSPOSED = "compare the adjoint with the transpose: gradmesh.verify.as_matrix(op, shape)"
_FROM_OPERAND = "compute the result from the operand alone in transfer()"

LAWS: list[Law] = []
"""The laws that `check_op` holds an op to."""


def _law(name: str, remedy: str) -> Callable[[Callable[[LinearOp, Sequence[int]], str | None]], Law]:
    """Add a law: a function that returns what is wrong, as text, or None."""

    def added(function: Callable[[LinearOp, Sequence[int]], str | None]) -> Law:
        @functools.wraps(function)
        def law(op: LinearOp, shape: Sequence[int]) -> None:
            found = function(op, shape)
            if found is not None:
                raise _broken(name, type(op).__name__, f"{found}, for {op} on shape {tuple(shape)}", remedy)

        law.law = name  # type: ignore[attr-defined]
        LAWS.append(law)
        return law

    return added


def _accepted(op: Op) -> Iterator[torch.dtype]:
    for dtype in ROUNDING:
        try:
            op.accepts(dtype)
        except DTypeError:
            continue
        yield dtype


def _unequal(got: Tensor, expected: Tensor, what: str) -> str | None:
    if got.shape == expected.shape and torch.equal(got, expected):
        return None
    return f"{what}: {got.tolist()} instead of {expected.tolist()}"


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


@_law("out_shape() is the shape of the result, and maps back through the adjoint", "correct out_shape()")
def tells_its_result_shape(op: LinearOp, shape: Sequence[int]) -> str | None:
    y = op.apply(laws.sample(op.src, shape, torch.float32, op.axis))
    if tuple(y.shape) != tuple(op.out_shape(shape)):
        return f"a result of shape {tuple(y.shape)}, and out_shape() == {op.out_shape(shape)}"
    back = tuple(op.adjoint.out_shape(y.shape))
    return None if back == tuple(shape) else f"adjoint.out_shape({tuple(y.shape)}) == {back}"


@_law(
    "a result of type R or I has the same bits on every rank",
    "change dst, or compute each element on one rank and gather",
)
def gives_the_same_on_every_rank_where_its_type_says_so(op: LinearOp, shape: Sequence[int]) -> str | None:
    if op.dst not in (R, I):
        return None
    for dtype in _accepted(op):
        y = op.apply(laws.sample(op.src, shape, dtype, op.axis))
        every = transport(op.axis).gather(y.reshape(-1), [y.numel()] * op.axis.size).view(op.axis.size, -1)
        if not bool((every == every[0]).all()):
            return f"results of the ranks that differ in {dtype}"
    return None


@_law("the operand is only read, and the result is fresh memory", "copy in transfer(): wire.copy(x)")
def returns_fresh_memory_and_only_reads(op: LinearOp, shape: Sequence[int]) -> str | None:
    x = laws.sample(op.src, shape, torch.float32, op.axis)
    before = x.clone()
    y = op.apply(x)
    if not torch.equal(x, before):
        return "an operand that the call changed"
    y.fill_(7)
    if not torch.equal(x, before):
        return "a result that shares memory with the operand"
    # A result that is a view inside the rule could not be written in place under autograd.
    y = apply(op, x.requires_grad_())
    y.mul_(2).sum().backward()
    return None if torch.equal(x, before) else "an operand that the backward changed"


@_law("the operand may have any strides", "use x.contiguous() before x.view() in transfer()")
def takes_any_strides(op: LinearOp, shape: Sequence[int]) -> str | None:
    x = laws.sample(op.src, shape, torch.float32, op.axis)
    expected = op.apply(x)
    spread = torch.empty((*shape, 2)).select(-1, 0).copy_(x)
    constant = torch.ones(()).expand(tuple(shape))
    return _first(
        (
            _unequal(op.apply(x.mT.contiguous().mT), expected, "transposed") if x.dim() > 1 else None,
            _unequal(op.apply(spread), expected, "with gaps"),
            _unequal(op.apply(constant), op.apply(constant.contiguous()), "expanded"),
        )
    )


@_law(
    "the operand may have a pending conjugation or sign", "use x.resolve_conj().resolve_neg() in transfer()"
)
def takes_pending_conjugation_and_sign(op: LinearOp, shape: Sequence[int]) -> str | None:
    z = laws.sample(op.src, shape, torch.complex64, op.axis)
    return _first(
        (
            _unequal(op.apply(z.conj()), op.apply(z.conj().resolve_conj()), "conjugated"),
            _unequal(op.apply(z.conj().imag), op.apply(z.conj().imag.resolve_neg()), "negated"),
        )
    )


@_law(
    "the op is linear: A 0 = 0, and A x is its matrix times x",
    "remove constants and nonlinear steps from transfer()",
)
def is_linear(op: LinearOp, shape: Sequence[int]) -> str | None:
    found = laws.matrix_of(op.apply, op.axis, shape)
    return None if found is None else laws.nonlinearity(found, op.apply, op.axis, shape, torch.float64)


@_law(
    "the adjoint of the adjoint is the op, its types are dual, and the sent dtypes are swapped",
    "pass every field and **self.swapped in both adjoints",
)
def is_its_adjoints_adjoint(op: LinearOp, shape: Sequence[int]) -> str | None:  # noqa: ARG001
    op = _with_precision(op)
    if op.adjoint.adjoint != op:
        return f"{op.adjoint.adjoint}"
    types, dual = (op.adjoint.src, op.adjoint.dst), (op.dst.dual, op.src.dual)
    return None if types == dual else f"an adjoint {types[0]} -> {types[1]} instead of {dual[0]} -> {dual[1]}"


def _with_precision(op: LinearOp) -> LinearOp:
    """The op with precisions that differ, so that a lost or unswapped one shows."""
    if isinstance(op, Mean):
        return Mean(_with_precision(op.op))
    return replace(op, comm_dtype=torch.float32, backward_dtype=torch.float64)


@_law("reverse mode: <A x, y> = <x, A* y>", _TRANSPOSED)
def keeps_the_law(op: LinearOp, shape: Sequence[int]) -> str | None:
    errors = {dtype: laws.inner_product_error(op, shape, dtype) for dtype in _accepted(op)}
    return _first(
        f"a relative error of {error:.1e} in {dtype}"
        for dtype, error in errors.items()
        if error >= ROUNDING[dtype]
    )


@_law("the adjoint's matrix is the transpose of the op's", _TRANSPOSED)
def has_its_transpose_as_adjoint(op: LinearOp, shape: Sequence[int]) -> str | None:
    error = laws.adjoint_matrix_error(op, shape)
    return None if error < 1e-12 else f"an error of {error:.1e}"


@_law("backward is the adjoint", "define the adjoint by another op, without state")
def has_its_adjoint_as_backward(op: LinearOp, shape: Sequence[int]) -> str | None:
    for dtype in (torch.float64, torch.complex128):
        x = laws.sample(op.src, shape, dtype, op.axis).requires_grad_()
        y = apply(op, x)
        g = laws.sample(op.dst.dual, y.shape, dtype, op.axis, seed=3)
        kept = g.clone()
        y.backward(g)
        assert x.grad is not None
        found = _unequal(x.grad, op.adjoint.apply(g), "gradient") or _unequal(g, kept, "cotangent afterwards")
        x.grad.fill_(7)
        found = found or _unequal(g, kept, "cotangent that shares memory with the gradient")
        if found is not None:
            return found
    return None


@_law("forward mode: the derivative is the op itself", "make transfer() linear and free of state")
def has_itself_as_forward_derivative(op: LinearOp, shape: Sequence[int]) -> str | None:
    x, t = (laws.sample(op.src, shape, torch.float64, op.axis, seed=seed) for seed in (1, 2))
    value, tangent, *_ = torch.func.jvp(lambda x: apply(op, x), (x,), (t,))
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(apply(op, forward_ad.make_dual(x, t)))
        if out.tangent is None:
            return "no tangent"
        wanted = op.apply(x), op.apply(t)
        return _first(
            (
                _unequal(value, wanted[0], "value of jvp"),
                _unequal(tangent, wanted[1], "tangent of jvp"),
                _unequal(out.primal, wanted[0], "value of a dual tensor"),
                _unequal(out.tangent, wanted[1], "tangent of a dual tensor"),
            )
        )


@_law(
    "batched() is the op on each element of a batch, under vmap",
    "move every dim of the op by one in batched()",
)
def is_a_loop_under_vmap(op: LinearOp, shape: Sequence[int]) -> str | None:
    def off(got: Tensor, expected: Tensor, what: str) -> str | None:
        # Where an element stands may decide in which order a backend adds its terms.
        near = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-14, atol=1e-14)
        return None if near else _unequal(got, expected, what)

    for at in range(len(shape) + 1):
        x = torch.stack([laws.sample(op.src, shape, torch.float64, op.axis, seed=s) for s in range(3)], at)
        expected = torch.stack([op.apply(part) for part in x.unbind(at)])
        found = off(torch.func.vmap(lambda x: apply(op, x), in_dims=at)(x), expected, f"in_dims={at}")
        if found is not None:
            return found
    twice = torch.func.vmap(torch.func.vmap(lambda x: apply(op, x), in_dims=len(shape)))(
        torch.stack([x, 2 * x])
    )
    return off(twice, torch.stack([expected, 2 * expected]), "nested")


@_law(
    "derivatives of every order are those of one dense program",
    "compute the result from the operand alone in transfer()",
)
def matches_dense_autograd_to_third_order(
    op: LinearOp, shape: Sequence[int], dtype: torch.dtype = torch.float64
) -> str | None:
    """Gradient, Hessian times a vector, and the derivative of that along another, against one dense program."""
    axis = op.axis
    x = laws.sample(op.src, shape, dtype, axis, seed=1)
    directions = [laws.sample(op.src, shape, dtype, axis, seed=s) for s in (2, 3)]
    y_shape = op.out_shape(shape)
    weight = laws.sample(I if op.dst is I else V, y_shape, dtype, axis, seed=4)

    def terms(weight: Tensor, y: Tensor) -> Tensor:
        """Real, and of complex values no part of an analytic function."""
        return (weight * torch.sin(y) * (1 + y.conj())).real

    def distributed(x: Tensor) -> Tensor:
        y = apply(op, x)
        if op.dst is P:
            y = all_reduce(y, axis, dst=R)
        return terms(weight, y).sum()

    matrix = laws.matrix(op, shape).to(dtype)
    weights = laws.gathered(weight, axis)

    def dense(flat: Tensor) -> Tensor:
        y = matrix @ flat
        if op.dst is P:
            y = y.view(axis.size, -1).sum(0).repeat(axis.size)
        return terms(weights, y).sum() / (axis.size if op.dst is I else 1)

    alike = op.src in (R, I)

    def whole(t: Tensor) -> Tensor:
        return t.reshape(-1) if alike else laws.gathered(t, axis)

    def derivatives(f: Callable[[Tensor], Tensor], x: Tensor, along: list[Tensor]) -> Iterator[Tensor]:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        yield g
        for v in along:
            (g,) = torch.autograd.grad((g * v).real.sum(), x, create_graph=True)
            yield g

    got = list(derivatives(distributed, x, directions))
    spread: Callable[[Tensor], Tensor] = (
        (lambda flat: flat.repeat(axis.size)) if alike else (lambda flat: flat)
    )
    expected = list(derivatives(lambda flat: dense(spread(flat)), whole(x), [whole(v) for v in directions]))
    for order, (g, e) in enumerate(zip(got, expected, strict=True), 1):
        total = transport(axis).sum(g.detach()) if op.src is R else g.detach()
        if not torch.allclose(whole(total), e.detach(), rtol=1e-12, atol=1e-12):
            return f"a wrong derivative of order {order} in {dtype}"
    return None


@_law(
    "gradients of complex values are those of one dense program",
    "compute the result from the operand alone in transfer()",
)
def has_conjugate_wirtinger_gradients_to_third_order(op: LinearOp, shape: Sequence[int]) -> str | None:
    return matches_dense_autograd_to_third_order.__wrapped__(op, shape, torch.complex128)  # type: ignore[attr-defined, no-any-return]


_MEANING = "transfer() on the ranks gives what it gives on lists of tensors"
_TRANSPOSE = "the adjoint is the gradient that autograd finds for the op on lists of tensors"


def check_op(
    examples: Examples,
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    expected: Meaning | None = None,
    timeout: float = 60.0,
) -> None:
    """Hold an op to every law, on ranks that are threads.

    The adjoint identity in reverse and forward, the adjoint of the adjoint, shapes, memory, strides, vmap, derivatives
    up to the third order, and the op on lists of tensors (`gradmesh.ops.meaning`) beside the op on ranks.

    Args:
        examples: from an axis, ops on it, each with the shape of this rank's operand.
        world_sizes: how many ranks to run on, one after another.
        expected: what the op means, stated independently: from the ops and the operands of all ranks, in rank order,
            the results of all ranks.
        timeout: seconds for one law.

    Raises:
        LawError: the op breaks a law; the text names it.

    Example:
        >>> from gradmesh.ops.permute import Shift
        >>> gm.testing.check_op(lambda axis: [(Shift(axis, offset=1), (2, 3))], world_sizes=[2])
    """
    for size in world_sizes:
        with Ranks(size, backend="threads", timeout=timeout) as ranks:
            (names, *_) = _run(ranks, "examples", "the op", functools.partial(_names, examples))
            for law in LAWS:
                _run(ranks, law.law, names, functools.partial(_hold, law, examples))  # type: ignore[attr-defined]
            calls = _run(ranks, _MEANING, names, lambda: [_Call(*call) for call in examples(find_axis())])
        for call in zip(*calls, strict=True):
            _compare_meaning(call, expected)


def _hold(law: Law, examples: Examples) -> None:
    for op, shape in examples(find_axis()):
        law(op, shape)


def _names(examples: Examples) -> str:
    """The classes of the ops."""
    return ", ".join(sorted({type(op).__name__ for op, _ in examples(find_axis())}))


def _run(ranks: Ranks, law: str, subject: str, on_each_rank: Callable[[], Any]) -> list[Any]:
    """Run a function on each rank; an error becomes one that names the law."""
    try:
        return ranks.run(on_each_rank)
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, LawError):
            raise cause from None
        got = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
        raise _broken(law, subject, got, "see the traceback of the rank") from error


class _Call:
    """An op on one rank: an operand and its result, a cotangent and the adjoint's result."""

    def __init__(self, op: LinearOp, shape: Sequence[int]) -> None:
        self.op, self.x = op, laws.sample(op.src, shape, torch.float64, op.axis, seed=1)
        self.y = op.apply(self.x)
        self.g = laws.sample(op.dst.dual, self.y.shape, torch.float64, op.axis, seed=2)
        self.back = op.adjoint.apply(self.g)


def _compare_meaning(calls: Sequence[_Call], expected: Meaning | None) -> None:
    ops, xs = [call.op for call in calls], [call.x.clone().requires_grad_() for call in calls]
    name, size = type(ops[0]).__name__, len(calls)
    try:
        ys = meaning(ops, xs)
    except Exception as error:
        raise _broken(
            _MEANING, name, f"{type(error).__name__}: {error}", "make transfer() free of state"
        ) from error
    stated = ys if expected is None else expected(ops, [x.detach() for x in xs])
    for rank, (call, y, wanted) in enumerate(zip(calls, ys, stated, strict=True)):
        for got, what in ((call.y, "on ranks"), (y, "on lists")):
            if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=1e-12, atol=1e-12):
                text = f"{got.tolist()} {what}, instead of {wanted.tolist()}, on rank {rank} of {size} for {call.op}"
                raise _broken(_MEANING, name, text, "make transfer() free of state, or correct expected=")
    weight = 1 / size if ops[0].dst is I else 1
    total = sum((weight * (y * call.g).sum() for y, call in zip(ys, calls, strict=True)), xs[0].new_zeros(()))
    found = torch.autograd.grad(total, xs, allow_unused=True) if total.requires_grad else [None] * size
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]
    backs = [call.back for call in calls]
    if ops[0].src in (R, I):  # one value on all ranks
        grads = [torch.stack(grads).sum(0)]
        backs = [torch.stack(backs).sum(0)] if ops[0].src is R else backs[:1]
    for got, wanted in zip(backs, grads, strict=True):
        if not torch.allclose(got, wanted, rtol=1e-12, atol=1e-12):
            text = f"{got.tolist()} instead of {wanted.tolist()}, on {size} ranks for {ops[0]}"
            raise _broken(_TRANSPOSE, name, text, "correct the property adjoint")


# -- transports

NewTransport = Callable[[Axis], Transport]
Case = tuple[str, tuple[Any, ...], Tensor | None]
"""What is passed, as text; the arguments, the operand first; the expected result."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.bool,
)
_REMEDY = "the contract is the docstring of gradmesh.transport.Transport and of its method"


def check_transport(
    new: NewTransport | None = None, *, backend: str = "threads", world_size: int = 3, timeout: float = 60.0
) -> None:
    """Compare every primitive of a transport with its contract, on dtypes, strides, and even and uneven counts.

    For each: the result, that the operand is only read and may be written afterwards, and whether ranks that have the
    same result have the same bits.

    Args:
        new: makes the transport for an axis, such as its class. None: the one that gradmesh chooses for the group, to
            prove a backend of torch.distributed.
        backend: the backend of torch.distributed that the ranks use.
        world_size: the number of ranks.
        timeout: seconds for one primitive.

    Raises:
        LawError: the transport breaks the contract of a primitive; the text names it.

    Example:
        >>> gm.testing.check_transport(backend="threads", world_size=2)
    """
    with Ranks(world_size, backend=backend, timeout=timeout) as ranks:
        for name, (law, cases) in _PRIMITIVES.items():
            found = _run(
                ranks, f"{name}: {law}", "the transport", functools.partial(_primitive, name, cases, new)
            )
            for rank, (wrong, results) in enumerate(found):
                if wrong is None and "same bits" in law:
                    pairs = zip(results, found[0][1], strict=True)
                    wrong = _first(_unequal(y, first, "compared with rank 0") for y, first in pairs)
                if wrong is not None:
                    raise _broken(f"{name}: {law}", "the transport", f"{wrong}, on rank {rank}", _REMEDY)


def _primitive(name: str, cases: Any, new: NewTransport | None) -> tuple[str | None, list[Tensor]]:
    """Run the cases of a primitive on this rank; what is wrong, as text, and the results."""
    results: list[Tensor] = []
    axis, make = find_axis(), new or transport
    if name == "fetch" and (axis.size == 1 or type(make(axis)).post is Transport.post):
        return None, []
    for dtype in _DTYPES:
        for passed, (x, *others), expected in cases(axis, dtype):
            what, before = f"with {passed} of {dtype}", x.clone()
            call = functools.partial(_message, make, axis) if name == "fetch" else getattr(make(axis), name)
            got = call(x, *others)
            if not torch.equal(x, before):
                return f"{what} it wrote its operand", results
            x.copy_(torch.ones_like(x))
            dist.barrier()  # every rank has written its operand, so a result that shares its memory is wrong
            if got is None or expected is None:
                if got is not expected:
                    return f"{what} {got} instead of {expected}", results
                continue
            if got.shape != expected.shape or got.dtype is not expected.dtype:
                return f"{what} a result of {got.dtype} and shape {tuple(got.shape)}", results
            rounding = (
                5e-2
                if dtype is torch.bfloat16
                else 1e-5
                if dtype.is_floating_point or dtype.is_complex
                else 0
            )
            if not torch.allclose(got, expected, rtol=rounding, atol=rounding):
                return (
                    f"{what} {got.tolist()} instead of {expected.tolist()}, or it depends on a written operand",
                    results,
                )
            results.append(got)
    return None, results


def _message(make: NewTransport, axis: Axis, x: Tensor, greeting: str, awaited: str) -> Tensor:
    """Send a message to the next rank and receive one; the number of another description is the result."""
    make(axis).post(x, (axis.rank + 1) % axis.size, greeting)
    dist.barrier()  # post() does not wait for fetch()
    out = torch.zeros_like(x)
    said = make(axis).fetch(out, (axis.rank - 1) % axis.size, awaited)
    return out if said is None else torch.tensor(int(said))


def _data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    x = torch.randint(-9, 10, (count,), generator=torch.Generator().manual_seed(1 + rank))
    return x > 0 if dtype is torch.bool else x.to(dtype) / 7 if dtype.is_floating_point else x.to(dtype)


def _parts(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    ranks, me = range(axis.size), axis.rank
    for passed, n in (
        ("equal counts", [[2 for _ in ranks] for _ in ranks]),
        ("uneven counts", [[(s + 2 * r) % 3 for r in ranks] for s in ranks]),
    ):
        every = [_data(s, sum(n[s]), dtype) for s in ranks]
        whole, receive = torch.cat([every[s].split(n[s])[me] for s in ranks]), [n[s][me] for s in ranks]
        yield passed, (every[me].clone(), n[me], receive), whole
        yield f"{passed} and a shape", (every[me].clone(), n[me], receive, (len(whole), 1)), whole.view(-1, 1)


def _counts(axis: Axis) -> list[list[int]]:
    """Counts for the ranks: equal, and uneven with an empty one."""
    return [[2] * axis.size, [(2, 3, 0, 1)[rank % 4] for rank in range(axis.size)]]


def _buffers(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for counts in _counts(axis):
        every = [_data(rank, n, dtype) for rank, n in enumerate(counts)]
        yield f"counts {counts}", (every[axis.rank].clone(), counts), torch.cat(every)


def _terms(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for counts in _counts(axis) if dtype is not torch.bool else ():
        every = [_data(rank, sum(counts), dtype) for rank in range(axis.size)]
        mine = torch.stack(every).sum(0, dtype=dtype).split(counts)[axis.rank].view(-1, 1)
        yield f"counts {counts}", (every[axis.rank].clone(), counts, mine.shape), mine


def _operands(axis: Axis, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """This rank's operand, dense, transposed and conjugated, and every rank's."""
    every = torch.stack([_data(rank, 15, dtype).view(3, 5) for rank in range(axis.size)])
    yield "a dense operand", every[axis.rank].clone(), every
    yield "a transposed operand", every[axis.rank].T.contiguous().T, every
    if dtype.is_complex:
        every = every * (1 + 1j)
        yield "a conjugated operand", every[axis.rank].conj().clone().conj(), every


def _sums(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for passed, x, every in _operands(axis, dtype) if dtype is not torch.bool else ():
        yield passed, (x,), every.sum(0, dtype=dtype)


def _sums_at(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for root in range(axis.size):
        for passed, (x,), total in _sums(axis, dtype):
            assert total is not None
            yield f"root {root} and {passed}", (x, root), total if axis.rank == root else 0 * total


def _largest(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for passed, x, every in _operands(axis, dtype) if not dtype.is_complex else ():
        yield passed, (x, lambda parts: parts.amax(0)), every.amax(0)


def _copied(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    for root in range(axis.size):
        for passed, x, every in _operands(axis, dtype):
            yield f"root {root} and {passed}", (x, root), every[root].clone()


def _relayed(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    me = axis.rank
    to, source = me + 1 if me + 1 < axis.size else None, me - 1 if me else None
    for passed, x, every in _operands(axis, dtype):
        yield passed, (x, to, source, (3, 5)), None if source is None else every[source].clone()


def _messages(axis: Axis, dtype: torch.dtype) -> Iterator[Case]:
    source = (axis.rank - 1) % axis.size
    yield "a message", (_data(axis.rank, 5, dtype), "7", "7"), _data(source, 5, dtype)
    yield "a message of another description", (_data(axis.rank, 5, dtype), "8", "7"), torch.tensor(8)


_PRIMITIVES: dict[str, tuple[str, Callable[[Axis, torch.dtype], Iterator[Case]]]] = {
    "exchange": ("a part from each rank, in rank order", _parts),
    "gather": ("every rank's buffer, in rank order, with the same bits on every rank", _buffers),
    "sum_and_scatter": ("this rank's part of the sum", _terms),
    "sum": ("the sum, with the same bits on every rank", _sums),
    "sum_at": ("the sum at the root, zeros elsewhere", _sums_at),
    "fold": ("the reduction, with the same bits on every rank", _largest),
    "copy_from": ("the root's tensor, with the same bits on every rank", _copied),
    "relay": ("the tensor of the source; None without a source", _relayed),
    "fetch": ("the message that was posted, or its description if that differs", _messages),
}
