"""Shared by the drop-ins: ops as torch.autograd.Function classes, calls of ops, and the docstrings of regions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, FunctionMeta

from gradmesh.autograd.rule import apply
from gradmesh.errors import ArgumentError
from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp
from gradmesh.ops.broadcast import Reduce
from gradmesh.ops.gather import Gather
from gradmesh.ops.shard import AllGatherInvariant, Shard
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport import Transport
from gradmesh.types import Convention, I, P, R, Type
from gradmesh.verbs.call import Call, SizesLike
from gradmesh.verbs.call import neighbors as neighbor_op

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


class TupleFunction(OpFunction):
    """A gather whose result is the tuple of the ranks' tensors, of the same shape; `forward` calls `gathered`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Apply the adjoint of the gather to the gradients of all parts.

        Returns:
            The gradient of the tensor; in a tuple with None for each further argument of `forward`, if there are any.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return with_nones(ctx, adjoint(ctx, torch.stack(grads)).squeeze(0))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Gather the tangents.

        Raises:
            ArgumentError: `forward` was not called with this context.
        """
        return separate(again(ctx, tangent.unsqueeze(0)))


def gathered(ctx: Any, x: Tensor, axis: Axis, *, dst: Convention, others: int = 0) -> tuple[Tensor, ...]:
    """The ranks' tensors; the op is saved as by `run`."""
    stack = x.unsqueeze(0)
    return separate(run(ctx, all_gather(stack, axis, dst=dst), stack, others))


def separate(stacked: Tensor) -> tuple[Tensor, ...]:
    """The entries along dim 0; `stacked` must not be used afterwards.

    Unlike the results of `unbind`, they are not views in autograd, so they can be modified in place.
    """
    return tuple(part.squeeze(0) for part in stacked.unsafe_split(1))


def run(ctx: Any, op: LinearOp, x: Tensor, others: int = 0, **attributes: Any) -> Tensor:
    """Apply an op, differentiably, and save it on the context, if any; `forward` has `others` further arguments.

    `attributes` are what the original saves besides the group; the `backward` of a subclass may read them.
    """
    if ctx is not None:
        ctx.gradmesh_call, ctx.group = (op, others), op.axis.group
        for name, value in attributes.items():
            setattr(ctx, name, value)
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
        raise ArgumentError.of(
            "forward was not called with this context",
            op="compat",
            expected="the ctx that forward was called with",
            got=type(ctx).__name__ if ctx is not None else "None",
            remedy="call forward(ctx, ...) first, with the same ctx",
        )
    return found


def single_rank_axis(name: str) -> Axis:
    """An axis with this rank only; needs no process group."""
    return Axis(name, 0, 1, dist.ProcessGroup(dist.HashStore(), 0, 1))  # type: ignore[attr-defined]


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, dst: Type, sizes: SizesLike = None) -> LinearOp:
    """The op of `gradmesh.all_gather`."""
    call = Call("all_gather", x, axis)
    dim = call.dim(dim)
    kind = AllGather if dst is R else AllGatherInvariant
    return kind(call.axis, dim, call.sizes(sizes, dim))


def all_reduce(x: Tensor, axis: Axis, *, dst: Type) -> LinearOp:
    """The op of `gradmesh.all_reduce`."""
    call = Call("all_reduce", x, axis)
    return (AllReduce if dst is R else AllReduceInvariant)(call.axis)


def replicate(x: Tensor, axis: Axis) -> LinearOp:
    """The op of `gradmesh.replicate`."""
    return Replicate(Call("replicate", x, axis).axis)


def shard(x: Tensor, axis: Axis, dim: int, split: Callable[[int, int], Sequence[int]]) -> LinearOp:
    """The op of `gradmesh.shard`; `split` maps the full size and the number of ranks to each rank's size."""
    call = Call("shard", x, axis)
    dim = call.dim(dim)
    return Shard(call.axis, dim, call.sizes(split(x.shape[dim], axis.size), dim))


def gather(x: Tensor, axis: Axis, root: int) -> LinearOp:
    """The op of `gradmesh.gather` along dim 0, one row from each rank; the verb would require `ordered()`."""
    call = Call("gather", x, axis)
    return Gather(call.axis, 0, root, Sizes((1,) * axis.size))


def reduce(x: Tensor, axis: Axis, root: int) -> LinearOp:
    """The op of `gradmesh.reduce`; the verb would require `ordered()`."""
    return Reduce(Call("reduce", x, axis).axis, root)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: SizesLike = None) -> LinearOp:
    """The op of `gradmesh.reduce_scatter`."""
    call = Call("reduce_scatter", x, axis)
    dim = call.dim(dim)
    return ReduceScatter(call.axis, dim, call.sizes(sizes, dim))


def all_to_all(
    x: Tensor, axis: Axis, split_sizes: Sequence[int] | None, concat_sizes: Sequence[int] | None
) -> LinearOp:
    """The op of `gradmesh.all_to_all` along dim 0."""
    call = Call("all_to_all", x, axis)
    dim = call.dim(0)
    send = call.sizes(split_sizes, dim, "split_sizes")
    return AllToAll(call.axis, dim, dim, send, call.sizes(concat_sizes, dim, "concat_sizes"))


