"""Libraries for atoms, weather and physics: graphs and fields that are sharded over ranks."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tools.replaced.cases import (
    Case,
    World,
    all_rows,
    gathered,
    kept,
    rows,
    sliced,
    sum_sliced,
    summed,
)
from tools.replaced.own_tests import Tests
from tools.replaced.repository import Repository, alone
from tools.replaced.sources import Replaced, Source


def _atoms_load(root: Path) -> Any:

    class StrEnum(enum.StrEnum):
        pass

    given: dict[str, Any] = {"fairchem.core.common.utils": {"StrEnum": StrEnum}}
    core = "fairchem.core.common"
    gp_utils = alone(root, "fairchem/core/common/gp_utils.py", f"{core}.gp_utils", **given)
    sys.modules[core].gp_utils = gp_utils  # type: ignore[attr-defined]
    return gp_utils


def _atoms_prepare(module: Any, world: World | None) -> None:
    module.setup_graph_parallel_groups(3, torch.distributed.get_backend())


def _wrapped(name: str) -> Any:
    """A function of gp_utils that takes the number of atoms."""
    return lambda m, x, w: getattr(m, name)(x, sum(w.sizes))


FAIRCHEM = Repository(
    "fairchem-core",
    Source("facebookresearch/fairchem", "a73c95be1db2f5ca60cce19f00fd5bff4c29fd7d", "fairchem-core==2.24.0"),
    (Replaced("fairchem/core/common/gp_utils.py", "fairchem.py"),),
    _atoms_load,
    (
        Case(
            "reduce_from_model_parallel_region",
            lambda m, x, w: m.reduce_from_model_parallel_region(x),
            summed,
            all_rows(0, 3),
            once=True,
            group=None,
            uneven=None,
        ),
        Case(
            "all_reduce_sum_with_grad",
            lambda m, x, w: m.all_reduce_sum_with_grad(x),
            summed,
            all_rows(0, 3),
            group=None,
            uneven=None,
        ),
        Case(
            "scatter_to_model_parallel_region",
            lambda m, x, w: m.scatter_to_model_parallel_region(x),
            sliced(),
            all_rows(0, 3),
            same=True,
            group=None,
            uneven=(3, 2, 2),
        ),
        Case(
            "gather_from_model_parallel_region",
            _wrapped("gather_from_model_parallel_region"),
            gathered(),
            rows(0, 3),
            once=True,
            group=None,
            uneven=(3, 2, 2),
        ),
        Case(
            "gather_from_model_parallel_region_sum_grad",
            _wrapped("gather_from_model_parallel_region_sum_grad"),
            gathered(),
            rows(0, 3),
            group=None,
            uneven=(3, 2, 2),
        ),
    ),
    Tests(
        (
            "tests/conftest.py",
            "tests/core/common/test_gp_utils.py",
        ),
        ("tests/core/common/test_gp_utils.py", "-k", "bwd or prod_reduce"),
    ),
    _atoms_prepare,
    left="`common/parallelism`, which `gradmesh.compat.fairchem` replaces too: see [migration](migration.md). Of its "
    "tests, those of gradients were run, `-k 'bwd or prod_reduce'`.",
)


def _halo(world: World, rank: int, to: int) -> Tensor:
    """The rows that a rank sends to another."""
    last = world.sizes[rank] - 1
    return torch.tensor([] if rank == to else [0, last] if (rank + to) % 2 else [last], dtype=torch.long)


def _with_halo(module: Any, x: Tensor, world: World) -> Tensor:
    everyone = range(world.size)
    info = SimpleNamespace(
        send_indices=tuple(_halo(world, world.rank, to) for to in everyone),
        recv_counts=tuple(len(_halo(world, source, world.rank)) for source in everyone),
        num_local_nodes=len(x),
    )
    found: Tensor = module.halo_exchange(x, info, world.group)
    return found


def _dense_halo(xs: Any, world: World) -> list[Tensor]:
    ranks = range(world.size)
    return [torch.cat([xs[to], *(xs[rank][_halo(world, rank, to)] for rank in ranks)]) for to in ranks]


def _columns(world: World) -> list[int]:
    """Shards of six columns."""
    return [2, 3, 1][: world.size] if world.size == 3 else [4, 2]


ANEMOI = Repository(
    "anemoi-models",
    Source("ecmwf/anemoi-core", "2cb9b6e18366ee0bbebc96b9bddd39b81298cf98", "anemoi-models==0.19.0"),
    (
        Replaced(
            "anemoi/models/distributed/graph.py",
            "anemoi.py",
            (
                "shard_tensor",
                "gather_tensor",
                "reduce_tensor",
                "sync_tensor",
                "reduce_shard_tensor",
                "all_to_all_transpose",
                "halo_exchange",
                "_SyncParallelSection",
                "_ReduceShardParallelSection",
                "_ShardParallelSection",
                "_GatherParallelSection",
                "_ReduceParallelSection",
                "_AllToAllParallelSection",
                "_HaloExchangeParallelSection",
            ),
        ),
    ),
    lambda root: __import__("anemoi.models.distributed.graph", fromlist=["graph"]),
    (
        Case(
            "shard_tensor",
            lambda m, x, w: m.shard_tensor(x, 0, list(w.sizes), w.group),
            sliced(),
            all_rows(0, 3),
            same=True,
        ),
        Case(
            "gather_tensor",
            lambda m, x, w: m.gather_tensor(x, 0, list(w.sizes), w.group),
            gathered(),
            rows(0, 3),
            once=True,
        ),
        Case(
            "reduce_tensor",
            lambda m, x, w: m.reduce_tensor(x, w.group),
            summed,
            all_rows(0, 3),
            once=True,
            uneven=None,
        ),
        Case(
            "sync_tensor", lambda m, x, w: m.sync_tensor(x, 0, list(w.sizes), w.group), gathered(), rows(0, 3)
        ),
        Case(
            "reduce_shard_tensor",
            lambda m, x, w: m.reduce_shard_tensor(x, 0, list(w.sizes), w.group),
            sum_sliced(),
            all_rows(0, 3),
        ),
        Case(
            "all_to_all_transpose",
            lambda m, x, w: m.all_to_all_transpose(x, 1, _columns(w), 0, list(w.sizes), w.group),
            lambda xs, w: list(torch.cat(list(xs)).split(_columns(w), 1)),
            rows(0, 6),
        ),
        Case("halo_exchange", _with_halo, _dense_halo, rows(0, 3)),
    ),
    Tests(
        ("models/tests", "models/pyproject.toml"),
        (
            "tests/distributed/test_communication_primitives.py",
            "tests/distributed/test_interfaces.py",
            "--distributed",
            "--distributed-world-size=3",
        ),
        inside="models",
        packages=("hypothesis", "sortedcontainers"),
    ),
    left="`primitives.py` stays; their tests of several ranks call that file alone: not run. "
    "`use_fp32` sums are in the precision of the operand.",
)

_GROUP: list[World] = []


class _Manager:
    """What the mappings ask of physicsnemo's DistributedManager."""

    def group(self, _name: str | None = None) -> Any:
        return _GROUP[-1].group

    def group_size(self, _name: str | None = None) -> int:
        return _GROUP[-1].size


