"""Drop-in for `megatron.core.tensor_parallel.mappings`: the regions of tensor and sequence parallelism.

==================================================  ========  =============================  =====================
name                                                type      forward                        backward
==================================================  ========  =============================  =====================
`copy_to_tensor_model_parallel_region`              I -> R    identity                       sum
`reduce_from_tensor_model_parallel_region`          P -> I    sum                            identity
`scatter_to_tensor_model_parallel_region`           I -> V    own part of the last dim       concatenate
`gather_from_tensor_model_parallel_region`          V -> I    concatenate along the last     own part
`all_gather_last_dim_from_tensor_parallel_region`   V -> R    concatenate along the last     sum, own part
`reduce_scatter_last_dim_to_tensor_parallel_region` P -> V    sum, own part of the last      concatenate
`scatter_to_sequence_parallel_region`               I -> V    own part of the first dim      concatenate
`gather_from_sequence_parallel_region`              V -> R    concatenate along the first    sum, own part
the same, `tensor_parallel_output_grad=False`       V -> I    concatenate along the first    own part
`reduce_scatter_to_sequence_parallel_region`        P -> V    sum, own part of the first     concatenate
`all_to_all`                                        V -> V    exchange parts of the first    the way back
`all_to_all_sp2hp`                                  V -> V    rows whole, columns cut        `all_to_all_hp2sp`
`all_to_all_hp2sp`                                  V -> V    columns whole, rows cut        `all_to_all_sp2hp`
==================================================  ========  =============================  =====================

`group` is a ProcessGroup or whatever else `gradmesh.axis` takes. None is the axis "tp" of the current mesh if it has
one, else the current mesh's only axis, else the world. Results are always fresh memory, also on a group of one rank,
and no gradient is summed in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

from torch import Tensor

from gradmesh import collectives
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.types import I, R
from gradmesh.world import current_mesh

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


# Megatron passes lists, NumPy arrays and tensors.
Sizes = Iterable[SupportsInt] | None


def copy_to_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """I -> R: say that the ranks use `input_` differently from here on; backward sums."""
    return collectives.replicate(input_, _axis(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """P -> I: the sum over the ranks; backward is the identity."""
    return collectives.all_reduce(input_, _axis(group), dst=I)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """I -> V: the own part of the last dimension; backward concatenates."""
    return collectives.shard(input_, _axis(group), -1)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """V -> I: the ranks' parts concatenated along the last dimension; backward is the own part."""
    return collectives.all_gather(input_, _axis(group), -1, dst=I)


def scatter_to_sequence_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """I -> V: the own part of the first dimension; backward concatenates."""
    return collectives.shard(input_, _axis(group), 0)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AxisLike = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - a choice of memory; results are always fresh here
) -> Tensor:
    """V -> R or V -> I: the ranks' parts concatenated along the first dimension.

    Args:
        input_: this rank's part.
        tensor_parallel_output_grad: whether tensor parallel work follows, which uses the result differently on each
            rank. If so backward sums over the ranks (V -> R), else it hands back the own part (V -> I).
        group: the ranks to gather from.
        output_split_sizes: each rank's size along the first dimension; None: the same on every rank.
        use_global_buffer: taken and not used.
    """
    dst = R if tensor_parallel_output_grad else I
    return collectives.all_gather(input_, _axis(group), 0, dst=dst, sizes=_ints(output_split_sizes))


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: AxisLike = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - a choice of memory; results are always fresh here
) -> Tensor:
    """P -> V: the sum over the ranks, of which each keeps its part of the first dimension; backward concatenates.

    Args:
        input_: this rank's term of the sum, whole along the first dimension.
        group: the ranks to sum over.
        input_split_sizes: the size of each rank's part; None: equal parts.
        use_global_buffer: taken and not used.
    """
    return collectives.reduce_scatter(input_, _axis(group), 0, sizes=_ints(input_split_sizes))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """V -> R: the ranks' parts concatenated along the last dimension; backward sums and keeps the own part."""
    return collectives.all_gather(input_, _axis(group), -1, dst=R)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: AxisLike = None) -> Tensor:
    """P -> V: the sum over the ranks, of which each keeps its part of the last dimension; backward concatenates."""
    return collectives.reduce_scatter(input_, _axis(group), -1)


def all_to_all(
    group: AxisLike,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
) -> Tensor:
    """V -> V: rank r gets the r-th part of the first dimension; backward is the way back.

    Args:
        group: the ranks to exchange among.
        input_: the parts for all ranks.
        output_split_sizes_: the size of the part from each rank; None: equal parts. (The original has the underscore.)
        input_split_sizes: the size of the part for each rank; None: equal parts.
    """
    send, receive = _ints(input_split_sizes), _ints(output_split_sizes_)
    return collectives.all_to_all(input_, _axis(group), split_sizes=send, concat_sizes=receive)


def all_to_all_sp2hp(input_: Tensor, group: AxisLike = None) -> Tensor:
    """V -> V: from rows cut over the ranks to columns cut, (n/W, H) to (n, H/W); backward is `all_to_all_hp2sp`.

    Leading dimensions are flattened into the rows.
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, _axis(group), split_dim=1, concat_dim=0)


def all_to_all_hp2sp(input_: Tensor, group: AxisLike = None) -> Tensor:
    """V -> V: from columns cut over the ranks to rows cut, (n, H/W) to (n/W, H); backward is `all_to_all_sp2hp`.

    Leading dimensions are flattened into the rows.
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, _axis(group), split_dim=0, concat_dim=1)


def _axis(group: AxisLike) -> Axis:
    mesh = current_mesh()
    if group is None and mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        group = "tp"
    return resolve(group, "compat.megatron")


def _ints(sizes: Sizes) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
