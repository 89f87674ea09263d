"""The block of `ordered()`, and what finds its chain."""

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

    On every rank, the same collectives have to run forward in the same order. Then the backward ones do too,
    on all axes together: also when a rank's loss does not use an output, when an operand does not require grad on
    one rank, when a rank has no loss at all. A block inside another one belongs to its chain; one that is opened in a
    running backward pass, by a hook or a Function that trains something, has a chain of its own. Collectives under
    `torch.no_grad()`, and those of integers and bools, have no backward and stay outside. After a pass with
    create_graph, a loss that is made from its gradients needs join again. Inside a forward-mode level the collective
    of a tangent is a link too, with zeros where a rank has no tangent.

    Yields:
        The chain, with `join(loss)`; `gm.join`, `gm.backward` and `gm.grad` find it too.

    Raises:
        OrderError: the block ends with collectives that were not joined to a loss; a collective runs after join, in
            a torch.func derivative, or in a reentrant checkpoint.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.all_gather(x)
        ...         loss = y.sum() if gm.axis().rank == 0 else None  # rank 1 has no use for y
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
    """Tie the chain of the `ordered()` block to this rank's loss; see `Order.join`.

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
    """Join this rank's loss and run its backward inside an `ordered()` block; see `Order.backward`.

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
                "there is no chain",
                op=op,
                expected="a call inside `with gradmesh.ordered():`",
                got="a call outside of it",
                remedy="open the block before the first collective",
            )
        )
    return chain
