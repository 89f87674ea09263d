"""The cost model of collectives: latency and bandwidth of a link, and an algorithm whose formula is in `costs`."""

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
    """The network link between ranks of an axis.

    Attributes:
        latency_us: latency of a message in microseconds.
        gbytes_per_s: bandwidth of a rank in 10^9 bytes per second.
        call_us: overhead of a collective in microseconds, independent of its number of messages.

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
                    "invalid link",
                    op="Link",
                    expected="latency_us >= 0, call_us >= 0 and gbytes_per_s > 0",
                    got=repr(self),
                    remedy="pass e.g. Link(latency_us=10, gbytes_per_s=25); math.inf for unlimited bandwidth",
                )
            )

    def seconds(self, rounds: float, size: float) -> float:
        """The time of a call with that number of rounds and total bytes."""
        return (self.call_us + rounds * self.latency_us) * 1e-6 + size / (self.gbytes_per_s * 1e9)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The links of the axes, and the assumed algorithm.

    Attributes:
        links: the link of every axis by name, or one for all. A group along several axes, such as the world of a mesh,
            has the largest latency and the smallest bandwidth of them.
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
                    "unknown algorithm",
                    op="CostModel",
                    expected=", ".join(map(repr, ALGORITHMS)),
                    got=repr(self.algorithm),
                    remedy='pass e.g. algorithm="ring"; their formulas are in gradmesh.verify.simulator.costs',
                )
            )

    def link(self, axis: str) -> Link:
        """The link of an axis, or of several axes joined with "+".

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
                    remedy=f"add the link, e.g. CostModel({{{missing[0]!r}: Link(10, 25), ...}}), or pass simulate a "
                    "mesh= with the axes of the model",
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
            sent: the most that a rank sends; None: its value for equal payloads.
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
        """Fit a link such that this model's algorithm takes the measured time for the first and the last size.

        Args:
            axis: the axis, for the error.
            op: the measured collective.
            size: the number of ranks.
            points: pairs of payload in bytes and seconds, from the smallest to the largest.
            per: whether the fixed time occurs per message, as on a network, or per call, as in shared memory.

        Raises:
            ArgumentError: no link has these times.
        """
        (small, quick), (large, slow) = points[0], points[-1]
        rounds, few = ALGORITHMS[self.algorithm](op, size, small, sent_evenly(op, size, small))[-1]
        _, many = ALGORITHMS[self.algorithm](op, size, large, sent_evenly(op, size, large))[-1]
        per_byte = (slow - quick) / (many - few) if many > few else 0.0
        if per_byte <= 0 or not rounds:
            raise ArgumentError(
                message(
                    "cannot fit a link to the measured times",
                    op="CostModel.fitted",
                    axis=axis,
                    expected="times of an op that sends data, longer for the larger size",
                    got=f"{small:g} bytes in {quick:g} s, {large:g} bytes in {slow:g} s",
                    remedy="measure sizes that are further apart, e.g. 1e3 and 1e8 bytes",
                )
            )
        fixed = 1e6 * max(0.0, quick - few * per_byte)
        bandwidth = 1e-9 / per_byte
        return Link(fixed / rounds, bandwidth) if per == "message" else Link(0.0, bandwidth, fixed)
