"""Layers whose parameters are cut over the ranks of an axis, and their state as that of the dense layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradmesh.arguments import Call, integer
from gradmesh.axis import Axis, AxisLike, balanced, resolve
from gradmesh.collectives import all_gather, replicate
from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message
from gradmesh.nn.sharding import remember

__all__ = ["Cut", "Parallel", "Replicated", "dense_state_dict", "load_dense_state_dict"]


@dataclass(frozen=True)
class Cut:
    """How a dense parameter is cut: each rank has `sizes[rank]` of it along `dim`."""

    dim: int
    sizes: tuple[int, ...]

    def part(self, dense: Tensor, rank: int) -> Tensor:
        """A rank's part of a dense parameter, in memory of its own."""
        begin = sum(self.sizes[:rank])
        return dense.detach().narrow(self.dim, begin, self.sizes[rank]).clone()


class Parallel(nn.Module):
    """A layer that has a part of its dense counterpart's parameters on each rank of an axis.

    Attributes:
        over: the axis, as it was given: a name is looked up when the layer is called.
        cuts: how each parameter that is cut is cut; the others are whole on every rank.
        path: the name in its module of the layer that `tensor_parallel` made it of, for errors; else empty.
        rows: each rank's rows of a sequence, for layers that have them.
    """

    path = ""
    rows: Any = None
    holds_parts = True
    """Whether its sharded parameters are parts of the dense layer's."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the layer, or a copy of one, known to `Sharding`."""
        made = super().__new__(cls)
        remember(made)
        return made

    def __init__(self, axis: AxisLike) -> None:
        super().__init__()
        self.over = axis
        self.cuts: dict[str, Cut] = {}

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The sharded parameters, each as the module that has it and its name there, also where it is replaced."""
        for name in list(self.__dict__.get("cuts", ())):
            parametrized = self._modules.get("parametrizations")
            if isinstance(parametrized, nn.ModuleDict) and name in parametrized:
                yield from ((parametrized[name], each) for each in parametrized[name]._parameters)
            else:
                yield self, name

    @property
    def axis(self) -> Axis:
        """The axis, of as many ranks as when the layer was made."""
        axis = resolve(self.over, f"nn.{type(self).__name__}")
        for name, cut in self.cuts.items():
            if len(cut.sizes) != axis.size:
                raise ArgumentError(
                    message(
                        "the layer was made for another number of ranks",
                        op=f"nn.{type(self).__name__}",
                        axis=str(axis),
                        expected=f"an axis of {len(cut.sizes)} ranks, for the parts of {name}: {cut.sizes}",
                        got=f"{axis.size} ranks",
                        remedy="make the layer on this axis, and load the dense state into it",
                    )
                )
        return axis

    def cut(self, dim: int, total: int, sizes: Sequence[int] | None) -> Cut:
        """How `total` is cut: as told, or evenly, where the first ranks get one more of what does not divide."""
        axis = self.axis
        given = sizes if isinstance(sizes, Iterable) else ()
        told = (
            balanced(total, axis.size)
            if sizes is None
            else tuple(-1 if integer(n) is None else n for n in given)
        )
        if len(told) != axis.size or sum(told) != total or min(told) < 0:
            raise ArgumentError(
                message(
                    "the sizes are no cut of what the layer has",
                    op=f"nn.{type(self).__name__}",
                    axis=str(axis),
                    expected=f"{axis.size} sizes with the sum {total}",
                    got=f"sizes={sizes!r}",
                    remedy="leave them out for an even cut",
                )
            )
        return Cut(dim, told)

    def put(self, name: str, dense: Tensor | None, cut: Cut | None) -> None:
        """Make a parameter of this rank's part of a dense one."""
        if dense is None:
            self.register_parameter(name, None)
            return
        grads = not isinstance(dense, nn.Parameter) or dense.requires_grad
        part = dense.detach().clone() if cut is None else cut.part(dense, self.axis.rank)
        setattr(self, name, nn.Parameter(part, requires_grad=grads))
        if cut is not None:
            self.cuts[name] = cut

    def along(self, x: Tensor, dim: int) -> int:
        """The dim of a sequence that is cut, counted from 0; one of those before the width."""
        call = Call(f"nn.{type(self).__name__}", x, self.axis)
        place = call.dim(dim, "sequence_dim")
        if place == x.dim() - 1:
            self.refuse(x, "sequence_dim of one of the dims before the last", "cut the width by `sizes`")
        return place

    @property
    def called(self) -> str:
        """The name in the module, for `extra_repr` and errors."""
        return f", {self.path!r}" if self.path else ""

    @contextmanager
    def naming_rows(self) -> Iterator[None]:
        """Have the error of a sequence that the ranks do not divide name the argument of the layer."""
        try:
            yield
        except (ShapeError, MismatchError) as error:
            if self.rows is None:
                text = str(error).rpartition("\n  remedy ")[0]  # which names an argument of the verb
                error.args = (
                    f"{text}\n  in        nn.{type(self).__name__}{self.called}, with equal rows on every rank\n"
                    '  remedy    pass rows="balanced" to gradmesh.nn.tensor_parallel or to the layer',
                )
            raise

    def refuse(self, x: Tensor, expected: str, remedy: str, got: str = "") -> NoReturn:
        """Raise an error of this rank's input; the others hear of it in the call that follows."""
        call = Call(f"nn.{type(self).__name__}", x, self.over)
        call.fail(
            f"the input does not fit this rank's part{self.called}",
            expected=expected,
            got=got or f"shape {list(x.shape)}",
            remedy=remedy,
        )


