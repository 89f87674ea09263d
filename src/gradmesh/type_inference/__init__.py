"""What every tensor is over the ranks, found out while a program runs: V, R, I or P, through every operator.

How it works. A dispatch mode sees every operator that a rank runs, and notes for each result what it is made of: a
number of 64 bits, made of the operator, its other arguments and the numbers of its operands; for what comes from
outside, of its bits (`digest`, `tape`, `operators`). Values with the same number are the same bits, so that a value is
the same on every rank if every rank has its number. Ranks tell each other their numbers where they meet anyway
(`agreement`): a rank may do what others do not in between. A pending sum has a number too, which says that the ranks
have put the terms through the same linear operators.

What operators do to a pending sum stands in one table (`table`), in a language of its own (`rules`), and is proven row
by row by `tools.operators`. What the library's collectives do stands in the registry of ops (`verbs`), what those of
torch.distributed do in `raw`. Findings wait until the ranks have met (`tracker`), and so come on every rank.
"""

from gradmesh.type_inference.asserted import assert_type
from gradmesh.type_inference.block import Types, typed
from gradmesh.type_inference.findings import Finding

__all__ = ["Finding", "Types", "assert_type", "typed"]
