import gradmesh as gm


def _over(verb, x, group, *args, **kwargs):
    return x if group is None else verb(x, group, *args, **kwargs)


def _transpose(x, dims, sizes, group):
    given = {"split_dim": dims[0], "concat_dim": dims[1], "split_sizes": "balanced", "concat_sizes": sizes}
    return _over(gm.all_to_all, x, group, **given)


def distributed_transpose_azimuth(input_, dims_, shapes_):
    return _transpose(input_, dims_, shapes_, azimuth_group())


def distributed_transpose_polar(input_, dims_, shapes_):
    return _transpose(input_, dims_, shapes_, polar_group())


def copy_to_polar_region(input_):
    return _over(gm.replicate, input_, polar_group())


def copy_to_azimuth_region(input_):
    return _over(gm.replicate, input_, azimuth_group())


def reduce_from_polar_region(input_):
    return _over(gm.all_reduce, input_, polar_group(), dst=gm.I)


def reduce_from_azimuth_region(input_):
    return _over(gm.all_reduce, input_, azimuth_group(), dst=gm.I)


def scatter_to_polar_region(input_, dim_):
    return _over(gm.shard, input_, polar_group(), dim_, sizes="balanced")


def gather_from_polar_region(input_, dim_, shapes_):
    return _over(gm.all_gather, input_, polar_group(), dim_, dst=gm.I, sizes=shapes_)


def reduce_from_scatter_to_polar_region(input_, dim_):
    return _over(gm.reduce_scatter, input_, polar_group(), dim_, sizes="balanced")


def reduce_from_scatter_to_azimuth_region(input_, dim_):
    return _over(gm.reduce_scatter, input_, azimuth_group(), dim_, sizes="balanced")


def gather_from_copy_to_polar_region(input_, dim_, shapes_):
    return _over(gm.all_gather, input_, polar_group(), dim_, sizes=shapes_)


def polar_halo_exchange(x, r_lat):
    if (group := polar_group()) is None:
        return x
    rank, size = gm.axis(group).rank, gm.axis(group).size
    ends = [r_lat * (rank == 0), r_lat * (rank == size - 1)]
    return torch.nn.functional.pad(gm.halo_exchange(x, group, 2, halo=r_lat, sizes="auto"), [0, 0, *ends])
