"""Layers with sharded parameters, and their conversion from and to dense state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message
from gradmesh.nn.sharding import remember
from gradmesh.runtime.mesh import Axis, AxisLike, balanced, resolve
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, replicate

__all__ = ["Cut", "Parallel", "Replicated", "dense_state_dict", "load_dense_state_dict"]


@dataclass(frozen=True)
class Cut:
    """How a dense parameter is sharded: each rank has `sizes[rank]` of it along `dim`."""

    dim: int
    sizes: tuple[int, ...]

    def part(self, dense: Tensor, rank: int) -> Tensor:
        """A copy of a rank's shard of a dense parameter."""
        begin = sum(self.sizes[:rank])
        return dense.detach().narrow(self.dim, begin, self.sizes[rank]).clone()


class Parallel(nn.Module):
    """A layer whose parameters are sharded over an axis.

    Attributes:
        over: the `axis` argument; a name is resolved when the layer is called.
        cuts: the sharded parameters; the others are replicated.
        path: the name of the layer that `tensor_parallel` replaced, for errors; else empty.
        rows: each rank's rows of a sequence, for layers with sequence parallelism.
    """

    path = ""
    rows: Any = None
    holds_parts = True
    """True if its parameters are shards of the dense layer's; see `Holder`."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Register the layer, or a copy of it, for `Sharding`."""
        made = super().__new__(cls)
        remember(made)
        return made

    def __init__(self, axis: AxisLike) -> None:
        super().__init__()
        self.over = axis
        self.cuts: dict[str, Cut] = {}

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The sharded parameters, each as its module and its name in it; also if parametrized."""
        for name in list(self.__dict__.get("cuts", ())):
            parametrized = self._modules.get("parametrizations")
            if isinstance(parametrized, nn.ModuleDict) and name in parametrized:
                yield from ((parametrized[name], each) for each in parametrized[name]._parameters)
            else:
                yield self, name

    @property
    def axis(self) -> Axis:
        """The axis, checked to have as many ranks as at construction."""
        axis = resolve(self.over, f"nn.{type(self).__name__}")
        for name, cut in self.cuts.items():
            if len(cut.sizes) != axis.size:
                raise ArgumentError(
                    message(
                        "the axis has another number of ranks than at the layer's construction",
                        op=f"nn.{type(self).__name__}",
                        axis=str(axis),
                        expected=f"an axis of {len(cut.sizes)} ranks: {name} is sharded as {cut.sizes}",
                        got=f"{axis.size} ranks",
                        remedy="construct the layer on this axis, and load the dense state with "
                        "gm.nn.load_dense_state_dict",
                    )
                )
        return axis

    def cut(self, dim: int, total: int, sizes: Sequence[int] | None) -> Cut:
        """Shard `total` entries as in `sizes`, or evenly; the first ranks get one more if there is a remainder."""
        axis = self.axis
        given = sizes if isinstance(sizes, Iterable) else ()
        even = balanced(total, axis.size)
        each = even if sizes is None else tuple(-1 if integer(n) is None else n for n in given)
        if len(each) != axis.size or sum(each) != total or min(each) < 0:
            raise ArgumentError(
                message(
                    "sizes does not match the layer",
                    op=f"nn.{type(self).__name__}",
                    axis=str(axis),
                    expected=f"{axis.size} ints >= 0 that add up to {total}",
                    got=f"sizes={sizes!r}",
                    remedy=f"pass e.g. sizes={even}, or omit it for this even split",
                )
            )
        return Cut(dim, each)

    def put(self, name: str, dense: Tensor | None, cut: Cut | None) -> None:
        """Register this rank's shard of a dense parameter."""
        if dense is None:
            self.register_parameter(name, None)
            return
        grads = not isinstance(dense, nn.Parameter) or dense.requires_grad
        part = dense.detach().clone() if cut is None else cut.part(dense, self.axis.rank)
        setattr(self, name, nn.Parameter(part, requires_grad=grads))
        if cut is not None:
            self.cuts[name] = cut

    def along(self, x: Tensor, dim: int) -> int:
        """`sequence_dim` counted from 0; the last dim has the features and is not allowed."""
        call = Call(f"nn.{type(self).__name__}", x, self.axis)
        sequence_dim = call.dim(dim, "sequence_dim")
        if sequence_dim == x.dim() - 1:
            self.refuse(
                x,
                "sequence_dim before the last dim",
                "pass e.g. sequence_dim=-2; `sizes` shards the features",
                f"sequence_dim={dim} for shape {list(x.shape)}",
            )
        return sequence_dim

    @property
    def called(self) -> str:
        """The layer's name, for `extra_repr` and errors."""
        return f", {self.path!r}" if self.path else ""

    @contextmanager
    def naming_rows(self) -> Iterator[None]:
        """Add the layer and its `rows` argument to errors of uneven sequences."""
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
        """Raise an error of this rank's input; the other ranks raise `MismatchError`."""
        call = Call(f"nn.{type(self).__name__}", x, self.over)
        call.fail(
            f"the input does not match the layer{self.called}",
            expected=expected,
            got=got or f"shape {list(x.shape)}",
            remedy=remedy,
        )


