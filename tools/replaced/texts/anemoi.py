import gradmesh as gm


def shard_tensor(input_, dim, sizes, mgroup, gather_in_backward=True):
    return (
        gm.shard(input_, mgroup, dim, src=gm.I if gather_in_backward else gm.R, sizes=sizes)
        if mgroup
        else input_
    )


def gather_tensor(input_, dim, sizes, mgroup):
    return gm.all_gather(input_, mgroup, dim, dst=gm.I, sizes=sizes) if mgroup else input_


def reduce_tensor(input_, mgroup):
    return gm.all_reduce(input_, mgroup, dst=gm.I) if mgroup else input_


def sync_tensor(input_, dim, sizes, mgroup, gather_in_fwd=True):
    if not mgroup:
        return input_
    gathers = gather_in_fwd and sizes is not None
    return gm.all_gather(input_, mgroup, dim, sizes=sizes) if gathers else gm.replicate(input_, mgroup)


def reduce_shard_tensor(input_, dim, sizes, mgroup):
    return gm.reduce_scatter(input_, mgroup, dim, sizes=sizes) if mgroup else input_


def all_to_all_transpose(input_, dim_split, split_sizes, dim_concat, concat_sizes, mgroup):
    if not mgroup:
        return input_
    dims = {"split_dim": dim_split, "concat_dim": dim_concat}
    return gm.all_to_all(input_, mgroup, **dims, split_sizes=split_sizes, concat_sizes=concat_sizes)


def halo_exchange(input_, halo_info, mgroup):
    if not mgroup:
        return input_
    rows, counts = (dict(enumerate(each)) for each in (halo_info.send_indices, halo_info.recv_counts))
    halo = gm.neighbor_all_to_all(input_, mgroup, send_rows=rows, receive_counts=counts)
    return torch.cat([input_, halo])
