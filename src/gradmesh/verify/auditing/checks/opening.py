"""What a function is, before it is judged: its dtype, whether it is linear, what comes out, what is rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, message
from gradmesh.verify.auditing.case import Case, RefusedError
from gradmesh.verify.auditing.probes import Answer, Point, Probe, attempt, difference, drawn, filled
from gradmesh.verify.auditing.readings import distance
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Subject, call_differentiably

__all__ = ["open_case", "shapes", "takes"]

_EXACT = 1e-11
"""Relative error up to which float64 arithmetic alone explains it."""
_ROUNDED = 3e-2
"""That up to which rounding to a narrow dtype does; a function that is not linear is further off."""
_STEPS = (1e-5, 1e-6, 1e-7, 1e-8)
"""Steps of central differences that are tried, relative to the size of the operands."""
_ROUNDED_STEPS = (3e-2, 1e-2, 3e-3)
"""Those for functions that round to float32."""
_NOISE = 32
"""Roundings in a result by which two differences may differ where the derivative is zero."""


@dataclass
class _Linearity(Answer):
    """How far a rank's function is from linear: on whole numbers, on others, and in backward."""

    whole: float = 0.0
    real: float = 0.0
    back: float = 0.0
    affine: bool = False
    narrow: str = ""
    blind: bool = False


def takes(case: Case, given: Sequence[torch.dtype]) -> bool:
    """Find out whether the function takes float64, and else a dtype that it takes.

    Args:
        case: the function; what is found out is written into it.
        given: the dtypes of the operands that `build` returned.

    Returns:
        Whether it has to be asked in a narrower dtype.

    Raises:
        ArgumentError: the function cannot be called with the operands that `build` returned.
        RefusedError: its ranks only wait for each other.
    """
    if _runs(case):
        return False
    narrow = max(given, key=lambda dtype: torch.finfo(dtype).bits).to_real()
    case.pool.configure(dtype=narrow)
    case.tolerance = 2e-4 if narrow is torch.float32 else 2e-2
    first = case.pool.ask(_call)
    if any(row[0].trouble for row in first):
        raise _cannot(first)
    _counted(first)
    case.left_out["precision-lost"] = "as it does not take float64"
    return True


def open_case(case: Case, narrow: bool) -> Iterator[Finding]:
    """Find out what is needed to ask anything at all; it is written into the case.

    Args:
        case: the function.
        narrow: whether it is asked in a narrower dtype than float64.

    Raises:
        ArgumentError: the function returns other values each time.
        RefusedError: its ranks only wait for each other.
        LostError: they did not come back.
    """
    _same_each_time(case)
    facts = [row[0] for row in case.pool.ask(_linearity, Probe(11))]
    # A function that raises on drawn operands may take those of build, beside which a derivative is taken.
    refused = any(fact.trouble for fact in facts)
    found = [] if refused else [fact for fact in facts if isinstance(fact, _Linearity)]
    whole, real = (max((getattr(f, name) for f in found), default=float("inf")) for name in ("whole", "real"))
    if max(whole, real) > max(_ROUNDED, case.tolerance):
        yield from _not_linear(case, narrow)
        if case.unasked:
            return
    else:
        if any(f.affine for f in found):
            case.point = Point(step=1.0, own=False)
        _note_backward(found, case.pool.ask(_backward_linearity, Probe(11)))
        back = max(f.back for f in found)
        if not narrow and max(real, back, whole) > _EXACT:
            case.whole = True
            case.tolerance = max(case.tolerance, 20 * whole)
            yield _rounded(case, found, real, back)
        elif not narrow and (width := next((f.narrow for f in found if f.narrow), "")):
            yield Finding(
                "precision-lost", f"of a float64 operand the result is {width}", (), case.forward_line
            )
    shapes(case)


def _runs(case: Case) -> bool:
    """Whether it takes float64, after finding out whether it has to be in `ordered()`."""
    for _ in range(2):
        first = case.pool.ask(_call)
        raised = [row[0].trouble for row in first if row[0].trouble is not None]
        if not raised:
            _counted(first)
            return True
        if not any(trouble.order for trouble in raised):
            return False
        case.pool.configure(ordered=True)
    return False


