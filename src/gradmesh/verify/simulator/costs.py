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

If two are given, the faster one counts. `direct` is for ranks that reach each other at once, as through one switch or
in shared memory. A link may add a fixed time per call. Arithmetic of reductions is free, unless the link's bandwidth
was fitted to include it.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ALGORITHMS", "Cost", "sent_evenly"]

Cost = tuple[float, float]
"""Rounds and bytes."""

Costs = dict[str, list[Cost]]


def _ring(op: str, size: int, n: float, s: float) -> list[Cost]:
    steps, log = size - 1, _log(size)
    costs: Costs = {
        "all_gather": [(steps, s)],
        "reduce_scatter": [(steps, s)],
        "all_to_all": [(steps, s)],
        "all_reduce": [(2 * steps, s)],
        "broadcast": [(log + steps, 2 * n * steps / size)],
        "reduce": [(log + steps, 2 * n * steps / size)],
        **_common(log, size, n, s),
    }
    return costs[op]


def _tree(op: str, size: int, n: float, s: float) -> list[Cost]:
    log = _log(size)
    rooted: list[Cost] = [(log, log * n), (2 * log, 2 * n * (size - 1) / size)]
    costs: Costs = {
        "all_gather": [(log, s)],
        "reduce_scatter": [(log, s)],
        "all_to_all": [(log, n * log / 2)],
        "all_reduce": [(log, log * n), (2 * log, s)],
        "broadcast": rooted,
        "reduce": rooted,
        **_common(log, size, n, s),
    }
    return costs[op]


def _direct(op: str, size: int, n: float, s: float) -> list[Cost]:
    if op == "all_reduce":
        return [(2, s)]
    if op in ("broadcast", "reduce"):
        return [(1, n)]
    return _common(1, size, n, s).get(op, [(1, s)])


def _fastest(op: str, size: int, n: float, s: float) -> list[Cost]:
    return _ring(op, size, n, s) + _tree(op, size, n, s)


def _common(log: int, size: int, n: float, s: float) -> Costs:
    one: list[Cost] = [(1, n)]
    return {
        "gather": [(log, n * (size - 1))],
        "scatter": [(log, s)],
        "permute": one,
        "send": one,
        "recv": one,
        "barrier": [(log, 0)],
        "withdrawn": [(0, 0)],
    }


def _log(size: int) -> int:
    return (size - 1).bit_length()


ALGORITHMS: dict[str, Callable[[str, int, float, float], list[Cost]]] = {
    "fastest": _fastest,
    "ring": _ring,
    "tree": _tree,
    "direct": _direct,
}
"""For each algorithm, its possible costs from the op, the number of ranks, n and s; the lowest counts."""


def sent_evenly(op: str, size: int, payload: float) -> float:
    """The most that a rank sends, if all payloads are equal."""
    factors = {
        "all_gather": size - 1,
        "broadcast": size - 1,
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "scatter": (size - 1) / size,
    }
    return payload * factors.get(op, 1)
