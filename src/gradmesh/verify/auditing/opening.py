"""Properties of a function that the other checks need: its dtype, linearity, result shapes and rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, message
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.probes import (
    Case,
    FunctionRaisedError,
    Point,
    Probe,
    difference,
    drawn,
    filled,
)
from gradmesh.verify.auditing.readings import Answer, distance
from gradmesh.verify.auditing.subject import Subject, differentiable_call

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


@dataclass
class _Linearity(Answer):
    """Deviations from linearity on one rank: on integers, on reals, and in backward."""

    whole: float = 0.0
    real: float = 0.0
    back: float = 0.0
    affine: bool = False
    narrow: str = ""
    blind: bool = False


def accepts(case: Case, given: Sequence[torch.dtype]) -> bool:
    """Determine whether the function accepts float64, and otherwise configure a narrower dtype.

    Args:
        case: the function; updated with the result.
        given: the dtypes of the operands that `build` returned.

    Returns:
        Whether it needs a narrower dtype.

    Raises:
        ArgumentError: the function raises on the operands that `build` returned.
        FunctionRaisedError: the ranks deadlock.
    """
    if _runs(case):
        return False
    narrow = max(given, key=lambda dtype: torch.finfo(dtype).bits).to_real()
    case.pool.configure(dtype=narrow)
    case.tolerance = 2e-4 if narrow is torch.float32 else 2e-2
    first = _called(case)
    if any(answer.failure for answer in first):
        raise _cannot(first)
    _counted(first)
    case.left_out["precision-lost"] = "the function does not accept float64"
    return True


def open_case(case: Case, narrow: bool) -> Iterator[Finding]:
    """Determine linearity, rounding, the point of differentiation and shapes, and store them in the case.

    Args:
        case: the function.
        narrow: whether it needs a narrower dtype than float64.

    Raises:
        ArgumentError: the function returns different values at each call.
        FunctionRaisedError: the ranks deadlock.
        RanksLostError: a rank died or timed out.
    """
    _same_each_time(case)
    facts = [row[0] for row in case.pool.attempt(_how_linear, [Probe(11)])]
    # A function that raises on random operands may accept those of build; then its derivative there is audited.
    raised = any(fact.failure for fact in facts)
    found = [] if raised else [fact for fact in facts if isinstance(fact, _Linearity)]
    whole, real = (max((getattr(f, name) for f in found), default=float("inf")) for name in ("whole", "real"))
    if max(whole, real) > max(_ROUNDED, case.tolerance):
        yield from _not_linear(case, narrow)
        if case.unchecked:
            return
    else:
        if any(f.affine for f in found):
            case.point = Point(step=1.0, own=False)
        _note_backward(found, case.pool.attempt(_how_linear_backward, [Probe(11)]))
        back = max(f.back for f in found)
        if not narrow and max(real, back, whole) > _EXACT:
            case.whole = True
            case.tolerance = max(case.tolerance, 20 * whole)
            yield _rounded(case, found, real, back)
        elif not narrow and (width := next((f.narrow for f in found if f.narrow), "")):
            yield Finding(
                "precision-lost", f"a float64 operand gives a {width} result", (), case.forward_line
            )
    shapes(case)


def _runs(case: Case) -> bool:
    """Whether it accepts float64; also determines whether it must run in `ordered()`."""
    for _ in range(2):
        first = _called(case)
        raised = [answer.failure for answer in first if answer.failure is not None]
        if not raised:
            _counted(first)
            return True
        if not any(failure.order for failure in raised):
            return False
        case.pool.configure(ordered=True)
    return False


def shapes(case: Case) -> None:
    """Store the shapes of operands and results in the case."""
    case.shapes = _common([[tuple(x.shape) for x in each.values] for each in case.pool.begin()])
    answers = _called(case)
    if any(answer.failure for answer in answers):
        raise _cannot(answers)
    _counted(answers)
    case.out_shapes = _common([[tuple(y.shape) for y in answer.results] for answer in answers])


def _same_each_time(case: Case) -> None:
    one, two = (_called(case) for _ in range(2))
    off = [
        rank
        for rank, (a, b) in enumerate(zip(one, two, strict=True))
        if any(distance(x, y) > max(1e-6, case.tolerance) for x, y in zip(a.results, b.results, strict=False))
    ]
    if off:
        raise ArgumentError(
            message(
                "the function returns different results for the same operands",
                op="verify.audit",
                expected="a deterministic function without state",
                got=f"two calls with different results on ranks {', '.join(map(str, off))}",
                remedy="call torch.manual_seed(0) inside the function, or switch dropout off with module.eval()",
            )
        )


def _counted(answers: Sequence[Answer]) -> None:
    """Raise if the function returns no differentiable tensor, or different numbers of tensors on different ranks."""
    counts = [len(answer.results) for answer in answers]
    if counts[0] and len(set(counts)) == 1:
        return
    raise ArgumentError(
        message(
            "ranks return different numbers of tensors"
            if any(counts)
            else "the function returns no differentiable tensor",
            op="verify.audit",
            expected="the same number of floating-point or complex tensors on every rank, at least one",
            got=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts)),
            remedy="on ranks without a result return an empty tensor, e.g. x.new_zeros(0)",
        )
    )


def _common(by_rank: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...] | None]:
    return [column[0] if len(set(column)) == 1 else None for column in zip(*by_rank, strict=True)]


def _called(case: Case) -> list[Answer]:
    return [row[0] for row in case.pool.attempt(_at_own_operands, [Probe(0)])]


def _at_own_operands(subject: Subject, _: Probe) -> Answer:
    values = [
        subject.inputs[i].detach().to(subject.operand_dtype(n)).clone()
        for n, i in enumerate(subject.operands)
    ]
    with torch.enable_grad(), differentiable_call(subject) as backward:
        results = subject.call([v.requires_grad_().clone() for v in values])
        answer = Answer(values, filled(results))
        if subject.ordered:
            backward(results, values, [torch.zeros_like(y) for y in results])
    return answer


def _how_linear(subject: Subject, probe: Probe) -> Answer:
    found = _Linearity()

    def forward(x: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return filled(subject.call([v.clone() for v in x]))

    for whole in (True, False):
        for seed in (probe.seed, probe.seed + 100):
            x, z = (drawn(subject, replace(probe, seed=seed + k, whole=whole)) for k in (0, 50))
            zero = forward([0 * v for v in x])
            both = forward([2 * a - b for a, b in zip(x, z, strict=True)])
            parts = [2 * a - b for a, b in zip(forward(x), forward(z), strict=True)]
            error = max(map(distance, both, parts), default=0.0)
            found.affine |= any(bool(y.abs().max() > 0) for y in zero if y.numel())
            if whole:
                found.whole = max(found.whole, error)
            else:
                found.real = max(found.real, error)
                found.narrow = next(
                    (str(y.dtype) for y in both if torch.finfo(y.dtype).bits < torch.finfo(x[0].dtype).bits),
                    "",
                )
    return found


def _note_backward(found: Sequence[_Linearity], answers: Sequence[Sequence[Answer]]) -> None:
    """Store each rank's deviation of backward from linearity; skipped if one raises, which `adjoint` reports."""
    if any(row[0].failure for row in answers):
        return
    for each, row in zip(found, answers, strict=True):
        each.back = row[0].back if isinstance(row[0], _Linearity) else 0.0


