"""Checks that a linear map over ranks is what it says, and that its adjoint is right.

For ops of one's own, and for ops of the library on a machine or backend that its tests have not seen: each check runs
on all ranks of the op's axis at once and returns an error that is the same on every rank, to be held against rounding.

* `inner_product_error`: |<A x, y> - <x, A* y>| on random operands of the op's types.
* `adjoint_matrix_error`: how far the adjoint's matrix is from the transpose of the op's; exact, for small operands.
* `matrix`: the op as a dense matrix over the values of all ranks.
* `sample`, `pairing`: what the checks are made of.

And a simulator, for any program (`gradmesh.verify.simulator`):

* `simulate`: many ranks in one process, in an order that a seed brings back, with a log of every collective, and at
  the speed of a `CostModel`.

>>> from gradmesh.ops.all_gather import AllGather
>>> from gradmesh.ops.shard import Shard
>>> from gradmesh.ops.sizes import EQUAL
>>> def on_each_rank():
...     op = AllGather(gm.axis(), 0, EQUAL)  # V -> R, so that its adjoint sums
...     right = gm.verify.adjoint_matrix_error(op, (2, 3))
...     wrong = gm.verify.adjoint_matrix_error(op, (2, 3), adjoint=Shard(gm.axis(), 0, EQUAL))
...     return right, wrong
>>> gm.launch(on_each_rank, 2, backend="threads")
[(0.0, 1.0), (0.0, 1.0)]
"""

from gradmesh.verify.laws import adjoint_matrix_error, inner_product_error, matrix, pairing, sample
from gradmesh.verify.simulator import CostModel, Link, Simulation, simulate

__all__ = [
    "CostModel",
    "Link",
    "Simulation",
    "adjoint_matrix_error",
    "inner_product_error",
    "matrix",
    "pairing",
    "sample",
    "simulate",
]