def shapes(case: Case) -> None:
    """Note the shapes of operands and results."""
    case.shapes = _common([[tuple(x.shape) for x in told.values] for told in case.pool.begin()])
    answers = case.pool.ask(_call)
    if any(row[0].trouble for row in answers):
        raise _cannot(answers)
    _counted(answers)
    case.out_shapes = _common([[tuple(y.shape) for y in row[0].results] for row in answers])


def _same_each_time(case: Case) -> None:
    one, two = (case.pool.ask(_call) for _ in range(2))
    off = [
        rank
        for rank, (a, b) in enumerate(zip(one, two, strict=True))
        if any(
            distance(x, y) > max(1e-6, case.tolerance)
            for x, y in zip(a[0].results, b[0].results, strict=False)
        )
    ]
    if off:
        raise ArgumentError(
            message(
                "the function returns other values each time, of the same operands",
                op="verify.audit",
                expected="a function without randomness and state",
                got=f"another result on ranks {', '.join(map(str, off))}",
                remedy="seed the generator inside of it, or turn dropout off by eval()",
            )
        )


def _counted(answers: Sequence[Sequence[Answer]]) -> None:
    """Refuse a function that returns nothing to differentiate, or other counts of tensors on other ranks."""
    counts = [len(row[0].results) for row in answers]
    if counts[0] and len(set(counts)) == 1:
        return
    raise ArgumentError(
        message(
            "ranks return different numbers of tensors"
            if any(counts)
            else "there is no result to differentiate",
            op="verify.audit",
            expected="as many floating-point or complex tensors on every rank, one at least",
            got=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts)),
            remedy="return a tensor without elements where a rank has no result",
        )
    )


def _common(by_rank: Sequence[Sequence[tuple[int, ...]]]) -> list[tuple[int, ...] | None]:
    return [column[0] if len(set(column)) == 1 else None for column in zip(*by_rank, strict=True)]


def _call() -> list[Answer]:
    return attempt([Probe(0)], _at_own_operands)


def _at_own_operands(subject: Subject, _: Probe) -> Answer:
    values = [
        subject.inputs[i].detach().to(subject.operand_dtype(n)).clone()
        for n, i in enumerate(subject.operands)
    ]
    with torch.enable_grad(), call_differentiably(subject) as backward:
        results = subject.call([v.requires_grad_().clone() for v in values])
        answer = Answer(values, filled(results))
        if subject.ordered:
            backward(results, values, [torch.zeros_like(y) for y in results])
    return answer


def _linearity(probe: Probe) -> list[Answer]:
    return attempt([probe], _how_linear)


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
    """Note how far each rank's backward is from linear; nothing where one raises, which the first order finds."""
    if any(row[0].trouble for row in answers):
        return
    for each, row in zip(found, answers, strict=True):
        each.back = row[0].back if isinstance(row[0], _Linearity) else 0.0


def _backward_linearity(probe: Probe) -> list[Answer]:
    return attempt([probe], lambda subject, probe: _Linearity(back=_backward_error(subject, probe)))


def _backward_error(subject: Subject, probe: Probe) -> float:
    """How far backward is from linear in the gradient."""
    x = [v.requires_grad_() for v in drawn(subject, probe)]

    def gradients(turn: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        with call_differentiably(subject) as backward:
            results = subject.call([v.clone() for v in x])
            handed = [turn(y, i) for i, y in enumerate(results)]
            grads = backward(results, x, handed)
        return [torch.zeros_like(v) if g is None else g.clone() for g, v in zip(grads, x, strict=True)]

    def cotangent(seed: int) -> Callable[[Tensor, int], Tensor]:
        def turn(y: Tensor, index: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed + index)
            return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)

        return turn

    one, two = gradients(cotangent(5)), gradients(cotangent(6))
    both = gradients(lambda y, i: cotangent(5)(y, i) + cotangent(6)(y, i))
    return max((distance(c, a + b) for a, b, c in zip(one, two, both, strict=True)), default=0.0)


