"""Drop-in for `torch.distributed.nn.functional`: the same functions, with right gradients at every order.

=====================  =========  ====================================================================
function               type       backward
=====================  =========  ====================================================================
`all_gather`           V -> R     the sum over the ranks of the own tensor's gradients
`_all_gather_base`     V -> R     the same
`all_reduce`           P -> R     the sum for SUM, its mean for AVG; for MAX and MIN the ranks that hold the
                                  extremum share it; for PRODUCT the product rule, right with zeros
`all_to_all`           V -> V     the way back
`all_to_all_single`    V -> V     the way back
`broadcast`            V -> R     the sum at `src`, zeros elsewhere
`gather`               V -> V     each rank's part of the gradient at `dst`
`reduce`               P -> V     the gradient at `dst`, through the same rules as `all_reduce`
`reduce_scatter`       P -> V     concatenates
`scatter`              V -> V     the gradients of all ranks, at `src`
=====================  =========  ====================================================================

What stays as in torch: the signatures; `src` and `dst` are ranks of the world; the results' shapes, zeros where
`gather` and `reduce` have no result; backward sums over ranks, as is right for losses that differ; a tensor given as
`output` is filled, without a gradient, while the tensor that is returned has one.

What is new: a group is looked up when the function is called, and None is the world; anything that
`gradmesh.axis` takes will do for it. Every function and its gradient run on every backend, and no call warns.
"""

from __future__ import annotations

from gradmesh.compat.torch_nn.exchange import _all_gather_base as _all_gather_base
from gradmesh.compat.torch_nn.exchange import all_gather, all_to_all, all_to_all_single
from gradmesh.compat.torch_nn.reductions import all_reduce, reduce_scatter
from gradmesh.compat.torch_nn.rooted import broadcast, gather, reduce, scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
