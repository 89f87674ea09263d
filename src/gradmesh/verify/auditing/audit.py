"""`audit`: the checks, one after another, on ranks that are made when they are needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradmesh.errors import ArgumentError, GradmeshError, RankError, message
from gradmesh.launch import launch
from gradmesh.verify.auditing.case import Case, RefusedError
from gradmesh.verify.auditing.checks.adjoint import adjoint
from gradmesh.verify.auditing.checks.memory import saved_buffers, uninitialised
from gradmesh.verify.auditing.checks.modes import complex_operands, forward_mode, vmap
from gradmesh.verify.auditing.checks.opening import open_case, takes
from gradmesh.verify.auditing.checks.parts import parts
from gradmesh.verify.auditing.checks.ranks import own_rank, unused_output
from gradmesh.verify.auditing.checks.second import KINDS_OF, second_order
from gradmesh.verify.auditing.checks.state import global_convention
from gradmesh.verify.auditing.checks.strides import strides
from gradmesh.verify.auditing.kinds import KINDS
from gradmesh.verify.auditing.pool import LostError, Pool, accepted
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
"""What is looked at after the first order, in this order, and the kinds that each check finds."""


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
    """Audit anyone's collective, autograd Function or layer: find out which law its backward obeys, and what is wrong.

    `build()` runs on each rank inside a ready process group and returns `(fn, inputs)`. `fn(*inputs)` returns a tensor,
    or tuples, lists and dicts with tensors in them, as many on every rank; `inputs` is a tensor or a tuple of
    arguments, which may hold tensors too. The operands are the tensors there that require grad, or all that are
    floating-point or complex where none does; the parameters of a module are none, unless they are passed. The audit
    draws its own values for the operands, in float64 where `fn` takes that, and leaves the other inputs as they are. A
    function that is linear in its operands is audited exactly; of another one the derivative is audited, at the inputs
    that `build` returned, and `Audit.linear` is False.

    Some kinds can only be asked for where `build` takes one of these keywords:

    * `build(group=None)`: the process group to work in. A group of the last ranks of a larger world is passed, in
      which no rank's number in the group is that in the world.
    * `build(parts=None)`: how many rows each rank has. Uneven ones and an empty one are passed.
    * `build(local_rank=None)`: the rank on its machine. It is passed as the rank, and then as 0 on every rank.

    A third value, `(fn, inputs, change)`, is a function without arguments that returns a context manager: backward is
    run inside and outside of it, to find a gradient that depends on what it changes.

    A backward may be the adjoint under an unintended convention: a ring shift that hands its gradient back as it
    came is right as P -> P. Pass the `arrow` that is meant, and the law is asked for under it. Without one, a function
    whose backward is right under unusual readings alone, or not under those that its name says, gets a warning.

    Args:
        build: makes the function and its inputs on each rank; the same ones each time.
        arrow: the types that are meant, such as "V -> V", or "V, I -> R" where operands differ in type; None: any
            reading that such functions are usually meant under.
        world_size: the number of ranks. On two, what goes to the next rank in a ring also comes from there.
        backend: as for `gradmesh.launch`: "threads", or processes on "shm" or "gloo". A function that may end its
            process belongs on processes.
        kinds: the kinds to look for, by name, or the name of one; all by default. What the others need is
            still found out.
        timeout: seconds that one question to the function may take.
        gloo: where the function calls torch.distributed, try operands and gradients that are not contiguous on
            processes with Gloo as well, which takes their memory otherwise than threads do, or ends. It costs the start
            of these processes.
        isolate: give ranks that are threads a process of their own. A function that ends its process is a finding
            then, at the cost of a fresh interpreter.

    Returns:
        The readings that hold and the findings, on all ranks.

    Raises:
        ArgumentError: `build` does not return a function and its inputs; the function raises on them, returns nothing
            that can have a gradient, returns other counts of tensors on other ranks, or other values each time; a
            kind has no such name.
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
    began = time.monotonic()
    if not callable(build):
        raise ArgumentError(
            message(
                "build is no function",
                op="verify.audit",
                expected="a function that returns (fn, inputs) on each rank",
                got=type(build).__name__,
                remedy="pass lambda: (fn, inputs)",
            )
        )
    wanted = _wanted([kinds] if isinstance(kinds, str) else kinds)
    if isolate and backend == "threads":
        return _isolated(build, arrow, world_size, wanted, timeout, gloo)
    options = {"local_rank": None} if accepted(build, "local_rank") else {}
    with Pool(build, world_size, backend, timeout, options) as pool:
        told = pool.begin()
        case = Case(
            pool, forward_line=told[0].line, line=told[0].line, arrow=arrow, name=told[0].name, gloo=gloo
        )
        if told[0].learns:
            case.left_out["parameters"] = "as they are not operands: pass them as inputs"
        findings = list(_found(case, wanted))
    return Audit(
        name=told[0].name,
        world_size=world_size,
        backend=backend,
        arrows=tuple(map(str, case.arrows)),
        findings=sorted_findings(f for f in findings if f.kind in wanted),
        linear=case.linear,
        left_out={kind: why for kind, why in case.left_out.items() if kind in {*wanted, "parameters"}},
        seconds=time.monotonic() - began,
        readings=frozenset(map(str, case.readings)),
        arrow=arrow,
        assumes=case.assumes,
    )


