"""Gradient clipping by the norm of the dense model, with parameters that are sharded, replicated or on one rank only.

Each rank computes its part of the norm, and one small all-gather combines them. A shard's contribution has the weight
|G| / W, where G are the ranks over which the parameter is sharded and W are all ranks. The sets G of a parameter
partition the ranks, so every dense parameter counts exactly once.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import utils

from gradmesh._torch import default_group
from gradmesh._torch.fsdp import flattened, is_flattened
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError
from gradmesh.nn.inputs import HALVES
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.runtime.state import check_level
from gradmesh.transport.run import constants, withdraw
from gradmesh.verbs.collectives import all_gather

TensorT = TypeVar("TensorT", bound=Tensor)
Place = tuple[int, str]
"""A parameter's location: the id of its module, and its name in it."""

_MARK = "_gradmesh_sharded_over"
"""The attribute of a marked parameter: the axes over which it is sharded."""


class Holder(Protocol):
    """A layer with sharded parameters, or with parameters that exist on one rank only."""

    @property
    def axis(self) -> Axis:
        """The ranks that have the other shards."""
        ...

    @property
    def holds_parts(self) -> bool:
        """True if each parameter is a shard of one tensor; False if ranks hold distinct parameters (experts)."""
        ...

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The parameters, each as its module and its name in it."""
        ...


_holders = WeakSet[Holder]()
_lock = threading.Lock()


def remember(layer: Holder) -> None:
    """Register a layer for `Sharding`, by weak reference.

    Layers are registered, not parameters: a copy of the layer has other parameters, and wrappers such as
    `fully_shard` replace them.
    """
    with _lock:
        _holders.add(layer)


class Sharding:
    """The sharded parameters at the time of construction."""

    def __init__(self) -> None:
        with _lock:
            layers = list(_holders)
        self._layers = defaultdict[Place, list[Holder]](list)
        self._places = dict[int, Place]()
        for layer in layers:
            for module, name in layer._sharded():
                place = id(module), name
                self._layers[place].append(layer)
                parameter = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)
                if parameter is not None:
                    self._places[id(parameter)] = place
                    # In a functional_call, maybe of a rank on another thread, it may be a non-leaf tensor.
                    if parameter.is_leaf and parameter.grad is not None:
                        self._places[id(parameter.grad)] = place

    def at(self, place: Place) -> list[Holder]:
        """The layers that hold the parameter at a location."""
        return self._layers.get(place, [])

    def of(self, tensor: Tensor) -> list[Holder]:
        """The layers that hold a parameter or, of a gradient, its parameter."""
        place = self._places.get(id(tensor))
        return [] if place is None else self._layers[place]

    def over(self, tensor: Tensor, layers: Iterable[Holder] | None = None) -> list[Axis]:
        """The axes over which a parameter (or a gradient's parameter) is sharded; `layers` defaults to `of(tensor)`."""
        held = [layer.axis for layer in (self.of(tensor) if layers is None else layers)]
        return [axis for axis in (*getattr(tensor, _MARK, ()), *held) if axis.size > 1]


def mark_sharded(parameter: TensorT, axis: AxisLike = None) -> TensorT:
    """Mark a parameter as a shard (each rank of the axis holds a different part), for `gm.nn.clip_grad_norm_`.

    Layers of `gm.nn` and DTensors need no mark. Mark custom shards, and parameters that exist on one rank of the axis
    only, such as the layers of a pipeline stage. If a parameter is sharded over several axes, mark it once for each.
    A copy of the parameter has no mark, nor has the parameter that replaces it in `fully_shard`: mark the parameters
    that the optimizer gets.

    Args:
        parameter: the parameter, or a tensor for `gm.nn.get_total_norm`.
        axis: the ranks that hold the shards.

    Returns:
        The parameter.

    Raises:
        ArgumentError: `parameter` is not a tensor.

    Example:
        >>> def on_each_rank():
        ...     weight = gm.nn.mark_sharded(torch.nn.Parameter(torch.zeros(1)))
        ...     weight.grad = torch.tensor([(3.0, 4.0)[gm.rank()]])
        ...     return gm.nn.clip_grad_norm_([weight], 1.0).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [5.0, 5.0]
    """
    here = resolve(axis, "nn.mark_sharded")
    if not isinstance(parameter, Tensor):
        raise ArgumentError.of(
            "parameter is not a tensor",
            op="nn.mark_sharded",
            axis=str(here),
            expected="a torch.nn.Parameter or another tensor",
            got=type(parameter).__name__,
            remedy="for a module: for p in module.parameters(): gm.nn.mark_sharded(p)",
        )
    known = getattr(parameter, _MARK, ())
    if here not in known:
        setattr(parameter, _MARK, (*known, here))
    return parameter


Tensors = Tensor | Iterable[Tensor] | nn.Module
Group = tuple[int, ...]
"""The global ranks of an axis."""


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    axis: AxisLike = None,
) -> Tensor:
    """Scale gradients so that the gradient norm of the dense model is at most `max_norm`. A collective.

    `torch.nn.utils.clip_grad_norm_` computes the norm of this rank's gradients only. Here every rank gets the norm of
    the full model, and the same factor, bit for bit::

        sharded (gm.nn, DTensor, FSDP, `gm.nn.mark_sharded`)    the shards of all ranks count
        experts of gm.nn.ExpertParallel                         the experts of all ranks count
        anything else, and tied parameters                      counts once, not once on each rank

    Call it on all ranks of `axis`, after the last backward and before the optimizer's step. It sends one message of
    four numbers, independent of the number of parameters and axes (for norm_type=0, two numbers per parameter).
    On a device the host does not wait for it, except with error_if_nonfinite (once).

    Args:
        parameters: the parameters, or the module. Pass a `FullyShardedDataParallel` as the module, not its parameters.
        max_norm: the largest norm; the same on every rank.
        norm_type: the exponent, or math.inf; the same on every rank.
        error_if_nonfinite: True to raise torch's RuntimeError if the norm is NaN or infinite, on every rank.
        foreach: as in torch.
        axis: all ranks that hold a part of the model. None: all ranks of the world.

    Returns:
        The norm before clipping, a 0-dim tensor in float32 or float64; the same on every rank.

    Raises:
        ArgumentError: an element is not a tensor, is sharded over ranks outside of `axis`, or was flattened by FSDP and
            its module is not passed.
        MismatchError: a parameter that counts as replicated has gradients of different norms on the ranks (compared on
            CPUs): it is an unmarked shard, or its gradient was not summed over the ranks. Or the ranks' arguments
            differ.

    Example:
        >>> import copy
        >>> dense, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), torch.ones(1, 3)
        >>> def on_each_rank():
        ...     net = gm.nn.tensor_parallel(copy.deepcopy(dense), {"0": "column", "1": "row"})
        ...     net(x).sum().backward()
        ...     return gm.nn.clip_grad_norm_(net.parameters(), 1.0)
        >>> norms = gm.launch(on_each_rank, 2, backend="threads")
        >>> dense(x).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
        >>> [torch.allclose(each, norm) for each in norms]
        [True, True]
    """
    call = _Call.of("nn.clip_grad_norm_", axis)
    with torch.no_grad():
        with call.aborting():
            held = _of_gradients(call, parameters)
        signature = f"clip_grad_norm_(max_norm={float(max_norm)}, norm_type={float(norm_type)})"
        total = _norm(call, signature, held, float(norm_type), error_if_nonfinite, foreach)
        alone = {id(each.stored): each.stored for each in held if each.stored is not None}.values()
        _scaled = [SimpleNamespace(grad=each) for each in alone]
        utils.clip_grads_with_norm_(_scaled, max_norm, total, foreach)  # type: ignore[arg-type]  # anything with .grad
        return total


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp each element of the gradients to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_`.

    Sends nothing, except that DTensor gradients with a partial placement are reduced first.

    Args:
        parameters: the parameters, or the module.
        clip_value: the largest absolute value.
        foreach: as in torch.

    Raises:
        ArgumentError: an element is not a tensor.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([0.5, -3.0])
        >>> gm.nn.clip_grad_value_([w], 1.0)
        >>> w.grad.tolist()
        [0.5, -1.0]
    """
    with torch.no_grad():
        parts = []
        for each in _listed(_Call("nn.clip_grad_value_", None), parameters):
            grad = each.grad
            if grad is not None:
                whole = _summed(grad)
                if whole is not grad:
                    each.grad = whole
                parts.append(SimpleNamespace(grad=_local(whole)))
        utils.clip_grad_value_(parts, clip_value, foreach)  # type: ignore[arg-type]  # anything with .grad


def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    axis: AxisLike = None,
) -> Tensor:
    """The norm of the dense model's tensors, as `torch.nn.utils.get_total_norm` on one process. A collective.

    Args:
        tensors: gradients of the parameters of `gm.nn` layers, DTensors, tensors marked by `gm.nn.mark_sharded`, and
            others, which count as replicated; or a module, for the gradients of its parameters.
        norm_type, error_if_nonfinite, foreach, axis: as in `gm.nn.clip_grad_norm_`.

    Returns:
        A 0-dim tensor, the same on every rank.

    Raises:
        ArgumentError, MismatchError: as in `gm.nn.clip_grad_norm_`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.ColumnParallelLinear(1, 2, bias=False)
        ...     (layer(torch.ones(1)) * (3.0, 4.0)[gm.rank()]).sum().backward()
        ...     return gm.nn.get_total_norm([layer.weight.grad]).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [5.0, 5.0]
    """
    call = _Call.of("nn.get_total_norm", axis)
    with torch.no_grad():
        with call.aborting():
            held = (_of_gradients if isinstance(tensors, nn.Module) else _of_tensors)(call, tensors)
        signature = f"get_total_norm(norm_type={float(norm_type)})"
        return _norm(call, signature, held, float(norm_type), error_if_nonfinite, foreach)


@dataclass(frozen=True)
class _Call:
    """A call on the ranks that hold the model; None: a single process."""

    op: str
    here: Axis | None

    @classmethod
    def of(cls, op: str, axis: AxisLike) -> _Call:
        group = default_group() if axis is None else axis
        return cls(op, None if group is None else resolve(group, op))

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """If this rank raises ArgumentError, the other ranks raise too."""
        try:
            yield
        except ArgumentError as error:
            if self.here is not None:
                withdraw(self.op, self.here, None, error)
            raise

    def fail(self, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
        axis = None if self.here is None else str(self.here)
        raise ArgumentError.of(problem, op=self.op, axis=axis, expected=expected, got=got, remedy=remedy)


@dataclass(frozen=True)
class _Part:
    """This rank's shard of one parameter's gradient."""

    values: Tensor | None  # the shard, reduced if it is a DTensor with a partial placement; None: no gradient
    stored: Tensor | None  # the tensor that contains it, which may be larger
    over: frozenset[Group]  # the ranks over which it is sharded, for each axis
    alone: bool  # whether it is a distinct parameter (an expert), not a shard of a tensor
    dtype: torch.dtype
    device: torch.device

    @property
    def ranks(self) -> int:
        """The number of ranks over which it is sharded."""
        return math.prod(map(len, self.over))


def _listed(call: _Call, tensors: Tensors) -> list[Tensor]:
    """The tensors, without duplicates."""
    given: Iterable[Any] = (
        tensors.parameters()
        if isinstance(tensors, nn.Module)
        else (tensors,)
        if isinstance(tensors, Tensor)
        else tensors
    )
    found = dict[int, Tensor]()
    for each in given:
        if not isinstance(each, Tensor):
            call.fail(
                "an element is not a tensor",
                "an iterable of tensors, or a module",
                type(each).__name__,
                "pass model.parameters(); of named_parameters() take the second elements",
            )
        found[id(each)] = each
    return list(found.values())


def _of_gradients(call: _Call, parameters: Tensors) -> list[_Part]:
    """The gradients of parameters; parameters without one are included, as other ranks may have one."""
    listed, known = _listed(call, parameters), Sharding()
    flat = dict[int, list[tuple[Any, Any, slice | None]]]()
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        if _is_fsdp(module):
            for parameter, group, owner, name, part in flattened(module):
                flat.setdefault(id(parameter), []).append((group, known.at((id(owner), name)), part))
    made = []
    for each in listed:
        if is_flattened(each) and id(each) not in flat:
            call.fail(
                "a parameter was flattened by FullyShardedDataParallel; its shard is not known without the module",
                "the wrapped module",
                "its parameters",
                "pass the module itself instead of module.parameters()",
            )
        for group, layers, part in flat.get(id(each), [(None, known.of(each), None)]):
            made.append(_part(known, layers, each, each.grad, group, part))
    return _checked(call, made)


def _of_tensors(call: _Call, tensors: Tensors) -> list[_Part]:
    """Tensors, some of which may be gradients of sharded parameters."""
    listed, known = _listed(call, tensors), Sharding()
    return _checked(call, [_part(known, known.of(each), each, each) for each in listed])


def _part(
    known: Sharding,
    layers: list[Holder],
    parameter: Tensor,
    grad: Tensor | None,
    group: dist.ProcessGroup | None = None,
    within: slice | None = None,
) -> _Part:
    """This rank's shard of a gradient."""
    over = {tuple(axis.global_ranks) for axis in known.over(parameter, layers)}
    if group is not None and group.size() > 1:
        over.add(tuple(dist.get_process_group_ranks(group)))
    sharded: Any = parameter if grad is None else grad
    if _is_dtensor(sharded):
        mesh = sharded.device_mesh
        for dim, placement in enumerate(sharded.placements):
            if mesh.size(dim) > 1 and not placement.is_replicate() and not placement.is_partial():
                over.add(tuple(dist.get_process_group_ranks(mesh.get_group(dim))))
    values = stored = None
    if grad is not None:
        stored = _local(grad)
        values = _local(_summed(grad)).detach()
        values = values if within is None else values[within]
    return _Part(
        values,
        stored,
        frozenset(over),
        not all(layer.holds_parts for layer in layers),
        parameter.dtype,
        parameter.device,
    )


def _checked(call: _Call, held: list[_Part]) -> list[_Part]:
    """Raise if a parameter is sharded over ranks outside of the axis."""
    ranks = set() if call.here is None else set(call.here.global_ranks)
    for each in held:
        outside = sorted({rank for group in each.over for rank in group} - ranks)
        if outside:
            call.fail(
                "a parameter is sharded over ranks that are not on the axis",
                f"shards on ranks {sorted(ranks)} only",
                f"shards on ranks {outside} too",
                "omit axis= for all ranks, or pass a group of all ranks that hold a shard",
            )
    return held


def _norm(
    call: _Call, signature: str, held: list[_Part], p: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """The norm of all ranks' shards, in float64 if one is in double precision, else in float32."""
    with call.aborting():
        _check_exponent(call, held, p)
    here = call.here
    single = here is None or here.size == 1
    double = any(each.dtype in (torch.float64, torch.complex128) for each in held)
    device = next((each.device for each in held), None) or _device(here)
    zero = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    if p == 0:
        rows = _flags(held, here, zero)
        if not single:
            rows = all_gather(rows, here, sizes="auto")
        # Shards of one parameter share a key, and count once if any has a nonzero element.
        keys, order = rows[:, 0].sort()
        place = keys.diff(prepend=keys[:1]).ne(0).cumsum(0)
        total = torch.zeros_like(keys).scatter_reduce(0, place, rows[order, 1], "amax").sum()
    else:
        shared = defaultdict[int, list[Tensor]](list)
        for each in held:
            if each.values is not None and each.values.numel():
                shared[each.ranks].append(each.values)
        norms = {ranks: _local_norm(values, p, foreach).to(zero) for ranks, values in shared.items()}
        if math.isinf(p):
            local = _extreme([zero if p > 0 else zero + math.inf, *norms.values()], p)
        else:
            size = 1 if here is None else here.size
            local = torch.stack([zero, *(norm**p * (ranks / size) for ranks, norm in norms.items())]).sum()
        dtypes = {each.dtype for each in held if each.dtype.is_floating_point or each.dtype.is_complex}
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        rows = torch.stack((local, norms.get(1, zero), zero + eps, zero + double)).view(1, -1)
        if not single:
            rows = all_gather(Packed(rows, signature), here)  # type: ignore[call-overload]
        total = _extreme(list(rows[:, 0]), p) if math.isinf(p) else rows[:, 0].sum() ** (1 / p)
        if here is not None and not single:
            _compare(call.op, here, rows, total)
            double = double or (rows.is_cpu and bool(rows[:, 3].any()))
    if error_if_nonfinite:  # raises torch's error
        utils.get_total_norm([total], p or 1.0, True)
    return total if double else total.float()


def _device(here: Axis | None) -> torch.device:
    """The device of the message on a rank without parameters."""
    if here is not None and dist.get_backend(here.group) == "nccl":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def _check_exponent(call: _Call, held: list[_Part], p: float) -> None:
    if math.isnan(p):
        call.fail("norm_type is NaN", "a number, or math.inf", "norm_type=nan", "pass e.g. norm_type=2.0")
    if p == 0 and any(len(each.over) > 1 for each in held):
        call.fail(
            "norm_type=0 is not supported for parameters that are sharded over several axes",
            "another norm_type, or parameters that are sharded over at most one axis",
            "norm_type=0, which counts the parameters with a nonzero gradient",
            "pass e.g. norm_type=2.0, or math.inf",
        )


def _extreme(values: list[Tensor], p: float) -> Tensor:
    """The maximum, or for a negative p the minimum."""
    return torch.stack(values).amax() if p > 0 else torch.stack(values).amin()


def _local_norm(values: list[Tensor], p: float, foreach: bool | None) -> Tensor:
    """The norm of nonempty tensors of this rank."""
    device = values[0].device
    double = torch.float32 if device.type == "mps" else torch.float64
    kinds = defaultdict[torch.dtype, list[Tensor]](list)
    for each in values:
        kinds[each.dtype].append(each)
    norms = list[Tensor]()
    for dtype, those in kinds.items():
        if dtype in HALVES:  # accumulate in float32
            norms += [torch.linalg.vector_norm(each, p, dtype=torch.float32) for each in those]
        else:
            norms.append(utils.get_total_norm(those, p, foreach=foreach))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, double) for norm in norms]), p)
    return total


def _flags(held: list[_Part], here: Axis | None, like: Tensor) -> Tensor:
    """For each parameter, a key that its shards share, and its weight if it has a nonzero element, else 0."""
    rank, size = (0, 1) if here is None else (here.rank, here.size)
    seen, rows, counts = Counter[frozenset[Group]](), [], [like]
    for each in held:
        seen[each.over] += 1
        text = repr((sorted(each.over), seen[each.over], rank if each.alone or not each.over else None))
        key = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")
        rows.append([float(key), each.ranks / size])
        counts.append(like if each.values is None else each.values.count_nonzero().to(like))
    keys, weights = constants(rows, like.device, like.dtype).view(-1, 2).unbind(1)
    return torch.stack((keys, weights * torch.stack(counts)[1:].ne(0)), 1)


def _compare(op: str, here: Axis, rows: Tensor, total: Tensor) -> None:
    """Raise if gradients that count as replicated differ between ranks."""
    if not rows.is_cpu or not check_level():
        return
    norms, eps = rows[:, 1].tolist(), float(rows[:, 2].max())
    # Tolerance for rounding: relative to these gradients, or to the total norm if they are close to zero.
    allowed = max(min(8 * eps**0.5, 0.05) * max(norms), min(1e3 * eps, 0.05) * float(total))
    if all(map(math.isfinite, norms)) and max(norms) - min(norms) > allowed:
        raise MismatchError.of(
            "parameters that count as replicated have different gradients on the ranks",
            op=op,
            axis=str(here),
            expected="equal gradients of replicated parameters: summed or averaged over the ranks",
            got="\n".join(f"rank {rank}: norm {norm:.6g}" for rank, norm in enumerate(norms)),
            remedy="mark custom shards with gradmesh.nn.mark_sharded(parameter, axis); reduce the gradients before "
            "clipping; or pass axis= if other ranks train another model",
        )


def _is_fsdp(module: nn.Module) -> bool:
    # If it is not imported, no module can be an instance.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_dtensor(x: Any) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


def _local(x: Any) -> Tensor:
    """The local tensor of a DTensor."""
    local: Tensor = x.to_local() if _is_dtensor(x) else x
    return local


def _summed(x: Any) -> Tensor:
    """A DTensor with its partial placements reduced."""
    if not _is_dtensor(x) or not any(placement.is_partial() for placement in x.placements):
        whole: Tensor = x
        return whole
    tensor: Any = sys.modules["torch.distributed.tensor"]
    placements = [tensor.Replicate() if each.is_partial() else each for each in x.placements]
    made: Tensor = x.redistribute(placements=placements)
    return made
