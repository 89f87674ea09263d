"""Every drop-in of `gradmesh.compat`, called as the original is: nothing may be found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.compat import fairchem, gp_utils, ksuit, megatron, torch_nn, towhee
from tests.zoo.program import right
from tests.zoo.raw import alike, operand, rank, world

Function = Callable[..., Any]
Operand = Callable[[], Tensor]


def varying() -> Tensor:
    return operand(4, 4)


def same() -> Tensor:
    return alike(4, 4)


def add(
    module: str,
    name: str,
    fn: Function,
    draw: Operand,
    prepare: Callable[[], object] | None = None,
    **options: Any,
) -> None:
    """Add a drop-in: it is called with one operand, after what it needs has been prepared."""

    def build() -> Any:
        if prepare is not None:
            prepare()
        return fn, (draw(),)

    build.__name__ = f"{module}_{name}"
    right("audit", f"gradmesh.compat.{module}: {name}", **options)(build)


def groups() -> None:
    """The graph parallel group: the whole world."""
    if not gp_utils.initialized():
        gp_utils.setup_gp({"gp_gpus": world(), "distributed_backend": dist.get_backend()})


def atoms() -> int:
    return 4 * world()


MEGATRON: dict[str, tuple[Function, Operand]] = {
    "copy_to_tensor_model_parallel_region": (megatron.copy_to_tensor_model_parallel_region, same),
    "reduce_from_tensor_model_parallel_region": (megatron.reduce_from_tensor_model_parallel_region, varying),
    "scatter_to_tensor_model_parallel_region": (megatron.scatter_to_tensor_model_parallel_region, same),
    "gather_from_tensor_model_parallel_region": (megatron.gather_from_tensor_model_parallel_region, varying),
    "all_gather_last_dim": (megatron.all_gather_last_dim_from_tensor_parallel_region, varying),
    "reduce_scatter_last_dim": (megatron.reduce_scatter_last_dim_to_tensor_parallel_region, varying),
    "scatter_to_sequence_parallel_region": (megatron.scatter_to_sequence_parallel_region, same),
    "gather_from_sequence_parallel_region": (megatron.gather_from_sequence_parallel_region, varying),
    "gather_from_sequence_parallel_region_without_grad": (
        lambda x: megatron.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False),
        varying,
    ),
    "reduce_scatter_to_sequence_parallel_region": (
        megatron.reduce_scatter_to_sequence_parallel_region,
        varying,
    ),
    "all_to_all": (lambda x: megatron.all_to_all(None, x), varying),
    "all_to_all_sp2hp": (megatron.all_to_all_sp2hp, varying),
    "all_to_all_hp2sp": (megatron.all_to_all_hp2sp, varying),
}
for name, (function, draw) in MEGATRON.items():
    add("megatron", name, function, draw)

GP_UTILS: dict[str, tuple[Function, Operand]] = {
    "copy_to_model_parallel_region": (gp_utils.copy_to_model_parallel_region, same),
    "reduce_from_model_parallel_region": (gp_utils.reduce_from_model_parallel_region, varying),
    "scatter_to_model_parallel_region": (gp_utils.scatter_to_model_parallel_region, same),
    "gather_from_model_parallel_region": (gp_utils.gather_from_model_parallel_region, varying),
    "gather_from_model_parallel_region_sum_grad": (
        gp_utils.gather_from_model_parallel_region_sum_grad,
        varying,
    ),
}
for name, (function, draw) in GP_UTILS.items():
    add("gp_utils", name, function, draw, groups)
# Its gradient has to be the same on every rank, which no audit expects unless asked.
add("gp_utils", "scale_backward_grad", gp_utils.scale_backward_grad, same, groups, arrow="I -> P")


def needed_rows(x: Tensor) -> Tensor:
    """Two rows of each other rank's, for edges between the first atoms of all."""
    size = 4
    owners = torch.arange(world()).repeat_interleave(size)
    sources = torch.cat([torch.tensor([size * r, size * r + 2]) for r in range(world())])
    edges = torch.stack([sources, torch.full_like(sources, size * rank())])
    context = fairchem.build_gp_context(edges, owners, rank(), world())
    return fairchem.all_to_all_collect(x, context)


FAIRCHEM: dict[str, tuple[Function, Operand]] = {
    "reduce_from_model_parallel_region": (fairchem.reduce_from_model_parallel_region, varying),
    "all_reduce_sum_with_grad": (fairchem.all_reduce_sum_with_grad, varying),
    "scatter_to_model_parallel_region": (fairchem.scatter_to_model_parallel_region, same),
    "gather_from_model_parallel_region": (
        lambda x: fairchem.gather_from_model_parallel_region(x, len(x) * world()),
        varying,
    ),
    "gather_from_model_parallel_region_sum_grad": (
        lambda x: fairchem.gather_from_model_parallel_region_sum_grad(x, len(x) * world()),
        varying,
    ),
    "all_to_all_collect": (needed_rows, varying),
}
for name, (function, draw) in FAIRCHEM.items():
    add("fairchem", name, function, draw, groups)

TORCH_NN: dict[str, tuple[Function, Operand]] = {
    "all_gather": (torch_nn.all_gather, varying),
    "all_reduce": (torch_nn.all_reduce, varying),
    "all_to_all_single": (lambda x: torch_nn.all_to_all_single(torch.empty_like(x), x), varying),
    "all_to_all": (
        lambda x: torch_nn.all_to_all([torch.empty_like(t) for t in x.chunk(world())], x.chunk(world())),
        varying,
    ),
    "reduce_scatter": (
        lambda x: torch_nn.reduce_scatter(torch.empty_like(x[: len(x) // world()]), x.chunk(world())),
        varying,
    ),
    "broadcast": (lambda x: torch_nn.broadcast(x, 0), varying),
    "gather": (lambda x: torch_nn.gather(x, 0), varying),
    "reduce": (lambda x: torch_nn.reduce(x, 0), varying),
    "scatter": (lambda x: torch_nn.scatter(x.chunk(world()), 0), varying),
}
for name, (function, draw) in TORCH_NN.items():
    add("torch_nn", name, function, draw)

add("ksuit", "AllGatherGradAutograd", ksuit.AllGatherGradAutograd.apply, varying)
add(
    "towhee",
    "AllGather",
    lambda x: towhee.AllGather.apply(x, SimpleNamespace(world_size=world(), local_rank=0)),
    varying,
)
