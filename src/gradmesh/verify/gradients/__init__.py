"""Gradient checks for multi-rank programs.

* `gradcheck` compares the gradients of every rank with finite differences of the objective of all ranks.
* `same_as_single` compares a multi-rank program with the same program on a single process.
* `Input` declares the type of an input over the ranks; `Shard` how a tensor is partitioned across them.

Modules, bottom up: `inputs` finds the leaves in a rank's inputs; `program` calls the function with perturbed leaves
and computes gradients; `measure` runs on each rank (`input_errors`: its errors); `comparisons` evaluates the
measurements of all ranks; `report` is the result and `check` the entry point. `diagnosis` explains a failure:
`hypotheses` predict wrong gradients from the finite differences (`cases`), and `trials` reruns the program with one
collective's gradient modified (`changes`; `calls` finds the collectives), to see which modification fixes all gradients
(`suspects`). `training` runs on each rank of `same_as_single` (`single`); `placements` describes its tensors,
`single_comparison` compares them.
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
