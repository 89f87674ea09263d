"""Tensor parallelism: linear layers, embeddings and cross entropies that are sharded over the ranks of an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from gradmesh._torch import is_fake, transforms_active
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, DTypeError, MismatchError, ShapeError
from gradmesh.nn.clipping import Sharding, remember
from gradmesh.nn.inputs import outside, readable, upcast
from gradmesh.ops.sizes import balanced, intervals
from gradmesh.runtime.checking import FULL
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.runtime.state import check_level
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import checksum
from gradmesh.transport.run import exchange_device, withdraw
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, broadcast, reduce_scatter, replicate, shard
from gradmesh.verbs.collectives import sizes as sizes_of

__all__ = [
    "ColumnParallelLinear",
    "Replicated",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "dense_state_dict",
    "linear_cross_entropy",
    "load_dense_state_dict",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]


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
    """A layer whose parameters in `cuts` are sharded over an axis; the others are replicated."""

    path = ""
    """The name of the layer that `tensor_parallel` replaced, for errors."""
    sequence_dim: int | None = None
    """The dim that is sharded over the ranks, for layers with sequence parallelism."""
    rows: Any = None
    """Each rank's rows along it."""
    holds_parts = True
    """True if its parameters are shards of the dense layer's; see `Holder`."""
    sizes: Sequence[int] = ()
    """Each rank's number of experts, for a layer of experts; `experts` has this rank's by their global index."""

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
            parametrized = getattr(self, "parametrizations", None)
            if isinstance(parametrized, nn.ModuleDict) and name in parametrized:
                own = parametrized[name].named_parameters(recurse=False, remove_duplicate=False)
                yield from ((parametrized[name], each) for each, _ in own)
            else:
                yield self, name

    @property
    def axis(self) -> Axis:
        """The axis, checked to have as many ranks as at construction."""
        axis = resolve(self.over, f"nn.{type(self).__name__}")
        if parametrize.is_parametrized(self):
            self._check_adapters(axis)
        each = [(name, cut.sizes) for name, cut in self.cuts.items()]
        for name, sizes in (*each, ("experts", self.sizes)):
            if sizes and len(sizes) != axis.size:
                raise ArgumentError.of(
                    "the axis has another number of ranks than at the layer's construction",
                    op=f"nn.{type(self).__name__}",
                    axis=str(axis),
                    expected=f"an axis of {len(sizes)} ranks: {name} is sharded as {sizes}",
                    got=f"{axis.size} ranks",
                    remedy="construct the layer on this axis, and load the dense state with "
                    "gm.nn.load_dense_state_dict",
                )
        return axis

    def _check_adapters(self, axis: Axis) -> None:
        """Refuse what peft adds to a sharded parameter for `target_parameters`: its factors would not be sharded."""
        for name, parametrization in self.get_submodule("parametrizations").named_children():
            if any(type(each).__name__.startswith("_Lora") for each in parametrization.children()):
                raise ArgumentError.of(
                    f"an adapter (LoRA) changes the sharded parameter {name} of {self.path or 'a layer'!r}",
                    op=f"nn.{type(self).__name__}",
                    axis=str(axis),
                    expected="low-rank weights that are sharded with the layer",
                    got="low-rank weights whose gradients are those of one rank's shard",
                    remedy="add the adapter with target_modules before tensor_parallel, which then shards both",
                )

    def cut(self, dim: int, total: int, sizes: Sequence[int] | None) -> Cut:
        """Shard `total` entries as in `sizes`, or evenly; the first ranks get one more if there is a remainder."""
        axis = self.axis
        given = sizes if isinstance(sizes, Iterable) else ()
        even = balanced(total, axis.size)
        each = even if sizes is None else tuple(-1 if integer(n) is None else n for n in given)
        if len(each) != axis.size or sum(each) != total or min(each) < 0:
            raise ArgumentError.of(
                "sizes does not match the layer",
                op=f"nn.{type(self).__name__}",
                axis=str(axis),
                expected=f"{axis.size} ints >= 0 that add up to {total}",
                got=f"sizes={sizes!r}",
                remedy=f"pass e.g. sizes={even}, or omit it for this even split",
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

    def summed(self, y: Tensor, here: Axis) -> Tensor:
        """The sum over the ranks; with `sequence_dim`, this rank's rows of it."""
        if self.sequence_dim is None:
            return all_reduce(y, here, dst=I)
        dim = self.along(y, self.sequence_dim)
        with self.naming_rows():
            return reduce_scatter(y, here, dim, sizes=self.rows)

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
            if isinstance(each, (Parallel, Replicated)) and each.over == axis:
                raise ArgumentError.of(
                    "the module contains a layer that is already sharded or replicated over this axis",
                    op="nn.Replicated",
                    axis=repr(axis),
                    expected="a module without parallel or Replicated layers over the axis",
                    got=f"{type(each).__name__} {name!r}",
                    remedy="wrap the other submodules one by one",
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
        named = dict(self.module.named_parameters())
        values = replicate(tuple(named.values()), self.over) if named else ()
        return functional_call(self.module, dict(zip(named, values, strict=True)), args, kwargs)


def _dense_names(module: nn.Module) -> Callable[[str], str]:
    """Maps a key of the state dict to the dense module's: without the `module.` of each `Replicated`."""
    named = module.named_modules(remove_duplicate=False)
    wrapped = [f"{name}.module." for name, each in named if isinstance(each, Replicated)]
    wrapped = sorted((prefix.removeprefix(".") for prefix in wrapped), key=len, reverse=True)

    def dense(name: str) -> str:
        for prefix in wrapped:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name[len(prefix) :]
        return name

    return dense


def entries(module: nn.Module) -> Iterator[tuple[str, str, Parallel | None, str]]:
    """For each key of the state dict: the key, the dense module's key, its parallel layer, and the name in it."""
    parts, dense = dict(module.named_modules(remove_duplicate=False)), _dense_names(module)
    for name in module.state_dict():
        parent, _, last = name.rpartition(".")
        owner, (layer, inside, rest) = parts.get(parent), name.partition("parametrizations.")
        if inside and rest.partition(".")[0] in getattr(parts.get(layer.removesuffix(".")), "cuts", ()):
            raise ArgumentError.of(
                f"{name!r} is a sharded parameter with a parametrization",
                op="nn.dense_state_dict",
                expected="sharded parameters without parametrizations",
                got=f"one in {layer.removesuffix('.') or 'the module'}",
                remedy="remove it before saving, with torch.nn.utils.parametrize.remove_parametrizations",
            )
        yield name, dense(name), owner if isinstance(owner, Parallel) else None, last


def _expert_layers(module: nn.Module) -> list[tuple[str, Parallel]]:
    """The layers of experts, inner ones first, each with the dense prefix of its experts' keys."""
    dense, named = _dense_names(module), list(module.named_modules(remove_duplicate=False))
    found = [(name, each) for name, each in reversed(named) if isinstance(each, Parallel) and each.sizes]
    return [(dense(f"{name}.experts.".removeprefix(".")), each) for name, each in found]


def _with_all_experts(state: dict[str, Any], prefix: str, axis: Axis) -> dict[str, Any]:
    """The state with the experts of all ranks, which have the keys below a prefix."""
    mine = {name: value for name, value in state.items() if name.startswith(prefix)}
    forms = {
        name: (value.to("meta"), value.device.type) if isinstance(value, Tensor) else (value, "")
        for name, value in mine.items()
    }
    every: list[dict[str, tuple[Any, str]]] = [{}] * axis.size
    dist.all_gather_object(every, forms, group=axis.group)
    found = dict[str, Any]()
    for rank, entries_of_rank in enumerate(every):
        for name, (value, device) in entries_of_rank.items():
            if device:
                own = mine[name] if rank == axis.rank else torch.empty_like(value, device=device)
                value = broadcast(own.contiguous(), axis, root=rank, dst=I)
            found[name] = value
    first = next((name for name in state if name in found), None)
    whole = dict[str, Any]()
    for name, value in state.items():
        whole |= found if name == first else {} if name in found else {name: value}
    return whole | found


def dense_state_dict(module: nn.Module) -> dict[str, Any]:
    """The full state dict of the corresponding dense module, on every rank. A collective.

    ::

        V -> I    each sharded parameter is gathered along the dim that is sharded; experts are gathered, each under its
              own name; the others are unchanged

    Args:
        module: a module that contains `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`,
            `Replicated` or `ExpertParallel` layers, at any depth.

    Returns:
        A state dict for `load_state_dict` of the dense module, or of the same module on any number of ranks. No tensor
        requires grad.

    Raises:
        ArgumentError: an axis has another number of ranks than when a layer was constructed; a sharded parameter has
            a parametrization.

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
        for name, dense, owner, last in entries(module):
            value = state[name]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # of fully_shard
            if owner is not None and last in owner.cuts:
                cut = owner.cuts[last]
                value = all_gather(value.contiguous(), owner.axis, cut.dim, sizes=cut.sizes)
            whole[dense] = value
        for prefix, layer in _expert_layers(module):
            whole = _with_all_experts(whole, prefix, layer.axis)
    return whole


def load_dense_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a dense module's state dict; each rank takes its shards and its experts. Sends nothing.

    Args:
        module: as in `dense_state_dict`.
        state: what the dense module's `state_dict` returned.
        strict: as in `torch.nn.Module.load_state_dict`.

    Returns:
        The missing and the unexpected keys, as `load_state_dict`.

    Raises:
        ArgumentError: a tensor does not have the dense shape; with `strict`, keys are missing or unexpected, or the
            state has another number of experts.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.RowParallelLinear(4, 1, bias=False)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.arange(4.0).view(1, 4)})
        ...     return layer.weight.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0.0, 1.0]], [[2.0, 3.0]]]
    """
    left, local = dict(state), {}
    for name, dense, owner, last in entries(module):
        if dense not in state:
            continue
        left.pop(dense, None)
        value = state[dense]
        if owner is not None and last in owner.cuts:
            cut = owner.cuts[last]
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if len(shape) <= cut.dim or shape[cut.dim] != sum(cut.sizes):
                raise ArgumentError.of(
                    f"{dense!r} does not have the dense layer's size",
                    op="nn.load_dense_state_dict",
                    axis=str(owner.axis),
                    expected=f"size {sum(cut.sizes)} along dim {cut.dim}",
                    got=f"shape {list(shape)}" if isinstance(value, Tensor) else type(value).__name__,
                    remedy="pass the state dict of the dense module; load a rank's local state dict with "
                    "module.load_state_dict(state)",
                )
            value = cut.part(value, owner.axis.rank)
        local[name] = value
    for prefix, layer in _expert_layers(module):
        numbers = {name: name[len(prefix) :].partition(".")[0] for name in state if name.startswith(prefix)}
        known = set(map(str, range(sum(layer.sizes))))
        if strict and numbers and known != {*numbers.values()}:
            raise ArgumentError.of(
                f"{prefix.removesuffix('.')!r} has another number of experts in the state than in the layer",
                op="nn.load_dense_state_dict",
                axis=str(layer.axis),
                expected=f"experts 0 to {len(known) - 1}",
                got="experts " + ", ".join(sorted({*numbers.values()}, key=lambda n: (len(n), n))),
                remedy="construct the layer with the state's number of experts, or pass strict=False",
            )
        others = known.difference(map(str, range(*intervals(layer.sizes)[layer.axis.rank])))
        left = {name: value for name, value in left.items() if numbers.get(name) not in others}
    try:
        return module.load_state_dict({**local, **left}, strict=strict)
    except RuntimeError as error:
        raise ArgumentError.of(
            "the state does not match the dense module",
            op="nn.load_dense_state_dict",
            expected="the names and shapes of the dense module's state dict",
            got=str(error),
            remedy="pass the state dict of this model, or strict=False if names are missing or left over",
        ) from None


Rows = Sequence[int] | Literal["balanced"] | None
"""Each rank's rows of a sequence: equal (None), as by `gm.shard` ("balanced"), or explicit sizes."""


def is_conv1d(layer: nn.Module) -> bool:
    """True for the `Conv1D` of transformers: a linear layer with a weight of shape (in, out)."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return (
        type(layer).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and weight.shape[1] == getattr(layer, "nf", None)
    )


class _Linear(Parallel):
    """A linear layer with sharded outputs or inputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False
    """True if the weight has shape (in, out), as in the `Conv1D` of transformers."""

    def __init__(
        self,
        dense: nn.Linear,
        axis: AxisLike,
        sequence_dim: int | None,
        rows: Rows,
        sizes: Sequence[int] | None,
    ) -> None:
        super().__init__(axis)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.sequence_dim, self.rows = sequence_dim, rows
        self._take(dense, sizes)

    @classmethod
    def of(cls, dense: nn.Linear, axis: AxisLike = None, **options: Any) -> Self:
        """Convert a dense layer; `options` are keyword arguments of the class.

        The dense layer may be the `Conv1D` of transformers, whose weight stays transposed.
        """
        sizes = options.pop("sizes", None)
        kind: type[Any] = cls  # a subclass
        transposed = is_conv1d(dense)
        both = tuple(dense.weight.shape) if transposed else (dense.in_features, dense.out_features)
        made: Self = kind(*both, False, axis, device="meta", **options)
        made.transposed = transposed
        made._take(dense, sizes)
        return made

    @property
    def matrix(self) -> Tensor:
        """The local shard of the weight, as (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        """Take this rank's shard of the values."""
        raise NotImplementedError

    def _needs(self, x: Tensor, features: int, remedy: str) -> None:
        """Refuse an input with another number of features."""
        if x.shape[-1:] != (features,):
            self.refuse(x, f"shape (..., {features})", remedy)

    def extra_repr(self) -> str:
        """The dense layer's sizes, and the local sizes."""
        return (
            f"{self.in_features}, {self.out_features}, local {tuple(reversed(self.matrix.shape))}"
            + self.called
        )


class ColumnParallelLinear(_Linear):
    """A linear layer with sharded outputs: the first of a tensor parallel pair.

    ::

        I -> V    x (..., in) -> local outputs (..., out_r)      backward sums x's gradient over the ranks
        V -> V    with `sequence_dim`: local rows of x are gathered first; backward is a reduce-scatter
        I -> I    with `gather_output`: all outputs (..., out) on every rank

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the full layer.
        axis: the ranks.
        sequence_dim: the dim of the input that is sharded over the ranks (sequence parallelism); None: the input is
            replicated.
        rows: with `sequence_dim`, each rank's number of rows along it: None: equal; "balanced": as in `gm.shard`; or
            e.g. `rows=(4, 3)`.
        gather_output: True to gather all outputs on every rank, which then does identical work on them.
        sizes: each rank's number of outputs; None: an even split, with one more on the first ranks if there is a
            remainder.

    The full layer is initialized as `torch.nn.Linear`, and then sharded: with equal seeds on all ranks, the values are
    those of a single process.

    Raises:
        ArgumentError: invalid `sizes`; when called, the input has a wrong number of features.

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al.
    (arXiv:2205.05198), section 4.2.

    Example:
        >>> def on_each_rank():
        ...     torch.manual_seed(0)
        ...     up, down = gm.nn.ColumnParallelLinear(3, 8), gm.nn.RowParallelLinear(8, 3)
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     y = down(up(x).relu())
        ...     y.sum().backward()
        ...     return tuple(up.weight.shape), tuple(y.shape), x.grad.norm().item()
        >>> a, b = gm.launch(on_each_rank, 2, backend="threads")
        >>> a == b, a[:2]
        (True, ((4, 3), (2, 3)))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        gather_output: bool = False,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device, dtype), axis, sequence_dim, rows, sizes
        )
        self.gather_output = gather_output

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        cut = self.cut(0, self.out_features, sizes)
        self.put("weight", dense.weight, Cut(1, cut.sizes) if self.transposed else cut)
        self.put("bias", dense.bias, cut)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs; see the class."""
        self._needs(x, self.in_features, "pass all features on every rank; only outputs are sharded")
        here = self.axis
        if self.sequence_dim is None:
            x = replicate(x, here)
        else:
            dim = self.along(x, self.sequence_dim)
            with self.naming_rows():
                x = all_gather(x, here, dim, sizes="auto" if self.rows == "balanced" else self.rows)
        y = linear(x, self.matrix, self.bias)
        return all_gather(y, here, -1, dst=I, sizes=self.cuts["weight"].sizes) if self.gather_output else y


class RowParallelLinear(_Linear):
    """A linear layer with sharded inputs: the second of a tensor parallel pair.

    ::

        V -> I    local inputs (..., in_r) -> the sum of the ranks' products (..., out)   backward: identity
        V -> V    with `sequence_dim`: local rows of the sum (reduce-scatter)             backward gathers the rows

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the full layer.
        axis: the ranks.
        sequence_dim: the dim of the output that is sharded over the ranks (sequence parallelism). The bias is then
            added to local rows, and its gradient is summed over the ranks.
        rows: with `sequence_dim`, each rank's number of rows along it; as in `ColumnParallelLinear`.
        split_input: True if the input is replicated; each rank takes its shard.
        sizes: each rank's number of inputs; None: an even split.

    Raises:
        ArgumentError: invalid `sizes`; when called, the input has a wrong number of features.

    Source: as `ColumnParallelLinear`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.RowParallelLinear(2, 1, bias=False)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.tensor([[1.0, 10.0]])})
        ...     return layer(torch.tensor([2.0 + gm.rank()])).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [32.0, 32.0]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        split_input: bool = False,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device, dtype), axis, sequence_dim, rows, sizes
        )
        self.split_input = split_input

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        self.put("weight", dense.weight, self.cut(int(not self.transposed), self.in_features, sizes))
        self.put("bias", dense.bias, None)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs; see the class."""
        here = self.axis
        if self.split_input:
            self._needs(x, self.in_features, "pass all features, or omit split_input for local ones")
            x = shard(x, here, -1, sizes=self.cuts["weight"].sizes)
        else:
            self._needs(
                x,
                self.matrix.shape[1],
                "pass this rank's features, or construct the layer with split_input=True for a replicated input",
            )
        y = self.summed(linear(x, self.matrix), here)
        bias: Tensor | None = self.bias
        if bias is not None and self.sequence_dim is not None:
            bias = replicate(bias, here)
        # Under autocast y is narrower than the bias; the dense layer returns the narrow dtype.
        return y if bias is None else y + bias.to(y.dtype)


def local_ids(ids: Tensor, sizes: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """The ids as local indices (0 if another rank's), and a mask of those in this rank's shard."""
    local = ids - sum(sizes[:rank])
    mask = (local >= 0) & (local < sizes[rank])
    return local.where(mask, 0), mask


def check_replicated(ids: Tensor, axis: Axis) -> None:
    """Under `check("full")`, raise if the ids differ between ranks."""
    if check_level() == FULL and not compiling() and not transforms_active():
        replicate(ids, axis)


def out_of_range(ids: Tensor, total: int, ignored: int | None = None) -> str:
    """The range of ids that are not all in the vocabulary; empty if the host would have to wait for them."""
    if not readable(ids):
        return ""
    return outside(ids if ignored is None else ids[ids != ignored], total)


class VocabParallelEmbedding(Parallel):
    """An embedding with the vocabulary sharded over the ranks: each rank looks up its rows, and the results are summed.

    ::

        I -> I    ids (...) -> vectors (..., dim)                     backward: identity
        I -> V    with `sequence_dim`: local rows of the vectors      backward gathers the rows

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in `torch.nn.Embedding`, for the full table.
        axis: the ranks.
        sequence_dim: the dim of the vectors that is sharded over the ranks (sequence parallelism).
        rows: with `sequence_dim`, each rank's number of rows along it; as in `ColumnParallelLinear`.
        sizes: each rank's number of vocabulary entries; None: an even split, with one more on the first ranks if there
            is a remainder. The vocabulary needs no padding.

    Raises:
        ArgumentError: invalid `sizes`; when called, an id is out of range (detected on a CPU).

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.VocabParallelEmbedding(3, 1)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.tensor([[5.0], [6.0], [7.0]])})
        ...     return layer(torch.tensor([2, 0, 1])).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[7.0, 5.0, 6.0], [7.0, 5.0, 6.0]]
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(axis)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_dim, self.rows = sequence_dim, rows
        dense = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._take(dense, sizes)

    @classmethod
    def of(
        cls,
        dense: nn.Embedding,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        sizes: Sequence[int] | None = None,
    ) -> VocabParallelEmbedding:
        """Convert a dense layer.

        Raises:
            ArgumentError: the dense layer uses `max_norm`, `scale_grad_by_freq` or `sparse`, which are not supported.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(dense, option):
                raise ArgumentError.of(
                    f"{option} is not supported for a sharded table",
                    op=f"nn.{cls.__name__}.of",
                    expected=f"an embedding without {option}",
                    got=f"{option}={getattr(dense, option)!r}",
                    remedy=f"construct the embedding without {option}, or do not shard it",
                )
        numbers = (dense.num_embeddings, dense.embedding_dim, dense.padding_idx)
        made = cls(*numbers, axis, sequence_dim=sequence_dim, rows=rows, device="meta")
        made._take(dense, sizes)
        return made

    def _take(self, dense: nn.Embedding, sizes: Sequence[int] | None) -> None:
        self.padding_idx = dense.padding_idx
        self.put("weight", dense.weight, self.cut(0, self.num_embeddings, sizes))

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors; see the class."""
        here, sizes = self.axis, self.cuts["weight"].sizes
        rank = here.rank
        wanted, remedy = f"ids from 0 to {self.num_embeddings - 1}", "pass global vocabulary ids as int64"
        if ids.dtype not in (torch.int64, torch.int32):
            self.refuse(ids, f"{wanted}, as int64", remedy, f"{ids.dtype}")
        if wrong := out_of_range(ids, self.num_embeddings):
            self.refuse(ids, wanted, remedy, f"ids {wrong}")
        check_replicated(ids, here)
        local, mask = local_ids(ids, sizes, rank)
        if sizes[rank]:
            # Not F.embedding: its double backward raises for empty input.
            rows = self.weight.index_select(0, local.reshape(-1)).view(*ids.shape, self.embedding_dim)
            found = rows.masked_fill(~mask.unsqueeze(-1), 0)
            if self.padding_idx is not None:
                found = torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)
        else:  # an empty shard: zeros that are part of the graph
            found = self.weight.sum() * self.weight.new_zeros(*ids.shape, self.embedding_dim)
        return self.summed(found, here)

    def extra_repr(self) -> str:
        """The dense layer's sizes, and the local size."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local entries {self.weight.shape[0]}" + self.called
        )


Style = Literal["column", "column, gathered", "row", "vocab", "replicated"]

_DENSE: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "column, gathered": nn.Linear,
    "row": nn.Linear,
    "vocab": nn.Embedding,
    "replicated": nn.Module,
}


def tensor_parallel(
    module: nn.Module,
    styles: Mapping[str, Style],
    axis: AxisLike = None,
    *,
    sequence_dim: int | None = None,
    rows: Rows = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """Convert layers of a module to tensor parallel layers with the same values, in place.

    Checksums of the parameters are compared between the ranks, in one message (not with `gradmesh.check(0)`).

    Args:
        module: a module of torch layers, with the same values on every rank.
        styles: maps patterns (with * and ?) of names, as in `named_modules`, to styles; the first match counts.
            "column" and "row": `nn.Linear`, or the `Conv1D` of transformers, whose weight stays transposed; "column,
            gathered": a column parallel layer whose outputs are gathered; "vocab": `nn.Embedding`; "replicated": any
            module that works on local rows, such as the norms of a sequence parallel region (where ranks have the same
            rows, its gradients would be W times too large). A linear layer of peft's LoRA is sharded together with
            its low-rank weights.
        axis: the ranks.
        sequence_dim: the dim that is sharded between the pairs of layers (sequence parallelism), for all styles but
            "column, gathered".
        rows: each rank's number of rows along it; as in `ColumnParallelLinear`.
        sizes: for patterns of `styles`, each rank's number of outputs ("column"), inputs ("row") or vocabulary entries
            ("vocab"), e.g. `sizes={"head": (5, 3)}`; the others are sharded evenly.

    Returns:
        The module. Tied parameters stay tied if they are sharded in the same way, and a layer with two names stays one
        layer. Hooks of the replaced layers are dropped.

    Raises:
        ArgumentError: a pattern matches no module; a style does not support the matched module (a subclass that
            overrides `forward`, a layer inside a replicated module, an adapter other than LoRA, or a layer in one); a
            tied parameter would be sharded in two ways, or in only one of its layers; invalid `sizes`. The module is
            unchanged.
        MismatchError: the ranks' modules or arguments differ; the error names the parameters. The module is unchanged.

    Example:
        >>> import copy
        >>> whole = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        >>> def on_each_rank():
        ...     net, x = copy.deepcopy(whole), torch.ones(2, 3)
        ...     dense = net(x)
        ...     gm.nn.tensor_parallel(net, {"0": "column", "2": "row"})
        ...     return torch.allclose(net(x), dense), net[0].weight.numel()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(True, 12), (True, 12)]
    """
    here = resolve(axis, "nn.tensor_parallel")
    names = dict[nn.Module, list[str]]()
    for name, each in module.named_modules(remove_duplicate=False):
        names.setdefault(each, []).append(name)
    try:
        made = _Conversion(module, names, styles, axis, here, sequence_dim, rows, sizes or {}).layers()
    except ArgumentError as error:
        withdraw("nn.tensor_parallel", here, None, error)
        raise
    signature = f"tensor_parallel({dict(styles)}, {sequence_dim=}, {rows=}, {sizes=})"
    _compare_parameters(module, here, signature)
    # All checks come before the first change: on errors the module is unchanged.
    for each, new in made.items():
        for name in names[each]:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, new)
            for ancestor in _ancestors(module, name):
                # torch's inference fast path reads the weights of inner layers without calling them.
                if isinstance(ancestor, nn.TransformerEncoderLayer):
                    ancestor.activation_relu_or_gelu = 0
                elif isinstance(ancestor, nn.TransformerEncoder):
                    ancestor.use_nested_tensor = False
    return module


@dataclass(frozen=True)
class _Conversion:
    """A call of `tensor_parallel`, whose `names` are those of each module."""

    module: nn.Module
    names: dict[nn.Module, list[str]]
    styles: Mapping[str, Style]
    axis: AxisLike
    here: Axis
    sequence_dim: int | None
    rows: Rows
    sizes: Mapping[str, Sequence[int]]

    def layers(self) -> dict[nn.Module, nn.Module]:
        """The parallel layer for each matched module."""
        if unknown := [
            pattern for pattern in self.sizes if self.styles.get(pattern, "replicated") == "replicated"
        ]:
            self._refuse(
                "sizes has patterns that are not in styles, or that are replicated",
                f"patterns of styles that are not replicated: {', '.join(map(repr, self.styles))}",
                ", ".join(map(repr, unknown)),
                "use the same pattern in styles and in sizes",
            )
        chosen = self._chosen()
        made, tied = dict[nn.Module, nn.Module](), dict[int, tuple[nn.Parameter, object]]()
        for each, (style, pattern) in chosen.items():
            name = self.names[each][0]
            new = made[each] = self._made(each, style, self.sizes.get(pattern))
            new.training = each.training
            if isinstance(new, Parallel):
                new.path = name
                self._tie(new, dict(each.named_parameters(recurse=False)), tied, name)
        for each, (name, *_) in self.names.items():
            kept = () if isinstance(made.get(each), Parallel) else each.named_parameters(recurse=False)
            if any(id(parameter) in tied for _, parameter in kept):
                self._refuse(
                    f"a parameter of {name or 'the module itself'!r} is tied to a parameter that would be sharded",
                    "a style for both layers, which shards them in the same way",
                    f"styles for {', '.join(self.styles)}",
                    f"add {name!r} to styles, or untie the parameters",
                )
        return made

    def _chosen(self) -> dict[nn.Module, tuple[Style, str]]:
        """The modules to replace, with the style of each, and the pattern that matched it or its adapter."""
        unused, chosen = dict.fromkeys(self.styles), dict[nn.Module, tuple[Style, str]]()
        for each, names in self.names.items():
            fitting = (next((one for one in self.styles if fnmatchcase(name, one)), None) for name in names)
            patterns = [pattern for pattern in fitting if pattern is not None]
            if not patterns or isinstance(each, (Parallel, Replicated)):
                continue
            for pattern in patterns:
                unused.pop(pattern, None)
            name, style = names[0], self.styles[patterns[0]]
            if any(self.styles[pattern] != style for pattern in patterns):
                got = ", ".join(f"{pattern!r}: {self.styles[pattern]!r}" for pattern in patterns)
                problem = f"{name!r} is a layer with two names, which have different styles"
                self._refuse(
                    problem, "the same style for both names", got, f"use {style!r} for both patterns"
                )
            ancestors = _ancestors(self.module, name)
            if why := _unsupported(each, style, ancestors):
                self._refuse(
                    f"cannot convert {name or 'the module itself'!r} with style {style!r}: {why}",
                    "a submodule of the type that the style supports: "
                    + ", ".join(f"{kind!r} {of.__name__}" for kind, of in _DENSE.items()),
                    f"{patterns[0]!r}: {style!r} for {type(each).__name__} {name!r}",
                    "use plain LoRA on a linear layer, with a pattern that matches only the layer that contains "
                    "base_layer; or merge the adapters first"
                    if "adapter" in why
                    else "use a style of this list, and a pattern that matches only layers of its type",
                )
            within = [
                outer
                for other in names
                for outer in _ancestors(self.module, other)
                if outer in chosen or (isinstance(outer, (Parallel, Replicated)) and outer.over == self.axis)
            ]
            if within and style != "replicated":
                self._refuse(
                    f"{name!r} is inside a module that is replicated over the same ranks",
                    "replicated and sharded layers that are not nested",
                    f"{patterns[0]!r}: {style!r}",
                    "use patterns that replicate its siblings one by one, instead of the enclosing module",
                )
            if not within:  # else the enclosing module replicates it too
                adapted = _adapted(each, style, self.sequence_dim is not None)
                chosen |= {part: (how, patterns[0]) for part, how in (adapted or {each: style}).items()}
        if unused:
            self._refuse(
                "a pattern matches no module",
                "names as in named_modules: "
                + ", ".join(name for name, _ in self.module.named_modules() if name),
                ", ".join(map(repr, unused)),
                "correct the pattern, or remove it",
            )
        return chosen

    def _made(self, each: Any, style: Style, sizes: Sequence[int] | None) -> nn.Module:
        if style == "replicated":
            return Replicated(each, self.axis)
        options: dict[str, Any] = {"rows": self.rows, "sizes": sizes}
        if style == "column, gathered":
            return ColumnParallelLinear.of(each, self.axis, gather_output=True, **options)
        kinds: dict[str, Any] = {"column": ColumnParallelLinear, "row": RowParallelLinear}
        made: nn.Module = kinds.get(style, VocabParallelEmbedding).of(
            each, self.axis, sequence_dim=self.sequence_dim, **options
        )
        return made

    def _tie(self, made: Parallel, old: dict[str, nn.Parameter], tied: dict[int, Any], name: str) -> None:
        """Share the sharded parameters of tied dense parameters."""
        for key, dense in old.items():
            cut = made.cuts.get(key)
            known = tied.setdefault(id(dense), (getattr(made, key), cut, dense))
            if known[1] != cut:
                self._refuse(
                    f"the tied parameter {name}.{key} would be sharded in two ways",
                    f"the same in both layers, {known[1]}",
                    str(cut),
                    "shard both layers along the same dim (e.g. a vocab parallel table and a column parallel head), or "
                    "untie them",
                )
            setattr(made, key, known[0])

    def _refuse(self, problem: str, expected: str, got: str, remedy: str) -> None:
        axis = str(self.here)
        raise ArgumentError.of(
            problem, op="nn.tensor_parallel", axis=axis, expected=expected, got=got, remedy=remedy
        )


def _compare_parameters(module: nn.Module, here: Axis, signature: str) -> None:
    """Compare replicated parameters between ranks, by checksums."""
    if here.size == 1 or not check_level():
        return
    ours, known = set(here.global_ranks), Sharding()
    compared = {
        name: parameter
        for name, parameter in module.named_parameters()
        if type(parameter) is nn.Parameter
        and not parameter.is_meta
        and not is_fake(parameter)
        and not any(len(ours & set(axis.global_ranks)) > 1 for axis in known.over(parameter))
    }
    shapes = [(name, tuple(each.shape), each.dtype) for name, each in compared.items()]
    number = checksum(torch.tensor(list(repr(shapes).encode()), dtype=torch.uint8))
    signature += f" of {len(shapes)} parameters, names and shapes checksum {number}"
    local = torch.tensor(
        [checksum(each.detach()) for each in compared.values()], device=exchange_device(here)
    )
    with torch.no_grad():
        rows: Tensor = all_gather(Packed(local.unsqueeze(0), signature), here)  # type: ignore[call-overload]
    same = (rows == rows[:1]).all(0).tolist()
    differing = [name for name, equal in zip(compared, same, strict=True) if not equal]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        others = [str(rank) for rank, row in enumerate(rows.tolist()) if row != rows[0].tolist()]
        raise MismatchError.of(
            "the ranks' modules have different values",
            op="nn.tensor_parallel",
            axis=str(here),
            expected="the same dense module on every rank, before it is sharded",
            got=f"{', '.join(differing[:5])}{more} differ between rank {', '.join(others)} and rank 0",
            remedy="construct the module after torch.manual_seed(0) on every rank, load the same checkpoint, or "
            "gradmesh.broadcast the parameters; mark custom shards with gradmesh.nn.mark_sharded first",
        )


def _ancestors(module: nn.Module, name: str) -> list[nn.Module]:
    """The modules that enclose the one of this name, outermost first."""
    steps = name.split(".") if name else []
    return [module.get_submodule(".".join(steps[:depth])) for depth in range(len(steps))]


def _unsupported(each: nn.Module, style: Style, ancestors: list[nn.Module]) -> str:
    """Why a style does not support a module; empty if it does."""
    kind = _DENSE.get(style)
    if _is_adapter(each) and style != "replicated":
        if _adapted(each, style, False) is None:
            return (
                "it is an adapter other than LoRA on a linear layer, whose own weights would not be sharded"
            )
        return _unsupported(each.get_submodule("base_layer"), style, [nn.Module()])
    if style != "replicated" and any(map(_is_adapter, ancestors)):
        return "it is a part of an adapter (LoRA), whose other parts would not be sharded"
    if ancestors and kind is nn.Linear and is_conv1d(each):
        return ""
    if kind is None:
        return "unknown style"
    if not ancestors:
        return "it is the root module, which cannot be replaced"
    if not isinstance(each, kind):
        return f"it is a {type(each).__name__}"
    if isinstance(ancestors[-1], nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weights without calling it"
    if kind is not nn.Module and type(each).forward is not kind.forward:
        return f"{type(each).__name__} overrides forward"
    if kind is not nn.Module and "weight" not in dict(each.named_parameters(recurse=False)):
        return "its weight is computed from other parameters"
    return ""


def _is_adapter(each: nn.Module) -> bool:
    """True for a layer of peft, which adds low-rank weights to the layer that it wraps."""
    return any(name == "base_layer" for name, _ in each.named_children())


def _adapted(each: nn.Module, style: Style, by_rows: bool) -> dict[nn.Module, Style] | None:
    """How to shard a LoRA layer of peft, base_layer(x) + B(A(x)): the parts with sharded features, as the base layer.

    The other factor works on all features, `by_rows` on local rows. None for any other module or style.
    """
    parts = {name: part for name, part in each.named_children() if any(True for _ in part.parameters())}
    parts.pop("lora_dropout", None)
    low, high = parts.get("lora_A"), parts.get("lora_B")
    if (
        style not in ("column", "column, gathered", "row")
        or type(each).__name__ != "Linear"  # other classes have a forward of their own, as some variants do
        or getattr(each, "lora_variant", None)
        or set(parts) != {"base_layer", "lora_A", "lora_B"}
        or not (isinstance(low, nn.ModuleDict) and isinstance(high, nn.ModuleDict))
        or any(type(factor) is not nn.Linear for factor in (*low.values(), *high.values()))
    ):
        return None
    cut, whole = (low, high) if style == "row" else (high, low)
    found: dict[nn.Module, Style] = {parts["base_layer"]: style, **dict.fromkeys(cut.values(), style)}
    if by_rows and style != "column, gathered":
        found |= dict.fromkeys(whole.values(), "replicated")
    return found


Reduction = Literal["mean", "sum", "none"]

SmoothingOver = Literal["all", "others"]
"""The vocabulary entries over which label smoothing spreads the target's weight: all, or all but the target."""


@dataclass(frozen=True)
class _Form:
    """The options of a cross entropy, and its name."""

    verb: str
    ignore_index: int
    label_smoothing: float
    smoothing_over: SmoothingOver
    z_loss: float
    reduction: Reduction

    def smoothing(self, vocabulary: int) -> float:
        """The weight of the mean over all entries that is equivalent to this smoothing."""
        if self.smoothing_over == "all":
            return self.label_smoothing
        return self.label_smoothing * vocabulary / (vocabulary - 1) if vocabulary > 1 else 0.0


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: AxisLike = None,
    *,
    sizes: Sequence[int] | Literal["auto"] = "auto",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: SmoothingOver = "all",
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Cross entropy of logits that are sharded over the vocabulary.

    ::

        V -> I    local logits (..., v_r), targets (...) -> loss () or (...)    backward: the local logits' gradient

        l = (1 - e) (z - x_t) + e (z - mean(x)) + c z^2,    z = log sum_v exp(x_v)   over the vocabulary of all ranks

    For each token, one all-reduce takes the maximum of one number and one sums two numbers (three with label
    smoothing), in float32 at least. Every rank gets the same loss, and does identical work on it.

    Args:
        logits: this rank's logits, the vocabulary along the last dim.
        target: global vocabulary ids; the same on every rank.
        axis: the ranks.
        sizes: each rank's number of vocabulary entries, e.g. `sizes=(4, 3)`; "auto": exchanged.
        ignore_index: a target that is ignored; the mean is over the others.
        label_smoothing: e, the share of the target's weight that is spread over the vocabulary.
        smoothing_over: "all": over all V entries, e / V each, as in `torch.nn.functional.cross_entropy`; the target
            keeps 1 - e + e / V. "others": over the V - 1 entries that are not the target, e / (V - 1) each, as in
            Megatron; the target keeps 1 - e. That is the formula above with e V / (V - 1) in place of e.
        z_loss: c, the weight of the squared log-normalizer z.
        reduction: "mean", "sum" or "none".

    Raises:
        ArgumentError: shapes or sizes do not match; a target is out of range (detected on a CPU).

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; smoothing over the others: its
    `vocab_parallel_cross_entropy(..., label_smoothing)`, with V the full vocabulary; z-loss: Chowdhery et al., PaLM
    (arXiv:2204.02311), section 5.

    Example:
        >>> def on_each_rank():
        ...     logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        ...     local = gm.shard(logits, dim=-1)
        ...     return round(gm.nn.vocab_parallel_cross_entropy(local, torch.tensor([1, 0])).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.8133, 0.8133]
    """
    form = _Form(
        "nn.vocab_parallel_cross_entropy", ignore_index, label_smoothing, smoothing_over, z_loss, reduction
    )
    call = _checked(form, logits, target, axis)
    each = _sizes(call, sizes, logits, -1)
    ids, here = _local_targets(form, call, target, each)
    parts = _parts(logits.reshape(len(ids), logits.shape[-1]), ids, here)
    return _reduced(form, _losses(form, parts, here, each, call), target)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    axis: AxisLike = None,
    *,
    bias: Tensor | None = None,
    sizes: Sequence[int] | Literal["auto"] = "auto",
    src: Convention = I,
    tile: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: SmoothingOver = "all",
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Cross entropy of the logits `x @ weight.T + bias`, with one tile of logits in memory at a time.

    ::

        I or R, V -> I    x (..., d), local rows of weight (v_r, d), targets (...) -> loss () or (...)
                          backward: x's gradient is summed over the ranks; the weight's gradient is local

    The logits of `tile` tokens are computed, reduced to three numbers for each token, and recomputed in backward.

    Args:
        x: the hidden states, replicated.
        weight: this rank's rows of the table, as in `VocabParallelEmbedding` and `ColumnParallelLinear`.
        bias: of this rank's vocabulary entries.
        src: the type of `x`. `gm.I`: every rank computed it by identical work; `gm.R`: the result of `gm.all_gather`,
            as in sequence parallelism.
        tile: number of tokens at a time.
        target: global vocabulary ids; the same on every rank.
        axis: the ranks.
        sizes, ignore_index, label_smoothing, smoothing_over, z_loss, reduction: as in `vocab_parallel_cross_entropy`.

    Raises:
        ArgumentError: shapes or sizes do not match; a target is out of range (detected on a CPU).

    Example:
        >>> def on_each_rank():
        ...     x, table = torch.eye(2), torch.tensor([[1.0, 3.0], [2.0, 4.0]])
        ...     local = gm.shard(table)
        ...     return round(gm.nn.linear_cross_entropy(x, local, torch.tensor([1, 0]), tile=1).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.8133, 0.8133]
    """
    form = _Form("nn.linear_cross_entropy", ignore_index, label_smoothing, smoothing_over, z_loss, reduction)
    call = _checked(form, x, target, axis)
    rows = integer(tile)
    fits = (
        weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits or rows is None or rows < 1:
        call.fail(
            "tile must be a positive int" if fits else "the shapes of x, weight and bias do not match",
            expected="x (..., d), weight (v_r, d), bias (v_r,) with this rank's v_r entries; tile an int >= 1",
            got=f"x {list(x.shape)}, weight {list(weight.shape)}, "
            f"bias {None if bias is None else list(bias.shape)}, tile={tile!r}",
            remedy="pass this rank's rows of the table, e.g. weight=gm.shard(table)"
            if not fits
            else "omit it for 1024",
        )
    each = _sizes(call, sizes, weight, 0)
    ids, here = _local_targets(form, call, target, each)
    kind = call.choose("src", src, {I: I, R: R})
    vectors = (replicate(x, call.axis) if kind is I else x).reshape(target.numel(), x.shape[-1])
    tiles = zip(vectors.split(rows), ids.split(rows), here.split(rows), strict=True)
    # torch.func transforms do not support checkpoint's hooks; without grad there is no backward.
    once = not torch.is_grad_enabled() or transforms_active()
    made = [
        _of_tile(*one, weight, bias)
        if once
        else checkpoint(_of_tile, *one, weight, bias, use_reentrant=False, preserve_rng_state=False)
        for one in tiles
    ]
    largest, sums = zip(*made, strict=True)
    parts = torch.cat(largest), torch.cat(sums, dim=1)
    return _reduced(form, _losses(form, parts, here, each, call), target)


def _of_tile(
    x: Tensor, ids: Tensor, here: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _parts(linear(x, weight, bias), ids, here)


def _parts(logits: Tensor, ids: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's local maximum; and, relative to it, the sum of exponentials, the target's logit, and the sum."""
    logits = upcast(logits)
    if not logits.shape[-1]:
        zeros = logits.sum(-1)  # part of the graph
        return torch.full_like(zeros, -torch.inf).detach(), torch.stack((zeros, zeros, zeros))
    # The maximum cancels, so it is detached.
    largest = logits.detach().amax(-1)
    above = logits - _finite(largest).unsqueeze(-1)
    at_target = above.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return largest, torch.stack((above.exp().sum(-1), torch.where(here, at_target, 0), above.sum(-1)))


def _finite(shift: Tensor) -> Tensor:
    return torch.where(shift.isfinite(), shift, 0)


def _losses(
    form: _Form, parts: tuple[Tensor, Tensor], here: Tensor, each: Sequence[int], call: Call
) -> Tensor:
    """Each token's loss."""
    largest, (total, at_target, everything) = parts
    shift = _finite(all_reduce(largest, call.axis, op="max", dst=I))
    # Relative to the maximum over all ranks, differences of large logits lose no digits.
    moved = _finite(largest) - shift
    scale = torch.where(total.detach() > 0, moved, 0).exp()
    at_target = torch.where(here, at_target + moved, 0)
    sums = [total * scale, at_target]
    if form.label_smoothing:
        sums.append(everything + moved * each[call.axis.rank])
    total, at_target, *rest = all_reduce(torch.stack(sums), call.axis, dst=I)
    z: Tensor = total.log()
    loss: Tensor = z - at_target
    if rest:
        smoothing = form.smoothing(sum(each))
        loss = (1 - smoothing) * loss + smoothing * (z - rest[0] / sum(each))
    return loss if form.z_loss == 0 else loss + form.z_loss * (z + shift) ** 2


def _reduced(form: _Form, losses: Tensor, target: Tensor) -> Tensor:
    counted = target.reshape(-1) != form.ignore_index
    losses = torch.where(counted, losses, 0)
    if form.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if form.reduction == "mean" else losses.sum()


def _checked(form: _Form, x: Tensor, target: Tensor, axis: AxisLike) -> Call:
    call = Call(form.verb, x, axis)
    call.choose("reduction", form.reduction, {"mean": 0, "sum": 0, "none": 0})
    call.choose("smoothing_over", form.smoothing_over, {"all": 0, "others": 0})
    known = isinstance(target, Tensor)
    fits = (
        known and x.dim() > 0 and target.shape == x.shape[:-1] and target.dtype in (torch.int64, torch.int32)
    )
    if not fits:
        call.fail(
            "target does not have one id for each token",
            expected=f"a tensor of int64 of shape {list(x.shape[:-1])}",
            got=f"{target.dtype} of shape {list(target.shape)}" if known else type(target).__name__,
            remedy="pass vocabulary ids with the shape of the operand without its last dim",
        )
    if not x.is_floating_point():
        call.fail(
            "the operand is not floating point",
            expected="a tensor of a floating-point dtype",
            got=str(x.dtype),
            remedy="convert it, e.g. x.float()",
            kind=DTypeError,
        )
    for name, weight, most in (("label_smoothing", form.label_smoothing, 1.0), ("z_loss", form.z_loss, inf)):
        if not isinstance(weight, (int, float)) or not 0 <= weight <= most:
            call.fail(
                f"{name} is out of range",
                expected=f"a number with 0 <= {name} <= {most:g}",
                got=f"{name}={weight!r}",
                remedy=f"pass e.g. {name}=0.1, or omit it",
            )
    check_replicated(target, call.axis)
    return call


def _sizes(call: Call, sizes: Sequence[int] | Literal["auto"], sharded: Tensor, dim: int) -> Sequence[int]:
    """Each rank's number of vocabulary entries."""
    if isinstance(sizes, str):
        call.choose("sizes", sizes, {"auto": 0})
        return sizes_of(sharded.detach(), call.axis, dim)
    given, local = [integer(n) for n in sizes] if isinstance(sizes, Iterable) else [], sharded.shape[dim]
    each = [n for n in given if n is not None and n >= 0]
    if len(given) != call.axis.size or len(each) != len(given) or each[call.axis.rank] != local:
        call.fail(
            "sizes does not match the ranks' vocabulary entries",
            expected=f"{call.axis.size} ints >= 0, with sizes[{call.axis.rank}] == {local}",
            got=f"sizes={sizes!r}",
            remedy='pass each rank\'s number of entries, e.g. sizes=(4, 3) for 7 over 2 ranks, or sizes="auto"',
        )
    return each


def _local_targets(form: _Form, call: Call, target: Tensor, each: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The targets of all tokens, which have to be in range, as `local_ids`."""
    if wrong := out_of_range(target, sum(each), form.ignore_index):
        call.fail(
            "a target is out of range",
            expected=f"0 <= target < {sum(each)}, or ignore_index={form.ignore_index}",
            got=f"targets {wrong}",
            remedy="pass global vocabulary ids, on every rank",
        )
    return local_ids(target.reshape(-1), each, call.axis.rank)
