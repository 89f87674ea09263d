"""The function under other conditions: autodiff modes, memory layouts, settings, groups, unused results."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh._torch import fill_fresh_memory
from gradmesh.errors import ArgumentError, RankError
from gradmesh.verify.auditing.adjoint import ask_all, holding_readings, notes
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.probes import (
    LAYOUTS,
    Case,
    FunctionRaisedError,
    Point,
    Pool,
    Probe,
    ProbeError,
    cotangents,
    filled,
    first_order,
    in_layout,
    leaves_of,
    mapped,
)
from gradmesh.verify.auditing.readings import Pairings, distance, largest_distance, ranks_apart
from gradmesh.verify.auditing.subject import (
    Subject,
    current_subject,
    dense,
    nodes,
    python_function,
    restore,
    same_values,
    set_switch,
    switches,
)
from gradmesh.verify.gradients.calls import is_raw
from gradmesh.verify.laws import as_real

_BATCH = 3


@dataclass(frozen=True)
class _Compared:
    """Results and the expected results."""

    got: Sequence[Tensor | None] = ()
    wanted: Sequence[Tensor] = ()

    @property
    def off(self) -> float:
        """The largest difference."""
        return max(
            (float(w.any()) if g is None else distance(g, w) for g, w in self.pairs if w.numel()), default=0.0
        )

    @property
    def pairs(self) -> list[tuple[Tensor | None, Tensor]]:
        """Each result with the expected one."""
        return list(zip(self.got, self.wanted, strict=True))


def _wrong(case: Case, ranks: Sequence[_Compared]) -> dict[int, _Compared]:
    tolerance = max(case.tolerance, 1e-9)
    return {rank: answer for rank, answer in enumerate(ranks) if answer.off > tolerance}


def forward_mode(case: Case) -> Iterator[Finding]:
    """The tangent of a linear map is the map applied to the tangent."""
    try:
        ranks = case.pool.answered(_tangent, [case.probe(51)])[0]
    except FunctionRaisedError as error:
        first = error.first
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
        yield Finding("forward-mode-wrong", text + case.scaled, tuple(wrong), case.forward_line)


def _tangent(subject: Subject, probe: Probe) -> _Compared:
    """The tangents of the results along drawn directions."""
    directions, wanted = mapped(subject, probe)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x, t) for x, t in zip(leaves_of(subject, probe), directions, strict=True)
        ]
        results = subject.call([d.clone() for d in duals])
        tangents: list[Tensor | None] = [forward_ad.unpack_dual(y).tangent for y in results]
        return _Compared([None if t is None else t.detach().clone() for t in tangents], wanted)


def vmap(case: Case) -> Iterator[Finding]:
    """Vmap gives the same result as a loop; a function that does not support vmap is skipped."""
    if case.pool.settings.get("ordered"):
        case.left_out["vmap-wrong"] = "the function must be called inside ordered()"
        return
    for dim in (0, -1):
        try:
            ranks = case.pool.answered(_batched, [case.probe(61)], dim)[0]
        except ProbeError as error:
            if error.waited:
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


def _batched(subject: Subject, probe: Probe, dim: int) -> _Compared:
    """Run a batch of operands under vmap and in a loop."""
    directions, _ = mapped(subject, probe)
    base = leaves_of(subject, probe)
    batches = [[b + 1e-2 * n * d for b, d in zip(base, directions, strict=True)] for n in range(_BATCH)]
    with torch.no_grad():
        wanted = [filled(subject.call([x.clone() for x in one])) for one in batches]
        stacked = [torch.stack(column, dim) for column in zip(*batches, strict=True)]
        got = torch.func.vmap(lambda *x: tuple(subject.call(x)), in_dims=dim)(*stacked)
    return _Compared([g.clone() for g in got], [torch.stack(column) for column in zip(*wanted, strict=True)])


def complex_operands(case: Case) -> Iterator[Finding]:
    """A function of real operands, applied to complex ones, acts on the real and the imaginary part separately."""
    if not case.linear or case.point.step:
        return
    if any(value.is_complex() for value in case.pool.begin()[0].values) and not case.arrows:
        return
    try:
        parts = case.pool.answered(_complex_parts, [case.probe(71, complex=True)])[0]
        pairings = ask_all(case, case.arrows, seed=72, count=2, complex=True)
    except FunctionRaisedError as error:
        if error.waited:
            yield case.failure("complex-wrong", error, "with complex operands")
        else:
            case.left_out["complex-wrong"] = f"it raises: {error}"
        return
    wrong = _wrong(case, parts)
    if wrong:
        pairs = [pair for answer in wrong.values() for pair in answer.pairs]
        how = "differs from that of the real and imaginary parts"
        if all(g is None or not g.is_complex() for g, _ in pairs):
            how = "loses the imaginary part"
        elif all(g is not None and distance(g.conj(), w) <= 1e-9 for g, w in pairs):
            how = "is the conjugate of the correct one"
        yield Finding("complex-wrong", f"the result {how}", tuple(wrong), case.forward_line)
        return
    if not case.arrows or holding_readings(case, case.arrows, pairings):
        return
    answers = [answer for each in pairings.values() for ranks in each.probes for answer in ranks]
    real = not any(g.is_complex() and g.imag.any() for answer in answers for g in answer.gradients)
    for answer in answers:
        answer.gradients = [g.conj().resolve_conj() for g in answer.gradients]
    conjugated = {pattern: Pairings(each.probes, case.tolerance) for pattern, each in pairings.items()}
    how = "loses the imaginary part" if real else "is wrong"
    if holding_readings(case, case.arrows, conjugated):
        how = "is the conjugate of the correct one"
    yield Finding("complex-wrong", f"the gradient of a complex operand {how}", (), case.line)


def _complex_parts(subject: Subject, probe: Probe) -> _Compared:
    """Run complex operands, and their real and imaginary parts separately."""
    x, got = mapped(subject, probe)
    if any(subject.inputs[i].is_complex() for i in subject.operands):
        return _Compared()  # written for complex operands: a conjugate may be intended
    with torch.no_grad():
        real = filled(subject.call([v.real.clone() for v in x]))
        imaginary = filled(subject.call([v.imag.clone() for v in x]))
    return _Compared(got, [torch.complex(a, b) for a, b in zip(real, imaginary, strict=True)])


_STEP = 1e-4
"""Nonzero, so that the gradient is taken at the operands that `build` returned; the value does not matter."""


def uninitialised(case: Case) -> Iterator[Finding]:
    """Forward and backward while torch fills uninitialized memory with NaN.

    This check runs first: uninitialized values change with each call and would disturb all other checks.
    """
    probe = Probe(1, point=Point(_STEP))
    plain = case.pool.answered(first_order, [probe])[0]
    with _filled_with_nan(case):
        ranks = case.pool.answered(first_order, [probe])[0]
    case.line = next((answer.lines[0] for answer in ranks if answer.lines), case.line)
    yield from notes(case, [ranks])
    for what in ("result", "gradient"):
        found, before = ([getattr(answer, f"{what}s") for answer in each] for each in (ranks, plain))
        lost = {rank: _nans(a) - _nans(b) for rank, (a, b) in enumerate(zip(found, before, strict=True))}
        lost = {rank: count for rank, count in lost.items() if count > 0}
        if lost:
            size = sum(x.numel() for tensors in found for x in tensors)
            text = f"{sum(lost.values())} of {size} elements of the {what} are uninitialized memory"
            yield Finding("gradient-uninitialised", text, tuple(lost), case.line)


def _nans(tensors: Sequence[Tensor]) -> int:
    return sum(int(as_real(x).isnan().sum()) for x in tensors)


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


def saved_buffers(case: Case) -> Iterator[Finding]:
    """Run backward twice through one graph."""
    answers = case.pool.answered(_repeated, [case.probe(31)])[0]
    off = tuple(rank for rank, (error, _) in enumerate(answers) if error > case.tolerance)
    if off:
        text = "a second backward with retain_graph=True gives a different gradient"
        yield Finding("saved-buffer-overwritten", text, off, case.line)
    written = tuple(rank for rank, (_, changed) in enumerate(answers) if changed)
    if written:
        text = "a second backward writes into the gradient that the first one returned"
        yield Finding("saved-buffer-overwritten", text, written, case.line)


def _repeated(subject: Subject, probe: Probe) -> tuple[float, bool]:
    """The difference between two backward passes, and whether the second one changed the first one's gradient."""
    with subject.differentiated(leaves_of(subject, probe)) as graph:
        first = graph.backward(cotangents(subject, probe, graph.results), retain_graph=True)
        kept = [None if g is None else g.clone() for g in first]
        second = graph.backward(cotangents(subject, probe, graph.results), retain_graph=True)
    changed = any(
        before is not None and now is not None and not same_values(before, now)
        for before, now in zip(kept, first, strict=True)
    )
    return _off(kept, second), changed


