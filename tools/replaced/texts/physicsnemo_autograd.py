import gradmesh as gm


def all_gather_v(tensor, sizes, dim=0, use_fp32=True, group=None):
    return gm.all_gather(tensor, group, dim, sizes=sizes)


def gather_v(tensor, sizes, dim=0, dst=0, group=None):
    return gm.gather(tensor, group, dim, root=dst, sizes=sizes)


def scatter_v(tensor, sizes, dim=0, src=0, group=None):
    return gm.scatter(tensor, group, dim, root=src, sizes=sizes)


def indexed_all_to_all_v(tensor, indices, sizes, use_fp32=True, dim=0, group=None):
    rank, rows = gm.axis(group).rank, dict(enumerate(indices))
    counts = {source: row[rank] for source, row in enumerate(sizes)}
    return gm.neighbor_all_to_all(tensor, group, send_rows=rows, receive_counts=counts)
