"""The same collectives in the same order on every rank, backward too.

Autograd runs only the backward nodes that a rank's loss reaches. Where a rank does not use the output of a
collective, it does not join the backward collective, and the others wait, or pair it with another one. Inside
`ordered()`, each collective also passes on a small token: it takes the token of the one before and gives its own to
the next, and `join` ties the last one to the loss. So the backward of every collective runs on every rank, each
after that of the one that followed it, in exactly the reverse of the forward order, with a gradient of zeros where an
output was not used.

An output that nobody used now meets zeros where there was no gradient at all: behind a function whose derivative
is infinite, such as sqrt at 0, that is NaN.
"""

from gradmesh.order.block import backward, grad, join, ordered
from gradmesh.order.chain import Order

__all__ = ["Order", "backward", "grad", "join", "ordered"]
