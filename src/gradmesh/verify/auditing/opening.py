"""Properties of a function that the other checks need: its dtype, linearity, result shapes and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.probes import (
    Case,
    FunctionRaisedError,
    Point,
    Probe,
    difference,
    drawn,
    filled,
    shifted,
)
from gradmesh.verify.auditing.readings import Answer, largest_distance, ranks_apart
from gradmesh.verify.auditing.subject import Failure, Subject, dense

_EXACT = 1e-11
"""The largest relative error that float64 rounding explains."""
_ROUNDED = 3e-2
"""The largest relative error that rounding to a narrow dtype explains; nonlinear functions exceed it."""
_STEPS = (1e-5, 1e-6, 1e-7, 1e-8)
"""Steps of central differences to try, relative to the size of the operands."""
_ROUNDED_STEPS = (3e-2, 1e-2, 3e-3)
"""The same for functions that round to float32."""
_NOISE = 32
"""Rounding errors by which two differences may differ where the derivative is zero."""


@dataclass(frozen=True)
class _Linearity:
    """Deviations from linearity on one rank: on integers and on reals."""

    whole: float  # the deviation on integers
    real: float  # the deviation on reals
    affine: bool  # whether the result at zero is not zero
    narrow: str  # the dtype of a result that is narrower than the operands; "" if none is


def accepts(case: Case, given: Sequence[torch.dtype]) -> bool:
    """Determine whether the function accepts float64, and otherwise configure a narrower dtype."""
    if _runs(case):
        return False
    narrow = max(given, key=lambda dtype: torch.finfo(dtype).bits).to_real()
    case.pool.configure(dtype=narrow)
    case.tolerance = 2e-4 if narrow is torch.float32 else 2e-2
    _counted(_called(case))
    case.left_out["precision-lost"] = "the function does not accept float64"
    return True


def open_case(case: Case, narrow: bool) -> Iterator[Finding]:
    """Determine linearity, rounding, the point of differentiation and shapes, and store them in the case."""
    _same_each_time(case)
    answers = [row[0] for row in case.pool.attempt(_how_linear, [Probe(11)])]
    found = [answer for answer in answers if not isinstance(answer, Failure)]
    # A function that raises on random operands may accept those of build; then its derivative there is audited.
    raised = len(found) < len(answers)
    if raised or max(max(f.whole, f.real) for f in found) > max(_ROUNDED, case.tolerance):
        yield from _not_linear(case, narrow)
        if case.unchecked:
            return
    else:
        if any(f.affine for f in found):
            case.point = Point(step=1.0, own=False)
        # A backward that raises is reported by the first-order check.
        rows = case.pool.attempt(_how_linear_backward, [Probe(11)])
        backs = [row[0] for row in rows if not isinstance(row[0], Failure)]
        if len(backs) < len(rows):
            backs = [0.0] * len(rows)
        reals, whole = [f.real for f in found], max(f.whole for f in found)
        if not narrow and max(*reals, *backs, whole) > _EXACT:
            case.whole = True
            case.tolerance = max(case.tolerance, 20 * whole)
            yield _rounded(case, reals, backs)
        elif not narrow and (width := next((f.narrow for f in found if f.narrow), "")):
            text = f"a float64 operand gives a {width} result"
            yield Finding("precision-lost", text, (), case.forward_line)
    shapes(case)


def _runs(case: Case) -> bool:
    """Whether it accepts float64; also determines whether it must run in `ordered()`."""
    for _ in range(2):
        try:
            answers = case.pool.answered(_at_own_operands, [Probe(0)])[0]
        except FunctionRaisedError as error:
            if not any(failure.order for failure in error.failures.values()):
                return False
            case.pool.configure(ordered=True)
        else:
            _counted(answers)
            return True
    return False


def shapes(case: Case) -> None:
    """Store the shapes of operands and results in the case."""
    case.shapes = _common([[tuple(x.shape) for x in each.values] for each in case.pool.begin()])
    answers = _called(case)
    _counted(answers)
    case.out_shapes = _common([[tuple(y.shape) for y in answer.results] for answer in answers])


def _same_each_time(case: Case) -> None:
    one, two = ([answer.results for answer in _called(case)] for _ in range(2))
    off = ranks_apart(one, two, max(1e-6, case.tolerance))
    if off:
        raise ArgumentError.of(
            "the function returns different results for the same operands",
            op="verify.audit",
            expected="a deterministic function without state",
            got=f"two calls with different results on ranks {', '.join(map(str, off))}",
            remedy="call torch.manual_seed(0) inside the function, or switch dropout off with module.eval()",
        )


def _counted(answers: Sequence[Answer]) -> None:
    """Raise if the function returns no differentiable tensor, or different numbers of tensors on different ranks."""
    counts = [len(answer.results) for answer in answers]
    if counts[0] and len(set(counts)) == 1:
        return
    problem = "ranks return different numbers of tensors"
    if not any(counts):
        problem = "the function returns no differentiable tensor"
    raise ArgumentError.of(
        problem,
        op="verify.audit",
        expected="the same number of floating-point or complex tensors on every rank, at least one",
        got=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts)),
        remedy="on ranks without a result return an empty tensor, e.g. x.new_zeros(0)",
    )


def _common(by_rank: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...] | None]:
    return [column[0] if len(set(column)) == 1 else None for column in zip(*by_rank, strict=True)]


def _called(case: Case) -> list[Answer]:
    """Each rank's results on the operands that `build` returned."""
    try:
        return case.pool.answered(_at_own_operands, [Probe(0)])[0]
    except FunctionRaisedError as error:
        if error.kind == "hangs":
            raise
        at = f", at {error.first.line}" if error.first.line else ""
        raise ArgumentError.of(
            f"the function raises on rank {error.rank}, on the inputs that build returned",
            op="verify.audit",
            expected="a function that runs on every rank",
            got=f"{error.first.kind}: {error.first.text}{at}",
            remedy="debug it with gradmesh.launch(lambda: fn(*inputs), 3), then audit it",
        ) from None


