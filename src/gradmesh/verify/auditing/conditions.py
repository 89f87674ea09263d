"""The function under other conditions: autodiff modes, memory layouts, settings, groups, unused results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch import fill_fresh_memory
from gradmesh.autograd.ordered import ordered
from gradmesh.errors import ArgumentError, RankError
from gradmesh.verify.auditing.adjoint import notes
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.probes import (
    LAYOUTS,
    Case,
    FunctionRaisedError,
    Point,
    Pool,
    Probe,
    RanksLostError,
    cotangents,
    filled,
    first_order,
    in_layout,
    leaves_of,
    mapped,
    patterns_of,
    show_failures,
    worst_failure,
)
from gradmesh.verify.auditing.readings import Answer, distance, law_error
from gradmesh.verify.auditing.subject import (
    IN_BACKWARD,
    Subject,
    current_subject,
    differentiable_call,
    nodes,
    python_function,
    restore,
    set_switch,
    switches,
)
from gradmesh.verify.gradients.calls import is_raw

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
        ranks = case.answered(_tangent, [case.probe(51)])[0]
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


def _tangent(subject: Subject, probe: Probe) -> Answer:
    """The tangents of the results along drawn directions."""
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
            ranks = case.answered(_batched, [case.probe(61)], dim)[0]
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


def _batched(subject: Subject, probe: Probe, dim: int) -> Answer:
    """Run a batch of operands under vmap and in a loop."""
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
        parts = case.answered(_complex_parts, [case.probe(71, complex=True)])[0]
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


def _complex_parts(subject: Subject, probe: Probe) -> Answer:
    """Run complex operands, and their real and imaginary parts separately."""
    x, got = mapped(subject, probe)
    if any(subject.inputs[i].is_complex() for i in subject.operands):
        return _Compared()  # written for complex operands: a conjugate may be intended
    with torch.no_grad(), differentiable_call(subject):
        real = filled(subject.call([v.real.clone() for v in x]))
        imaginary = filled(subject.call([v.imag.clone() for v in x]))
    return _Compared(
        got=list(got), wanted=[torch.complex(a, b) for a, b in zip(real, imaginary, strict=True)]
    )


_STEP = 1e-4
"""Nonzero, so that the gradient is taken at the operands that `build` returned; the value does not matter."""


def uninitialised(case: Case) -> Iterator[Finding]:
    """Forward and backward while torch fills uninitialized memory with NaN.

    This check runs first: uninitialized values change with each call and would disturb all other checks.
    """
    probe = Probe(1, point=Point(_STEP))
    plain = case.first_order([probe])[0]
    with _filled_with_nan(case):
        ranks = case.first_order([probe])[0]
    case.line = next((answer.lines[0] for answer in ranks if answer.lines), case.line)
    yield from notes(case, [ranks])
    for name in ("results", "gradients"):
        lost: dict[int, int] = {}
        for rank, (answer, before) in enumerate(zip(ranks, plain, strict=True)):
            count = sum(map(_nans, getattr(answer, name))) - sum(map(_nans, getattr(before, name)))
            if count > 0:
                lost[rank] = count
        if lost:
            whole = sum(x.numel() for answer in ranks for x in getattr(answer, name))
            what = "result" if name == "results" else "gradient"
            text = f"{sum(lost.values())} of {whole} elements of the {what} are uninitialized memory"
            yield Finding("gradient-uninitialised", text, tuple(lost), case.line)


def _nans(x: Tensor) -> int:
    return int(torch.isnan(torch.view_as_real(x) if x.is_complex() else x).sum())


@contextlib.contextmanager
def _filled_with_nan(case: Case) -> Iterator[None]:
    """Fill uninitialized memory with NaN in process ranks and in this process, whose threads may be ranks."""
    case.pool.begin()
    before = fill_fresh_memory(True)
    case.pool.ask(fill_fresh_memory, True)
    try:
        yield
    finally:
        fill_fresh_memory(before)
        with contextlib.suppress(Exception):
            case.pool.ask(fill_fresh_memory, before)


@dataclass
class _Repeated(Answer):
    """The difference between a first and a second backward, and whether the first one's gradient changed."""

    off: float = 0.0
    changed: bool = False


def saved_buffers(case: Case) -> Iterator[Finding]:
    """Run backward twice through one graph."""
    ranks = case.answered(_repeated, [case.probe(31)])[0]
    answers = [answer for answer in ranks if isinstance(answer, _Repeated)]
    off = tuple(rank for rank, answer in enumerate(answers) if answer.off > case.tolerance)
    if off:
        text = "a second backward with retain_graph=True gives a different gradient"
        yield Finding("saved-buffer-overwritten", text, off, case.line)
    changed = tuple(rank for rank, answer in enumerate(answers) if answer.changed)
    if changed:
        text = "a second backward writes into the gradient that the first one returned"
        yield Finding("saved-buffer-overwritten", text, changed, case.line)


