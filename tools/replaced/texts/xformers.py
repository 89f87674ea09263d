import gradmesh as gm


def copy_to_model_parallel_region(x, process_group):
    return x if process_group is None else gm.replicate(x, process_group)


def reduce_from_model_parallel_region(x, process_group):
    return x if process_group is None else gm.all_reduce(x, process_group, dst=gm.I)


def gather_from_sequence_parallel_region(x, process_group):
    return x if process_group is None else gm.all_gather(x, process_group)


def scatter_to_sequence_parallel_region(x, process_group):
    return x if process_group is None else gm.reduce_scatter(x, process_group)
