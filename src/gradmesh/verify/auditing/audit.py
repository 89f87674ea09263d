"""`audit`: runs the checks one after another, on ranks that are started when needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradmesh.errors import ArgumentError, GradmeshError, RankError, message
from gradmesh.launch import launch
from gradmesh.verify.auditing.case import Case, FunctionRaisedError
from gradmesh.verify.auditing.checks.adjoint import adjoint
from gradmesh.verify.auditing.checks.memory import saved_buffers, uninitialised
from gradmesh.verify.auditing.checks.modes import complex_operands, forward_mode, vmap
from gradmesh.verify.auditing.checks.opening import accepts, open_case
from gradmesh.verify.auditing.checks.parts import parts
from gradmesh.verify.auditing.checks.ranks import own_rank, unused_output
from gradmesh.verify.auditing.checks.second import KINDS_OF, second_order
from gradmesh.verify.auditing.checks.state import global_convention
from gradmesh.verify.auditing.checks.strides import strides
from gradmesh.verify.auditing.kinds import KINDS
from gradmesh.verify.auditing.pool import Pool, RanksLostError, accepted
from gradmesh.verify.auditing.report import Audit, Finding, sorted_findings
from gradmesh.verify.auditing.subject import line_of

__all__ = ["audit"]

CHECKS: tuple[tuple[tuple[str, ...], Callable[[Case], Iterator[Finding]]], ...] = (
    (("strided-operand", "strided-gradient"), strides),
    (("saved-buffer-overwritten",), saved_buffers),
    (KINDS_OF, second_order),
    (("forward-mode-wrong", "forward-mode-missing"), forward_mode),
    (("vmap-wrong",), vmap),
    (("complex-wrong",), complex_operands),
    (("global-convention",), global_convention),
    (("uneven-parts", "empty-part"), parts),
    (("own-rank-assumed",), own_rank),
    (("unused-output",), unused_output),
)
"""The checks that run after the first-order check, in this order, each with the kinds that it reports."""


def audit(
    build: Callable[..., Any],
    *,
    arrow: str | None = None,
    world_size: int = 3,
    backend: str = "threads",
    kinds: Iterable[str] | str | None = None,
    timeout: float = 20.0,
    isolate: bool = False,
    gloo: bool = True,
) -> Audit:
    """Audit a collective, autograd Function or layer: report which law its backward obeys, and what is wrong.

    `build()` runs on each rank inside an initialized process group and returns `(fn, inputs)`. `fn(*inputs)` returns a
    tensor, or nested tuples, lists and dicts of tensors, the same number on every rank; `inputs` is a tensor or a tuple
    of arguments, which may contain tensors. The operands are the input tensors that require grad, or all floating-point
    and complex ones if none does. Parameters of a module are not operands unless they are passed as inputs. The audit
    draws random values for the operands, in float64 if `fn` accepts it, and leaves the other inputs unchanged. A
    function that is linear in its operands is audited exactly. For any other function the derivative at the inputs of
    `build` is audited, and `Audit.linear` is False.

    Some kinds can only be checked if `build` accepts one of these keywords:

    * `build(group=None)`: the process group to use. The audit passes a group of the last ranks of a larger world, in
      which no group rank equals its global rank.
    * `build(parts=None)`: the number of rows of each rank. The audit passes uneven sizes, one of them 0.
    * `build(local_rank=None)`: the rank on its host. The audit passes the rank, and then 0 on every rank.

    `build` may return a third value, `(fn, inputs, change)`: a function without arguments that returns a context
    manager. Backward runs inside and outside of it, to find a gradient that depends on what it changes.

    A backward may be the adjoint under an unintended convention: a ring shift that returns its gradient unchanged is
    correct as P -> P. Pass the intended `arrow` to check the law under that reading. Without `arrow`, a function whose
    backward is correct only under unusual readings, or not under those that its name suggests, gets a warning.

    Args:
        build: returns the function and its inputs on each rank; the same ones at each call.
        arrow: the intended types, such as "V -> V", or "V, I -> R" if operands differ in type. None: any usual
            reading.
        world_size: the number of ranks. With 2, a ring's next and previous rank are the same, which hides errors.
        backend: as for `gradmesh.launch`: "threads", or processes on "shm" or "gloo". Use processes for a function
            that may crash its process.
        kinds: the kinds to report, by name, or one name. Defaults to all. Checks that these depend on still run. A
            note makes `Audit.ok` False only if its kind is named here, e.g. "forward-mode-missing" for a Function that
            must support forward-mode AD.
        timeout: seconds that one call of the function may take.
        gloo: if the function calls torch.distributed, also try non-contiguous operands and gradients on processes with
            Gloo, which treats their memory differently from threads. Costs the start of these processes.
        isolate: run thread ranks in a separate process. A crash of that process is then reported as a finding. Costs
            the start of an interpreter.

    Returns:
        The readings that hold and the findings, of all ranks.

    Raises:
        ArgumentError: `build` does not return a function and its inputs; the function raises on them, returns no
            differentiable tensor, returns different numbers of tensors on different ranks, or different values at each
            call; an unknown name in `kinds`.
        RankError: `build` raised.

    Example:
        >>> class Sum(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         y = x.clone()
        ...         torch.distributed.all_reduce(y)
        ...         return y
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         torch.distributed.all_reduce(grad)
        ...         return grad
        >>> found = gm.verify.audit(lambda: (Sum.apply, torch.ones(3)))
        >>> "P -> R" in found.arrows, "gradient-overwritten" in found.kinds
        (True, True)
    """
    start = time.monotonic()
    if not callable(build):
        raise ArgumentError(
            message(
                "build is not callable",
                op="verify.audit",
                expected="a function that returns (fn, inputs) on each rank",
                got=type(build).__name__,
                remedy="pass e.g. lambda: (fn, torch.ones(3))",
            )
        )
    wanted = _wanted([kinds] if isinstance(kinds, str) else kinds)
    if isolate and backend == "threads":
        return _isolated(build, arrow, world_size, None if kinds is None else wanted, timeout, gloo)
    options = {"local_rank": None} if accepted(build, "local_rank") else {}
    with Pool(build, world_size, backend, timeout, options) as pool:
        described = pool.begin()
        case = Case(
            pool,
            forward_line=described[0].line,
            line=described[0].line,
            arrow=arrow,
            name=described[0].name,
            gloo=gloo,
        )
        if described[0].has_parameters:
            case.left_out["parameters"] = (
                "parameters are not operands; pass them as inputs to audit their gradients"
            )
        findings = list(_found(case, wanted))
    return Audit(
        name=described[0].name,
        world_size=world_size,
        backend=backend,
        arrows=tuple(map(str, case.arrows)),
        findings=sorted_findings(f for f in findings if f.kind in wanted),
        linear=case.linear,
        left_out={kind: why for kind, why in case.left_out.items() if kind in {*wanted, "parameters"}},
        seconds=time.monotonic() - start,
        readings=frozenset(map(str, case.readings)),
        arrow=arrow,
        assumes=case.assumes,
        required=frozenset() if kinds is None else wanted,
    )


def _isolated(
    build: Callable[..., Any],
    arrow: str | None,
    world_size: int,
    kinds: frozenset[str] | None,
    timeout: float,
    gloo: bool,
) -> Audit:
    """Run the audit in a separate process; a crash of that process is a finding."""
    start = time.monotonic()
    options = {
        "arrow": arrow,
        "world_size": world_size,
        "kinds": None if kinds is None else sorted(kinds),
        "timeout": timeout,
        "gloo": gloo,
    }
    try:
        return launch(audit, 1, backend="gloo", args=(build,), kwargs=options)[0]
    except RankError as error:
        if isinstance(error.__cause__, GradmeshError):
            raise error.__cause__ from None
        lost = RanksLostError(error)
        if lost.kind != "aborts":
            raise
    name = getattr(build, "__qualname__", type(build).__qualname__)
    finding = Finding(lost.kind, lost.text, (), line_of(build))
    return Audit(name, world_size, "threads", findings=(finding,), seconds=time.monotonic() - start)


_UNWRITTEN = "part of the gradient is uninitialized memory"
_FOUND_DESPITE_UNWRITTEN = {
    "gradient-uninitialised",
    "gradient-overwritten",
    "operand-overwritten",
    "result-aliases-operand",
    "forward-mode-missing",
    "forward-mode-wrong",
    "aborts",
    "hangs",
    "backward-raises",
}


def _found(case: Case, wanted: frozenset[str]) -> Iterator[Finding]:
    try:
        narrow = accepts(case, [value.dtype for value in case.pool.begin()[0].values])
    except (FunctionRaisedError, RanksLostError) as error:
        kind = error.kind if isinstance(error, RanksLostError) else "hangs"
        yield case.failure(kind, error, "in the first call")
        return
    unwritten: list[Finding] = []
    with contextlib.suppress(
        FunctionRaisedError, RanksLostError
    ):  # the first-order check raises and reports it again
        unwritten = list(uninitialised(case))
        if any(finding.kind == "gradient-uninitialised" for finding in unwritten):
            yield from unwritten
            yield from forward_mode(case)
            case.left_out |= {kind: _UNWRITTEN for kind in KINDS if kind not in _FOUND_DESPITE_UNWRITTEN}
            return
    try:
        yield from open_case(case, narrow)
    except (FunctionRaisedError, RanksLostError) as error:
        kind = error.kind if isinstance(error, RanksLostError) else "hangs"
        yield case.failure(kind, error, "in the first calls")
        return
    if case.unchecked:
        yield from unwritten
        checked = {finding.kind for finding in unwritten} | {"gradient-uninitialised"}
        case.left_out |= {kind: case.unchecked for kind in KINDS if kind not in checked}
        return
    yield from adjoint(case)
    if not case.answers:
        return
    for kinds, check in CHECKS:
        if not wanted.isdisjoint(kinds):
            try:
                yield from check(case)
            except (FunctionRaisedError, RanksLostError) as error:
                yield case.failure(kinds[0], error, "during this check")
            except (ArgumentError, RankError) as error:
                case.left_out[kinds[0]] = f"build failed: {str(error).splitlines()[0]}"


def _wanted(kinds: Iterable[str] | None) -> frozenset[str]:
    chosen = frozenset(KINDS if kinds is None else kinds)
    unknown = sorted(chosen - set(KINDS))
    if unknown:
        raise ArgumentError(
            message(
                "unknown kind of finding",
                op="verify.audit",
                expected=", ".join(KINDS),
                got=", ".join(unknown),
                remedy='pass names from the list above, e.g. kinds=["not-adjoint", "hangs"]',
            )
        )
    return chosen
