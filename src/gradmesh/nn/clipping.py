"""Gradient clipping by the norm of the dense model, whatever is sharded, replicated or on one rank alone.

Each rank adds up its own part of the norm, and one small message brings the ranks' numbers to all of them. A number
counts by the share |G| / W, where G are the ranks over which the parameter is sharded and W all ranks: every dense
parameter then counts once, however often it is replicated and however it is sharded, since the sets G of a parameter
divide the ranks among them.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import utils

from gradmesh._torch import default_group, flattened, is_flattened
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.checking import check_level
from gradmesh.collectives import all_gather
from gradmesh.errors import ArgumentError, MismatchError, message
from gradmesh.nn.sharding import Holder, Sharding
from gradmesh.structure import Packed
from gradmesh.withdrawal import withdraw

__all__ = ["clip_grad_norm_", "clip_grad_value_", "get_total_norm"]

Tensors = Tensor | Iterable[Tensor] | nn.Module
Group = tuple[int, ...]
"""The ranks of an axis, as ranks of the world."""


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    axis: AxisLike = None,
) -> Tensor:
    """Scale gradients so that the norm of the dense model's gradient is no larger than `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which takes the norm of this rank's parts alone. Here every rank gets the norm
    of the whole model, and the same factor to the last bit::

        sharded (gm.nn, DTensor, FSDP, `gm.nn.mark_sharded`)    the parts of all ranks count
        experts of gm.nn.ExpertParallel                         those of all ranks count
        anything else, and tied parameters                      counts once, not once on each rank

    All ranks of `axis` call it, after the last backward and before the optimizer's step; one message of four numbers
    is sent, whatever the number of parameters and axes (one more for a norm_type of 0).

    Args:
        parameters: the parameters, or the module. A `FullyShardedDataParallel` is passed as the module, since it alone
            knows its parts.
        max_norm: the largest norm; the same on every rank.
        norm_type: the exponent, or math.inf; the same on every rank.
        error_if_nonfinite: whether a norm that is NaN or infinite raises torch's RuntimeError, on every rank.
        foreach: as in torch.
        axis: all ranks that hold a part of the model. None: all ranks of the world.

    Returns:
        The norm before clipping, a tensor without dims, in float32 or float64; the same on every rank.

    Raises:
        ArgumentError: something is not a tensor, or is sharded over ranks outside of `axis`, or was flattened by FSDP
            and is not passed as the module.
        MismatchError: a parameter that is taken to be the same on every rank has gradients of different norms: it is a
            shard without a mark, or its gradient was not summed over the ranks. Compared on CPUs. Or the ranks'
            arguments differ.

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
    op = "nn.clip_grad_norm_"
    with torch.no_grad():
        here = _ranks(axis, op)
        held = _told(op, here, lambda: _of_gradients(op, here, parameters))
        words = f"clip_grad_norm_(max_norm={float(max_norm)}, norm_type={float(norm_type)})"
        total = _norm(op, here, words, held, float(norm_type), error_if_nonfinite, foreach)
        _scaled = [SimpleNamespace(grad=each) for each in _storages(held)]
        utils.clip_grads_with_norm_(_scaled, max_norm, total, foreach)  # type: ignore[arg-type]  # what has a grad
        return total


