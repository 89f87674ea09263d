"""The rows of the registry, and helpers for their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradmesh.ops.base import LinearOp
from gradmesh.ops.sizes import Sizes
from gradmesh.ops.transport import Axis

Example = tuple[LinearOp, Sequence[int]]
"""An op on an axis, and the shape of this rank's operand."""

Examples = Callable[[Axis], list[Example]]


@dataclass(frozen=True)
class Row:
    """One row of the registry; the op's class has the types and the adjoint."""

    call: str  # how the verb is called, as the table shows it
    forward: str  # what the op does, for the table
    # ops on an axis, each with the shape of this rank's operand; the first represents the row
    examples: Examples
    turned: str = ""  # what is swapped in an adjoint that is the same verb
    public: bool = True  # whether the op is the forward of a verb, not only the adjoint of one


def uneven(axis: Axis) -> Sizes:
    """Uneven sizes; one is 0 from three ranks on."""
    return Sizes(tuple((2, 3, 0, 1)[rank % 4] for rank in range(axis.size)))


def on_axis(op: type[LinearOp]) -> Examples:
    """Examples of an op whose only argument is the axis."""
    return lambda axis: [(op(axis), (2, 3)), (op(axis), ())]


def adjoints(examples: Examples) -> Examples:
    """Examples of the adjoints of ops."""
    return lambda axis: [(op.adjoint, op.out_shape(shape)) for op, shape in examples(axis)]
