import gradmesh as gm
from gradmesh.compat import torch_nn


class DistributedAutograd:
    class AllReduce:
        @staticmethod
        def apply(group, input_, op=ReduceOp.SUM):
            return torch_nn.all_reduce(input_, op, group)

    class AllGather:
        @staticmethod
        def apply(group, input_, world_size, dim):
            return gm.all_gather(input_, group, dim)

    class Slice:
        @staticmethod
        def apply(group, input_, world_size, dim, scale_grad):
            part = gm.shard(input_, group, dim)
            return gm.scale_gradient(part, 1 / world_size) if scale_grad else part

    class AllToAll4D:
        @staticmethod
        def apply(group, input_, world_size, scatter_dim, gather_dim):
            return gm.all_to_all(input_, group, split_dim=scatter_dim, concat_dim=gather_dim)