class Replicated(nn.Module):
    """A replicated module that is applied to different rows on each rank; its gradients are summed over the axis.

    ::

        I -> R    each parameter, by `gm.replicate`; backward sums the ranks' gradients

    Use it for every module with parameters in a sequence parallel region, such as the norms between linear layers. In
    backward, one all-reduce on the axis sums the gradients of all its parameters.

    Args:
        module: the module; equal on all ranks.
        axis: the ranks.

    Raises:
        ArgumentError: the module contains a layer that is already sharded or replicated over the axis.

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
    """Marks that gradients are summed in this module; other layers have an argument of this name."""

    def __init__(self, module: nn.Module, axis: AxisLike = None) -> None:
        super().__init__()
        for name, each in module.named_modules():
            if isinstance(each, Parallel | Replicated) and each.over == axis:
                raise ArgumentError(
                    message(
                        "the module contains a layer that is already sharded or replicated over this axis",
                        op="nn.Replicated",
                        axis=repr(axis),
                        expected="a module without parallel or Replicated layers over the axis",
                        got=f"{type(each).__name__} {name!r}",
                        remedy="wrap the other submodules one by one",
                    )
                )
        self.module = module
        self.over = axis

    def __getattr__(self, name: str) -> Any:
        """Forward attribute access to the module; torch's transformer layers read attributes of inner layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with replicated parameters."""
        names, values = zip(*self.module.named_parameters(), strict=True) if _any(self.module) else ((), ())
        if values:
            values = replicate(tuple(values), self.over)
        return functional_call(self.module, dict(zip(names, values, strict=True)), args, kwargs)


def _any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _entries(module: nn.Module) -> Iterator[tuple[str, str, Parallel | None, str]]:
    """For each key of the state dict: the key, the dense module's key, its parallel layer, and the name in it."""
    parts = dict(module.named_modules(remove_duplicate=False))
    wrapped = [name for name, each in parts.items() if isinstance(each, Replicated)]
    for name in module.state_dict():
        parent, _, last = name.rpartition(".")
        owner = parts.get(parent)
        dense = name
        for prefix in sorted(wrapped, key=len, reverse=True):
            inside = f"{prefix}.module." if prefix else "module."
            if dense.startswith(inside):
                dense = f"{prefix}." * bool(prefix) + dense[len(inside) :]
        yield name, dense, owner if isinstance(owner, Parallel) else None, last


def dense_state_dict(module: nn.Module) -> dict[str, Any]:
    """The full state dict of the corresponding dense module, on every rank. A collective.

    ::

        V -> I    each sharded parameter is gathered along the dim that is sharded; the others are unchanged

    Args:
        module: a module that contains `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding` or
            `Replicated` layers, at any depth.

    Returns:
        A state dict for `load_state_dict` of the dense module. No tensor requires grad.

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
    """Load a dense module's state dict; each rank takes its shards. Sends nothing.

    Args:
        module: as in `dense_state_dict`.
        state: what the dense module's `state_dict` returned.
        strict: as in `torch.nn.Module.load_state_dict`.

    Returns:
        The missing and the unexpected keys, as `load_state_dict`.

    Raises:
        ArgumentError: a tensor does not have the dense shape.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.RowParallelLinear(4, 1, bias=False)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.arange(4.0).view(1, 4)})
        ...     return layer.weight.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    left, local = dict(state), {}
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
                        f"{dense!r} does not have the dense layer's size",
                        op="nn.load_dense_state_dict",
                        axis=str(owner.axis),
                        expected=f"size {sum(cut.sizes)} along dim {cut.dim}",
                        got=f"shape {list(shape)}" if isinstance(value, Tensor) else type(value).__name__,
                        remedy="pass the state dict of the dense module; load a rank's local state dict with "
                        "module.load_state_dict(state)",
                    )
                )
            value = cut.part(value, owner.axis.rank)
        local[name] = value
    return module.load_state_dict({**local, **left}, strict=strict)
