"""The block of `typed()`, and what it hands out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradmesh._torch import DispatchMode, dispatched_name, need_dispatch
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.errors import ArgumentError, TypeMismatchError, message
from gradmesh.ops.base import Op
from gradmesh.state import ACTIVE_TRACERS, Tracer, rank_state
from gradmesh.transport.call_checks import CallRecord
from gradmesh.type_inference import gradients, operators, raw, verbs
from gradmesh.type_inference.digest import within
from gradmesh.type_inference.findings import Finding
from gradmesh.type_inference.kinds import shown
from gradmesh.type_inference.tracker import Tracker, together
from gradmesh.types import Type
from gradmesh.world import current_mesh

__all__ = ["Types", "current", "typed"]


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
        if space in raw.CALLS:
            return raw.follow(tracker, space, name, [*args, *kwargs.values()], lambda: func(*args, **kwargs))
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


class _Follower:
    """The seam to the library's own calls.

    Args:
        tracker: what follows types.
        around: another tracer that was there before, and goes on with its work: `gradmesh check` on a script that
            has blocks of its own.
    """

    def __init__(self, tracker: Tracker, around: Tracer | None) -> None:
        self.tracker = tracker
        self._around = around
        self.plain = around is not None and around.plain

    def begins(self, op: Op, x: Tensor, recorded: CallRecord | None) -> None:
        """For the other one alone: a call is looked at when it is made."""
        if self._around is not None:
            self._around.begins(op, x, recorded)

    def follow(self, op: Op, x: Tensor, recorded: CallRecord | None, run: Callable[[], Tensor]) -> Tensor:
        """Run an op of the library, and note what its result is."""
        around = self._around
        if around is None:
            return verbs.follow(self.tracker, op, x, recorded, run)
        return verbs.follow(self.tracker, op, x, recorded, lambda: around.follow(op, x, recorded, run))

    def declare(self, x: Tensor, axis: Axis, kind: Type) -> None:
        """Take a tensor for what the library itself says it is."""
        self.tracker.declare(x, axis, kind)
        if self._around is not None:
            self._around.declare(x, axis, kind)


def current() -> Tracker | None:
    """What follows this rank's tensors."""
    tracer = rank_state().tracer if ACTIVE_TRACERS[0] else None
    return tracer.tracker if isinstance(tracer, _Follower) else None


_lock = threading.Lock()
_hook: list[RemovableHandle] = []
_eager: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    tracker = current()
    if tracker is not None and not tracker.aside:
        gradients.look_at(tracker, [x for group in optimizer.param_groups for x in group["params"]])


def _count(by: int) -> None:
    with _lock:
        ACTIVE_TRACERS[0] += by
        if ACTIVE_TRACERS[0] and not _hook:
            _hook.append(register_optimizer_step_pre_hook(_before_step))
            if "torch._dynamo" in sys.modules:
                # Torch compiles nothing that a mode follows, but the library's own frames below it, one by one.
                _eager.append(torch.compiler.set_stance("force_eager"))
                _eager[0].__enter__()
        if not ACTIVE_TRACERS[0] and _hook:
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

    In backward, the gradient of a value that is I has to be the same on every rank. It is looked at where an optimizer
    makes its step, and at the end of the block.

    Args:
        axis: the axis to follow; None: every axis of the current mesh, or the world.
        strict: raise the first finding, on every rank, where the ranks next meet. Else findings are collected, and
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
    state = rank_state()
    around = state.tracer if ACTIVE_TRACERS[0] else None
    if isinstance(around, _Follower):
        raise ArgumentError(
            message(
                "there is a block already",
                op="typed",
                expected="one block at a time on each rank",
                got="a block inside another one",
                remedy="leave the inner one out; the outer one follows what is in it",
            )
        )
    tracker = Tracker([one for one in _axes(axis) if one.size > 1], strict=strict)
    state.tracer = _Follower(tracker, around)
    _count(1)
    try:
        with _Unseen(tracker), _Mode(tracker):
            yield Types(tracker)
        _end(tracker)
    finally:
        tracker.open = False
        state.tracer = around
        _count(-1)
    if not strict:
        tracker.warn()


def _end(tracker: Tracker) -> None:
    """Look at the gradients that are there, meet for the last time, and judge what is left."""
    gradients.look_at(tracker, [x for x, _ in tracker.tape.leaves()])
    device = next((x.device for x, _ in tracker.tape.leaves()), torch.device("cpu"))
    for axis in tracker.axes:
        tracker.meet(axis, "the end of the block", [], device)
    tracker.judge(at_the_end=True)
    if tracker.strict and tracker.findings:
        raise TypeMismatchError(str(tracker.findings[0]))


def _axes(axis: AxisLike) -> list[Axis]:
    mesh = current_mesh() if axis is None else None
    names = mesh.mesh_dim_names if mesh is not None else None
    return [resolve(name, "typed") for name in names] if names else [resolve(axis, "typed")]
