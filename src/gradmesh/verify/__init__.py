"""Tools that prove the gradients of programs of several ranks, or find what is wrong with them. For anyone's code.

* `audit`: anyone's collective: which typed law its backward obeys, and every kind of fault in it.
* `gradcheck`: the gradients of a program of several ranks against finite differences; `Input` types its inputs.
* `same_as_single`: a program of several ranks against the same on one process; `Shard` cuts tensors for it.
* `simulate`: many ranks in one process, in an order that a seed brings back, with a log of every collective, and at
  the speed of a `CostModel` of `Link`s.
* `timeline`: what each rank of a real run worked, began, sent and waited for, as a trace file and a picture.
* `profiled`: torch's profiler on every rank, as one trace and one table by verb, axis and direction.
* `delayed`: a wire that is as slow as a test says, on any backend.
* `adjoint_error`, `as_matrix`: the law and the matrix of anyone's map, whatever it is made of.

For ops of one's own, made as the library's are, and for ops of the library on a machine or backend that its tests have
not seen. Each check runs on all ranks of the op's axis at once and returns an error that is the same on every rank, to
be held against rounding.

* `inner_product_error`: |<A x, y> - <x, A* y>| on random operands of the op's types.
* `adjoint_matrix_error`: how far the adjoint's matrix is from the transpose of the op's; exact, for small operands.
* `matrix`: the op as a dense matrix over the values of all ranks.
* `sample`, `pairing`: what the checks are made of.

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

from gradmesh.verify.auditing import Audit, Finding, audit
from gradmesh.verify.gradients import (
    GradcheckReport,
    Input,
    Shard,
    SingleReport,
    gradcheck,
    same_as_single,
)
from gradmesh.verify.laws import adjoint_matrix_error, inner_product_error, matrix, pairing, sample
from gradmesh.verify.maps import adjoint_error, as_matrix
from gradmesh.verify.profiles import Profile, profiled
from gradmesh.verify.simulator import CostModel, Link, Simulation, simulate
from gradmesh.verify.timelines import Timeline, delayed, timeline

__all__ = [
    "Audit",
    "CostModel",
    "Finding",
    "GradcheckReport",
    "Input",
    "Link",
    "Profile",
    "Shard",
    "Simulation",
    "SingleReport",
    "Timeline",
    "adjoint_error",
    "adjoint_matrix_error",
    "as_matrix",
    "audit",
    "delayed",
    "gradcheck",
    "inner_product_error",
    "matrix",
    "pairing",
    "profiled",
    "same_as_single",
    "sample",
    "simulate",
    "timeline",
]