def neighbors(
    x: Tensor, axis: AxisLike, index: Tensor, sent: Sequence[int], received: Sequence[int]
) -> LinearOp:
    """The op of `gradmesh.neighbor_all_to_all`, with the rows for all ranks in one index."""
    call = Call("neighbor_all_to_all", x, axis)
    rows = dict(enumerate(index.split(list(sent))))
    return neighbor_op(x, call.axis, call.dim(0), rows, dict(enumerate(received)), call.fail)


@dataclass(frozen=True)
class CountedByAll(Replicate):
    """I -> R, the identity; like `replicate`, for a result whose gradient the caller guarantees to be equal everywhere.

    The sum of W equal gradients needs no communication. The adjoint is exact for such gradients only.
    """

    verb = "compat.gp_utils.scale_backward_grad"

    @property
    def adjoint(self) -> LinearOp:
        """The sum of equal gradients."""
        return SumOfEqual(self.axis, **self.swapped)


@dataclass(frozen=True)
class SumOfEqual(CountedByAll):
    """P -> I, W times a term that is equal on all ranks. The adjoint of `CountedByAll`."""

    public = False
    src, dst = P, I

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """Scale."""
        return wire.copy(x).mul_(self.axis.size)

    @property
    def adjoint(self) -> LinearOp:
        """The identity."""
        return CountedByAll(self.axis, **self.swapped)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Tensor])


class Region(NamedTuple):
    """A mapping that several libraries have: its types, what two ranks hold in it and in backward, and an example."""

    types: str
    ranks: tuple[str, str]
    example: str


def region(
    kind: Region, shape: str = "(...) -> (...)", *, setup: str = "", more: str = ""
) -> Callable[[FunctionT], FunctionT]:
    """Complete the docstring of a region: a picture after its first paragraph, and an example at its end.

    `setup` is the example's first line, `more` are the arguments that it passes after the tensor.
    """

    def documented(function: FunctionT) -> FunctionT:
        summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        head = f"{kind.types}    shape {shape}    "
        picture = f"{head}{kind.ranks[0]}\n{' ' * len(head)}{kind.ranks[1]}"
        example = kind.example.replace("SETUP", f"\n...     {setup}" if setup else "")
        example = example.replace("REGION", function.__name__).replace("MORE", more)
        parts = summary, f"::\n\n{_indented(picture)}", rest, f"Example:\n{_indented(example)}"
        function.__doc__ = "\n\n".join(parts)
        return function

    return documented


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


COPY = Region(
    "I -> R",
    ("x -> x      g0+g1 <- g0", "x -> x      g0+g1 <- g1"),
    """\
>>> def on_each_rank():SETUP
...     x = torch.tensor(2.0, requires_grad=True)
...     ((1 + gm.rank()) * REGION(x)).backward()
...     return x.grad.item()
>>> gm.launch(on_each_rank, 2, backend="threads")
[3.0, 3.0]""",
)
REDUCE = Region(
    "P -> I",
    ("x0 -> x0+x1      g <- g", "x1 -> x0+x1      g <- g"),
    """\
>>> def on_each_rank():SETUP
...     x = torch.tensor(1.0 + gm.rank(), requires_grad=True)
...     energy = REGION(x**2)
...     energy.backward()
...     return energy.item(), x.grad.item()
>>> gm.launch(on_each_rank, 2, backend="threads")
[(5.0, 2.0), (5.0, 4.0)]""",
)
SCATTER = Region(
    "I -> V",
    ("[a b] -> a      [g0 g1] <- g0", "[a b] -> b      [g0 g1] <- g1"),
    """\
>>> def on_each_rank():SETUP
...     return REGION(torch.arange(3)).tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[0, 1], [2]]""",
)
GATHER = Region(
    "V -> I",
    ("a -> [a b]      g[a] <- g", "b -> [a b]      g[b] <- g"),
    """\
>>> def on_each_rank():SETUP
...     x = torch.ones(1, requires_grad=True)
...     (REGION(xMORE) * torch.tensor([3.0, 4.0])).sum().backward()
...     return x.grad.tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[3.0], [4.0]]""",
)
GATHER_SUM_GRAD = Region(
    "V -> R",
    ("a -> [a b]      g0[a]+g1[a] <- g0", "b -> [a b]      g0[b]+g1[b] <- g1"),
    """\
>>> def on_each_rank():SETUP
...     x = torch.ones(1, requires_grad=True)
...     ((1 + gm.rank()) * REGION(xMORE) * torch.tensor([3.0, 4.0])).sum().backward()
...     return x.grad.tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[9.0], [12.0]]""",
)
REDUCE_SCATTER = Region(
    "P -> V",
    ("[x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0", "[x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1"),
    """\
>>> def on_each_rank():
...     return REGION(torch.arange(4.0)).tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[0.0, 2.0], [4.0, 6.0]]""",
)