def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Limit each element of the gradients to [-clip_value, clip_value]; nothing is sent.

    As `torch.nn.utils.clip_grad_value_`; a shard's elements are the dense model's. Gradients that are DTensors with a
    pending sum are summed first, which torch does by a message.

    Args:
        parameters: the parameters, or the module.
        clip_value: the largest absolute value.
        foreach: as in torch.

    Raises:
        ArgumentError: something is not a tensor.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([0.5, -3.0])
        >>> gm.nn.clip_grad_value_([w], 1.0)
        >>> w.grad.tolist()
        [0.5, -1.0]
    """
    with torch.no_grad():
        parts = []
        for each in _listed("nn.clip_grad_value_", None, parameters):
            grad = each.grad
            if grad is not None:
                whole = _summed(grad)
                if whole is not grad:
                    each.grad = whole
                parts.append(SimpleNamespace(grad=_local(whole)))
        utils.clip_grad_value_(parts, clip_value, foreach)  # type: ignore[arg-type]  # what has a grad


def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    axis: AxisLike = None,
) -> Tensor:
    """The norm of tensors as of one dense vector, on every rank; as `torch.nn.utils.get_total_norm` on one process.

    Args:
        tensors: the gradients of parameters that layers of `gm.nn` hold, DTensors, tensors that
            `gm.nn.mark_sharded` marked, and any others, which are the same on every rank; or a module, for the
            gradients of its parameters.
        norm_type: as in `gm.nn.clip_grad_norm_`, as are the others.
        error_if_nonfinite: as there.
        foreach: as there.
        axis: as there.

    Returns:
        A tensor without dims, the same on every rank.

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
    op = "nn.get_total_norm"
    with torch.no_grad():
        here = _ranks(axis, op)
        if isinstance(tensors, nn.Module):
            held = _told(op, here, lambda: _of_gradients(op, here, tensors))
        else:
            held = _told(op, here, lambda: _of_tensors(op, here, tensors))
        words = f"get_total_norm(norm_type={float(norm_type)})"
        return _norm(op, here, words, held, float(norm_type), error_if_nonfinite, foreach)


@dataclass(frozen=True)
class _Part:
    """What this rank has of one parameter's gradient.

    Attributes:
        values: the part, None if there is no gradient; of a DTensor with a pending sum, of the sum.
        stored: the memory that it is in, which may be more than the part.
        over: the ranks over which it is sharded, for each axis.
        alone: whether it is a parameter of its own, and not a part of one that the others have parts of.
        dtype: of the parameter.
        device: of the parameter.
    """

    values: Tensor | None
    stored: Tensor | None
    over: frozenset[Group]
    alone: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def ranks(self) -> int:
        """Over how many ranks it is sharded."""
        return math.prod(map(len, self.over))


def _ranks(axis: AxisLike, op: str) -> Axis | None:
    """The ranks that hold the model; None: there is one process."""
    if axis is not None:
        return resolve(axis, op)
    group = default_group()
    return None if group is None else resolve(group, op)


def _told(op: str, here: Axis | None, make: Any) -> Any:
    """Do what this rank may refuse, and report it to the others."""
    try:
        return make()
    except ArgumentError as error:
        if here is not None:
            withdraw(op, here, None, error)
        raise


def _listed(op: str, here: Axis | None, tensors: Tensors) -> list[Tensor]:
    """The tensors, each once."""
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
            _refuse(
                op,
                here,
                "this is not a tensor",
                "tensors, or a module",
                type(each).__name__,
                "pass model.parameters()",
            )
        found[id(each)] = each
    return list(found.values())


def _of_gradients(op: str, here: Axis | None, parameters: Tensors) -> list[_Part]:
    """The gradients of parameters; also those without one, as it may have one on other ranks."""
    listed, known = _listed(op, here, parameters), Sharding()
    flat = dict[int, list[tuple[Any, Any, slice | None]]]()
    for module in parameters.modules() if isinstance(parameters, nn.Module) else ():
        if _is_fsdp(module):
            for parameter, group, owner, name, part in _flattened(op, here, module):
                flat.setdefault(id(parameter), []).append((group, known.at((id(owner), name)), part))
    made = []
    for each in listed:
        if is_flattened(each) and id(each) not in flat:
            _refuse(
                op,
                here,
                "FullyShardedDataParallel flattened this parameter, which does not show what part of it is here",
                "the wrapped module",
                "its parameters",
                "pass the module itself in the place of module.parameters()",
            )
        for group, layers, part in flat.get(id(each), [(None, known.of(each), None)]):
            made.append(_part(known, layers, each, each.grad, group, part))
    return _checked(op, here, made)


def _of_tensors(op: str, here: Axis | None, tensors: Tensors) -> list[_Part]:
    """Tensors, of which some may be gradients of parameters that layers hold."""
    listed, known = _listed(op, here, tensors), Sharding()
    return _checked(op, here, [_part(known, known.of(each), each, each) for each in listed])


