import gradmesh as gm


def neighbour_exchange_with_grad(from_rank, to_rank, tensor, group=None):
    axis = gm.axis(group)
    return gm.shift(tensor, axis, (axis.global_ranks.index(to_rank) - axis.rank) % axis.size)


def neighbour_exchange_bidir_with_grad(left_rank, right_rank, tensor_to_left, tensor_to_right, group=None):
    from_right = neighbour_exchange_with_grad(right_rank, left_rank, tensor_to_left, group)
    return from_right, neighbour_exchange_with_grad(left_rank, right_rank, tensor_to_right, group)