def _off(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """The largest distance of gradients; infinite if only one of two is None."""
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a is not None or b is not None]
    return max((math.inf if a is None or b is None else distance(a, b) for a, b in pairs), default=0.0)


STRIDE_KINDS = ("strided-operand", "strided-gradient")


def strides(case: Case) -> Iterator[Finding]:
    """The same values in other memory layouts; also on processes with Gloo if torch.distributed is called.

    Thread ranks respect strides. Gloo treats memory as contiguous, or crashes the process.
    """
    found = list(_strided(case, STRIDE_KINDS, ""))
    yield from found
    left = [kind for kind in STRIDE_KINDS if all(one.kind != kind for one in found)]
    if not (left and case.gloo and case.pool.backend == "threads" and _calls_torch(case)):
        return
    with case.pool.like_this(backend="gloo") as pool:
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
        return any(case.pool.answered(_looks_for_raw_calls, [case.probe(21)])[0])
    except ProbeError:
        return False


def _looks_for_raw_calls(subject: Subject, probe: Probe) -> bool:
    """Run forward and backward, and return whether they call torch.distributed with tensors."""
    found = False

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found |= event == "call" and is_raw(frame.f_code)

    leaves, before = leaves_of(subject, probe), sys.getprofile()
    sys.setprofile(called)
    try:
        with subject.differentiated(leaves) as graph:
            graph.backward(cotangents(subject, probe, graph.results))
    finally:
        sys.setprofile(before)
    return found