def _repeated(subject: Subject, probe: Probe) -> Answer:
    """Run backward twice with the same gradients."""
    found = _Repeated()
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        first = backward(results, leaves, cotangents(subject, probe, results), retain_graph=True)
        kept = [None if g is None else g.clone() for g in first]
        second = backward(results, leaves, cotangents(subject, probe, results), retain_graph=True)
    for before, now, after in zip(kept, first, second, strict=True):
        if before is None or after is None or now is None:
            found.off = max(found.off, 0.0 if before is after else float("inf"))
            continue
        found.off = max(found.off, distance(before, after))
        found.changed |= not torch.equal(torch.nan_to_num(before), torch.nan_to_num(now))
    return found


@dataclass
class _Difference(Answer):
    """The difference of results and gradients from those of contiguous tensors with the same values."""

    tried: bool = False
    off: float = 0.0
    off_back: float = 0.0


KINDS_OF = ("strided-operand", "strided-gradient")


@dataclass
class _Calls(Answer):
    """Whether a rank's function calls torch.distributed with tensors."""

    raw: bool = False


def strides(case: Case) -> Iterator[Finding]:
    """The same values in other memory layouts; also on processes with Gloo if torch.distributed is called.

    Thread ranks respect strides. Gloo treats memory as contiguous, or crashes the process.
    """
    found = [*_strided(case, KINDS_OF, "")]
    yield from found
    left = tuple(kind for kind in KINDS_OF if all(one.kind != kind for one in found))
    if not (left and case.gloo and case.pool.backend == "threads" and _calls_torch(case)):
        return
    with case.pool.on("gloo") as pool:
        try:
            pool.begin()
        except (ArgumentError, RankError) as error:
            why = str(error).splitlines()[0].removeprefix("gradmesh.launch: ")
            case.left_out |= dict.fromkeys(left, f"not on Gloo, because build fails there: {why}")
            return
        yield from _strided(replace(case, pool=pool), left, "on processes with Gloo, ")


def _calls_torch(case: Case) -> bool:
    """Whether forward or backward calls torch.distributed on any rank."""
    try:
        answers = case.answered(_look, [case.probe(21)])[0]
    except (FunctionRaisedError, RanksLostError):
        return False
    return any(isinstance(answer, _Calls) and answer.raw for answer in answers)


def _look(subject: Subject, probe: Probe) -> Answer:
    """Run forward and backward, and detect calls of torch.distributed."""
    found = _Calls()

    def called(frame: FrameType, event: str, _: object) -> None:
        found.raw |= event == "call" and is_raw(frame.f_code)

    leaves, before = [x.requires_grad_() for x in leaves_of(subject, probe)], sys.getprofile()
    with differentiable_call(subject) as backward:
        sys.setprofile(called)
        try:
            results = subject.call([leaf.clone() for leaf in leaves])
            backward(results, leaves, cotangents(subject, probe, results))
        finally:
            sys.setprofile(before)
    return found


def _strided(case: Case, kinds: Sequence[str], where: str) -> Iterator[Finding]:
    for kind in kinds:
        of_gradient = kind == "strided-gradient"
        wrong: dict[str, tuple[int, ...]] = {}
        raised: dict[str, FunctionRaisedError | RanksLostError] = {}
        for layout in LAYOUTS:
            try:
                ranks = case.answered(_beside, [case.probe(21)], layout, of_gradient)[0]
            except (FunctionRaisedError, RanksLostError) as error:
                raised[layout] = error
                if isinstance(error, RanksLostError) or any(t.waited for t in error.failures.values()):
                    break  # each further layout would run into the timeout too
                continue
            found = [a for a in ranks if isinstance(a, _Difference) and a.tried]
            off = tuple(
                r
                for r, a in enumerate(ranks)
                if isinstance(a, _Difference) and max(a.off, a.off_back) > case.tolerance
            )
            if found and off:
                wrong[layout] = off
        if wrong:
            layouts = "; ".join(LAYOUTS[layout] for layout in wrong)
            what = "incoming gradient" if of_gradient else "operand"
            text = f"{where}silently wrong if the {what} is {layouts}"
            yield Finding(kind, text, next(iter(wrong.values())), case.line)
        if raised:
            layout, first = next(iter(raised.items()))
            what = "incoming gradient" if of_gradient else "operand"
            yield case.failure(kind, first, f"{where}if the {what} is {LAYOUTS[layout]}")


