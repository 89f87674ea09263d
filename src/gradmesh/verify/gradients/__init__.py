"""Checks of the gradients of programs of several ranks.

* `gradcheck` holds what backward leaves on every rank against finite differences of the objective of all ranks.
* `Input` says what an input is over the ranks.

How it works, from the bottom: `inputs` finds the leaves of what a rank is given; `program` calls the function with
leaves moved and takes gradients; `measure` is what one rank does, `judge` what is made of all ranks' numbers, and
`check` the call.
"""

from gradmesh.verify.gradients.check import gradcheck
from gradmesh.verify.gradients.inputs import Input
from gradmesh.verify.gradients.report import Entry, GradcheckReport

__all__ = ["Entry", "GradcheckReport", "Input", "gradcheck"]
