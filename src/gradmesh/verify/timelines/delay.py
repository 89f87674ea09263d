"""A wire that is as slow as a test says, under the calls of any backend."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gradmesh.transport import Transport, install_middleware
from gradmesh.verify.simulator.model import CostModel, Link
from gradmesh.verify.timelines.through import Motion, Through

__all__ = ["delayed"]

T = TypeVar("T")


class _Delayed(Through):
    """A transport whose motions take at least what a cost model says."""

    def __init__(self, inner: Transport, model: CostModel) -> None:
        super().__init__(inner)
        self._model = model

    def through(self, motion: Motion, move: Callable[[], T]) -> T:
        """Make the motion, and sleep for what is left of its time."""
        op, payload, sent = motion
        seconds = self._model.seconds(op, self.axis.name, self.axis.size, payload, sent)
        begun = time.perf_counter()
        result = move()
        left = begun + seconds - time.perf_counter()
        if left > 0 and op != "send":
            time.sleep(left)
        return result


@contextlib.contextmanager
def delayed(wire: CostModel | Link) -> Iterator[None]:
    """Make every collective of gradmesh take at least the time that a link would need for it, on any backend.

    The calling rank sleeps for what is left of that time when the transfer itself is over, in the thread that made
    it and without the interpreter's lock, so that other threads work meanwhile: what begins a call and goes on
    (`async_op=True`) hides the delay as it would hide the time of a network. All ranks have to ask for the same.

    The time is counted on each rank from when that rank began. It is that of the `CostModel`, of the bytes that this
    rank has to send (`gradmesh.verify.timelines.through` says how many those are); a `Link` alone stands for a model
    with the algorithm "direct". A message is slow at its receiving end: `send` does not wait. A call of
    torch.distributed itself is not delayed, nor what a compiler may reorder. Of blocks inside of each other the slower
    one counts.

    Args:
        wire: the link of every axis, or a model with a link for each axis by name.

    Raises:
        ArgumentError: the model has no link for an axis that is used; from the call, on every rank.

    Example:
        >>> import time
        >>> def on_each_rank():
        ...     x = torch.ones(1_000_000)  # 4 MB, of which each rank keeps half
        ...     with gm.verify.delayed(gm.verify.Link(latency_us=500, gbytes_per_s=0.1)):
        ...         begun = time.perf_counter()
        ...         gm.reduce_scatter(x)
        ...     return time.perf_counter() - begun >= 0.0205
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    model = CostModel(wire, "direct") if isinstance(wire, Link) else wire
    # Inside of what watches, so that a timeline shows the delay whichever of the two was entered first.
    with install_middleware(lambda transport: _Delayed(transport, model), innermost=True):
        yield
