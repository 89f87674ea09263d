"""Checks of the gradients of programs of several ranks.

* `gradcheck` holds what backward leaves on every rank against finite differences of the objective of all ranks.
* `same_as_single` holds a program of several ranks against the same on one process.
* `Input` says what an input is over the ranks; `Shard` how a tensor of one process is cut for them.

How it works, from the bottom: `inputs` finds the leaves of what a rank is given; `program` calls the function with
leaves moved and takes gradients; `measure` is what one rank does (`refusals`: where it cannot), `judge` what is made of
all ranks' numbers, `report` what is told, and `check` the call. A failure is looked into by `diagnosis`: `hypotheses`
predict the wrong gradients from the finite differences (`cases`), and `trials` run the program again with one
collective's gradient changed (`changes`), found by `calls`, to see which of them mends all (`suspects`). `training` is
a rank of `same_as_single` (`single`), whose tensors lie as `placements` says and are compared by `comparison`.
"""

from gradmesh.verify.gradients.check import gradcheck
from gradmesh.verify.gradients.inputs import Input
from gradmesh.verify.gradients.placements import Shard
from gradmesh.verify.gradients.report import Entry, GradcheckReport
from gradmesh.verify.gradients.single import same_as_single
from gradmesh.verify.gradients.single_report import Deviation, SingleReport

__all__ = [
    "Deviation",
    "Entry",
    "GradcheckReport",
    "Input",
    "Shard",
    "SingleReport",
    "gradcheck",
    "same_as_single",
]
