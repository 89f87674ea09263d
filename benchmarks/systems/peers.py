"""What else there is, as systems under measurement. Each is called as its own documentation says.

`torch.distributed.nn.functional`, the functional collectives and DTensor are part of torch; private names of them are
reached here alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.systems.system import Make, Op, Setting, System

__all__ = ["DTENSOR", "FUNCTIONAL", "NN", "PEERS", "SPMD_TYPES"]


def _shape(x: Tensor, rows: int) -> tuple[int, ...]:
    return (rows, *x.shape[1:])


# torch.distributed.nn.functional


def _nn(name: str) -> Any:
    return getattr(importlib.import_module("torch.distributed.nn.functional"), name)


def _nn_all_reduce(op: Any) -> Make:
    return _nn_call("all_reduce", lambda x, at: (x, op, at.group))


def _nn_call(name: str, arguments: Callable[[Tensor, Setting], tuple[Any, ...]]) -> Make:
    """A function by its name; what it returns in parts is concatenated."""

    def make(at: Setting) -> Op:
        function = _nn(name)

        def call(x: Tensor) -> Tensor:
            out: Tensor | tuple[Tensor, ...] = function(*arguments(x, at))
            return out if isinstance(out, Tensor) else torch.cat(out)

        return call

    return make


def _nn_reduce_scatter(op: Any) -> Make:
    def arguments(x: Tensor, at: Setting) -> tuple[Any, ...]:
        parts = list(x.split(at.sizes))
        return torch.empty_like(parts[at.rank]), parts, op, at.group

    return _nn_call("reduce_scatter", arguments)


def _all_to_all_arguments(x: Tensor, at: Setting) -> tuple[Any, ...]:
    out = x.new_empty(_shape(x, sum(at.receives)))
    return out, x, list(at.receives), list(at.sends), at.group


def _scatter_arguments(x: Tensor, at: Setting) -> tuple[Any, ...]:
    if at.rank == at.root:
        parts = list(x.split(at.sizes))
    else:
        # Parts that depend on the operand, as a rank without any gradient would not take part in backward.
        parts = [0 * x.sum() + x.new_zeros(_shape(x, n)) for n in at.sizes]
    return parts, at.global_root, at.group


_OPS = {
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}

NN = System(
    name="torch.distributed.nn.functional",
    where="benchmarks.systems.peers:NN",
    own=("torch.distributed",),
    assumed="Its gradients sum over the ranks, so that its results are judged as R. Roots are global ranks, as in "
    "`torch.distributed`. A rank that is not the root scatters zeros that depend on its operand.",
    verbs={
        "all_gather(dst=R)": _nn_call("all_gather", lambda x, at: (x, at.group)),
        "reduce_scatter": _nn_reduce_scatter(dist.ReduceOp.SUM),
        "reduce_scatter(op='mean')": _nn_reduce_scatter(dist.ReduceOp.AVG),
        "all_reduce(dst=R)": _nn_all_reduce(dist.ReduceOp.SUM),
        **{f"all_reduce(op='{name}', dst=R)": _nn_all_reduce(op) for name, op in _OPS.items()},
        "all_to_all": _nn_call("all_to_all_single", _all_to_all_arguments),
        "broadcast(dst=R)": _nn_call("broadcast", lambda x, at: (x, at.global_root, at.group)),
        "reduce": _nn_call("reduce", lambda x, at: (x, at.global_root, dist.ReduceOp.SUM, at.group)),
        "gather": _nn_call("gather", lambda x, at: (x, at.global_root, at.group)),
        "scatter": _nn_call("scatter", _scatter_arguments),
    },
)

# Functional collectives


def _funcol(*names: str) -> Any:
    """The first of these names that this torch has."""
    module = importlib.import_module("torch.distributed._functional_collectives")
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _funcol_call(arguments: Callable[[Tensor, Setting], tuple[Any, ...]], *names: str) -> Make:
    def make(at: Setting) -> Op:
        function = _funcol(*names)
        return lambda x: function(*arguments(x, at))

    return make


def _funcol_all_reduce(op: str) -> Make:
    return _funcol_call(lambda x, at: (x, op, at.group), "all_reduce")


def _funcol_reduce_scatter(op: str) -> Make:
    names = ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
    return _funcol_call(lambda x, at: (x, op, 0, at.group), *names)


def _funcol_shift(at: Setting) -> Op:
    permute, targets = _funcol("permute_tensor"), [(rank + 1) % at.size for rank in range(at.size)]
    # The elements are counted along dim 0.
    return lambda x: permute(x.reshape(-1), targets, at.group).view(x.shape)


FUNCTIONAL = System(
    name="functional collectives",
    where="benchmarks.systems.peers:FUNCTIONAL",
    own=("torch.distributed",),
    assumed="`torch.distributed._functional_collectives`, the `_autograd` forms where there are any. Their gradients "
    "sum over the ranks, so that results are judged as R. They know no uneven sizes but in all_to_all. "
    "The root is a rank of the group. "
    "`permute_tensor` gets a flat tensor.",
    verbs={
        "all_gather(dst=R)": _funcol_call(
            lambda x, at: (x, 0, at.group), "all_gather_single_autograd", "all_gather_tensor_autograd"
        ),
        "reduce_scatter": _funcol_reduce_scatter("sum"),
        "reduce_scatter(op='mean')": _funcol_reduce_scatter("avg"),
        "all_reduce(dst=R)": _funcol_all_reduce("sum"),
        "all_reduce(op='mean', dst=R)": _funcol_all_reduce("avg"),
        "all_reduce(op='max', dst=R)": _funcol_all_reduce("max"),
        "all_reduce(op='min', dst=R)": _funcol_all_reduce("min"),
        "all_reduce(op='prod', dst=R)": _funcol_all_reduce("product"),
        "all_to_all": _funcol_call(
            lambda x, at: (x, list(at.receives), list(at.sends), at.group), "all_to_all_single_autograd"
        ),
        "broadcast(dst=R)": _funcol_call(lambda x, at: (x, at.root, at.group), "broadcast"),
        "shift": _funcol_shift,
    },
)

# DTensor


def _dtensor(source: str, target: str, grad: str | None = None, source_grad: str | None = None) -> Make:
    """`from_local`, `redistribute`, `to_local`, and what is said about the gradients at both ends.

    Placements are written R, S0, S1, or by the reduction that is pending.
    """

    def make(at: Setting) -> Op:
        tensor: Any = importlib.import_module("torch.distributed.tensor")
        known = {"R": tensor.Replicate(), "S0": tensor.Shard(0), "S1": tensor.Shard(1)}

        def place(name: str | None) -> Any:
            return None if name is None else [known.get(name) or tensor.Partial(name)]

        mesh = DeviceMesh.from_group(at.group, "cpu")
        before, after, out, into = (place(name) for name in (source, target, grad, source_grad))

        def call(x: Tensor) -> Tensor:
            extra: dict[str, Any] = {} if into is None else {"grad_placements": into}
            if source == "S0" and not at.even:
                extra |= {"shape": torch.Size(_shape(x, sum(at.sizes))), "stride": (x.shape[1], 1)}
            held = tensor.DTensor.from_local(x, mesh, before, run_check=False, **extra)
            local: Tensor = held.redistribute(mesh, after).to_local(grad_placements=out)
            return local

        return call

    return make


DTENSOR = System(
    name="DTensor",
    where="benchmarks.systems.peers:DTENSOR",
    own=("torch.distributed",),
    assumed="`from_local`, `redistribute`, `to_local` over a 1-D mesh: Replicate with `grad_placements=[Partial()]` "
    "is R, without it is I. Uneven shards are passed by `shape=` and `stride=`. In second order, the gradient of a "
    "replicated gradient is taken to be the same on every rank; no argument says otherwise.",
    verbs={
        "all_gather(dst=R)": _dtensor("S0", "R", "sum"),
        "all_gather(dst=I)": _dtensor("S0", "R"),
        "reduce_scatter": _dtensor("sum", "S0"),
        "reduce_scatter(op='mean')": _dtensor("avg", "S0"),
        "all_reduce(dst=R)": _dtensor("sum", "R", "sum"),
        "all_reduce(dst=I)": _dtensor("sum", "R"),
        "all_reduce(op='mean', dst=R)": _dtensor("avg", "R", "sum"),
        "all_reduce(op='mean', dst=I)": _dtensor("avg", "R"),
        "all_reduce(op='max', dst=R)": _dtensor("max", "R", "sum"),
        "all_reduce(op='min', dst=R)": _dtensor("min", "R", "sum"),
        "all_reduce(op='prod', dst=R)": _dtensor("product", "R", "sum"),
        "replicate": _dtensor("R", "R", "sum"),
        "shard(src=I)": _dtensor("R", "S0"),
        "shard(src=R)": _dtensor("R", "S0", source_grad="sum"),
        "convert(src=R, dst=P)": _dtensor("R", "sum", "R", "sum"),
        "all_to_all(split_dim=1)": _dtensor("S0", "S1"),
    },
)

# spmd_types


def _spmd(name: str, src: str, dst: str, more: Callable[[Setting], dict[str, Any]] | None = None) -> Make:
    """A function of spmd_types between two types; "S0" is a shard of dim 0."""

    def make(at: Setting) -> Op:
        spmd = importlib.import_module("spmd_types")
        kinds = {letter: getattr(spmd, letter) for letter in "VRIP"} | {"S0": spmd.S(0), "S1": spmd.S(1)}
        extra = {} if more is None else more(at)
        verb = getattr(spmd, name)
        return lambda x: verb(x, at.group, src=kinds[src], dst=kinds[dst], **extra)

    return make


def _expert(_: Setting) -> dict[str, Any]:
    return {"expert_mode": True}


def _split_sizes(at: Setting) -> dict[str, Any]:
    return {} if at.even else {"split_sizes": list(at.sizes)}


def _spmd_splits(at: Setting) -> dict[str, Any]:
    if at.even:
        return {}
    return {"output_split_sizes": list(at.receives), "input_split_sizes": list(at.sends)}


SPMD_TYPES = System(
    name="spmd_types",
    where="benchmarks.systems.peers:SPMD_TYPES",
    own=("spmd_types",),
    needs=("spmd_types", "pip install spmd_types"),
    assumed="The types are those of gradmesh, and are passed as `src=` and `dst=` (a shard as `S(0)`), with the type "
    "checker off. Uneven sizes are passed where a function takes them, `expert_mode=True` where it is asked for.",
    verbs={
        "all_gather(dst=R)": _spmd("all_gather", "S0", "R", _split_sizes),
        "all_gather(dst=I)": _spmd("all_gather", "S0", "I", _split_sizes),
        "reduce_scatter": _spmd("reduce_scatter", "P", "S0", _split_sizes),
        "all_reduce(dst=R)": _spmd("all_reduce", "P", "R"),
        "all_reduce(dst=I)": _spmd("all_reduce", "P", "I"),
        "replicate": _spmd("convert", "I", "R"),
        "shard(src=I)": _spmd("shard", "I", "S0"),
        "shard(src=R)": _spmd("shard", "R", "S0"),
        "convert(src=R, dst=P)": _spmd("convert", "R", "P"),
        "convert(src=R, dst=I)": _spmd("convert", "R", "I", _expert),
        "convert(src=I, dst=P)": _spmd("convert", "I", "P", _expert),
        "convert(src=V, dst=P)": _spmd("reinterpret", "V", "P"),
        "convert(src=R, dst=V)": _spmd("reinterpret", "R", "V", _expert),
        "all_to_all": _spmd("all_to_all", "S0", "S0", _spmd_splits),
        "all_to_all(split_dim=1)": _spmd("all_to_all", "S0", "S1"),
    },
)

PEERS = (NN, FUNCTIONAL, DTENSOR, SPMD_TYPES)
