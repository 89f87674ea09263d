import gradmesh as gm

from .initialize import get_model_parallel_group as _group


def copy_to_model_parallel_region(input_):
    return gm.replicate(input_, _group())


def reduce_from_model_parallel_region(input_):
    return gm.all_reduce(input_, _group(), dst=gm.I)


def scatter_to_model_parallel_region(input_):
    return gm.shard(input_, _group(), -1)


def gather_from_model_parallel_region(input_):
    return gm.all_gather(input_, _group(), -1, dst=gm.I)
