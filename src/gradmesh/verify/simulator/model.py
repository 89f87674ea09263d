"""What a collective costs: latency and bandwidth of a link, and the formula of an algorithm.

The formulas are in `costs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from gradmesh.errors import ArgumentError, message
from gradmesh.verify.simulator.costs import ALGORITHMS, sent_evenly

__all__ = ["Algorithm", "CostModel", "Link"]

Algorithm = Literal["fastest", "ring", "tree", "direct"]


@dataclasses.dataclass(frozen=True)
class Link:
    """How ranks of an axis reach each other.

    Attributes:
        latency_us: microseconds that a message takes, however short.
        gbytes_per_s: 10^9 bytes that a rank can send per second.
        call_us: microseconds that a collective takes besides, however many messages it is made of: the software's part.

    >>> Link(latency_us=10, gbytes_per_s=2).seconds(rounds=3, size=1e6)
    0.00053
    """

    latency_us: float
    gbytes_per_s: float
    call_us: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and self.gbytes_per_s > 0 and self.call_us >= 0):
            raise ArgumentError(
                message(
                    "this is no link",
                    op="Link",
                    expected="times that are not negative and a positive bandwidth",
                    got=repr(self),
                    remedy="use math.inf for a bandwidth without limit",
                )
            )

    def seconds(self, rounds: float, size: float) -> float:
        """The time of a call of so many rounds of messages with so many bytes in all."""
        return (self.call_us + rounds * self.latency_us) * 1e-6 + size / (self.gbytes_per_s * 1e9)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The links of the axes, and the algorithm that the ranks are taken to use.

    Attributes:
        links: the link of every axis by name, or one for all. A group that runs along several axes, such as the world
            of a mesh, has the largest latency and the smallest bandwidth of theirs.
        algorithm: "ring", "tree", "direct", or "fastest" for the faster of ring and tree.

    >>> model = CostModel({"inner": Link(5, 100), "outer": Link(20, 10)}, algorithm="ring")
    >>> model.seconds("all_reduce", "outer", 128, payload=1e9)  # 254 rounds, 1.98 GB
    0.2035175
    """

    links: Mapping[str, Link] | Link
    algorithm: Algorithm = "fastest"

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError(
                message(
                    "there is no such algorithm",
                    op="CostModel",
                    expected=", ".join(ALGORITHMS),
                    got=repr(self.algorithm),
                    remedy="the formulas of each are in gradmesh.verify.simulator.costs",
                )
            )

    def link(self, axis: str) -> Link:
        """The link of an axis, or of several that are joined with "+".

        Raises:
            ArgumentError: the model has no link for it.
        """
        if isinstance(self.links, Link):
            return self.links
        names = [axis] if axis in self.links else axis.split("+")
        missing = [name for name in names if name not in self.links]
        if missing:
            raise ArgumentError(
                message(
                    "the cost model has no link for an axis",
                    op="CostModel",
                    axis=axis,
                    expected=f"one of {', '.join(self.links)}",
                    got=", ".join(missing),
                    remedy="add a link of that name, or pass simulate the mesh= whose axes have these names",
                )
            )
        found = [self.links[name] for name in names]
        return Link(
            max(link.latency_us for link in found),
            min(link.gbytes_per_s for link in found),
            max(link.call_us for link in found),
        )

    def seconds(self, op: str, axis: str, size: int, payload: float, sent: float | None = None) -> float:
        """The time of one collective.

        Args:
            op: as in an `Event`.
            axis: the axis.
            size: the number of ranks.
            payload: the largest payload of a rank.
            sent: the most that a rank sends; None: what it is where all payloads are equal.
        """
        link = self.link(axis)
        sent = sent_evenly(op, size, payload) if sent is None else sent
        return min(link.seconds(*cost) for cost in ALGORITHMS[self.algorithm](op, size, payload, sent))

    def fitted(
        self,
        axis: str,
        op: str,
        size: int,
        points: Sequence[tuple[float, float]],
        *,
        per: Literal["message", "call"] = "message",
    ) -> Link:
        """The link with which this model's algorithm takes the measured time for the first and the last size.

        Args:
            axis: the axis, for the error.
            op: the collective that was measured.
            size: the number of ranks.
            points: pairs of payload in bytes and seconds, from the smallest to the largest.
            per: whether the time that does not depend on the size is one of each message, as on a network, or one of
                the call, as in shared memory.

        Raises:
            ArgumentError: no link takes these times.
        """
        (small, quick), (large, slow) = points[0], points[-1]
        rounds, few = ALGORITHMS[self.algorithm](op, size, small, sent_evenly(op, size, small))[-1]
        _, many = ALGORITHMS[self.algorithm](op, size, large, sent_evenly(op, size, large))[-1]
        per_byte = (slow - quick) / (many - few) if many > few else 0.0
        if per_byte <= 0 or not rounds:
            raise ArgumentError(
                message(
                    "no link takes these times",
                    op="CostModel.fitted",
                    axis=axis,
                    expected="two sizes of an op that sends, the larger one slower",
                    got=f"{small:g} bytes in {quick:g} s, {large:g} bytes in {slow:g} s",
                    remedy="measure sizes that lie further apart",
                )
            )
        fixed = 1e6 * max(0.0, quick - few * per_byte)
        bandwidth = 1e-9 / per_byte
        return Link(fixed / rounds, bandwidth) if per == "message" else Link(0.0, bandwidth, fixed)
