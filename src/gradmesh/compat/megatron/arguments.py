"""The arguments of Megatron's mappings in gradmesh's terms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.world import current_mesh

__all__ = ["Sizes", "axis_of", "ints"]

Sizes = Iterable[SupportsInt] | None
"""Megatron passes lists, NumPy arrays and tensors."""


def axis_of(group: AxisLike) -> Axis:
    """The tensor parallel ranks; None is the axis "tp" of the current mesh if it has one, else as everywhere."""
    mesh = current_mesh()
    if group is None and mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        group = "tp"
    return resolve(group, "compat.megatron")


def ints(sizes: Sizes) -> list[int] | None:
    """Sizes as ints."""
    return None if sizes is None else [int(size) for size in sizes]