def _beside(subject: Subject, probe: Probe, layout: str, of_gradient: bool) -> Answer:
    """Run with contiguous tensors, then with the same values in a layout."""
    found = _Difference()
    runs = []
    for strided in (False, True):
        leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
        with differentiable_call(subject) as backward:
            given: list[Tensor] = []
            for leaf in leaves:
                laid = None if of_gradient else in_layout(leaf, layout)
                found.tried |= laid is not None
                given.append(leaf.clone() if laid is None else laid if strided else laid.contiguous().clone())
            results = subject.call(given)
            handed: list[Tensor] = []
            for y in cotangents(subject, probe, results):
                laid = in_layout(y, layout) if of_gradient else None
                found.tried |= laid is not None
                handed.append(y if laid is None else laid if strided else laid.contiguous().clone())
            out = filled(results)
            runs.append((out, backward(results, leaves, handed)))
    (plain, grads), (other, other_grads) = runs
    found.off = max((distance(a, b) for a, b in zip(plain, other, strict=True)), default=0.0)
    for a, b in zip(grads, other_grads, strict=True):
        if a is not None or b is not None:
            found.off_back = max(found.off_back, float("inf") if a is None or b is None else distance(a, b))
    return found


def global_convention(case: Case) -> Iterator[Finding]:
    """Change each switch of the function's modules between forward and backward, and compare the gradients."""
    places: list[int | None] = [None] if case.pool.begin()[0].can_change else []
    try:
        found = case.pool.ask(look_for_switches)[0]
        places += range(len(found))
        if not places:
            return
        plain = _gradients(case, None, switched=False)
    except (
        FunctionRaisedError,
        RanksLostError,
    ) as error:  # forward and backward run in separate calls here, which DDP does not support
        why = error.text if isinstance(error, RanksLostError) else str(error)
        case.left_out["global-convention"] = f"backward in a separate call fails: {why}"
        return
    for place in places:
        try:
            changed = _gradients(case, place, switched=True)
        except (
            FunctionRaisedError,
            RanksLostError,
        ):  # a switch that makes backward raise does not change the gradient
            case.pool.ask(look_for_switches)  # again, because the ranks may have been replaced
            continue
        finally:
            restore()  # thread ranks that are gone may have left a switch changed in this process
        off = [
            rank
            for rank, (a, b) in enumerate(zip(plain, changed, strict=True))
            if any(distance(x, y) > case.tolerance for x, y in zip(a, b, strict=True))
        ]
        if off:
            what = "entering `change` of build" if place is None else found[place]
            yield Finding(
                "global-convention", f"{what}, after forward, changes the gradient", tuple(off), case.line
            )


def _gradients(case: Case, place: int | None, switched: bool) -> list[list[Tensor]]:
    """Each rank's gradients, optionally with a switch changed after forward."""
    case.answered(_forward, [case.probe(91)])
    if switched:
        case.pool.ask(change, place, True)
    try:
        return [answer.gradients for answer in case.answered(_backward, [Probe(0)])[0]]
    finally:
        if switched:
            case.pool.ask(change, place, False)


def _forward(subject: Subject, probe: Probe) -> Answer:
    """Run forward and keep its state for `_backward`."""
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    stack = contextlib.ExitStack()
    backward = stack.enter_context(differentiable_call(subject))
    results = subject.call([leaf.clone() for leaf in leaves])
    subject.kept["forward"] = stack, backward, results, leaves, cotangents(subject, probe, results)
    return Answer()


