"""`typed` and its block, `assert_type`, and the comparison of gradients with the duals of their tensors' types."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradmesh._torch import DispatchMode, dispatched_name, need_dispatch
from gradmesh._torch.compilers import compiler_loaded
from gradmesh._util.call_sites import call_site, show_site
from gradmesh.autograd.missing_sums import is_plain
from gradmesh.errors import ArgumentError, TypeMismatchError
from gradmesh.ops.base import Op
from gradmesh.runtime.mesh import Axis, AxisLike, current_mesh, resolve
from gradmesh.runtime.state import Instrument, installed, instruments
from gradmesh.transport.call_checks import CallRecord
from gradmesh.transport.run import withdraw
from gradmesh.type_inference import collectives, operators, rules
from gradmesh.type_inference.rules import SAMES, I, P, V, shown
from gradmesh.type_inference.tracker import (
    Condition,
    Finding,
    Mark,
    Node,
    Tracker,
    gathered,
    number_of_bits,
    observable,
    together,
    token,
    types_of,
    within,
)
from gradmesh.types import Type


def compare_gradients(tracker: Tracker, parameters: Sequence[Tensor]) -> None:
    """Note the gradients that parameters have, before a step uses them or the block ends."""
    for x in parameters:
        grad = x.grad
        node = None if tracker.values.find(x) is None else tracker.node_of(x)
        if node is None or not observable(x):
            continue
        for at, mark in enumerate(node.marks):
            if mark.kind != I or not mark.number:
                continue
            # Another rank may have freed the parameter, and then it has no gradient that could be compared.
            looked = tracker.looked_at(at, mark.number)
            if grad is None or not observable(grad):
                continue
            with tracker.paused():
                number = number_of_bits(grad)
                plain = not node.declared and is_plain(x.detach())
            pair = token("gradient", mark.number, number)
            tracker.agreement.announce(at, pair)
            tracker.expect(
                Condition(
                    lambda at=at, node=node: _missing(tracker, at, node),  # type: ignore[misc]
                    at,
                    (mark.number, looked),
                    token("missing", mark.number, number),
                    (pair,),
                    doubtful=f"the gradients of a parameter {list(x.shape)} of equal entries differ over axis "
                    f"{tracker.axes[at].name!r}: if it is one and the same on every rank, declare it I with "
                    "gm.assert_type, and its sum is missing; if each rank has its own, declare it V"
                    if plain
                    else "",
                )
            )


def _missing(tracker: Tracker, at: int, leaf: Node) -> Finding:
    """The finding, with the line where the copies part ways, and the collective next to the parameter."""
    agreed = tracker.agreement.agreed
    parted = collective = None
    for root in tracker.roots:
        depends = {id(leaf)}
        for node in sorted(root.before(), key=lambda node: node.depth):
            if not any(id(one) in depends for one in node.inputs):
                continue
            depends.add(id(node))
            if node.collective:
                collective = collective or node
            mark = node.marks[at]
            same = mark.kind in SAMES and agreed(at, mark.number)
            if parted is None and not same and mark.kind != P:
                parted = node
        if parted is not None:
            break
    began = (
        "no collective lies between the loss and it"
        if collective is None
        else f"the nearest collective between the loss and it is {collective.op} {show_site(collective.site)}"
    )
    axis, shape = tracker.axes[at].name, list(leaf.shape)
    op, site = ("a parameter", leaf.site) if parted is None else (f"aten.{parted.op}", parted.site)
    others = (
        ""
        if parted is None
        else ", ".join(
            f"{shown(one.marks[at].kind) if one.marks[at].kind == V or agreed(at, one.marks[at].number) else V}"
            f"{list(one.shape)}"
            for one in parted.inputs
        )
    )
    return Finding.at("missing-sum", op, axis, others or f"I{shape}", site, f"of I{shape}; {began}")


def watch_gradient(tracker: Tracker, x: Tensor, at: int, kind: Type) -> None:
    """Compare the gradient that a declared tensor will get with the dual of its type."""
    if kind.dual not in (Type.I, Type.R) or not x.requires_grad:
        return

    def arrived(grad: Tensor) -> None:
        if not tracker.open or tracker.aside:
            return
        node = tracker.node_of(within(grad))
        mark = node.marks[at]
        if mark.kind not in SAMES and mark.kind != V:
            return
        axis, shape = tracker.axes[at].name, list(grad.shape)
        last = next((one for one in node.before() if one.collective), None)
        began = "" if last is None else f"the collective before it in backward: {last.op}"
        finding = Finding.at(
            "declared-gradient",
            f"the gradient of a value declared {kind}",
            axis,
            f"V{shape}",
            node.site,
            began,
            f"a gradient of type {kind.dual}",
        )
        absent = (mark.number,) if mark.kind != V else ()
        own = token("declared", at, node.site and node.site[1], mark.number, tuple(shape))
        tracker.expect(Condition(lambda: finding, at, (), own, absent))

    x.register_hook(arrived)


class Types:
    """What `typed` has found out; the block hands it out.

    Attributes:
        findings: types that do not fit, each with the operator, the line, the types and the remedy.
        notes: what could not be followed, and what may be meant.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @property
    def findings(self) -> list[Finding]:
        """What was found so far; complete behind the block."""
        return self._tracker.findings

    @property
    def notes(self) -> list[str]:
        """What could not be followed."""
        return self._tracker.notes

    def of(self, x: Tensor) -> dict[str, Type | None]:
        """The type of a tensor over each axis, None where it is not known. Every rank calls it.

        A value that is the same on every rank is R unless it is known to be I. For a DTensor, this is the type of the
        rank's local tensor.
        """
        tracker = self._tracker
        node, found = tracker.node_of(within(x)), {}
        for at, axis in enumerate(tracker.axes):
            rows = tracker.meet(axis, "types.of", [node.marks[at]], x.device)
            found[axis.name] = shown(together([row[0] for row in rows]))
        return found


