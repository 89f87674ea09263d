"""`ordered()`: the same collectives in the same order on every rank, backward too.

Autograd runs only the backward nodes that a rank's loss reaches. A rank that does not use the output of a collective
skips its backward collective, and the other ranks hang or pair it with another one. Inside `ordered()` each collective
takes the ordering token of the previous one and returns its own, and `join` connects the last token to the loss. So
every rank runs the backward of every collective, in exactly the reverse of the forward order, with a zero gradient
where an output was not used.

An unused output gets zeros instead of no gradient: behind a function whose derivative is infinite, such as sqrt at 0,
the result is NaN.
"""

from gradmesh.order.block import backward, grad, join, ordered
from gradmesh.order.chain import Order

__all__ = ["Order", "backward", "grad", "join", "ordered"]