def _part(
    known: Sharding,
    layers: list[Holder],
    parameter: Tensor,
    grad: Tensor | None,
    group: dist.ProcessGroup | None = None,
    place: slice | None = None,
) -> _Part:
    """What this rank has of a gradient."""
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
        values = values if place is None else values[place]
    return _Part(
        values,
        stored,
        frozenset(over),
        not all(layer.holds_parts for layer in layers),
        parameter.dtype,
        parameter.device,
    )


def _checked(op: str, here: Axis | None, held: list[_Part]) -> list[_Part]:
    """Refuse what is sharded over ranks that do not take part."""
    ranks = set() if here is None else set(here.global_ranks)
    for each in held:
        outside = sorted({rank for group in each.over for rank in group} - ranks)
        if outside:
            _refuse(
                op,
                here,
                "a parameter is sharded over ranks that do not take part",
                f"ranks among {sorted(ranks)}",
                f"shards on ranks {outside} too",
                "leave axis= out for all ranks, or pass a group of all that hold a part",
            )
    return held


def _norm(
    op: str,
    here: Axis | None,
    words: str,
    held: list[_Part],
    p: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """The norm of all ranks' parts, in double precision where a part is, else in float32."""
    _told(op, here, lambda: _check_exponent(op, here, held, p))
    alone = here is None or here.size == 1
    double = any(each.dtype in (torch.float64, torch.complex128) for each in held)
    device = next((each.device for each in held), None) or _device(here)
    zero = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    if p == 0:
        rows = _flags(held, here, zero)
        if not alone:
            rows = all_gather(rows, here, sizes="auto")
        # Parts of one parameter have one key, and count once if any of them has an element that is not zero.
        counted = dict[float, float]()
        for key, share in rows.tolist():
            counted[key] = max(counted.get(key, 0.0), share)
        total = zero + sum(counted.values())
    else:
        shared = defaultdict[int, list[Tensor]](list)
        for each in held:
            if each.values is not None and each.values.numel():
                shared[each.ranks].append(each.values)
        norms = {ranks: _local_norm(values, p, foreach).to(zero) for ranks, values in shared.items()}
        if math.isinf(p):
            own = _extreme([zero if p > 0 else zero + math.inf, *norms.values()], p)
        else:
            size = 1 if here is None else here.size
            own = torch.stack([zero, *(norm**p * (ranks / size) for ranks, norm in norms.items())]).sum()
        eps = [torch.finfo(each.dtype).eps for each in held if _has_digits(each.dtype)]
        mine = (own, norms.get(1, zero), zero + max(eps, default=0.0), zero + double)
        rows = torch.stack(mine).view(1, -1)
        if not alone:
            rows = all_gather(Packed(rows, words), here)  # type: ignore[call-overload]
        total = _extreme(list(rows[:, 0]), p) if math.isinf(p) else rows[:, 0].sum() ** (1 / p)
        if here is not None and not alone:
            _compare(op, here, rows, total)
            double = double or (rows.is_cpu and bool(rows[:, 3].any()))
    if error_if_nonfinite:  # torch's own error
        utils.get_total_norm([total], p or 1.0, True)
    return total if double else total.float()


def _has_digits(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _device(here: Axis | None) -> torch.device:
    """Where a rank without parameters has its message."""
    if here is not None and dist.get_backend(here.group) == "nccl":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def _check_exponent(op: str, here: Axis | None, held: list[_Part], p: float) -> None:
    if math.isnan(p):
        _refuse(op, here, "norm_type is NaN", "a number, or math.inf", "norm_type=nan", "pass 2")
    if p == 0 and any(len(each.over) > 1 for each in held):
        _refuse(
            op,
            here,
            "parameters are not counted where one is sharded over several axes",
            "a norm_type that is not 0, or parameters that are sharded over one axis at most",
            "norm_type=0, which in torch counts the parameters with a gradient that is not zero",
            "pass 2, or math.inf",
        )


def _extreme(values: list[Tensor], p: float) -> Tensor:
    """The largest of the numbers, or for a negative p the smallest."""
    return torch.stack(values).amax() if p > 0 else torch.stack(values).amin()


def _local_norm(values: list[Tensor], p: float, foreach: bool | None) -> Tensor:
    """The norm of tensors of this rank, none of which is empty."""
    device = values[0].device
    double = torch.float32 if device.type == "mps" else torch.float64
    kinds = defaultdict[torch.dtype, list[Tensor]](list)
    for each in values:
        kinds[each.dtype].append(each)
    norms = list[Tensor]()
    for dtype, those in kinds.items():
        if dtype in (torch.float16, torch.bfloat16):  # added up, and returned, in float32
            norms += [torch.linalg.vector_norm(each, p, dtype=torch.float32) for each in those]
        else:
            norms.append(utils.get_total_norm(those, p, foreach=foreach))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, double) for norm in norms]), p)
    return total