class _Mode(DispatchMode):
    """Sees every operator that is run on this thread."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow an operator."""
        tracker, kwargs = self._tracker, kwargs or {}
        if tracker.aside:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            fake = any(kind.__name__ in ("FakeTensor", "FunctionalTensor") for kind in types)
            # What else has an own dispatch is made of tensors, which come back here.
            return func(*args, **kwargs) if fake else NotImplemented
        space, name = dispatched_name(func)
        if space in collectives.CALLS:
            return collectives.follow_torch(
                tracker, space, name, [*args, *kwargs.values()], lambda: func(*args, **kwargs)
            )
        if space in ("profiler", "prim"):
            return func(*args, **kwargs)
        return operators.follow(tracker, func, args, kwargs)


class _Unseen(TorchFunctionMode):
    """Sees the few calls that make something of a tensor without any operator."""

    _NUMBERS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))
    _DATA = Tensor.data.__get__  # type: ignore[attr-defined]
    _SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow such a call."""
        tracker = self._tracker
        result = func(*args, **(kwargs or {}))
        if args and not tracker.aside and type(args[0]) in (Tensor, Parameter):
            if func in self._NUMBERS:
                operators.read(tracker, args[0], func.__name__)
            elif func == self._DATA:
                node, patches = tracker.looked_up(args[0])
                tracker.keep(result, dataclasses.replace(node, leaf=False), patches=patches)
            elif func == self._SET_DATA:
                tracker.assigned(args[0], args[1])
        return result


class _Follower(Instrument):
    """The seam to the library's own calls."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def called(self, op: Op, x: Tensor, recorded: CallRecord | None, run: Callable[[], Tensor]) -> Tensor:
        """Run an op of the library, and note what its result is."""
        return collectives.follow_verb(self.tracker, op, x, recorded, run)

    def declared(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Give a tensor the type that the library declares."""
        self.tracker.declare(x, axis, kind)


def current() -> Tracker | None:
    """What follows this rank's tensors."""
    return next((each.tracker for each in instruments() if isinstance(each, _Follower)), None)


_lock = threading.Lock()
_open = [0]
"""Number of open blocks in the process."""
_hook: list[RemovableHandle] = []
_eager: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    tracker = current()
    if tracker is not None and not tracker.aside:
        compare_gradients(tracker, [x for group in optimizer.param_groups for x in group["params"]])


def _count(by: int) -> None:
    with _lock:
        _open[0] += by
        if _open[0] and not _hook:
            _hook.append(register_optimizer_step_pre_hook(_before_step))
            if compiler_loaded():
                # Torch compiles nothing that a mode follows, but the library's own frames below it, one by one.
                _eager.append(torch.compiler.set_stance("force_eager"))
                _eager[0].__enter__()
        if not _open[0] and _hook:
            _hook.pop().remove()
            if _eager:
                _eager.pop().__exit__(None, None, None)


@contextlib.contextmanager
def typed(axis: AxisLike = None, strict: bool = False) -> Iterator[Types]:
    """Infer the type V, R, I or P of every tensor, through every operator and every collective.

    Nothing is annotated. Inputs are observed: a parameter that is the same on every rank is I, data that is the same is
    R or I depending on its use, everything else is V. Results follow by the rules of docs/reports/operators.md, and
    those of the verbs by the registry of ops. Ranks compare what they have where they meet anyway, at collectives and
    at the end of the block, so they may do different things in between; what only some of them do is V.

    In backward, the gradient of a value that is I has to be the same on every rank. It is compared where an optimizer
    makes its step, and at the end of the block.

    Args:
        axis: the axis to follow; None: every axis of the current mesh, or the world.
        strict: raise the first finding, on every rank, at the next collective. Else findings are collected, and
            each is reported as a `CheckWarning` when the block ends.

    Yields:
        `types`, with `types.findings`, `types.notes` and `types.of(x)`.

    Raises:
        TypeMismatchError: types that do not fit, in a strict block; in any block, a wrong `gm.assert_type`.
        ArgumentError: a block inside another one.
        MismatchError: the ranks leave the block at different places.

    Example:
        >>> def on_each_rank():
        ...     w = torch.tensor(3.0, requires_grad=True)
        ...     x = torch.tensor(1.0 + gm.rank())
        ...     with gm.typed() as types:
        ...         y = w * x
        ...         total = gm.all_reduce(y, dst=gm.I)
        ...         return types.of(w), types.of(y), types.of(total)
        >>> gm.launch(on_each_rank, 2, backend="threads")[0]
        ({'world': I}, {'world': V}, {'world': I})
    """
    need_dispatch()
    if current() is not None:
        raise ArgumentError.of(
            "typed() blocks cannot be nested",
            op="typed",
            expected="one typed() block at a time on each rank",
            got="a block inside another one",
            remedy="remove the inner block; the outer one also tracks the tensors inside it",
        )
    tracker = Tracker([one for one in _axes(axis) if one.size > 1], strict=strict)
    _count(1)
    try:
        with installed(_Follower(tracker)):
            with _Unseen(tracker), _Mode(tracker):
                yield Types(tracker)
            _end(tracker)
    finally:
        tracker.open = False
        _count(-1)
    if not strict:
        tracker.warn()


def _end(tracker: Tracker) -> None:
    """Compare the gradients that are there, exchange numbers for the last time, and decide what is left."""
    compare_gradients(tracker, [x for x, _ in tracker.values.leaves()])
    device = next((x.device for x, _ in tracker.values.leaves()), torch.device("cpu"))
    for axis in tracker.axes:
        tracker.meet(axis, "the end of the block", [], device)
    tracker.judge(at_the_end=True)
    if tracker.strict and tracker.findings:
        raise TypeMismatchError(str(tracker.findings[0]))


def _axes(axis: AxisLike) -> list[Axis]:
    mesh = current_mesh() if axis is None else None
    names = mesh.mesh_dim_names if mesh is not None else None
    return [resolve(name, "typed") for name in names] if names else [resolve(axis, "typed")]


def assert_type(x: Tensor, types: Type | Mapping[str, Type]) -> Tensor:
    """Declare a tensor's type over the ranks, and check it.

    A value that is declared R or I is compared bit for bit, so every rank of the axis has to make this call. Inside of
    `gradmesh.typed` the tensor has that type from here on, and its gradient is compared with the dual type. A tensor of
    another known type is a finding. Varying values may be declared P, a pending sum, and values that are the same on
    every rank may be declared V.

    Args:
        x: the tensor.
        types: its type over each axis, by the axis' name in the current mesh; or one type, over the mesh's only axis or
            the world.

    Returns:
        The tensor itself.

    Raises:
        TypeMismatchError: the ranks' values differ, and are declared R or I.
        ArgumentError: something else than types.
        AxisError: there is no such axis.

    Example:
        >>> def on_each_rank():
        ...     x = torch.ones(2)
        ...     gm.assert_type(x, gm.R)
        ...     return gm.assert_type(x * gm.rank(), gm.V).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 0.0], [1.0, 1.0]]
    """
    given: Mapping[AxisLike, Type] = types if isinstance(types, Mapping) else {None: types}  # type: ignore[assignment]
    for name, kind in given.items():
        axis = resolve(name, "assert_type")
        if not isinstance(kind, Type) or not isinstance(x, Tensor):
            _refuse(axis, x, kind)
        tracker = current()
        at = None if tracker is None or tracker.aside else tracker.place_of(axis)
        if kind in (Type.R, Type.I):
            _compare(axis, x, kind, tracker)
        if tracker is not None and at is not None:
            _declare(tracker, at, x, kind)
    return x


def _compare(axis: Axis, x: Tensor, kind: Type, tracker: Tracker | None) -> None:
    """Raise if values are declared the same on every rank and are not."""
    x = within(x)
    if axis.size == 1 or not observable(x):
        return
    with contextlib.nullcontext() if tracker is None else tracker.paused():
        numbers = gathered(axis, [number_of_bits(x)], x.device, operand_desc=f"assert_type of gm.{kind}")
    if len(set(numbers)) > 1:
        raise TypeMismatchError.of(
            f"a tensor declared as {kind} differs between ranks",
            op="assert_type",
            axis=str(axis),
            expected="the same bits on every rank",
            got="\n".join(
                f"rank {rank}: values number {one & 0xFFFFF}" for rank, (one,) in enumerate(numbers)
            ),
            remedy="look for what makes it differ (data, dropout, the order of a sum), or say gm.V or gm.P",
        )


def _declare(tracker: Tracker, at: int, x: Tensor, kind: Type) -> None:
    """Give the tensor the declared type; a finding if it is known to be of another one."""
    part = within(x)
    node, axis = tracker.node_of(part), tracker.axes[at]
    rows = tracker.meet(axis, f"assert_type {kind}", [node.marks[at]], x.device)
    known = together([row[0] for row in rows])
    learns = x.requires_grad
    wrong = {
        Type.P: known == rules.I or known == rules.R,
        Type.R: known == rules.P or (learns and known == rules.I),
        Type.I: known == rules.P or (learns and known == rules.R),
    }.get(kind, known == rules.P)
    if wrong:
        types, took = types_of([(known, node.shape)]), f"a value of type {kind}, as it is declared"
        tracker.found(
            Finding.at("declared-otherwise", "gm.assert_type", axis.name, types, call_site(), took=took)
        )
    serial = tracker.next_call(axis.global_ranks)
    number = node.marks[at].number
    if kind is Type.V:
        number = 0
    elif kind is Type.P or known not in rules.SAMES:  # the same bits, made in different ways
        number = token("declared", axis.global_ranks, serial)
    tracker.mark(part, node, at, Mark(str(kind), number), declared=True)
    watch_gradient(tracker, x, at, kind)


def _refuse(axis: Axis, x: object, kind: object) -> NoReturn:
    error = ArgumentError.of(
        "x must be a tensor, and types its type over each axis",
        op="assert_type",
        axis=str(axis),
        expected='a tensor, and gm.V, gm.R, gm.I or gm.P for each axis: {"tp": gm.P}',
        got=f"{type(x).__name__} and {kind!r}",
        remedy='name each axis and its type, as in assert_type(x, {"tp": gm.P})',
    )
    if isinstance(x, Tensor):
        withdraw("assert_type", axis, x, error)
    raise error
