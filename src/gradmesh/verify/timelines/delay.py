"""`delayed`: artificial network delays, on any backend."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gradmesh.transport import Transport, install_middleware
from gradmesh.verify.simulator.model import CostModel, Link
from gradmesh.verify.timelines.middleware import Middleware, Transfer

__all__ = ["delayed"]

T = TypeVar("T")


class _Delayed(Middleware):
    """Middleware that delays each transfer to the time of a cost model."""

    def __init__(self, inner: Transport, model: CostModel) -> None:
        super().__init__(inner)
        self._model = model

    def through(self, transfer: Transfer, run: Callable[[], T]) -> T:
        """Run the transfer, and sleep for the rest of its modelled time."""
        op, payload, sent = transfer
        seconds = self._model.seconds(op, self.axis.name, self.axis.size, payload, sent)
        start = time.perf_counter()
        result = run()
        left = start + seconds - time.perf_counter()
        if left > 0 and op != "send":
            time.sleep(left)
        return result


@contextlib.contextmanager
def delayed(wire: CostModel | Link) -> Iterator[None]:
    """Delay every gradmesh collective to at least the time that it would take on a given link, on any backend.

    After the transfer the rank sleeps for the rest of that time, in the transfer's thread and without holding the GIL,
    so that other threads continue: asynchronous calls (`async_op=True`) hide the delay like that of a real network.
    All ranks must pass the same model.

    The time counts on each rank from the start of its transfer. It is given by the `CostModel` for the bytes that this
    rank sends (see `gradmesh.verify.timelines.middleware`); a single `Link` means a model with the algorithm "direct".
    A point-to-point message is delayed at the receiver; `send` does not wait. Direct calls of torch.distributed, and
    calls that a compiler may reorder, are not delayed. In nested blocks the longer delay counts.

    Args:
        wire: the link of every axis, or a model with a link for each axis by name.

    Raises:
        ArgumentError: the model has no link for the axis of a call; raised by the call, on every rank.

    Example:
        >>> import time
        >>> def on_each_rank():
        ...     x = torch.ones(1_000_000)  # 4 MB, of which each rank keeps half
        ...     with gm.verify.delayed(gm.verify.Link(latency_us=500, gbytes_per_s=0.1)):
        ...         start = time.perf_counter()
        ...         gm.reduce_scatter(x)
        ...     return time.perf_counter() - start >= 0.0205
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    model = CostModel(wire, "direct") if isinstance(wire, Link) else wire
    # Innermost, so that a timeline includes the delay whichever of the two was entered first.
    with install_middleware(lambda transport: _Delayed(transport, model), innermost=True):
        yield
