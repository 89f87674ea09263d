"""The rounds and bytes of a collective for each algorithm.

The formulas are those of a postal model: a message of n bytes takes `latency + n / bandwidth` (R. Hockney, "The
communication challenge for MPP", Parallel Computing 20, 1994). The rounds and bytes of ring and tree algorithms are
those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19, 2005. With W ranks, L = ceil(log2 W), n the largest
payload of a rank and s the most that a rank sends (`counting`), in rounds and bytes:

| op | ring | tree | direct |
|---|---|---|---|
| all_gather, reduce_scatter | W - 1, s | L, s | 1, s |
| all_to_all | W - 1, s | L, n L / 2 | 1, s |
| all_reduce | 2 (W - 1), s | L, n L; or 2 L, s | 2, s |
| broadcast, reduce | L + W - 1, 2 n (W - 1) / W | L, n L; or 2 L, 2 n (W - 1) / W | 1, n |
| gather | L, n (W - 1) | L, n (W - 1) | 1, n (W - 1) |
| scatter | L, s | L, s | 1, s |
| permute, send, recv | 1, n | 1, n | 1, n |
| barrier | L, 0 | L, 0 | 1, 0 |

`gloo` is what gradmesh sends over Gloo at check level 1. A round is a message and the notice of the receiver that it is
ready, for which Gloo waits, and a message has `MESSAGE` bytes more. Every call begins with an exchange of `HEAD` bytes,
which compares it and carries at most `inline(W)` bytes for each rank where data goes to each rank at once. Longer data
of at most `PAIRS` ranks does so at the same time. In rounds, with the first one, and bytes:

| op | up to `direct(W)` bytes | above |
|---|---|---|
| all_gather | 1 or 2, s | 1 of two ranks, W of more, s |
| reduce_scatter, all_to_all, gather, scatter, permute | 1 or 2, s | 1 or 2, s |
| all_reduce up to `gathered(W)` | 1, n (W - 1) | the same |
| all_reduce | 2, s | 2 W - 1, s |
| broadcast | 1, or (3 + L) / 2, s | 1 of two ranks, (3 + L) / 2 of more, s |
| reduce (above roughly) | 1 or W, s | W, s |

If two are given, the faster one counts. `direct` is for ranks that reach each other at once, as through one switch or
in shared memory. A link may add a fixed time per call. Arithmetic of reductions is free, unless the link's bandwidth
was fitted to include it.

Each rank has a link for each axis, which carries one collective or message at a time. A collective starts when all its
ranks have called it and their links are free. Links of different axes are independent.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from gradmesh.errors import ArgumentError
from gradmesh.transport.process_group import HEAD, PAIRS, direct, gathered, inline

if TYPE_CHECKING:
    from gradmesh.verify.simulator.trace import Event

Cost = tuple[float, float]
"""Rounds and bytes."""

Costs = dict[str, list[Cost]]


def _ring(op: str, size: int, n: float, s: float) -> list[Cost]:
    steps, log = size - 1, _log(size)
    costs: Costs = {
        "all_reduce": [(2 * steps, s)],
        **_each("all_gather reduce_scatter all_to_all", (steps, s)),
        **_each("broadcast reduce", (log + steps, 2 * n * steps / size)),
        **_common(log, size, n, s),
    }
    return costs[op]


def _tree(op: str, size: int, n: float, s: float) -> list[Cost]:
    log = _log(size)
    costs: Costs = {
        "all_to_all": [(log, n * log / 2)],
        "all_reduce": [(log, log * n), (2 * log, s)],
        **_each("all_gather reduce_scatter", (log, s)),
        **_each("broadcast reduce", (log, log * n), (2 * log, 2 * n * (size - 1) / size)),
        **_common(log, size, n, s),
    }
    return costs[op]


def _each(ops: str, *costs: Cost) -> Costs:
    return {op: list(costs) for op in ops.split()}


def _direct(op: str, size: int, n: float, s: float) -> list[Cost]:
    if op == "all_reduce":
        return [(2, s)]
    if op in ("broadcast", "reduce"):
        return [(1, n)]
    return _common(1, size, n, s).get(op, [(1, s)])


def _common(log: int, size: int, n: float, s: float) -> Costs:
    return {
        "gather": [(log, n * (size - 1))],
        "scatter": [(log, s)],
        "barrier": [(log, 0)],
        "withdrawn": [(0, 0)],
        **_each("permute send recv", (1, n)),
    }


def _log(size: int) -> int:
    return (size - 1).bit_length()


MESSAGE = 144
"""Bytes that Gloo adds to each message."""


def _gloo(op: str, size: int, n: float, s: float) -> list[Cost]:
    others, first = size - 1, int(size > PAIRS)
    meeting = others * (HEAD + MESSAGE)
    if op == "all_reduce" and n <= gathered(size):
        op, s = "all_gather", n * others
    whole = op in ("all_gather", "all_reduce", "broadcast", "reduce")
    directly = not whole or n <= direct(size) or (size == 2 and op in ("all_gather", "broadcast"))
    if op == "all_reduce" and directly:
        return [(2, meeting + others * MESSAGE + s)]
    part = n / size if op in ("reduce_scatter", "all_to_all", "scatter") else n
    if part <= inline(size) and directly:
        return [(1, meeting + s)]
    rounds, messages = {
        "all_gather": (first if directly else others, others),
        "all_reduce": (2 * others, 2 * others),
        "broadcast": (0 if directly and not first else (1 + _log(size)) / 2, others),
        "reduce": (others, 1),
    }.get(op, (first, others))
    return [(1 + rounds, meeting + messages * MESSAGE + s)]


ALGORITHMS: dict[str, Callable[[str, int, float, float], list[Cost]]] = {
    "fastest": lambda *of: _ring(*of) + _tree(*of),
    "ring": _ring,
    "tree": _tree,
    "direct": _direct,
    "gloo": _gloo,
}
"""For each algorithm, its possible costs from the op, the number of ranks, n and s; the lowest counts."""


def sent_evenly(op: str, size: int, payload: float) -> float:
    """The most that a rank sends, if all payloads are equal."""
    others = size - 1
    factors = dict.fromkeys(("reduce_scatter", "all_to_all", "scatter"), others / size)
    factors |= {"all_gather": others, "broadcast": others, "all_reduce": 2 * others / size}
    return payload * factors.get(op, 1)


Algorithm = Literal["fastest", "ring", "tree", "direct", "gloo"]


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
            raise ArgumentError.of(
                "invalid link",
                op="Link",
                expected="latency_us >= 0, call_us >= 0 and gbytes_per_s > 0",
                got=repr(self),
                remedy="pass e.g. Link(latency_us=10, gbytes_per_s=25); math.inf for unlimited bandwidth",
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
        algorithm: "ring", "tree", "direct", "fastest" for the faster of ring and tree, or "gloo" for what gradmesh
            sends over Gloo, where the latency is that of a message and a notice.

    Raises:
        ArgumentError: another algorithm.

    Source: Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005: rounds times the latency,
    plus bytes over the bandwidth.

    Example:
        >>> model = CostModel({"inner": Link(5, 100), "outer": Link(20, 10)}, algorithm="ring")
        >>> model.seconds("all_reduce", "outer", 128, payload=1e9)  # seconds: 254 rounds, 1.98 GB
        0.2035175
    """

    links: Mapping[str, Link] | Link
    algorithm: Algorithm = "fastest"

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError.of(
                "unknown algorithm",
                op="CostModel",
                expected=", ".join(map(repr, ALGORITHMS)),
                got=repr(self.algorithm),
                remedy='pass e.g. algorithm="ring"; their formulas are in gradmesh.verify.simulator.costs',
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
            raise ArgumentError.of(
                "the cost model has no link for an axis",
                op="CostModel",
                axis=axis,
                expected=f"one of {', '.join(self.links)}",
                got=", ".join(missing),
                remedy=f"add the link, e.g. CostModel({{{missing[0]!r}: Link(10, 25), ...}}), or pass simulate a "
                "mesh= with the axes of the model",
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
            raise ArgumentError.of(
                "cannot fit a link to the measured times",
                op="CostModel.fitted",
                axis=axis,
                expected="times of an op that sends data, longer for the larger size",
                got=f"{small:g} bytes in {quick:g} s, {large:g} bytes in {slow:g} s",
                remedy="measure sizes that are further apart, e.g. 1e3 and 1e8 bytes",
            )
        fixed = 1e6 * max(0.0, quick - few * per_byte)
        bandwidth = 1e-9 / per_byte
        return Link(fixed / rounds, bandwidth) if per == "message" else Link(0.0, bandwidth, fixed)


class Links:
    """The links of all ranks, and until when they are busy."""

    def __init__(self, model: CostModel | None) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, int], float] = {}

    def collective(self, events: Sequence[Event], now: float) -> float:
        """Set the times of a collective that all its ranks have called, and return its end (not before `now`)."""
        ready = max(event.called for event in events)
        first = events[0]
        if self.model is None:
            start = end = ready
        else:
            seconds = self.model.seconds(
                first.op,
                first.axis,
                first.size,
                max(event.payload for event in events),
                max(event.sent for event in events),
            )
            start, end = self._book(first.axis, [event.rank for event in events], ready, seconds)
        end = max(end, now)
        for event in events:
            event.start, event.end = start, end
        return end

    def message(self, event: Event) -> float:
        """Set the times of a message, and return its end."""
        if self.model is None:
            event.start = event.end = event.called
        else:
            seconds = self.model.seconds("send", event.axis, event.size, event.payload)
            event.start, event.end = self._book(event.axis, [event.rank], event.called, seconds)
        return event.end

    def _book(self, axis: str, ranks: Iterable[int], ready: float, seconds: float) -> tuple[float, float]:
        links = [(axis, rank) for rank in ranks]
        with self._lock:
            start = max(ready, *(self._taken.get(link, 0.0) for link in links))
            for link in links:
                self._taken[link] = start + seconds
        return start, start + seconds


