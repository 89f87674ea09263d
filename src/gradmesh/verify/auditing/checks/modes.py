"""Forward mode, vmap and complex operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh.verify.auditing.case import Case, FunctionRaisedError, patterns_of, worst_failure
from gradmesh.verify.auditing.pool import RanksLostError
from gradmesh.verify.auditing.probes import Answer, Probe, attempt, filled, leaves_of, mapped
from gradmesh.verify.auditing.readings import distance, law_error
from gradmesh.verify.auditing.report import Finding
from gradmesh.verify.auditing.subject import Subject, differentiable_call

__all__ = ["complex_operands", "forward_mode", "vmap"]

_BATCH = 3


@dataclass
class _Compared(Answer):
    """Results and the expected results."""

    got: list[Tensor | None] = field(default_factory=list)
    wanted: list[Tensor] = field(default_factory=list)

    @property
    def off(self) -> float:
        """The largest difference."""
        return max(
            (
                float(bool(w.abs().max() > 0)) if g is None else distance(g, w)
                for g, w in self.pairs
                if w.numel()
            ),
            default=0.0,
        )

    @property
    def pairs(self) -> list[tuple[Tensor | None, Tensor]]:
        """Each result with the expected one."""
        return list(zip(self.got, self.wanted, strict=True))


def _wrong(case: Case, ranks: Sequence[Answer]) -> dict[int, _Compared]:
    tolerance = max(case.tolerance, 1e-9)
    return {r: a for r, a in enumerate(ranks) if isinstance(a, _Compared) and a.off > tolerance}


def forward_mode(case: Case) -> Iterator[Finding]:
    """The tangent of a linear map is the map applied to the tangent."""
    try:
        ranks = case.answered(tangent, case.probe(51))[0]
    except FunctionRaisedError as error:
        first = worst_failure(error.failures)
        if first.kind == "TorchVersionError" or (first.order and not first.waited):
            case.left_out["forward-mode-missing"] = f"forward mode is not supported here: {error}"
            return
        kind = "forward-mode-wrong" if first.waited else "forward-mode-missing"
        yield case.failure(kind, error, "under forward-mode AD")
        return
    wrong = _wrong(case, ranks)
    if wrong:
        lost = all(g is None or not bool(g.abs().max() > 0) for a in wrong.values() for g, _ in a.pairs)
        worst = max(answer.off for answer in wrong.values())
        text = "the tangent is silently lost" if lost else f"the tangent has an error of {worst:.0%}"
        yield Finding("forward-mode-wrong", text, tuple(wrong), case.forward_line)


def tangent(probe: Probe) -> list[Answer]:
    """The tangents of the results along drawn directions."""
    return attempt([probe], _tangent)


def _tangent(subject: Subject, probe: Probe) -> Answer:
    directions, wanted = mapped(subject, probe)
    found = _Compared(wanted=wanted)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x, t) for x, t in zip(leaves_of(subject, probe), directions, strict=True)
        ]
        results = subject.call([d.clone() for d in duals])
        moved: list[Any] = [forward_ad.unpack_dual(y).tangent for y in results]
        found.got = [None if t is None else t.detach().clone() for t in moved]
    return found


def vmap(case: Case) -> Iterator[Finding]:
    """Vmap gives the same result as a loop; a function that does not support vmap is skipped."""
    if case.pool.settings.get("ordered"):
        case.left_out["vmap-wrong"] = "the function must be called inside ordered()"
        return
    for dim in (0, -1):
        try:
            ranks = case.answered(batched, case.probe(61), dim)[0]
        except (FunctionRaisedError, RanksLostError) as error:
            if isinstance(error, RanksLostError) or any(t.waited for t in error.failures.values()):
                yield case.failure("vmap-wrong", error, "under torch.func.vmap")
            else:
                case.left_out["vmap-wrong"] = f"it raises: {error}"
            return
        wrong = _wrong(case, ranks)
        if wrong:
            shapes = {
                tuple(g.shape) == tuple(w.shape) for a in wrong.values() for g, w in a.pairs if g is not None
            }
            what = "the shape of the result" if False in shapes else "the result"
            text = f"{what} differs from that of a loop, with the batch in dim {dim}"
            yield Finding("vmap-wrong", text, tuple(wrong), case.forward_line)
            return


def batched(probe: Probe, dim: int) -> list[Answer]:
    """Run a batch of operands under vmap and in a loop."""
    return attempt([probe], lambda subject, probe: _batched(subject, probe, dim))


def _batched(subject: Subject, probe: Probe, dim: int) -> Answer:
    directions, _ = mapped(subject, probe)
    base = leaves_of(subject, probe)
    batches = [[b + 1e-2 * n * d for b, d in zip(base, directions, strict=True)] for n in range(_BATCH)]
    with torch.no_grad():
        wanted = [filled(subject.call([x.clone() for x in one])) for one in batches]
        stacked = [torch.stack(column, dim) for column in zip(*batches, strict=True)]
        got = torch.func.vmap(lambda *x: tuple(subject.call(x)), in_dims=dim)(*stacked)
    return _Compared(
        got=[g.clone() for g in got], wanted=[torch.stack(column) for column in zip(*wanted, strict=True)]
    )


def complex_operands(case: Case) -> Iterator[Finding]:
    """A function of real operands, applied to complex ones, acts on the real and the imaginary part separately."""
    if not case.linear or case.point.step:
        return
    if any(value.is_complex() for value in case.pool.begin()[0].values) and not case.arrows:
        return
    try:
        parts = case.answered(complex_parts, case.probe(71, complex=True))[0]
        patterns = list(patterns_of(case.arrows))
        probes = [case.probe(72 + n, pattern, complex=True) for pattern in patterns for n in range(2)]
        answers = case.first_order(probes)
    except FunctionRaisedError as error:
        if any(failure.waited for failure in error.failures.values()):
            yield case.failure("complex-wrong", error, "with complex operands")
        else:
            case.left_out["complex-wrong"] = f"it raises: {error}"
        return
    wrong = _wrong(case, parts)
    if wrong:
        real = all(g is None or not g.is_complex() for a in wrong.values() for g, _ in a.pairs)
        conjugated = all(
            g is not None and distance(g.conj(), w) <= 1e-9 for a in wrong.values() for g, w in a.pairs
        )
        how = (
            "loses the imaginary part"
            if real
            else "is the conjugate of the correct one"
            if conjugated
            else "differs from that of the real and imaginary parts"
        )
        yield Finding("complex-wrong", f"the result {how}", tuple(wrong), case.forward_line)
        return
    by_pattern = {p: answers[2 * i : 2 * i + 2] for i, p in enumerate(patterns)}
    if not case.arrows or any(
        law_error(a, by_pattern, case.tolerance) <= case.tolerance for a in case.arrows
    ):
        return
    for rows in answers:
        for answer in rows:
            answer.gradients = [g.conj().resolve_conj() for g in answer.gradients]
    conjugated = any(law_error(a, by_pattern, case.tolerance) <= case.tolerance for a in case.arrows)
    real = all(
        not g.imag.any() for rows in answers for answer in rows for g in answer.gradients if g.is_complex()
    )
    how = (
        "is the conjugate of the correct one"
        if conjugated
        else "loses the imaginary part"
        if real
        else "is wrong"
    )
    yield Finding("complex-wrong", f"the gradient of a complex operand {how}", (), case.line)


def complex_parts(probe: Probe) -> list[Answer]:
    """Run complex operands, and their real and imaginary parts separately."""
    return attempt([probe], _complex_parts)


def _complex_parts(subject: Subject, probe: Probe) -> Answer:
    x, got = mapped(subject, probe)
    if any(subject.inputs[i].is_complex() for i in subject.operands):
        return _Compared()  # written for complex operands: a conjugate may be intended
    with torch.no_grad(), differentiable_call(subject):
        real = filled(subject.call([v.real.clone() for v in x]))
        imaginary = filled(subject.call([v.imag.clone() for v in x]))
    return _Compared(
        got=list(got), wanted=[torch.complex(a, b) for a, b in zip(real, imaginary, strict=True)]
    )