def _at_own_operands(subject: Subject, _: Probe) -> Answer:
    values = subject.own()
    with torch.enable_grad(), subject.differentiated(values) as graph:
        answer = Answer(values, filled(graph.results))
        if subject.ordered:
            graph.backward([torch.zeros_like(y) for y in graph.results])
    return answer


def _how_linear(subject: Subject, probe: Probe) -> _Linearity:
    affine, narrow = False, ""
    deviations = {True: 0.0, False: 0.0}

    def forward(x: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return filled(subject.call([v.clone() for v in x]))

    for whole in (True, False):
        for seed in (probe.seed, probe.seed + 100):
            x, z = (drawn(subject, replace(probe, seed=seed + k, whole=whole)) for k in (0, 50))
            zero = forward([0 * v for v in x])
            both = forward([2 * a - b for a, b in zip(x, z, strict=True)])
            parts = [2 * a - b for a, b in zip(forward(x), forward(z), strict=True)]
            deviations[whole] = max(deviations[whole], largest_distance(both, parts))
            affine |= any(bool(y.any()) for y in zero)
            bits = torch.finfo(x[0].dtype).bits
            narrow = next((str(y.dtype) for y in both if torch.finfo(y.dtype).bits < bits), "")
    return _Linearity(deviations[True], deviations[False], affine, narrow)


def _how_linear_backward(subject: Subject, probe: Probe) -> float:
    """The deviation of backward from linearity in the incoming gradient."""

    def gradients(cotangent_of: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        with subject.differentiated(drawn(subject, probe)) as graph:
            grads = graph.backward([cotangent_of(y, i) for i, y in enumerate(graph.results)])
        return dense(grads, graph.leaves)

    def cotangent(seed: int, y: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + index)
        return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)

    one, two = gradients(lambda y, i: cotangent(5, y, i)), gradients(lambda y, i: cotangent(6, y, i))
    both = gradients(lambda y, i: cotangent(5, y, i) + cotangent(6, y, i))
    return largest_distance(both, [a + b for a, b in zip(one, two, strict=True)])


def _not_linear(case: Case, narrow: bool) -> Iterator[Finding]:
    """Choose a step for finite differences; if none works, note that the function cannot be checked."""
    case.linear = False
    ranks = case.pool.begin()
    dtype = case.pool.settings.get("dtype", torch.float64)
    if torch.finfo(dtype).bits < 32:
        width = str(dtype).removeprefix("torch.")
        case.unchecked = (
            f"it is not linear and accepts only {width}, which is too narrow for finite differences"
        )
        return
    # A rank without a result, such as a non-root rank of a reduce, sees no change either.
    lost = narrow or all(case.pool.answered(_blind, [Probe(3)])[0])
    case.tolerance = max(case.tolerance, 3e-2 if lost else 2e-5)
    sizes = [max(_size(rank.values[i]) for rank in ranks) for i in range(len(ranks[0].values))]
    scale = min((size for size in sizes if 0 < size < float("inf")), default=1.0)
    step = _step(case, scale, lost)
    if not step:
        case.unchecked = (
            "finite differences at the inputs of build do not converge; pass inputs away from kinks"
        )
        return
    case.point = Point(step, tuple(ranks[0].values))
    if lost and not narrow:
        text = "a change of 1e-10 in the operand does not change the result"
        yield Finding("precision-lost", text, (), case.forward_line)


def _step(case: Case, scale: float, lost: bool) -> float:
    """The largest step for which finite differences agree with those of half the step on all ranks; 0 if none."""
    eps = torch.finfo(torch.float32 if lost else torch.float64).eps
    for relative in _ROUNDED_STEPS if lost else _STEPS:
        try:
            found = case.pool.answered(_by_half, [Probe(7), Probe(8)], relative * scale, eps)
        except FunctionRaisedError as error:
            if error.kind == "hangs":
                raise
            continue
        if all(off <= case.tolerance / 4 for offs in found for off in offs):
            return relative * scale
    return 0.0


def _by_half(subject: Subject, probe: Probe, step: float, eps: float) -> float:
    """The difference between central differences with a step and with half of it; infinite at a kink."""
    base, along = subject.own(), drawn(subject, probe)
    off = 0.0
    points = (shifted(subject, base, times * step, along) for times in (0, 1, -1, 0.5, -0.5))
    for middle, *sides in zip(*points, strict=True):
        if not middle.numel():
            continue
        up, down, half_up, half_down = (difference(y, middle) for y in sides)
        noise = _NOISE * eps * float(torch.nan_to_num(middle, 0, 0, 0).abs().max())
        whole, half = (up - down) / 2, half_up - half_down
        size = float(torch.maximum(whole.abs(), half.abs()).max())
        error = max(0.0, float((whole - half).abs().max()) - noise)
        # f(+h) + f(-h) - 2 f(0) halves with the step at a kink, and is quartered where the function is smooth.
        bend, half_bend = (float((a + b).abs().max()) for a, b in ((up, down), (half_up, half_down)))
        if half_bend > max(1e-3 * size, 0.4 * bend, noise):
            return math.inf
        off = max(off, error / max(size, 1e-300))
    return off


def _blind(subject: Subject, probe: Probe) -> bool:
    """Whether a tiny change of the operands does not change a result."""
    base, x = subject.own(), drawn(subject, probe)
    there = shifted(subject, base, 0, x)
    beside = shifted(subject, base, 1e-10, [(_size(b) or 1.0) * v for b, v in zip(base, x, strict=True)])
    sees = any(not torch.equal(a, b) for a, b in zip(there, beside, strict=True))
    return not sees and any(y.numel() for y in there)


def _size(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rounded(case: Case, reals: Sequence[float], backs: Sequence[float]) -> Finding:
    """The finding that numbers are rounded, given each rank's deviations from linearity."""
    real, back = max(reals), max(backs)
    exact = {"forward": real <= _EXACT, "backward": back <= _EXACT}
    where = " and ".join(name for name, is_exact in exact.items() if not is_exact) or "forward"
    ranks = tuple(rank for rank, offs in enumerate(zip(reals, backs, strict=True)) if max(offs) > _EXACT)
    text = f"{where} of float64 has a relative error of {max(real, back):.0e}"
    return Finding("precision-lost", text, ranks, case.line if exact["forward"] else case.forward_line)
