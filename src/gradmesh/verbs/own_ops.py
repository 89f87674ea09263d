"""`apply`: run an op that is defined outside of the package."""

from __future__ import annotations

from torch import Tensor

from gradmesh.errors import ArgumentError, message
from gradmesh.ops.base import LinearOp
from gradmesh.verbs.call import Call


def apply(op: LinearOp, x: Tensor) -> Tensor:
    """Run a collective of your own on this rank's tensor, with its derivatives of every order.

    Every rank of the op's axis calls it. The ranks compare the call as they compare those of the verbs.

    Args:
        op: an object of a subclass of `gradmesh.ops.base.LinearOp`.
        x: the operand.

    Raises:
        ArgumentError: `op` is not a LinearOp, or `x` is not a dense tensor.
        MismatchError: the ranks' calls differ.

    Example:
        >>> from gradmesh.ops.permute import Shift
        >>> def on_each_rank():
        ...     return gm.apply(Shift(gm.axis(), offset=1), torch.tensor([1.0 + gm.rank()]))
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [tensor([2.]), tensor([1.])]
    """
    if not isinstance(op, LinearOp):
        raise ArgumentError(
            message(
                "the op is not a LinearOp",
                op="apply",
                expected="an object of a subclass of gradmesh.ops.base.LinearOp",
                got=f"{type(op).__name__}",
                remedy="pass the op first, made with its axis: gradmesh.apply(MyOp(gradmesh.axis()), x)",
            )
        )
    call = Call(op.verb, x, op.axis)
    result: Tensor = call.run(op, call.x)
    return result
