"""What `tools.audits` audits: the verbs and drop-ins of gradmesh, and the systems that `benchmarks` compares with.

Each entry makes a function that the audit can call on each rank, for two ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from benchmarks.systems.cases import CASES, ROOT
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import DTENSOR, FUNCTIONAL, NN, SPMD_TYPES
from benchmarks.systems.system import Setting, System
from gradmesh.compat import fairchem, ksuit, megatron, torch_nn, towhee
from gradmesh.compat import gp_utils as gp

Build = Callable[..., tuple[Callable[..., Any], Tensor]]


@dataclasses.dataclass(frozen=True)
class _At(Setting):
    """A setting with any sizes."""

    parts: tuple[int, ...] | None = None

    @property
    def even(self) -> bool:
        return self.parts is None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.parts or (2, 2)

    def _amount(self, sender: int, receiver: int) -> int:
        return 2 if self.parts is None else max(0, self.parts[sender] - receiver)

    @property
    def sends(self) -> tuple[int, ...]:
        return tuple(self._amount(self.rank, other) for other in range(self.size))

    @property
    def receives(self) -> tuple[int, ...]:
        return tuple(self._amount(other, self.rank) for other in range(self.size))


_SHAPES: dict[str, Callable[[_At], tuple[int, ...]]] = {
    "part": lambda at: (at.sizes[at.rank], 3),
    "whole": lambda at: (sum(at.sizes), 3),
    "sends": lambda at: (sum(at.sends), 3),
    "at root": lambda at: (sum(at.sizes) if at.rank == at.root else 0, 3),
    "wide": lambda at: (at.sizes[at.rank], 4),
    "plain": lambda _: (2, 3),
}

_OPERAND = {
    "all_gather(dst=R)": "part",
    "all_gather(dst=I)": "part",
    "reduce_scatter": "whole",
    "reduce_scatter(op='mean')": "whole",
    "shard(src=I)": "whole",
    "shard(src=R)": "whole",
    "all_to_all": "sends",
    "all_to_all(split_dim=1)": "wide",
    "exchange": "sends",
    "gather": "part",
    "scatter": "at root",
    "halo_exchange": "part",
    "neighbor_all_to_all": "part",
}
"""What the operand of a case is, where it is not the same plain tensor on every rank."""

_ANY_PARTS: dict[str, Sequence[str]] = {
    "gradmesh": [name for name in _OPERAND if name != "neighbor_all_to_all"],
    NN.name: ["all_to_all"],
    FUNCTIONAL.name: ["all_to_all"],
    SPMD_TYPES.name: ["all_gather(dst=R)", "all_gather(dst=I)", "reduce_scatter", "all_to_all"],
}
"""The cases that a system takes any sizes for; DTensor takes those of torch.chunk alone."""


def _of_system(system: System, case: str) -> Build:
    shape = _SHAPES[_OPERAND.get(case, "plain")]

    def build(group: Any = None, parts: Any = None) -> tuple[Callable[..., Any], Tensor]:
        group = group or dist.group.WORLD
        at = _At(group, dist.get_rank(group), "even", None if parts is None else tuple(parts))
        call = system.verbs[case](at)
        if CASES[case].at_root and at.rank != ROOT:  # what others than the root get is not defined
            return (lambda x: 0 * call(x)), torch.rand(shape(at)) + 1
        return call, torch.rand(shape(at)) + 1

    if case in _ANY_PARTS.get(system.name, ()):
        return build
    return lambda group=None: build(group)


SYSTEMS: dict[str, dict[str, Build]] = {
    system.name: {case: _of_system(system, case) for case in system.verbs}
    for system in (GRADMESH, NN, FUNCTIONAL, DTENSOR, SPMD_TYPES)
}
"""For each system, its calls."""


def drop_ins() -> dict[str, Build]:
    """Every drop-in."""
    return {**_graph_parallel(), **_megatron(), **_torch_nn(), **_others()}


def _in_gp(call: Callable[[Tensor], Any], shape: tuple[int, ...]) -> Build:
    """A function of a graph-parallel module, which keeps its groups itself."""

    def build() -> tuple[Callable[..., Any], Tensor]:
        if gp.initialized():
            gp.cleanup_gp()
        gp.setup_gp({"gp_gpus": dist.get_world_size(), "distributed_backend": "threads"})
        return call, torch.rand(shape) + 1

    return build


def _graph_parallel() -> dict[str, Build]:
    atoms = 4
    calls: Mapping[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
        "gp_utils.copy_to_model_parallel_region": (gp.copy_to_model_parallel_region, (3, 2)),
        "gp_utils.reduce_from_model_parallel_region": (gp.reduce_from_model_parallel_region, (3, 2)),
        "gp_utils.scatter_to_model_parallel_region": (
            lambda x: gp.scatter_to_model_parallel_region(x, 0),
            (5, 2),
        ),
        "gp_utils.gather_from_model_parallel_region": (
            lambda x: gp.gather_from_model_parallel_region(x, 0),
            (3, 2),
        ),
        "gp_utils.gather_from_model_parallel_region_sum_grad": (
            lambda x: gp.gather_from_model_parallel_region_sum_grad(x, 0),
            (3, 2),
        ),
        "fairchem.reduce_from_model_parallel_region": (fairchem.reduce_from_model_parallel_region, (3, 2)),
        "fairchem.all_reduce_sum_with_grad": (fairchem.all_reduce_sum_with_grad, (3, 2)),
        "fairchem.scatter_to_model_parallel_region": (fairchem.scatter_to_model_parallel_region, (5, 2)),
        "fairchem.gather_from_model_parallel_region": (
            lambda x: fairchem.gather_from_model_parallel_region(x, atoms),
            (2, 2),
        ),
        "fairchem.gather_from_model_parallel_region_sum_grad": (
            lambda x: fairchem.gather_from_model_parallel_region_sum_grad(x, atoms),
            (2, 2),
        ),
        "fairchem.GatherFromModelParallelRegionGradPadded": (
            fairchem.GatherFromModelParallelRegionGradPadded.apply,
            (2, 2),
        ),
        "fairchem.GatherFromModelParallelRegionSumGradPadded": (
            fairchem.GatherFromModelParallelRegionSumGradPadded.apply,
            (2, 2),
        ),
    }
    return {name: _in_gp(call, shape) for name, (call, shape) in calls.items()}


def _in_group(call: Callable[[Tensor, Any], Any], shape: tuple[int, ...]) -> Build:
    def build(group: Any = None) -> tuple[Callable[..., Any], Tensor]:
        group = group or dist.group.WORLD
        return (lambda x: call(x, group)), torch.rand(shape) + 1

    return build


def _megatron() -> dict[str, Build]:
    plain, tall, wide = (3, 2), (4, 3), (3, 4)
    shapes: Mapping[str, tuple[int, ...]] = {
        "copy_to_tensor_model_parallel_region": plain,
        "reduce_from_tensor_model_parallel_region": plain,
        "scatter_to_tensor_model_parallel_region": wide,
        "gather_from_tensor_model_parallel_region": plain,
        "scatter_to_sequence_parallel_region": tall,
        "reduce_scatter_to_sequence_parallel_region": tall,
        "all_gather_last_dim_from_tensor_parallel_region": plain,
        "reduce_scatter_last_dim_to_tensor_parallel_region": wide,
        "all_to_all_sp2hp": wide,
        "all_to_all_hp2sp": tall,
    }
    builds = {f"megatron.{name}": _in_group(getattr(megatron, name), shape) for name, shape in shapes.items()}
    gather = megatron.gather_from_sequence_parallel_region
    builds["megatron.gather_from_sequence_parallel_region"] = _in_group(
        lambda x, g: gather(x, group=g), plain
    )
    builds["megatron.gather_from_sequence_parallel_region(x, False)"] = _in_group(
        lambda x, g: gather(x, False, g), plain
    )
    builds["megatron.all_to_all"] = _in_group(lambda x, g: megatron.all_to_all(g, x), tall)
    return builds


def _torch_nn() -> dict[str, Build]:
    nn = torch_nn

    def root(group: Any) -> int:
        return dist.get_global_rank(group, ROOT)

    def reduced(verb: str, op: Any, x: Tensor, g: Any) -> Tensor:
        if verb == "all_reduce":
            return nn.all_reduce(x, op, g)
        if verb == "reduce":
            return nn.reduce(x, root(g), op, g)
        return nn.reduce_scatter(x.new_empty(2, 2), list(x.unbind(0)), op, g)

    calls: dict[str, tuple[Callable[[Tensor, Any], Any], tuple[int, ...]]] = {
        "all_gather": (nn.all_gather, (3, 2)),
        "all_to_all": (
            lambda x, g: nn.all_to_all(list(torch.empty_like(x)), list(x.unbind(0)), g),
            (2, 2, 2),
        ),
        "all_to_all_single": (lambda x, g: nn.all_to_all_single(torch.empty_like(x), x, group=g), (4, 2)),
        "broadcast": (lambda x, g: nn.broadcast(x, root(g), g), (3, 2)),
        "gather": (lambda x, g: nn.gather(x, root(g), g), (3, 2)),
        "scatter": (lambda x, g: nn.scatter(list(x.unbind(0)), root(g), g), (2, 2, 2)),
    }
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        calls |= {
            f"{verb}(op={name})": (partial(reduced, verb, getattr(ReduceOp, name)), shape)
            for verb, shape in (("all_reduce", (3, 2)), ("reduce", (3, 2)), ("reduce_scatter", (2, 2, 2)))
        }
    return {f"torch_nn.{name}": _in_group(call, shape) for name, (call, shape) in calls.items()}


def _others() -> dict[str, Build]:
    def towhee_build(group: Any = None, local_rank: int = 0) -> tuple[Callable[..., Any], Tensor]:
        place: Any = group or dist.group.WORLD

        class Args:
            world_size = place.size()

        Args.local_rank = local_rank  # type: ignore[attr-defined]
        return (lambda x: towhee.AllGather.apply(x, Args, group)), torch.rand(3, 2)

    return {
        "ksuit.AllGatherGradAutograd": lambda: (ksuit.AllGatherGradAutograd.apply, torch.rand(3, 2)),
        "towhee.AllGather": towhee_build,
    }