_POLL = 1e-5
"""Seconds that pass on a rank's virtual clock when it polls a pending call."""


class Clock:
    """Wall-clock time, the same for all ranks, in seconds since the start of the run."""

    of_ranks = False
    """Whether each rank has a virtual clock, which can be put."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self, rank: int | None) -> float:  # noqa: ARG002
        """The time on a rank; None: in a thread that does not belong to a rank."""
        return time.perf_counter() - self._start

    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:
        """Wait until a time; `check` raises if the world has been stopped."""
        while (left := end - self.now(rank)) > 0:
            time.sleep(min(left, 0.2))
            check()

    def put(self, rank: int, time: float) -> None:
        """Set a rank's virtual clock."""
        raise NotImplementedError

    def pause(self, rank: int) -> None:
        """Stop counting: from here on the simulator or another rank runs."""

    def resume(self, rank: int) -> None:
        """Count again: the rank runs."""

    def poll(self, rank: int | None) -> None:
        """The rank polled a pending call."""


class VirtualClocks(Clock):
    """A clock for each rank, which advances while that rank runs, and is set forward when it has waited."""

    of_ranks = True

    def __init__(self, size: int, compute: float) -> None:
        super().__init__()
        self._compute = compute
        self._times = [0.0] * size
        self._since: list[float | None] = [None] * size

    def now(self, rank: int | None) -> float:
        """The rank's time."""
        return 0.0 if rank is None else self._times[rank]

    def until(self, rank: int | None, end: float, check: Callable[[], None]) -> None:  # noqa: ARG002
        """Set the clock."""
        if rank is not None:
            self._times[rank] = max(self._times[rank], end)

    def pause(self, rank: int) -> None:
        """Add the time since `resume`."""
        since, self._since[rank] = self._since[rank], None
        if since is not None:
            self._times[rank] += self._compute * (time.perf_counter() - since)

    def resume(self, rank: int) -> None:
        """Start to count."""
        self._since[rank] = time.perf_counter()

    def put(self, rank: int, time: float) -> None:
        """Set the clock, forward or back."""
        self._times[rank] = time

    def poll(self, rank: int | None) -> None:
        """Advance the clock, so that a polling loop ends."""
        if rank is not None:
            self._times[rank] += _POLL
