"""`audit`, which runs the checks one after another, and the command `gradmesh audit`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gradmesh.errors import ArgumentError, GradmeshError, RankError
from gradmesh.launch import launch
from gradmesh.verify.auditing.adjoint import KINDS_OF, adjoint, parts, second_order
from gradmesh.verify.auditing.conditions import (
    STRIDE_KINDS,
    complex_operands,
    forward_mode,
    global_convention,
    own_rank,
    saved_buffers,
    strides,
    uninitialised,
    unused_output,
    vmap,
)
from gradmesh.verify.auditing.findings import KINDS, Audit, Finding, shown, sorted_findings
from gradmesh.verify.auditing.opening import accepts, open_case
from gradmesh.verify.auditing.probes import Case, Pool, ProbeError, RanksLostError, accepted
from gradmesh.verify.auditing.subject import line_of

CHECKS: tuple[tuple[tuple[str, ...], Callable[[Case], Iterator[Finding]]], ...] = (
    (STRIDE_KINDS, strides),
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
        raise ArgumentError.of(
            "build is not callable",
            op="verify.audit",
            expected="a function that returns (fn, inputs) on each rank",
            got=type(build).__name__,
            remedy="pass e.g. lambda: (fn, torch.ones(3))",
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
            case.left_out["parameters"] = "not operands; pass them as inputs to audit their gradients"
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
    finding = Finding(lost.kind, str(lost), (), line_of(build))
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
    when = "first call"
    try:
        narrow = accepts(case, [value.dtype for value in case.pool.begin()[0].values])
        unwritten: list[Finding] = []
        # The first-order check raises and reports it again.
        with contextlib.suppress(ProbeError):
            unwritten = list(uninitialised(case))
        if any(finding.kind == "gradient-uninitialised" for finding in unwritten):
            yield from unwritten
            yield from forward_mode(case)
            case.left_out |= {kind: _UNWRITTEN for kind in KINDS if kind not in _FOUND_DESPITE_UNWRITTEN}
            return
        when = "first calls"
        yield from open_case(case, narrow)
    except ProbeError as error:
        yield case.failure("aborts" if error.kind == "aborts" else "hangs", error, f"in the {when}")
        return
    if case.unchecked:
        yield from unwritten
        checked = {finding.kind for finding in unwritten} | {"gradient-uninitialised"}
        case.left_out |= {kind: case.unchecked for kind in KINDS if kind not in checked}
        return
    yield from adjoint(case)
    if not case.pairings:
        return
    for kinds, check in CHECKS:
        if not wanted.isdisjoint(kinds):
            try:
                yield from check(case)
            except ProbeError as error:
                yield case.failure(kinds[0], error, "during this check")
            except (ArgumentError, RankError) as error:
                case.left_out[kinds[0]] = f"build failed: {str(error).splitlines()[0]}"


def _wanted(kinds: Iterable[str] | None) -> frozenset[str]:
    chosen = frozenset(KINDS if kinds is None else kinds)
    unknown = sorted(chosen - set(KINDS))
    if unknown:
        raise ArgumentError.of(
            "unknown kind of finding",
            op="verify.audit",
            expected=", ".join(KINDS),
            got=", ".join(unknown),
            remedy='pass names from the list above, e.g. kinds=["not-adjoint", "hangs"]',
        )
    return chosen


FOUND, NOT_RUN = 1, 2
"""Exit status: an audit is not `Audit.ok`; a target could not be audited."""


@contextlib.contextmanager
def _restored_sys_path() -> Iterator[None]:
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


@_restored_sys_path()
def audit_command(
    targets: Sequence[str],
    arrow: str | None,
    world_size: int,
    backend: str,
    timeout: float,
    kinds: Sequence[str],
    isolate: bool,
    gloo: bool,
    as_json: bool,
) -> int:
    """Audit each function, print what was found, and return the exit status."""
    status = 0
    for target in targets:
        try:
            found = audit(
                named(target),
                arrow=arrow,
                world_size=world_size,
                backend=backend,
                kinds=kinds or None,
                timeout=timeout,
                isolate=isolate,
                gloo=gloo,
            )
        except GradmeshError as error:
            print(
                json.dumps({"target": target, "error": str(error)}) if as_json else f"{target}: {error}",
                file=None if as_json else sys.stderr,
            )
            status = NOT_RUN
            continue
        width = shutil.get_terminal_size((112, 24)).columns
        text = json.dumps({"target": target, **found.as_json()}) if as_json else shown(found, width)
        print(text, flush=True)
        status = max(status, 0 if found.ok else FOUND)
    return status


def named(target: str) -> Callable[..., Any]:
    """Import the function that "module:function" or "file.py:function" names."""
    where, _, name = target.rpartition(":")
    try:
        found: Any = _from_file(Path(where).resolve()) if where.endswith(".py") else _import(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise _no_such(target, f"{type(error).__name__}: {error}") from error
    if not callable(found):
        raise _no_such(target, f"{name} is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _import(module: str) -> ModuleType:
    _look_in(os.getcwd())
    return importlib.import_module(module)


def _from_file(path: Path) -> ModuleType:
    """Import a file under its own name (numbered if taken), so that process ranks can import it by that name."""
    _look_in(str(path.parent))
    name = path.stem
    for number in itertools.count(1):
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"{path.stem}_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: str) -> None:
    """Append the folder to sys.path: last, so that its files cannot shadow modules that torch imports."""
    if folder not in sys.path:
        sys.path.append(folder)


def _no_such(target: str, got: str) -> ArgumentError:
    return ArgumentError.of(
        f"cannot import {target!r}",
        op="verify.audit",
        expected="module:function or file.py:function, e.g. mypackage.collectives:build; it returns (fn, inputs)",
        got=got,
        remedy="run the command in the folder that contains the module, or pass the file's path",
    )
