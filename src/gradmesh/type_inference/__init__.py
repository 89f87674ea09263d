"""Inference of types: V, R, I or P of every tensor, through every operator, while a program runs.

A dispatch mode sees every operator that a rank runs, and gives each result a 64-bit number, made of the operator, its
other arguments and the numbers of its operands; a tensor from outside gets a number of its bits. Values with the same
number have the same bits, so a value is the same on every rank if every rank has its number. Ranks exchange numbers
only with collectives that they make anyway, so they may do different things in between. A pending sum has a number too:
it shows that the ranks have put the terms through the same linear operators. Findings wait until the ranks have
communicated, so that every rank reports them.

* `block`: `typed` and `assert_type`; gradients compared with the duals of types
* `tracker`: the state of a block: numbers, values, memory, conditions and findings
* `operators`: torch's operators
* `collectives`: collectives of the library and of torch
* `rules`: the table of operators, which `python -m tools.operators` proves row by row
"""

from gradmesh.type_inference.block import Types, assert_type, typed
from gradmesh.type_inference.tracker import Finding

__all__ = ["Finding", "Types", "assert_type", "typed"]
