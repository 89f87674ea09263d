import gradmesh as gm


class _DimZeroAllToAll:
    @staticmethod
    def apply(group, input):
        return gm.all_to_all(input, group)


class _SeqAllToAll:
    @staticmethod
    def apply(
        group, input, scatter_idx, gather_idx, batch_dim_idx, stream=None, handle=None, type=None, is_fwd=True
    ):
        return gm.all_to_all(input, group, split_dim=scatter_idx, concat_dim=gather_idx)
