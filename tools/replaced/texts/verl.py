import gradmesh as gm


class SeqAllToAll:
    @staticmethod
    def apply(group, local_input, scatter_dim, gather_dim, async_op=False):
        return gm.all_to_all(local_input, group, split_dim=scatter_dim, concat_dim=gather_dim)


class Gather:
    @staticmethod
    def apply(group, local_tensor, gather_dim, grad_scaler=True, async_op=False):
        whole = gm.all_gather(local_tensor, group, gather_dim, dst=gm.I)
        return gm.scale_gradient(whole, gm.axis(group).size) if grad_scaler else whole