class Replicated(nn.Module):
    """A module that every rank has whole, and that works on other rows on each: gradients are summed.

    ::

        I -> R    each parameter, by `gm.replicate`; backward sums what the ranks send back

    The norms between the linear layers of a sequence parallel region are such modules, and everything else that has
    parameters and gets own rows. The sum is taken in backward, once for all its parameters, on the axis alone.

    Args:
        module: the module; equal on all ranks.
        axis: the ranks.

    Raises:
        ArgumentError: something in the module has its gradients summed, or its parameters cut, over the axis already.

    Example:
        >>> def on_each_rank():
        ...     scale = torch.nn.Linear(1, 1, bias=False)
        ...     layer = gm.nn.Replicated(scale)
        ...     layer(torch.full((1, 1), 1.0 + gm.rank())).sum().backward()
        ...     return scale.weight.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """

    over: AxisLike
    replicated = True
    """That gradients are summed here, as layers say that do so by an argument."""

    def __init__(self, module: nn.Module, axis: AxisLike = None) -> None:
        super().__init__()
        for name, each in module.named_modules():
            if isinstance(each, Parallel | Replicated) and each.over == axis:
                raise ArgumentError(
                    message(
                        "the module holds a layer that has its own way over these ranks",
                        op="nn.Replicated",
                        axis=repr(axis),
                        expected="a module whose parameters are all whole, and whose gradients nobody has summed",
                        got=f"{type(each).__name__} {name!r}",
                        remedy="replicate the other modules one by one, or this one over another axis",
                    )
                )
        self.module = module
        self.over = axis

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module, which code around it may read, as torch's own transformer layers do."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before it is there
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of its arguments."""
        names, values = zip(*self.module.named_parameters(), strict=True) if _any(self.module) else ((), ())
        if values:
            values = replicate(tuple(values), self.over)
        return functional_call(self.module, dict(zip(names, values, strict=True)), args, kwargs)


def _any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _entries(module: nn.Module) -> Iterator[tuple[str, str, Parallel | None, str]]:
    """Each name of the state dict, that of the dense module, and whose it is under which name."""
    parts = dict(module.named_modules(remove_duplicate=False))
    wrapped = [name for name, each in parts.items() if isinstance(each, Replicated)]
    for name in module.state_dict():
        room, _, last = name.rpartition(".")
        owner = parts.get(room)
        dense = name
        for prefix in sorted(wrapped, key=len, reverse=True):
            inside = f"{prefix}.module." if prefix else "module."
            if dense.startswith(inside):
                dense = f"{prefix}." * bool(prefix) + dense[len(inside) :]
        yield name, dense, owner if isinstance(owner, Parallel) else None, last


def dense_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of the dense module that this one was made of, whole on every rank.

    ::

        V -> I    each parameter that is cut is concatenated along the dim that it was cut along; the others stay

    Args:
        module: a module that holds `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding` or
            `Replicated` ones, at any depth. Every rank calls it.

    Returns:
        Names and tensors that `load_state_dict` of the dense module takes. Nothing requires grad.

    Example:
        >>> def on_each_rank():
        ...     dense = torch.nn.Linear(2, 4)
        ...     with torch.no_grad():
        ...         dense.weight.copy_(torch.arange(8.0).view(4, 2))
        ...     layer = gm.nn.ColumnParallelLinear.of(dense)
        ...     return gm.nn.dense_state_dict(layer)["weight"].tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")[1]
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """
    state, whole = module.state_dict(), {}
    with torch.no_grad():
        for name, dense, owner, last in _entries(module):
            value = state[name]
            if owner is not None and last in owner.cuts:
                cut = owner.cuts[last]
                value = all_gather(value.contiguous(), owner.axis, cut.dim, sizes=cut.sizes)
            whole[dense] = value
    return whole


def load_dense_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a dense module's state dict: each rank takes its parts. Nothing is sent.

    Args:
        module: as for `dense_state_dict`.
        state: what the dense module's `state_dict` returned.
        strict: as in `torch.nn.Module.load_state_dict`.

    Returns:
        The missing and the unexpected names, as those of `load_state_dict`.

    Raises:
        ArgumentError: a tensor is not of the dense shape.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.RowParallelLinear(4, 1, bias=False)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.arange(4.0).view(1, 4)})
        ...     return layer.weight.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    left, own = dict(state), {}
    for name, dense, owner, last in _entries(module):
        if dense not in state:
            continue
        left.pop(dense, None)
        value = state[dense]
        if owner is not None and last in owner.cuts:
            cut = owner.cuts[last]
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if len(shape) <= cut.dim or shape[cut.dim] != sum(cut.sizes):
                raise ArgumentError(
                    message(
                        f"{dense!r} is not of the dense layer's size",
                        op="nn.load_dense_state_dict",
                        axis=str(owner.axis),
                        expected=f"{sum(cut.sizes)} along dim {cut.dim}",
                        got=f"shape {list(shape)}" if isinstance(value, Tensor) else type(value).__name__,
                        remedy="pass the state dict of the dense module; this rank's own one goes to "
                        "module.load_state_dict",
                    )
                )
            value = cut.part(value, owner.axis.rank)
        own[name] = value
    return module.load_state_dict({**own, **left}, strict=strict)