def _isolated(
    build: Callable[..., Any],
    arrow: str | None,
    world_size: int,
    wanted: frozenset[str],
    timeout: float,
    gloo: bool,
) -> Audit:
    """The audit in a process of its own, or the finding that it ended that one."""
    began = time.monotonic()
    options = {
        "arrow": arrow,
        "world_size": world_size,
        "kinds": sorted(wanted),
        "timeout": timeout,
        "gloo": gloo,
    }
    try:
        return launch(audit, 1, backend="gloo", args=(build,), kwargs=options)[0]
    except RankError as error:
        if isinstance(error.__cause__, GradmeshError):
            raise error.__cause__ from None
        lost = LostError(error)
        if lost.kind != "aborts":
            raise
    name = getattr(build, "__qualname__", type(build).__qualname__)
    finding = Finding(lost.kind, lost.text, (), line_of(build))
    return Audit(name, world_size, "threads", findings=(finding,), seconds=time.monotonic() - began)


_UNWRITTEN = "as part of the gradient is memory that nobody wrote"
_TOLD_OF_UNWRITTEN = {
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
        narrow = takes(case, [value.dtype for value in case.pool.begin()[0].values])
    except (RefusedError, LostError) as error:
        kind = error.kind if isinstance(error, LostError) else "hangs"
        yield case.refused(kind, error, "at the first call")
        return
    unwritten: list[Finding] = []
    with contextlib.suppress(RefusedError, LostError):  # that is found again, and told, in the first order
        unwritten = list(uninitialised(case))
        if any(finding.kind == "gradient-uninitialised" for finding in unwritten):
            yield from unwritten
            yield from forward_mode(case)
            case.left_out |= {kind: _UNWRITTEN for kind in KINDS if kind not in _TOLD_OF_UNWRITTEN}
            return
    try:
        yield from open_case(case, narrow)
    except (RefusedError, LostError) as error:
        kind = error.kind if isinstance(error, LostError) else "hangs"
        yield case.refused(kind, error, "at the first calls")
        return
    if case.unasked:
        yield from unwritten
        told = {finding.kind for finding in unwritten} | {"gradient-uninitialised"}
        case.left_out |= {kind: case.unasked for kind in KINDS if kind not in told}
        return
    yield from adjoint(case)
    if not case.answers:
        return
    for kinds, check in CHECKS:
        if not wanted.isdisjoint(kinds):
            try:
                yield from check(case)
            except (RefusedError, LostError) as error:
                yield case.refused(kinds[0], error, "where it was asked")
            except (ArgumentError, RankError) as error:
                case.left_out[kinds[0]] = f"as build failed: {str(error).splitlines()[0]}"


def _wanted(kinds: Iterable[str] | None) -> frozenset[str]:
    chosen = frozenset(KINDS if kinds is None else kinds)
    unknown = sorted(chosen - set(KINDS))
    if unknown:
        raise ArgumentError(
            message(
                "no such kind of finding",
                op="verify.audit",
                expected=", ".join(KINDS),
                got=", ".join(unknown),
                remedy="name kinds as they stand in findings",
            )
        )
    return chosen
