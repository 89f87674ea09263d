import gradmesh as gm


class _SeqAllToAll:
    @staticmethod
    def apply(group, input, scatter_idx, gather_idx, batch_dim_idx, *streams):
        return gm.all_to_all(input, group, split_dim=scatter_idx, concat_dim=gather_idx)
