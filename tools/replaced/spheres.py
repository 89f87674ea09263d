"""Libraries for fields on the sphere, whose latitudes and longitudes are sharded over two groups of ranks."""

from __future__ import annotations

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
    transposed,
)
from tools.replaced.repository import Repository, alone
from tools.replaced.sources import Replaced, Source

_BALANCED = (3, 2, 2)
_GROUP: list[World] = []


def _regions(call: Any, names: dict[str, str], of: Any) -> tuple[Case, ...]:
    """The cases that both libraries have: `of` passes their group, `call` finds the function."""
    return (
        Case(
            names["transpose"],
            lambda m, x, w: call(m, names["transpose"])(x, (0, 1), list(w.sizes), *of),
            transposed(0, 1),
            rows(7, 0, dim=1),
        ),
        Case(
            names["copy"],
            lambda m, x, w: call(m, names["copy"])(x, *of),
            kept,
            all_rows(0, 3),
            same=True,
            uneven=None,
        ),
        Case(
            names["reduce"],
            lambda m, x, w: call(m, names["reduce"])(x, *of),
            summed,
            all_rows(0, 3),
            once=True,
            uneven=None,
        ),
        Case(
            names["scatter"],
            lambda m, x, w: call(m, names["scatter"])(x, 0, *of),
            sliced(),
            all_rows(0, 3),
            same=True,
            uneven=_BALANCED,
        ),
        Case(
            names["gather"],
            lambda m, x, w: call(m, names["gather"])(x, 0, list(w.sizes), *of),
            gathered(),
            rows(0, 3),
            once=True,
            uneven=_BALANCED,
        ),
    )


def _harmonics_load(root: Path) -> Any:
    names = ("_amp_utils", "utils", "primitives")
    place = "torch_harmonics/distributed"
    files = [alone(root, f"{place}/{name}.py", f"torch_harmonics.distributed.{name}") for name in names]
    return SimpleNamespace(utils=files[1], primitives=files[2])


def _harmonics_prepare(module: Any, world: World | None) -> None:
    if world is not None:
        module.utils.init(world.group, world.group)


def _primitive(module: Any, name: str) -> Any:
    return getattr(module.primitives, name)


def _halo(xs: Any, world: World) -> list[Tensor]:
    """A row of each neighbor, zeros at both ends."""
    whole = torch.nn.functional.pad(torch.cat(list(xs), 2), [0, 0, 1, 1])
    ends = torch.tensor(world.sizes).cumsum(0).tolist()
    return [whole[:, :, end - size : end + 2] for end, size in zip(ends, world.sizes, strict=True)]


_HARMONICS = {
    "transpose": "distributed_transpose_polar",
    "copy": "copy_to_polar_region",
    "reduce": "reduce_from_polar_region",
    "scatter": "scatter_to_polar_region",
    "gather": "gather_from_polar_region",
}
_REGIONS = ("Polar", "Azimuth")
TORCH_HARMONICS = Repository(
    "torch-harmonics",
    Source(
        "NVIDIA/torch-harmonics",
        "9e9fa5373bc66add241638ef7a481da2e5c80d32",
        parts=("torch_harmonics",),
    ),
    (
        Replaced(
            "torch_harmonics/distributed/primitives.py",
            "torch_harmonics.py",
            (
                "_transpose",
                "_reduce",
                "_split",
                "_gather",
                "_reduce_scatter",
                *(f"_DistributeTranspose{where}" for where in _REGIONS),
                *(f"_CopyTo{where}Region" for where in _REGIONS),
                *(f"_ReduceFrom{where}Region" for where in _REGIONS),
                *(f"_ReduceFromScatterTo{where}Region" for where in _REGIONS),
                "_ScatterToPolarRegion",
                "_GatherFromPolarRegion",
                "_GatherFromCopyToPolarRegion",
                "_PolarHaloExchangeFn",
                *_HARMONICS.values(),
                "distributed_transpose_azimuth",
                "copy_to_azimuth_region",
                "reduce_from_azimuth_region",
                "reduce_from_scatter_to_polar_region",
                "reduce_from_scatter_to_azimuth_region",
                "gather_from_copy_to_polar_region",
                "polar_halo_exchange",
            ),
        ),
    ),
    _harmonics_load,
    (
        *_regions(_primitive, _HARMONICS, ()),
        Case(
            "reduce_from_scatter_to_polar_region",
            lambda m, x, w: m.primitives.reduce_from_scatter_to_polar_region(x, 0),
            sum_sliced(),
            all_rows(0, 3),
            uneven=_BALANCED,
        ),
        Case(
            "gather_from_copy_to_polar_region",
            lambda m, x, w: m.primitives.gather_from_copy_to_polar_region(x, 0, list(w.sizes)),
            gathered(),
            rows(0, 3),
            uneven=_BALANCED,
        ),
        Case(
            "polar_halo_exchange",
            lambda m, x, w: m.primitives.polar_halo_exchange(x, 1),
            _halo,
            rows(1, 1, 0, 2, dim=2),
        ),
    ),
    None,
    _harmonics_prepare,
    left="sums are in the precision of the operand, not always in float32. Its tests need its compiled kernels, with "
    "which a package would be built: not run.",
)


class _Comm:
    """What the mappings ask of makani's `comm`."""

    def get_group(self, _name: str) -> Any:
        return _GROUP[-1].group

    def get_size(self, _name: str) -> int:
        return _GROUP[-1].size


def _makani_load(root: Path) -> Any:
    given: dict[str, Any] = {
        "makani.utils": {"comm": _Comm()},
        "makani.models.helpers": {"count_parameters": None},
    }
    for name in ("_amp_utils", "config"):
        alone(root, f"makani/mpu/{name}.py", f"makani.mpu.{name}", **given)
    return alone(root, "makani/mpu/mappings.py", "makani.mpu.mappings", **given)


def _makani_prepare(module: Any, world: World | None) -> None:
    if world is not None:
        _GROUP.append(world)


_MAKANI = {
    "transpose": "distributed_transpose",
    "copy": "copy_to_parallel_region",
    "reduce": "reduce_from_parallel_region",
    "scatter": "scatter_to_parallel_region",
    "gather": "gather_from_parallel_region",
}
MAKANI = Repository(
    "makani",
    Source("NVIDIA/makani", "2dfc4c893343dce717d611099f0df8cf0d243311", parts=("makani/mpu",)),
    (
        Replaced(
            "makani/mpu/mappings.py",
            "makani.py",
            (
                "_DistributedTranspose",
                "_CopyToParallelRegion",
                "_ReduceFromParallelRegion",
                "_ScatterToParallelRegion",
                "_GatherFromParallelRegion",
                *_MAKANI.values(),
            ),
        ),
    ),
    _makani_load,
    _regions(getattr, _MAKANI, ("h",)),
    None,
    _makani_prepare,
    left="`makani.utils.comm`, which keeps the groups, stays; where the file is imported a small one stands for it. "
    "Sums are in the precision of the operand, not always in float32. Its tests need its trainers, and these "
    "physicsnemo, zarr, h5py and wandb: not run.",
    packages=("torch-harmonics==0.9.3",),
)

SPHERES = (TORCH_HARMONICS, MAKANI)
"""Those that are compared."""