def _backward(subject: Subject, _: Probe) -> Answer:
    """Run backward of the kept forward."""
    stack, backward, results, leaves, handed = subject.kept.pop("forward")
    with stack:
        grads = backward(results, leaves, handed)
    return Answer(
        gradients=[torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    )


def look_for_switches() -> list[str]:
    """Find the switches that the function's code reads; returns a description of each change."""
    subject = current_subject()
    leaves = [x.requires_grad_() for x in leaves_of(subject, Probe(0, point=Point(1.0)))]
    with differentiable_call(subject) as backward:
        results = subject.call([leaf.clone() for leaf in leaves])
        functions = [python_function(node) for node in nodes(results)]
        if subject.ordered:
            backward(results, leaves, [torch.zeros_like(y) for y in results])
    subject.kept["switches"] = found = switches(subject.fn, *dict.fromkeys(filter(None, functions)))
    return [str(switch) for switch in found]


def change(place: int | None, forth: bool) -> None:
    """Change or restore a switch; `place` None: enter or exit the context manager `change` of `build`."""
    subject = current_subject()
    if place is not None:
        found = subject.kept.get("switches", ())
        if place < len(found):
            set_switch(found[place], forth)
    elif not forth:
        context = subject.kept.pop("change", None)
        if context is not None:
            context.__exit__(None, None, None)
    elif subject.change is not None:
        subject.kept["change"] = context = subject.change()
        context.__enter__()


def own_rank(case: Case) -> Iterator[Finding]:
    """Results must not change in a group with other global ranks, nor on hosts with one rank each."""
    kind = "own-rank-assumed"
    asked = False
    case.pool.begin()  # an earlier check may have left a function with other sizes
    if case.pool.accepts("group"):
        asked = True
        size = case.pool.size
        what = f"in a group of ranks 1 to {size} of a world of {size + 1}"
        with case.pool.larger(outside=1) as pool:
            by_rank = _call_on_ranks(case, pool, what)
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, what)
    if case.pool.accepts("local_rank"):
        asked = True
        with case.pool.built_with(local_rank=0):
            by_rank = _call_on_ranks(case, case.pool, "with one rank per host")
        if isinstance(by_rank, Finding):
            yield by_rank
        else:
            yield from _compared(case, by_rank, "with one rank per host")
    if not asked:
        case.left_out[kind] = "build accepts neither group= nor local_rank="


def _call_on_ranks(case: Case, pool: Pool, what: str) -> list[Answer] | Finding:
    try:
        by_rank = pool.attempt(first_order, [_same_operands(case)])
    except RanksLostError as error:
        return case.failure("own-rank-assumed", error, what)
    except (ArgumentError, RankError) as error:
        text = f"{what}: build fails: {str(error).splitlines()[0].removeprefix('gradmesh.launch: ')}"
        return Finding("own-rank-assumed", text, (), case.forward_line)
    raised = {rank: row[0].failure for rank, row in enumerate(by_rank) if row[0].failure is not None}
    if raised:
        first = worst_failure(raised)
        text = f"{what}: {show_failures(raised)}"
        return Finding("own-rank-assumed", text, tuple(sorted(raised)), first.line or case.line)
    return [row[0] for row in by_rank]


def _same_operands(case: Case) -> Probe:
    """A probe at the operands of the first run, since `build` may return others at each call."""
    values = tuple(tuple(each.values) for each in case.pool.described)
    return case.probe(1, point=case.point if case.linear else replace(case.point, rotated=values))


def _compared(case: Case, ranks: Sequence[Answer], what: str) -> Iterator[Finding]:
    plain = case.first_order([_same_operands(case)])[0]
    for name, line in (("results", case.forward_line), ("gradients", case.line)):
        off = [
            rank
            for rank, (answer, before) in enumerate(zip(ranks, plain, strict=True))
            if _off(getattr(answer, name), getattr(before, name)) > case.tolerance
        ]
        if off:
            text = f"{what} the {name[:-1]} changes, for the same operands"
            yield Finding("own-rank-assumed", text, tuple(off), line)
            return


def _off(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    if len(one) != len(other):
        return float("inf")
    return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def unused_output(case: Case) -> Iterator[Finding]:
    """Run backward inside `ordered()` on all ranks but the last, whose loss does not use the result."""
    idle = case.pool.size - 1
    if not idle:
        return
    what = f"when rank {idle} does not use the result"
    try:
        ranks = case.answered(_with_idle, [case.probe(81)], idle, False)[0]
    except (FunctionRaisedError, RanksLostError) as error:
        yield case.failure("unused-output", error, what)
        return
    wanted = case.answered(_with_idle, [case.probe(81)], idle, True)[0]
    off = [
        r
        for r, (a, b) in enumerate(zip(ranks, wanted, strict=True))
        if _off(a.gradients, b.gradients) > case.tolerance
    ]
    if off:
        text = f"{what}, the gradients are wrong: they differ from those for a zero gradient of that rank"
        yield Finding("unused-output", text, tuple(off), case.line)


def _with_idle(subject: Subject, probe: Probe, idle: int, zeros: bool) -> Answer:
    """Run backward on the ranks that use the result; with `zeros` also on the idle one, with a zero gradient."""
    leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
    with ordered() as order:
        results = subject.call([leaf.clone() for leaf in leaves])
        used = [y for y in results if y.requires_grad] if subject.rank != idle or zeros else []
        handed = cotangents(subject, probe, used)
        if subject.rank == idle:
            handed = [torch.zeros_like(y) for y in handed]
        try:
            grads = order.grad(used or None, leaves, handed or None, allow_unused=True)
        except Exception as error:
            error.add_note(IN_BACKWARD)
            raise
    return Answer(
        gradients=[torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    )
