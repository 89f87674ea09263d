import gradmesh as gm


class _SeqAllToAll:
    @staticmethod
    def apply(group, local_input, scatter_dim, gather_dim):
        return gm.all_to_all(local_input, group, split_dim=scatter_dim, concat_dim=gather_dim)


class _Slice:
    @staticmethod
    def apply(group, local_input, dim, scale_grad):
        part = gm.shard(local_input, group, dim)
        return gm.scale_gradient(part, 1 / gm.axis(group).size) if scale_grad else part


class _Gather:
    @staticmethod
    def apply(group, local_input, dim, grad_scale=False):
        whole = gm.all_gather(local_input, group, dim, sizes="auto")
        return gm.scale_gradient(whole, gm.axis(group).size) if grad_scale else whole


class _AlltoAllRegion:
    @staticmethod
    def apply(group, x, input_splits, output_splits):
        return gm.all_to_all(x, group, split_sizes=input_splits, concat_sizes=output_splits)


class _Roll:
    @staticmethod
    def apply(input, shifts, dims, group):
        if group is None or shifts == 0:
            return torch.roll(input, shifts, dims)
        size, out = input.size(dims), abs(shifts)
        edge = input.narrow(dims, size - out if shifts > 0 else 0, out)
        rest = input.narrow(dims, 0 if shifts > 0 else out, size - out)
        from_other = gm.shift(edge, group, 1 if shifts > 0 else -1)
        return torch.cat([from_other, rest] if shifts > 0 else [rest, from_other], dims)