def _physics_load(root: Path) -> Any:
    given: dict[str, Any] = {"physicsnemo.distributed.manager": {"DistributedManager": _Manager}}
    _utils, mappings, autograd = (
        alone(root, f"physicsnemo/distributed/{name}.py", f"physicsnemo.distributed.{name}", **given)
        for name in ("utils", "mappings", "autograd")
    )
    return SimpleNamespace(**{**vars(mappings), **vars(autograd)})


def _physics_prepare(module: Any, world: World | None) -> None:
    if world is not None:
        _GROUP.append(world)


def _at_root(module: Any, x: Tensor, world: World) -> Tensor:
    whole: Tensor = module.gather_v(x, list(world.sizes), 0, 0, world.group)
    return whole if world.rank == 0 else whole.narrow(0, 0, 0).sum()


def _dense_at_root(xs: Any, world: World) -> list[Tensor]:
    return [torch.cat(list(xs)), *(0 * x.sum() for x in xs[1:])]


def _indexed(module: Any, x: Tensor, world: World) -> Tensor:
    everyone = range(world.size)
    sizes = [[len(_halo(world, rank, to)) for to in everyone] for rank in everyone]
    indices = [_halo(world, world.rank, to) for to in everyone]
    found: Tensor = module.indexed_all_to_all_v(x, indices, sizes, group=world.group)
    return found


PHYSICSNEMO = Repository(
    "nvidia-physicsnemo",
    Source("NVIDIA/physicsnemo", "94b355108cfd10e253d3d41cacdc0c0112b078e4", "nvidia-physicsnemo==2.2.2"),
    (
        Replaced("physicsnemo/distributed/mappings.py", "physicsnemo_mappings.py"),
        Replaced("physicsnemo/distributed/autograd.py", "physicsnemo_autograd.py"),
    ),
    _physics_load,
    (
        Case(
            "copy_to_parallel_region",
            lambda m, x, w: m.copy_to_parallel_region(x, "tp"),
            kept,
            all_rows(0, 3),
            same=True,
            uneven=None,
        ),
        Case(
            "reduce_from_parallel_region",
            lambda m, x, w: m.reduce_from_parallel_region(x, "tp"),
            summed,
            all_rows(0, 3),
            once=True,
            uneven=None,
        ),
        Case(
            "scatter_to_parallel_region",
            lambda m, x, w: m.scatter_to_parallel_region(x, 0, "tp"),
            sliced(),
            all_rows(0, 3),
            same=True,
            uneven=(3, 3, 1),
        ),
        Case(
            "gather_from_parallel_region",
            lambda m, x, w: m.gather_from_parallel_region(x, 0, list(w.sizes), "tp"),
            gathered(),
            rows(0, 3),
            once=True,
        ),
        Case(
            "all_gather_v",
            lambda m, x, w: m.all_gather_v(x, list(w.sizes), group=w.group),
            gathered(),
            rows(0, 3),
        ),
        Case("gather_v", _at_root, _dense_at_root, rows(0, 3)),
        Case(
            "scatter_v",
            lambda m, x, w: m.scatter_v(x, list(w.sizes), 0, 0, w.group),
            lambda xs, w: [
                part + 0 * x.sum() for part, x in zip(xs[0].split(list(w.sizes)), xs, strict=True)
            ],
            all_rows(0, 3),
        ),
        Case(
            "indexed_all_to_all_v",
            _indexed,
            lambda xs, w: [_received(xs, w, to) for to in range(w.size)],
            rows(0, 3),
        ),
    ),
    None,
    _physics_prepare,
    left="`DistributedManager` stays; where the two files are imported a small one stands for it. `gather_v` returns a "
    "tensor with no rows off the root, where the original returns uninitialized memory. `use_fp32` sums are in the "
    "precision of the operand. Its tests need GPUs, and packages such as warp and s3fs: not run.",
)


def _received(xs: Any, world: World, to: int) -> Tensor:
    return torch.cat([xs[rank][_halo(world, rank, to)] for rank in range(world.size)])


SCIENCE = (FAIRCHEM, ANEMOI, PHYSICSNEMO)
"""Those that are compared."""