def _flags(held: list[_Part], here: Axis | None, like: Tensor) -> Tensor:
    """For each parameter a key that is the same for all its parts, and its share if an element is not zero."""
    rank, size = (0, 1) if here is None else (here.rank, here.size)
    seen, rows = Counter[frozenset[Group]](), []
    for each in held:
        seen[each.over] += 1
        text = repr((sorted(each.over), seen[each.over], rank if each.alone or not each.over else None))
        key = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")
        some = each.values is not None and bool(each.values.count_nonzero())
        rows.append([float(key), some * each.ranks / size])
    return like.new_tensor(rows).view(-1, 2)


def _compare(op: str, here: Axis, rows: Tensor, total: Tensor) -> None:
    """Refuse gradients that are taken to be the same on every rank, and are not."""
    if not rows.is_cpu or not check_level():
        return
    norms, eps = rows[:, 1].tolist(), float(rows[:, 2].max())
    # What rounding may do to the gradients themselves, and to a gradient that is zero but for rounding.
    allowed = max(min(8 * eps**0.5, 0.05) * max(norms), min(1e3 * eps, 0.05) * float(total))
    if all(map(math.isfinite, norms)) and max(norms) - min(norms) > allowed:
        raise MismatchError(
            message(
                "parameters that are taken to be the same on every rank have different gradients",
                op=op,
                axis=str(here),
                expected="gradients that are summed or averaged over the ranks, of parameters that every rank has",
                got="\n".join(f"rank {rank}: norm {norm:.6g}" for rank, norm in enumerate(norms)),
                remedy="mark the shards that are made by hand with gradmesh.nn.mark_sharded(parameter, axis); sum the "
                "gradients first; or pass axis= where other ranks train another model",
            )
        )


def _storages(held: list[_Part]) -> Iterator[Tensor]:
    """The gradients of this rank, each once."""
    yield from {id(each.stored): each.stored for each in held if each.stored is not None}.values()


def _flattened(op: str, here: Axis | None, module: nn.Module) -> list[Any]:
    try:
        return list(flattened(module))
    except AttributeError as error:
        _refuse(
            op,
            here,
            "this torch does not show what FullyShardedDataParallel has flattened",
            "a torch that was tried",
            f"torch {torch.__version__}: {error}",
            "call module.clip_grad_norm_",
        )


def _is_fsdp(module: nn.Module) -> bool:
    # Who has such a module has loaded it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_dtensor(x: Any) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


def _local(x: Any) -> Tensor:
    """This rank's part of a DTensor, in the same memory."""
    local: Tensor = x.to_local() if _is_dtensor(x) else x
    return local


def _summed(x: Any) -> Tensor:
    """A DTensor without pending sums."""
    if not _is_dtensor(x) or not any(placement.is_partial() for placement in x.placements):
        whole: Tensor = x
        return whole
    tensor: Any = sys.modules["torch.distributed.tensor"]
    placements = [tensor.Replicate() if each.is_partial() else each for each in x.placements]
    made: Tensor = x.redistribute(placements=placements)
    return made


def _refuse(op: str, here: Axis | None, problem: str, expected: str, got: str, remedy: str) -> NoReturn:
    raise ArgumentError(
        message(
            problem,
            op=op,
            axis=None if here is None else str(here),
            expected=expected,
            got=got,
            remedy=remedy,
        )
    )
