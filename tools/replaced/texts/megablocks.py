from types import SimpleNamespace

import gradmesh as gm


def all_to_all(x, output_split_sizes, input_split_sizes, group, async_op=False):
    found = gm.all_to_all(x, group, split_sizes=input_split_sizes, concat_sizes=output_split_sizes)
    return found, SimpleNamespace(wait=lambda: None)
