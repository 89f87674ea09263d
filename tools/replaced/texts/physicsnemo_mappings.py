import gradmesh as gm
from physicsnemo.distributed.manager import DistributedManager
from physicsnemo.distributed.utils import compute_split_shapes


def _of(group):
    return DistributedManager().group(group)


def copy_to_parallel_region(input, group):
    return gm.replicate(input, _of(group))


def reduce_from_parallel_region(input, group):
    return gm.all_reduce(input, _of(group), dst=gm.I)


def scatter_to_parallel_region(input, dim, group):
    sizes = compute_split_shapes(input.shape[dim], DistributedManager().group_size(group))
    return gm.shard(input, _of(group), dim, sizes=sizes)


def gather_from_parallel_region(input, dim, shapes, group):
    return gm.all_gather(input, _of(group), dim, dst=gm.I, sizes=shapes)