def _how_linear_backward(subject: Subject, probe: Probe) -> Answer:
    """The deviation of backward from linearity in the incoming gradient."""
    x = [v.requires_grad_() for v in drawn(subject, probe)]

    def gradients(cotangent_of: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        with differentiable_call(subject) as backward:
            results = subject.call([v.clone() for v in x])
            handed = [cotangent_of(y, i) for i, y in enumerate(results)]
            grads = backward(results, x, handed)
        return [torch.zeros_like(v) if g is None else g.clone() for g, v in zip(grads, x, strict=True)]

    def cotangent(seed: int) -> Callable[[Tensor, int], Tensor]:
        def cotangent_of(y: Tensor, index: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed + index)
            return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)

        return cotangent_of

    one, two = gradients(cotangent(5)), gradients(cotangent(6))
    both = gradients(lambda y, i: cotangent(5)(y, i) + cotangent(6)(y, i))
    off = max((distance(c, a + b) for a, b, c in zip(one, two, both, strict=True)), default=0.0)
    return _Linearity(back=off)


def _not_linear(case: Case, narrow: bool) -> Iterator[Finding]:
    """Choose a step for finite differences; if none works, note that the function cannot be checked."""
    case.linear = False
    ranks = case.pool.begin()
    if narrow and torch.finfo(case.pool.settings["dtype"]).bits < 32:
        width = str(case.pool.settings["dtype"]).removeprefix("torch.")
        case.unchecked = (
            f"it is not linear and accepts only {width}, which is too narrow for finite differences"
        )
        return
    lost = narrow
    if not narrow:
        blind = case.answered(_blind, [Probe(3)])[0]
        # A rank without a result, such as a non-root rank of a reduce, sees no change either.
        lost = all(isinstance(answer, _Linearity) and answer.blind for answer in blind)
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
        yield Finding(
            "precision-lost",
            "a change of 1e-10 in the operand does not change the result",
            (),
            case.forward_line,
        )