def _not_linear(case: Case, narrow: bool) -> Iterator[Finding]:
    """Find a step by which the derivative can be taken; there may be none, which is noted."""
    case.linear = False
    told = case.pool.begin()
    if narrow and torch.finfo(case.pool.settings["dtype"]).bits < 32:
        width = str(case.pool.settings["dtype"]).removeprefix("torch.")
        case.unasked = f"as it is not linear and takes {width} only, too narrow for finite differences"
        return
    lost = narrow
    if not narrow:
        blind = case.answered(_blindness)[0]
        # A rank that gets nothing, as from a reduction to another one, sees no change either.
        lost = all(isinstance(answer, _Linearity) and answer.blind for answer in blind)
    case.tolerance = max(case.tolerance, 3e-2 if lost else 2e-5)
    sizes = [max(_size(rank.values[i]) for rank in told) for i in range(len(told[0].values))]
    scale = min((size for size in sizes if 0 < size < float("inf")), default=1.0)
    step = _step(case, scale, lost)
    if not step:
        case.unasked = "as it has no derivative at the inputs of build that finite differences agree on"
        return
    case.point = Point(step, tuple(told[0].values))
    if lost and not narrow:
        yield Finding(
            "precision-lost",
            "a change of 1e-10 in the operand does not change the result",
            (),
            case.forward_line,
        )


@dataclass
class _Differences(Answer):
    """How far central differences by a step are from those by half of it, and whether there is a kink."""

    off: float = 0.0
    kink: bool = False


def _step(case: Case, scale: float, lost: bool) -> float:
    """The largest step by which differences on all ranks are those by half of it; 0 if there is none."""
    eps = torch.finfo(torch.float32 if lost else torch.float64).eps
    for relative in _ROUNDED_STEPS if lost else _STEPS:
        rows = case.pool.ask(_differences, [Probe(7), Probe(8)], relative * scale, eps)
        raised = {r: a.trouble for r, row in enumerate(rows) for a in row if a.trouble is not None}
        if raised and all(trouble.waited for trouble in raised.values()):
            raise RefusedError(raised)
        found = [answer for row in rows for answer in row if isinstance(answer, _Differences)]
        if not raised and all(a.off <= case.tolerance / 4 and not a.kink for a in found):
            return relative * scale
    return 0.0


def _differences(probes: Sequence[Probe], step: float, eps: float) -> list[Answer]:
    return attempt(probes, lambda subject, probe: _by_half(subject, probe, step, eps))


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
        # Beside a kink the two sides differ by as much for half the step; elsewhere by a quarter.
        bend, half_bend = (float((a + b).abs().max()) for a, b in ((up, down), (half_up, half_down)))
        found.kink |= half_bend > max(1e-3 * size, 0.4 * bend, noise)
    return found


def _blindness() -> list[Answer]:
    return attempt([Probe(3)], _blind)


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
    text = f"{where} of float64 is off by {max(real, back):.0e}, relative to the largest value"
    return Finding("precision-lost", text, ranks, case.line if real <= _EXACT else case.forward_line)


def _cannot(answers: Sequence[Sequence[Answer]]) -> ArgumentError | RefusedError:
    raised = {rank: row[0].trouble for rank, row in enumerate(answers) if row[0].trouble is not None}
    if all(trouble.waited for trouble in raised.values()):
        return RefusedError(raised)
    rank, trouble = min(raised.items(), key=lambda item: item[1].waited)
    at = f", at {trouble.line}" if trouble.line else ""
    return ArgumentError(
        message(
            f"the function raises on the operands that build returned, on rank {rank}",
            op="verify.audit",
            expected="a function that runs on every rank",
            got=f"{trouble.kind}: {trouble.text}{at}",
            remedy="call it on the ranks by gradmesh.launch until it runs; then audit it",
        )
    )
