"""Mappings of sequence parallel regions, along the first dimension."""

from __future__ import annotations

from torch import Tensor

from gradmesh.compat.megatron.arguments import Group, Sizes, axis_of, ints
from gradmesh.types import Convention, I, R
from gradmesh.verbs import collectives

__all__ = [
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
]


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - results are always freshly allocated
) -> Tensor:
    """Concatenate along the first dimension.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                  b -> [a b]      g0[b]+g1[b] <- g1

        V -> I    the same forward; backward returns the local slice, g[a] and g[b]

    Args:
        input_: this rank's shard.
        tensor_parallel_output_grad: True if tensor parallel work follows, which uses the result differently on each
            rank: backward sums over the ranks (V -> R). False: backward returns the local slice (V -> I).
        group: the ranks to gather from.
        output_split_sizes: each rank's size along the first dimension; None: the same on every rank.
        use_global_buffer: ignored.

    Raises:
        ShapeError: `input_` does not match `output_split_sizes`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0], requires_grad=True)
        ...     ((1 + gm.axis().rank) * gather_from_sequence_parallel_region(x)).sum().backward()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0], [3.0]]
    """
    dst: Convention = R if tensor_parallel_output_grad else I
    return collectives.all_gather(input_, axis_of(group), 0, dst=dst, sizes=ints(output_split_sizes))


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - results are always freshly allocated
) -> Tensor:
    """Sum over the ranks; each rank keeps its slice of the first dimension.

    ::

        P -> V    shape (n, ...) -> (n/W, ...)    [x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0
                                                  [x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1

    Args:
        input_: this rank's term of the sum, with the full first dimension.
        group: the ranks to sum over.
        input_split_sizes: each rank's size along the first dimension; None: equal sizes.
        use_global_buffer: ignored.

    Raises:
        ShapeError: the sizes do not add up; or None, and the first dimension is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return reduce_scatter_to_sequence_parallel_region(torch.arange(4.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 2.0], [4.0, 6.0]]
    """
    return collectives.reduce_scatter(input_, axis_of(group), 0, sizes=ints(input_split_sizes))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's slice of the first dimension.

    ::

        I -> V    shape (n, ...) -> (n/W, ...)    [a b] -> a      [g0 g1] <- g0
                                                  [a b] -> b      [g0 g1] <- g1

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.

    Example:
        >>> def on_each_rank():
        ...     return scatter_to_sequence_parallel_region(torch.arange(4)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [2, 3]]
    """
    return collectives.shard(input_, axis_of(group), 0)
