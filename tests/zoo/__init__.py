"""Small programs over several ranks, wrong ones and right ones, each with what has to be said of it.

* `wrong_adjoint`, `wrong_memory`, `wrong_modes`, `wrong_ranks`: hand-written collectives, one fault each.
* `wrong_contrastive`, `wrong_tensor_parallel`, `wrong_sequence`, `wrong_graph`: programs with a loss.
* `wrong_pains`: order, recomputation, mismatches, and what torch itself gets wrong.
* `wrong_training`: programs whose losses are consistent and not those of one process.
* `right_verbs`, `right_compat`, `right_models`, `right_training`: where nothing may be found.

`PROGRAMS` has them all; `python -m tools.zoo` runs them.
"""

from tests.zoo import (
    right_compat,
    right_models,
    right_training,
    right_verbs,
    wrong_adjoint,
    wrong_contrastive,
    wrong_graph,
    wrong_memory,
    wrong_modes,
    wrong_pains,
    wrong_ranks,
    wrong_sequence,
    wrong_tensor_parallel,
    wrong_training,
)
from tests.zoo.program import PROGRAMS, Checker, Program

__all__ = [
    "PROGRAMS",
    "Checker",
    "Program",
    "right_compat",
    "right_models",
    "right_training",
    "right_verbs",
    "wrong_adjoint",
    "wrong_contrastive",
    "wrong_graph",
    "wrong_memory",
    "wrong_modes",
    "wrong_pains",
    "wrong_ranks",
    "wrong_sequence",
    "wrong_tensor_parallel",
    "wrong_training",
]
