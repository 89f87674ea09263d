"""Differentiable collectives for PyTorch: every collective is a linear map over ranks, with its exact adjoint.

>>> import torch, gradmesh as gm
>>> def on_each_rank():
...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
...     loss = (1 + gm.axis().rank) * (gm.all_gather(x) ** 2).sum()
...     loss.backward()
...     return x.grad.tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[6.0], [12.0]]
"""

from gradmesh.axis import Axis, axis
from gradmesh.backends import shm as _shm
from gradmesh.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    convert,
    exchange,
    exscan,
    gather,
    halo_exchange,
    neighbor_all_to_all,
    permute,
    recv,
    reduce,
    reduce_scatter,
    replicate,
    scan,
    scatter,
    send,
    shard,
    shift,
    sizes,
)
from gradmesh.errors import (
    ArgumentError,
    AxisError,
    DeadlockError,
    DTypeError,
    GradmeshError,
    MismatchError,
    MissingExtraError,
    NotInitializedError,
    OrderError,
    RankError,
    ShapeError,
    TorchVersionError,
    TorchWarning,
)
from gradmesh.launch import Ranks, launch
from gradmesh.order import Order, backward, grad, join, ordered
from gradmesh.types import I, P, R, Type, V
from gradmesh.world import init, mesh, use_mesh

# So that torch.distributed.init_process_group("shm") and new_group(backend="shm") know it.
_shm.register()

__all__ = [
    "ArgumentError",
    "Axis",
    "AxisError",
    "DTypeError",
    "DeadlockError",
    "GradmeshError",
    "I",
    "MismatchError",
    "MissingExtraError",
    "NotInitializedError",
    "Order",
    "OrderError",
    "P",
    "R",
    "RankError",
    "Ranks",
    "ShapeError",
    "TorchVersionError",
    "TorchWarning",
    "Type",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis",
    "backward",
    "broadcast",
    "convert",
    "exchange",
    "exscan",
    "gather",
    "grad",
    "halo_exchange",
    "init",
    "join",
    "launch",
    "mesh",
    "neighbor_all_to_all",
    "ordered",
    "permute",
    "recv",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scan",
    "scatter",
    "send",
    "shard",
    "shift",
    "sizes",
    "use_mesh",
]
