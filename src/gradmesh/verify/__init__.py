"""Tools that verify the gradients of multi-rank programs and locate errors in them. They work on any code.

* `audit`: audit a custom collective: which convention its backward implements, and every kind of fault in it.
* `gradcheck`: compare the gradients of a multi-rank program with finite differences; `Input` types its inputs.
* `same_as_single`: compare a multi-rank program with a single-process reference; `Shard` partitions its inputs.
* `simulate`: many ranks in one process, in a seeded, reproducible order, with a log of every collective and with
  durations from a `CostModel` of `Link`s.
* `timeline`: what each rank of a real run computes, launches, sends and waits for, as a trace file and a picture.
* `profiled`: torch's profiler on every rank, as one trace and one table by verb, axis and direction.
* `delayed`: adds a delay to every transfer, on any backend.
* `adjoint_error`, `as_matrix`: the adjoint error and the dense matrix of any linear map over ranks.

The following check custom ops (subclasses of `LinearOp`), and the library's ops on a new machine or backend. Each runs
on all ranks of the op's axis at once and returns the same error on every rank; compare it with rounding.

* `inner_product_error`: |<A x, y> - <x, A* y>| on random operands of the op's types.
* `adjoint_matrix_error`: how far the adjoint's matrix is from the transpose of the op's; exact, for small operands.
* `matrix`: the op as a dense matrix over the values of all ranks.
* `sample`, `pairing`: building blocks of these checks.

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

from gradmesh.verify.auditing.audit import audit
from gradmesh.verify.auditing.findings import Audit, Finding
from gradmesh.verify.gradients.gradcheck import gradcheck
from gradmesh.verify.gradients.inputs import Input, Shard
from gradmesh.verify.gradients.report import GradcheckReport
from gradmesh.verify.gradients.same_as_single import SingleReport, same_as_single
from gradmesh.verify.laws import (
    adjoint_error,
    adjoint_matrix_error,
    as_matrix,
    inner_product_error,
    matrix,
    pairing,
    sample,
)
from gradmesh.verify.profiles import Profile, profiled
from gradmesh.verify.simulator.costs import CostModel, Link
from gradmesh.verify.simulator.simulate import Simulation, simulate
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