def _strided(case: Case, kinds: Sequence[str], where: str) -> Iterator[Finding]:
    for kind in kinds:
        of_gradient = kind == "strided-gradient"
        what = "incoming gradient" if of_gradient else "operand"
        wrong: dict[str, tuple[int, ...]] = {}
        raised: dict[str, ProbeError] = {}
        for layout in LAYOUTS:
            try:
                off = case.pool.answered(_beside, [case.probe(21)], layout, of_gradient)[0]
            except ProbeError as error:
                raised[layout] = error
                if error.waited:
                    break  # each further layout would run into the timeout too
                continue
            ranks = tuple(rank for rank, error in enumerate(off) if error > case.tolerance)
            if ranks:
                wrong[layout] = ranks
        if wrong:
            layouts = "; ".join(LAYOUTS[layout] for layout in wrong)
            text = f"{where}silently wrong if the {what} is {layouts}"
            yield Finding(kind, text, next(iter(wrong.values())), case.line)
        if raised:
            layout, first = next(iter(raised.items()))
            yield case.failure(kind, first, f"{where}if the {what} is {LAYOUTS[layout]}")


def _beside(subject: Subject, probe: Probe, layout: str, of_gradient: bool) -> float:
    """The difference of results and gradients between contiguous tensors and the same values in a layout.

    The values are those of the layout, e.g. equal rows if expanded. 0 if no tensor can have the layout.
    """
    runs = []
    for strided in (False, True):

        def laid_out(x: Tensor) -> Tensor:
            laid = in_layout(x, layout)
            if laid is None:
                return x.clone()
            return laid if strided else laid.contiguous().clone()  # noqa: B023 - called in this round

        leaves = [x.requires_grad_() for x in leaves_of(subject, probe)]
        given = None if of_gradient else [laid_out(x) for x in leaves]
        with subject.differentiated(leaves, given) as graph:
            handed = cotangents(subject, probe, graph.results)
            out = filled(graph.results)
            runs.append((out, graph.backward([laid_out(y) for y in handed] if of_gradient else handed)))
    (plain, grads), (other, other_grads) = runs
    return max(largest_distance(plain, other), _off(grads, other_grads))


def global_convention(case: Case) -> Iterator[Finding]:
    """Change each switch of the function's modules between forward and backward, and compare the gradients."""
    places: list[int | None] = [None] if case.pool.begin()[0].can_change else []
    try:
        found = case.pool.ask(look_for_switches)[0]
        places += range(len(found))
        if not places:
            return
        plain = _gradients(case, None, switched=False)
    except ProbeError as error:
        # Forward and backward run in separate calls here, which DDP does not support.
        case.left_out["global-convention"] = f"backward in a separate call fails: {error}"
        return
    for place in places:
        try:
            changed = _gradients(case, place, switched=True)
        except ProbeError:  # a switch that makes backward raise does not change the gradient
            case.pool.ask(look_for_switches)  # again, because the ranks may have been replaced
            continue
        finally:
            restore()  # thread ranks that are gone may have left a switch changed in this process
        off = ranks_apart(plain, changed, case.tolerance)
        if off:
            what = "entering `change` of build" if place is None else found[place]
            text = f"{what}, after forward, changes the gradient"
            yield Finding("global-convention", text, off, case.line)


