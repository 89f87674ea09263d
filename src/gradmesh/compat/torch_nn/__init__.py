"""Drop-in for `torch.distributed.nn.functional`: the same functions, with correct gradients of every order.

=====================  =========  ====================================================================
function               type       backward
=====================  =========  ====================================================================
`all_gather`           V -> R     the sum over the ranks of the gradients of this rank's tensor
`_all_gather_base`     V -> R     the same
`all_reduce`           P -> R     the sum for SUM, its mean for AVG; for MAX and MIN the ranks that hold the
                                  extremum share it; for PRODUCT the product rule, correct with zeros
`all_to_all`           V -> V     the inverse exchange
`all_to_all_single`    V -> V     the inverse exchange
`broadcast`            V -> R     the sum at `src`, zeros elsewhere
`gather`               V -> V     each rank's part of the gradient at `dst`
`reduce`               P -> V     the gradient at `dst`, through the same rules as `all_reduce`
`reduce_scatter`       P -> V     concatenates
`scatter`              V -> V     the gradients of all ranks, at `src`
=====================  =========  ====================================================================

As in torch: the signatures; `src` and `dst` are global ranks; the results' shapes, with zeros where `gather` and
`reduce` have no result; backward sums over ranks, as needed for losses that differ; `output` is filled without a
gradient, and the returned tensor has one.

New: `group` is anything that `gradmesh.axis` accepts, resolved at each call; None is the world. Every function and its
gradient run on every backend, without warnings.
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
