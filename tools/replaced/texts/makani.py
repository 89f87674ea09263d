import gradmesh as gm


def copy_to_parallel_region(input, comm_id):
    return gm.replicate(input, comm.get_group(comm_id))


def reduce_from_parallel_region(input, comm_id):
    return gm.all_reduce(input, comm.get_group(comm_id), dst=gm.I)


def scatter_to_parallel_region(input, dim, comm_id):
    return gm.shard(input, comm.get_group(comm_id), dim, sizes="balanced")


def gather_from_parallel_region(input, dim, shapes, comm_id):
    return gm.all_gather(input, comm.get_group(comm_id), dim, dst=gm.I, sizes=shapes)


def distributed_transpose(x, dims, shapes, comm_id):
    given = {"split_dim": dims[0], "concat_dim": dims[1], "split_sizes": "balanced", "concat_sizes": shapes}
    return gm.all_to_all(x, comm.get_group(comm_id), **given)