def _gradients(case: Case, place: int | None, switched: bool) -> list[list[Tensor]]:
    """Each rank's gradients, optionally with a switch changed after forward."""
    case.pool.answered(_forward, [case.probe(91)])
    if switched:
        case.pool.ask(change, place, True)
    try:
        return case.pool.answered(_backward, [Probe(0)])[0]
    finally:
        if switched:
            case.pool.ask(change, place, False)


def _forward(subject: Subject, probe: Probe) -> None:
    """Run forward and keep its state for `_backward`."""
    stack = contextlib.ExitStack()
    graph = stack.enter_context(subject.differentiated(leaves_of(subject, probe)))
    subject.kept["forward"] = stack, graph, cotangents(subject, probe, graph.results)


def _backward(subject: Subject, _: Probe) -> list[Tensor]:
    """Run backward of the kept forward."""
    stack, graph, handed = subject.kept.pop("forward")
    with stack:
        return dense(graph.backward(handed), graph.leaves)


def look_for_switches() -> list[str]:
    """Find the switches that the function's code reads; returns a description of each change."""
    subject = current_subject()
    with subject.differentiated(subject.own()) as graph:
        functions = [python_function(node) for node in nodes(graph.results)]
        if subject.ordered:
            graph.backward([torch.zeros_like(y) for y in graph.results])
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
    if case.pool.accepts("group"):
        size = case.pool.size
        with case.pool.like_this(outside=1) as pool:
            yield from _same_on(case, pool, f"in a group of ranks 1 to {size} of a world of {size + 1}")
    if case.pool.accepts("local_rank"):
        yield from _same_on(case, case.pool, "with one rank per host", local_rank=0)
    if not (case.pool.accepts("group") or case.pool.accepts("local_rank")):
        case.left_out["own-rank-assumed"] = "build accepts neither group= nor local_rank="


def _same_on(case: Case, pool: Pool, what: str, **options: object) -> Iterator[Finding]:
    """Compare with the function that `build` returns on other ranks, or with other keywords, on the same operands."""
    values = tuple(tuple(each.values) for each in case.pool.begin())
    probe = case.probe(1, point=case.point if case.linear else replace(case.point, rotated=values))
    plain = case.pool.answered(first_order, [probe])[0]
    try:
        with pool.built_with(**options):
            ranks = pool.answered(first_order, [probe])[0]
    except ProbeError as error:
        yield case.failure("own-rank-assumed", error, what)
        return
    except (ArgumentError, RankError) as error:
        why = str(error).splitlines()[0].removeprefix("gradmesh.launch: ")
        yield Finding("own-rank-assumed", f"{what}: build fails: {why}", (), case.forward_line)
        return
    for changed, line in (("result", case.forward_line), ("gradient", case.line)):
        found, before = ([getattr(answer, f"{changed}s") for answer in each] for each in (ranks, plain))
        off = ranks_apart(found, before, case.tolerance)
        if off:
            text = f"{what} the {changed} changes, for the same operands"
            yield Finding("own-rank-assumed", text, off, line)
            return


def unused_output(case: Case) -> Iterator[Finding]:
    """Run backward inside `ordered()` on all ranks but the last, whose loss does not use the result."""
    idle = case.pool.size - 1
    if not idle:
        return
    what = f"when rank {idle} does not use the result"
    try:
        ranks = case.pool.answered(_with_idle, [case.probe(81)], idle, False)[0]
    except ProbeError as error:
        yield case.failure("unused-output", error, what)
        return
    wanted = case.pool.answered(_with_idle, [case.probe(81)], idle, True)[0]
    off = ranks_apart(ranks, wanted, case.tolerance)
    if off:
        text = f"{what}, the gradients are wrong: they differ from those for a zero gradient of that rank"
        yield Finding("unused-output", text, off, case.line)


def _with_idle(subject: Subject, probe: Probe, idle: int, zeros: bool) -> list[Tensor]:
    """The gradients if one rank does not use the result; with `zeros`: if it has a zero gradient."""
    with subject.differentiated(leaves_of(subject, probe), in_order=True) as graph:
        results, handed = graph.results, cotangents(subject, probe, graph.results)
        if subject.rank == idle:
            results, handed = (results, [torch.zeros_like(y) for y in results]) if zeros else ([], [])
        return dense(graph.grad(results, graph.leaves, handed), graph.leaves)
