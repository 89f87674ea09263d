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
import threading
from typing import TYPE_CHECKING

from gradmesh import backends as _backends
from gradmesh.autograd.pending import Pending
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
from gradmesh.runtime.checking import check
from gradmesh.runtime.mesh import Axis, axis, init, mesh, rank, use_mesh, world_size
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
from gradmesh.verbs.reductions import barrier

if TYPE_CHECKING:
    from gradmesh import compat as compat
    from gradmesh import nn as nn
    from gradmesh import testing as testing
    from gradmesh import verify as verify
    from gradmesh.autograd.coalesce import coalesce
    from gradmesh.autograd.deferred import no_sync
    from gradmesh.autograd.ordered import Order, backward, grad, join, ordered, reorderable
    from gradmesh.autograd.scaling import scale_gradient
    from gradmesh.loss_scaling import objective
    from gradmesh.type_inference import Types, assert_type, typed
    from gradmesh.verbs.call import apply

__version__ = "0.2.0"

# So that torch.distributed.init_process_group("shm") and new_group(backend="shm") know it.
_backends.register()

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

_LAZY_PACKAGES = ("compat", "nn", "testing", "verify")
# Two threads that import a package and a module in it at the same time would wait for each other.
_importing = threading.RLock()
_LAZY = {
    name: f"{__name__}.{module}"
    for module, names_of_module in {
        "autograd.coalesce": ("coalesce",),
        "autograd.deferred": ("no_sync",),
        "autograd.ordered": ("Order", "backward", "grad", "join", "ordered", "reorderable"),
        "autograd.scaling": ("scale_gradient",),
        "loss_scaling": ("objective",),
        "type_inference": ("Types", "assert_type", "typed"),
        "verbs.call": ("apply",),
    }.items()
    for name in names_of_module
}
"""Public names whose module is imported on first use. None of them is also the name of a file or folder here: importing
that would set the attribute."""


def __dir__() -> list[str]:
    """The public names alone: files of the package are attributes too once they are imported."""
    return sorted([*__all__, *_LAZY_PACKAGES, "__version__"])


if not TYPE_CHECKING:  # otherwise type checkers accept any name

    def __getattr__(name: str) -> object:
        """Import what importing gradmesh does not."""
        with _importing:
            if name in _LAZY_PACKAGES:
                return importlib.import_module(f"{__name__}.{name}")
            if name in _LAZY:
                value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
