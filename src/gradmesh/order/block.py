"""`ordered()`, `join`, `backward` and `grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from gradmesh._torch import saves_for_a_checkpoint
from gradmesh.errors import OrderError, message
from gradmesh.order.chain import Order
from gradmesh.state import rank_state

__all__ = ["backward", "grad", "join", "ordered"]


@contextlib.contextmanager
def ordered() -> Iterator[Order]:
    """Run the backward of all collectives in the block on every rank, in the reverse of their order.

    Every rank has to run the same collectives forward in the same order. Then every rank also runs their backward, on
    all axes together, even if its loss does not use an output, an operand does not require grad on it, or it has no
    loss. A nested block joins the outer one; a block that is opened during a backward pass (in a hook or a Function
    that trains something) is separate. Collectives under `torch.no_grad()`, and those of integers and bools, have no
    backward and are not ordered. After a pass with create_graph=True, a loss computed from its gradients has to be
    joined again. Inside a forward-mode level the collective of a tangent is ordered too, with zeros where a rank has no
    tangent.

    Yields:
        An `Order`, with `join(loss)`; `gm.join`, `gm.backward` and `gm.grad` use the innermost one.

    Raises:
        OrderError: the block ends without `join`, `backward` or `grad`; a collective runs after `join`, in a torch.func
            derivative, or in a reentrant checkpoint.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.all_gather(x)
        ...         loss = y.sum() if gm.axis().rank == 0 else None  # rank 1 does not use y
        ...         gm.backward(loss)
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0], [1.0]]
    """
    state = rank_state()
    around = state.chain
    if isinstance(around, Order) and (around.here or saves_for_a_checkpoint()):
        yield around
        return
    state.chain = order = Order()
    try:
        yield order
        order.close()
    finally:
        state.chain = around


def join(loss: Tensor | None) -> Tensor:
    """Connect the collectives of the `ordered()` block to this rank's loss; see `Order.join`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(2.0, requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.all_reduce(x, dst=gm.R)
        ...         loss = gm.join(y if gm.axis().rank == 0 else None)
        ...     loss.backward()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    return _current("join").join(loss)


def backward(loss: Tensor | None, gradient: Tensor | None = None, **options: Any) -> None:
    """`join` and `loss.backward()` inside an `ordered()` block; see `Order.backward`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.scan(x)
        ...         gm.backward(y if gm.axis().rank == 1 else None)
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    _current("backward").backward(loss, gradient, **options)


def grad(
    outputs: Tensor | Sequence[Tensor] | None,
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` inside an `ordered()` block; see `Order.grad`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     with gm.ordered():
        ...         energy = gm.all_reduce(x**2, dst=gm.R) * (1 + gm.axis().rank)
        ...         (force,) = gm.grad(energy, x, create_graph=True)
        ...         gm.backward(force if gm.axis().rank == 0 else None)
        ...     return force.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(18.0, 6.0), (18.0, 0.0)]
    """
    return _current("grad").grad(outputs, inputs, grad_outputs, **options)


def _current(op: str) -> Order:
    chain = rank_state().chain
    if not isinstance(chain, Order):
        raise OrderError(
            message(
                f"gm.{op}() called outside of gm.ordered()",
                op=op,
                expected="a call inside `with gm.ordered():`",
                got="a call outside of it",
                remedy=f"wrap the forward pass and gm.{op}() in `with gm.ordered():`",
            )
        )
    return chain
