"""Differentiable collectives for PyTorch: every collective is a linear map over ranks, with its exact adjoint.

>>> import torch, gradmesh as gm
>>> def on_each_rank():
...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
...     loss = (1 + gm.axis().rank) * (gm.all_gather(x) ** 2).sum()
...     loss.backward()
...     return x.grad.tolist()
>>> gm.launch(on_each_rank, 2, backend="threads")
[[6.0], [12.0]]

Three packages come with it that are loaded when they are first asked for: `gm.compat`, drop-ins for code that exists,
`gm.nn`, losses of the samples of all ranks and layers, graphs and fields that are cut over them, and `gm.verify`, tools
that prove gradients over ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gradmesh.autograd.coalesce import coalesce
from gradmesh.autograd.deferred import no_sync
from gradmesh.autograd.ordered import Order, backward, grad, join, ordered, reorderable
from gradmesh.autograd.pending import Pending
from gradmesh.autograd.scaling import scale_gradient
from gradmesh.backends import shm as _shm
from gradmesh.dims import named, names
from gradmesh.errors import (
    ArgumentError,
    AxisError,
    CheckWarning,
    DeadlockError,
    DTypeError,
    GradcheckError,
    GradmeshError,
    MismatchError,
    MissingExtraError,
    NotInitializedError,
    OrderError,
    RankError,
    ShapeError,
    TorchVersionError,
    TorchWarning,
    TypeMismatchError,
)
from gradmesh.launch import Ranks, launch
from gradmesh.objective import objective
from gradmesh.runtime.checking import check
from gradmesh.runtime.mesh import Axis, axis, init, mesh, rank, use_mesh, world_size
from gradmesh.type_inference import Types, assert_type, typed
from gradmesh.types import I, P, R, Type, V
from gradmesh.verbs.collectives import (
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
from gradmesh.verbs.own_ops import apply
from gradmesh.verbs.reductions import barrier

if TYPE_CHECKING:
    from gradmesh import compat as compat
    from gradmesh import nn as nn
    from gradmesh import testing as testing
    from gradmesh import verify as verify

__version__ = "0.1.0"

# So that torch.distributed.init_process_group("shm") and new_group(backend="shm") know it.
_shm.register()

__all__ = [
    "ArgumentError",
    "Axis",
    "AxisError",
    "CheckWarning",
    "DTypeError",
    "DeadlockError",
    "GradcheckError",
    "GradmeshError",
    "I",
    "MismatchError",
    "MissingExtraError",
    "NotInitializedError",
    "Order",
    "OrderError",
    "P",
    "Pending",
    "R",
    "RankError",
    "Ranks",
    "ShapeError",
    "TorchVersionError",
    "TorchWarning",
    "Type",
    "TypeMismatchError",
    "Types",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply",
    "assert_type",
    "axis",
    "backward",
    "barrier",
    "broadcast",
    "check",
    "coalesce",
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
    "named",
    "names",
    "neighbor_all_to_all",
    "no_sync",
    "objective",
    "ordered",
    "permute",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reorderable",
    "replicate",
    "scale_gradient",
    "scan",
    "scatter",
    "send",
    "shard",
    "shift",
    "sizes",
    "typed",
    "use_mesh",
    "world_size",
]

_LOADED_WHEN_ASKED_FOR = ("compat", "nn", "testing", "verify")


def __dir__() -> list[str]:
    """The public names alone: files of the package are attributes too once they are imported."""
    return sorted([*__all__, *_LOADED_WHEN_ASKED_FOR, "__version__"])


if not TYPE_CHECKING:  # else type checkers take any name for one that is there

    def __getattr__(name: str) -> object:
        """Load a package that is not part of what importing gradmesh costs."""
        if name in _LOADED_WHEN_ASKED_FOR:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