@dataclass
class _Differences(Answer):
    """The difference between central differences with a step and with half of it, and whether there is a kink."""

    off: float = 0.0
    kink: bool = False


def _step(case: Case, scale: float, lost: bool) -> float:
    """The largest step for which finite differences agree with those of half the step on all ranks; 0 if none."""
    eps = torch.finfo(torch.float32 if lost else torch.float64).eps
    for relative in _ROUNDED_STEPS if lost else _STEPS:
        rows = case.pool.attempt(_by_half, [Probe(7), Probe(8)], relative * scale, eps)
        raised = {r: a.failure for r, row in enumerate(rows) for a in row if a.failure is not None}
        if raised and all(failure.waited for failure in raised.values()):
            raise FunctionRaisedError(raised)
        found = [answer for row in rows for answer in row if isinstance(answer, _Differences)]
        if not raised and all(a.off <= case.tolerance / 4 and not a.kink for a in found):
            return relative * scale
    return 0.0


def _by_half(subject: Subject, probe: Probe, step: float, eps: float) -> Answer:
    base = [subject.inputs[i].detach().to(subject.operand_dtype(n)) for n, i in enumerate(subject.operands)]
    along = drawn(subject, probe)

    def at(times: float) -> list[Tensor]:
        with torch.no_grad():
            return filled(subject.call([b + times * step * v for b, v in zip(base, along, strict=True)]))

    found = _Differences()
    for middle, *sides in zip(at(0), at(1), at(-1), at(0.5), at(-0.5), strict=True):
        if not middle.numel():
            continue
        up, down, half_up, half_down = (difference(y, middle) for y in sides)
        noise = _NOISE * eps * float(torch.nan_to_num(middle, 0, 0, 0).abs().max())
        whole, half = (up - down) / 2, half_up - half_down
        size = float(torch.maximum(whole.abs(), half.abs()).max())
        error = max(0.0, float((whole - half).abs().max()) - noise)
        found.off = max(found.off, error / max(size, 1e-300) if error == error else float("inf"))
        # f(+h) + f(-h) - 2 f(0) halves with the step at a kink, and is quartered where the function is smooth.
        bend, half_bend = (float((a + b).abs().max()) for a, b in ((up, down), (half_up, half_down)))
        found.kink |= half_bend > max(1e-3 * size, 0.4 * bend, noise)
    return found


def _blind(subject: Subject, probe: Probe) -> Answer:
    base = [subject.inputs[i].detach().to(subject.operand_dtype(n)) for n, i in enumerate(subject.operands)]
    x = drawn(subject, probe)
    with torch.no_grad():
        there = filled(subject.call([b.clone() for b in base]))
        beside = filled(
            subject.call([b + 1e-10 * (_size(b) or 1.0) * v for b, v in zip(base, x, strict=True)])
        )
    sees = any(not torch.equal(a, b) for a, b in zip(there, beside, strict=True))
    return _Linearity(blind=not sees and any(y.numel() for y in there))


def _size(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _rounded(case: Case, found: Sequence[_Linearity], real: float, back: float) -> Finding:
    where = (
        " and ".join(name for name, e in (("forward", real), ("backward", back)) if e > _EXACT) or "forward"
    )
    ranks = tuple(r for r, f in enumerate(found) if max(f.real, f.back) > _EXACT)
    text = f"{where} of float64 has a relative error of {max(real, back):.0e}"
    return Finding("precision-lost", text, ranks, case.line if real <= _EXACT else case.forward_line)


def _cannot(answers: Sequence[Answer]) -> ArgumentError | FunctionRaisedError:
    raised = {rank: answer.failure for rank, answer in enumerate(answers) if answer.failure is not None}
    if all(failure.waited for failure in raised.values()):
        return FunctionRaisedError(raised)
    rank, failure = min(raised.items(), key=lambda item: item[1].waited)
    at = f", at {failure.line}" if failure.line else ""
    return ArgumentError(
        message(
            f"the function raises on rank {rank}, on the inputs that build returned",
            op="verify.audit",
            expected="a function that runs on every rank",
            got=f"{failure.kind}: {failure.text}{at}",
            remedy="debug it with gradmesh.launch(lambda: fn(*inputs), 3), then audit it",
        )
    )
